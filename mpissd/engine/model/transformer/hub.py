"""Fetches models named OWNER/NAME from the hub, where there is a network."""

from __future__ import annotations

from mpissd.common.errors import ConfigError
from mpissd.common.presets import is_missing, missing_pair
from mpissd.engine.model.transformer.libraries import library

_FILES = ["*.json", "*.safetensors", "*.jinja"]
_TIMEOUT_S = 10


def fetch_missing(pair: str | None, *models: str | None) -> None:
    """Downloads the models of these names that the hub's cache lacks; local files are skipped.

    Raises ConfigError, one line that says how to go on without a network.
    """
    for name in [*(missing_pair(pair) if pair else ()), *filter(None, models)]:
        if is_missing(name):
            _fetch(name)


def _fetch(name: str) -> None:
    hub = library("huggingface_hub", name)
    try:
        hub.snapshot_download(name, allow_patterns=_FILES, etag_timeout=_TIMEOUT_S)
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{name} is not on this machine and cannot be fetched ({reason}): give "
            "--target=FOLDER (--draft, --pair) with its config.json and *.safetensors, or a .gguf"
        ) from error
