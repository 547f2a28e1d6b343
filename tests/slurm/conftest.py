"""One Slurm for all tests here; it leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.sandbox import Sandbox, why_not


@pytest.fixture(scope="session")
def slurm() -> Iterator[Sandbox]:
    if reason := why_not():
        pytest.skip(reason)
    with Sandbox() as sandbox:
        yield sandbox
    assert sandbox.left == []
