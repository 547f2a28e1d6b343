"""Where a row says that it comes from."""

from __future__ import annotations

import pytest

from mpissd.lab.measure.provenance import provenance


def test_the_variables_that_choose_kernels_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPISSD_WHOLE", raising=False)
    monkeypatch.setenv("MPISSD_DRAW", "1")
    monkeypatch.setenv("MPISSD_API_KEY", "secret")
    assert provenance([], (), "Open MPI 5")["variables"] == {"MPISSD_DRAW": "1"}
