"""Adds implied flags: a pair with weights answers prompts, a prompt needs a pair."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from mpissd.common.errors import ConfigError
from mpissd.common.presets import files_of, is_missing, resolve_model, target_of

PROMPTS = ("prompt", "prompts", "prompt_ids")
DEFAULT_PAIR = "smollm2"
_ON_TWO_CORES = {"lookahead": "3", "fan_out": "uniform:2"}  # of that pair: results/cpu-text


def with_text(flags: Mapping[str, str]) -> dict[str, str]:
    """Adds workload=text for a prompt or a target with weights, and pair=smollm2 for a text prompt
    without models.

    Adds nothing if --workload or --forward is given. Raises ConfigError if a target's weights
    belong to a package that is not installed.
    """
    given = dict(flags)
    if not {"workload", "forward"} & given.keys() and _wants_text(given):
        given["workload"] = "text"
    is_text = given.get("workload") == "text" and "prompt_ids" not in given
    if is_text and not {"pair", "target"} & given.keys():
        given["pair"] = DEFAULT_PAIR
    return given


def with_measured(flags: Mapping[str, str]) -> dict[str, str]:
    """Adds K and fan-out at which the shipped pair's SSD was fastest on two cores, if a CPU runs
    its text and the flags give neither."""
    is_ssd = flags.get("workload") == "text" and flags.get("mode", "ssd") == "ssd"
    is_shipped = flags.get("pair", "").lower() == DEFAULT_PAIR
    if is_ssd and is_shipped and _runs_on_cpu(flags.get("backend", "auto")):
        return {**_ON_TWO_CORES, **flags}
    return dict(flags)


def _runs_on_cpu(backend: str) -> bool:
    return backend == "numpy" or (backend == "auto" and find_spec("cupy") is None)


def _wants_text(flags: Mapping[str, str]) -> bool:
    if any(name in flags for name in PROMPTS):
        return True
    target = _target_of(flags)
    return target is not None and _has_weights(target)


def _target_of(flags: Mapping[str, str]) -> str | None:
    """Returns the target's name; None if none is given, or if the pair is unknown."""
    if "pair" not in flags:
        return flags.get("target")
    try:
        return target_of(flags["pair"])
    except ConfigError:
        return None  # resolving the job reports why


def _has_weights(target: str) -> bool:
    """Returns whether a target's name refers to files with weights, fetched or not."""
    if is_missing(target):
        return True
    try:
        path = files_of(target)
    except ConfigError:
        try:
            resolve_model(target)
        except ConfigError:  # an unknown name: resolving the job reports it
            return False
        raise
    if path is None:
        return False
    return path.suffix == ".gguf" or any(path.glob("*.safetensors"))
