"""The folder of compiled code, and the message without Numba."""

import os
import sys
from pathlib import Path

import numba
import pytest

from mpissd.common.errors import ConfigError
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.model.transformer import numba_ops
from mpissd.engine.model.transformer.ops import ops_of
from tests.transformer_rig import FAMILIES


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout that cannot be written, for a user who asked for no folder."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(os, "access", lambda *_: False)


def test_a_read_only_checkout_compiles_into_the_users_cache(
    read_only: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Path(numba_ops._cache_folder())
    assert folder.parent == tmp_path / "cache" and folder.is_dir()


def test_without_numba_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ConfigError, match=r"on a CPU needs numba: pip install 'mpissd\[text\]'"):
        ops_of(NumpyBackend(), FAMILIES["llama"], heads=6, kv_heads=3)
