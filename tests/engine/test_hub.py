"""Names of the hub: fetched once into its cache, and refused in one line where that fails."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from mpissd.common.errors import ConfigError
from mpissd.common.presets import resolve_model
from mpissd.engine.model.transformer.sources import config_of, fetch_missing
from tests.weight_files import CONFIG, random_folder

NAME = "owner/tiny-model"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_name_is_fetched_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(name: str, **how: Any) -> None:
        """Writes a snapshot as the library does."""
        asked.append(name)
        folder = cache / "models--owner--tiny-model"
        random_folder(folder / "snapshots" / "abc")
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("abc")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    fetch_missing(f"{NAME}/{NAME}", None, "toy-target", str(tmp_path))
    fetch_missing(None, NAME)
    assert asked == [NAME]
    assert resolve_model(NAME).hidden == config_of(NAME).shape.hidden == CONFIG["hidden_size"]


def test_without_a_network_one_line_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str, **how: Any) -> None:
        raise OSError("no route to the hub\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    for pair, model in ((None, "owner/absent"), ("toy-target/owner/absent", None)):
        with pytest.raises(ConfigError) as error:
            fetch_missing(pair, model)
        told = "owner/absent is not on this machine and cannot be fetched (no route to the hub): "
        assert str(error.value).startswith(told) and "\n" not in str(error.value)
        assert "--target=FOLDER" in str(error.value)


def test_a_damaged_file_of_two_words_is_no_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path has the form OWNER/NAME, too."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "cut.gguf").write_bytes(b"GGUF")
    fetch_missing(None, "weights/cut.gguf")
    with pytest.raises(ConfigError, match=r"weights/cut\.gguf'.* cut off"):
        resolve_model("weights/cut.gguf")
