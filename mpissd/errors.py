"""What can go wrong, told apart by whose fault it is; each class carries its exit code.

ConfigError    the user's: one line that names the value and what is allowed (exit 2)
GateError      a measured row contradicts itself or physics (exit 3)
ProtocolError  two ranks disagree: names the round and both values (exit 4)
FaultError     a peer is gone, or a wait outlasted its deadline (exit 5)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MpissdError(Exception):
    """Base of everything mpissd raises on purpose."""

    exit_code = 1


class ConfigError(MpissdError):
    """A usage or configuration error; the message is the whole line the user sees."""

    exit_code = 2


class GateError(MpissdError):
    """A consistency gate failed: the row is flagged and not shown as a result."""

    exit_code = 3


class ProtocolError(MpissdError):
    """Peers disagree about a round, a version or a shape."""

    exit_code = 4


class FaultError(MpissdError):
    """A wait outlasted its deadline, or a peer is gone."""

    exit_code = 5


def unknown(kind: str, value: str, allowed: Iterable[str]) -> ConfigError:
    """A ConfigError for a name that is not among `allowed`, with a did-you-mean."""
    names = sorted(allowed)
    close = difflib.get_close_matches(value, names, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return ConfigError(f"unknown {kind} {value!r}: {hint}allowed: {', '.join(names)}")
