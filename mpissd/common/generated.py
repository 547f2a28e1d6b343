"""Reads a model's shape from a name that spells it out: `gen:layers=…,hidden=…,ffn=…`."""

from __future__ import annotations

import re
from typing import Any

from mpissd.common.errors import ConfigError, unknown

GEN_FORM = "gen:layers=…,hidden=…,ffn=…"
_NUMBER = re.compile(r"\s*[0-9]{1,9}\s*")
_GEN_KEYS = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "gated")
_FIELDS = tuple("num_layers hidden ffn num_heads num_kv_heads head_dim vocab_size gated".split())


def generated_fields(text: str) -> dict[str, Any]:
    """Returns the fields of a presets.ModelShape that `gen:layers=…,hidden=…,ffn=…[,…]` gives.

    Heads are 64 wide by default. The name lists every value, so equal shapes have equal names.
    Raises ConfigError for an unknown, missing or repeated key.
    """
    given = _gen_values(text)
    if missing := [key for key in _GEN_KEYS[:3] if key not in given]:
        raise ConfigError(f"{text!r}: {missing[0]} is missing; allowed: {GEN_FORM}")
    if "heads" not in given:
        width = given.setdefault("head_dim", 64)
        given["heads"] = _exact(text, "head_dim", given["hidden"], width)
    elif "head_dim" not in given:
        given["head_dim"] = _exact(text, "heads", given["hidden"], given["heads"])
    given.setdefault("kv_heads", given["heads"])
    given.setdefault("vocab", 32000)
    given.setdefault("gated", 1)
    if given["gated"] not in (0, 1):
        raise ConfigError(f"{text!r}: gated={given['gated']}: allowed: 0, 1")
    name = "gen:" + ",".join(f"{key}={given[key]}" for key in _GEN_KEYS)
    fields = {field: given[key] for key, field in zip(_GEN_KEYS, _FIELDS, strict=True)}
    return {**fields, "name": name, "gated": bool(given["gated"])}


def _gen_values(text: str) -> dict[str, int]:
    values: dict[str, int] = {}
    for item in text.removeprefix("gen:").split(","):
        key, _, value = item.partition("=")
        if (key := key.strip()) not in _GEN_KEYS:
            raise unknown("key in gen:", key, _GEN_KEYS)
        if key in values or not _NUMBER.fullmatch(value):
            raise ConfigError(f"{text!r}: {item!r}: allowed: {key}=<whole number>, once")
        values[key] = int(value)
    return values


def _exact(where: str, what: str, hidden: int, divisor: int) -> int:
    """Returns hidden / divisor; raises ConfigError unless it is a whole number."""
    if divisor < 1 or hidden % divisor:
        raise ConfigError(f"{where!r}: {what}={divisor}: allowed: a divisor of hidden={hidden}")
    return hidden // divisor
