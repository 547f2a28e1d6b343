"""The errors that mpissd raises on purpose. Each class is one cause with one exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MpissdError(Exception):
    exit_code = 1


class ConfigError(MpissdError):
    """A fault of the user's flags or machine: one line that names the value and what is allowed."""

    exit_code = 2


class GateError(MpissdError):
    """A measured row that contradicts itself or physics: it goes to flagged.jsonl."""

    exit_code = 3


class ProtocolError(MpissdError):
    """Two ranks disagree about a round, a version or a shape; the message has both values."""

    exit_code = 4


class FaultError(MpissdError):
    """A rank is gone, or a wait outlasted its deadline."""

    exit_code = 5


class DivergedError(FaultError):
    """A model's logits are not finite: its weights are damaged, or overflow."""


def line_of(error: ConfigError) -> str:
    """Returns an error's line for the user, who may have given lookahead by make's variable K."""
    return f"{error} (lookahead: K)" if "lookahead" in str(error) else str(error)


def unknown(kind: str, value: str, allowed: Iterable[str]) -> ConfigError:
    """Returns the ConfigError for a name that is not allowed; it lists the allowed names and
    suggests the closest. kind: what the name is of, such as "flag"."""
    names = sorted(allowed)
    close = difflib.get_close_matches(value, names, n=1, cutoff=0.6)
    # top_k is no mistyped top_p: their last words have nothing in common.
    ends = [name.rpartition("_")[2] for name in (value, *close)]
    is_typo = bool(difflib.get_close_matches(ends[0], ends[1:], cutoff=0.4))
    hint = f"did you mean {close[0]!r}? " if is_typo else ""
    return ConfigError(f"unknown {kind} {value!r}: {hint}allowed: {', '.join(names)}")
