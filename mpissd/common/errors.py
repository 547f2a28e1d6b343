"""The errors that mpissd raises on purpose; each class has its own exit code."""

import difflib
from collections.abc import Iterable


class MpissdError(Exception):
    exit_code = 1


class ConfigError(MpissdError):
    """The flags or the machine do not allow the run. The message is one line that names the value
    at fault and the allowed values."""

    exit_code = 2


class GateError(MpissdError):
    """A measured result contradicts itself or physics; its row goes to flagged.jsonl."""

    exit_code = 3


class ProtocolError(MpissdError):
    """Two ranks disagree about a round, a version or a shape; the message has both values."""

    exit_code = 4


class FaultError(MpissdError):
    """A rank has ended, or a wait took longer than its deadline."""

    exit_code = 5


class DivergedError(FaultError):
    """A model's logits are infinite or NaN, because its weights are damaged or sums overflow."""


def line_of(error: ConfigError) -> str:
    """Returns the error's text for the user. If it names the flag lookahead, "(lookahead: K)" is
    added, because K is the name of this flag's variable in the Makefile."""
    return f"{error} (lookahead: K)" if "lookahead" in str(error) else str(error)


def unknown(kind: str, value: str, allowed: Iterable[str]) -> ConfigError:
    """Returns a ConfigError for an unknown name `value`, which lists the allowed names and suggests
    the closest one. kind: what is named, such as "flag"."""
    names = sorted(allowed)
    close = difflib.get_close_matches(value, names, n=1, cutoff=0.6)
    # The last words must be similar, too: top_p is not suggested for top_k.
    ends = [name.rpartition("_")[2] for name in (value, *close)]
    is_typo = bool(difflib.get_close_matches(ends[0], ends[1:], cutoff=0.4))
    hint = f"did you mean {close[0]!r}? " if is_typo else ""
    return ConfigError(f"unknown {kind} {value!r}: {hint}allowed: {', '.join(names)}")
