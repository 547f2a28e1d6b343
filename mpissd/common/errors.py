"""The errors that mpissd raises on purpose. Each class is one cause with one exit code.

ConfigError    the user's flags or machine; one line that names the value and what is allowed (2)
GateError      a measured row that contradicts itself or physics (3)
ProtocolError  two ranks that disagree; the message names the round and both values (4)
FaultError     a rank that is gone, or a wait that outlasted its deadline (5)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MpissdError(Exception):
    """Base class of the errors in this module."""

    exit_code = 1


class ConfigError(MpissdError):
    """A usage or configuration error. The user sees only the message."""

    exit_code = 2


class GateError(MpissdError):
    """A row that failed a consistency gate: it goes to flagged.jsonl and is no result."""

    exit_code = 3


class ProtocolError(MpissdError):
    """Two ranks disagree about a round, a version or a shape."""

    exit_code = 4


class FaultError(MpissdError):
    """A wait outlasted its deadline, or a peer is gone."""

    exit_code = 5


class DivergedError(FaultError):
    """A model's logits are not finite: its weights are damaged, or overflow."""


def line_of(error: ConfigError) -> str:
    """Returns an error's line for a user, who may have given lookahead as make's K."""
    return f"{error} (lookahead: K)" if "lookahead" in str(error) else str(error)


def unknown(kind: str, value: str, allowed: Iterable[str]) -> ConfigError:
    """Returns the ConfigError for a name that is not among `allowed`.

    kind: the sort of name, for example "flag". The message lists all allowed names and suggests
    the closest one.
    """
    names = sorted(allowed)
    close = difflib.get_close_matches(value, names, n=1, cutoff=0.6)
    # top_k is no mistyped top_p: their last words have nothing in common.
    ends = [name.rpartition("_")[2] for name in (value, *close)]
    is_typo = bool(difflib.get_close_matches(ends[0], ends[1:], cutoff=0.4))
    hint = f"did you mean {close[0]!r}? " if is_typo else ""
    return ConfigError(f"unknown {kind} {value!r}: {hint}allowed: {', '.join(names)}")
