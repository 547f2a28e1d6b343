"""Fetches models named OWNER/NAME from the hub, where there is a network."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mpissd.common.errors import ConfigError
from mpissd.common.model_files import find_in_cache, is_hub_name
from mpissd.common.presets import preset_of, resolve_model
from mpissd.engine.model.transformer.libraries import library

_FILES = ["*.json", "*.safetensors", "*.jinja"]
_TIMEOUT_S = 10


def fetch_missing(pair: str | None, *models: str | None) -> None:
    """Downloads the models of these names that the hub's cache lacks; local files are skipped.

    Raises ConfigError, one line that says how to go on without a network.
    """
    for name in [*(_sides(pair) if pair else ()), *filter(None, models)]:
        if _is_missing(name):
            _fetch(name)


def _is_missing(name: str) -> bool:
    """Returns whether a name can only be one of the hub, and is not in its cache."""
    if not is_hub_name(name) or preset_of(name) is not None:
        return False
    return not _resolves(name) and find_in_cache(name) is None


def _sides(pair: str) -> Iterator[str]:
    """Yields the two model names of a pair TARGET/DRAFT if some of them must be fetched.

    Names of the hub contain a slash, so the pair is split at each slash in turn. Nothing is yielded
    if one split gives two models that are on this machine.
    """
    splits = [(pair[: slash.start()], pair[slash.end() :]) for slash in re.finditer("/", pair)]
    if any(_resolves(target) and _resolves(draft) for target, draft in splits):
        return
    for sides in splits:
        if all(_resolves(side) or _is_missing(side) for side in sides):
            yield from sides
            return


def _resolves(name: str) -> bool:
    try:
        resolve_model(name)
    except ConfigError:
        return False
    return True


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
