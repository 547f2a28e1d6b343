"""One line of the doctor's table."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, BAD = "ok", "warn", "BAD"


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, how bad that is, and how to mend it.

    BAD: the run that was asked about fails. warn: it runs, slower or less trustworthy.
    """

    what: str
    found: str
    verdict: str = OK
    mend: str = ""

    def __post_init__(self) -> None:
        assert (self.verdict == OK) == (not self.mend), f"{self.what}: a mend for what is not ok"


def ok(what: str, found: str) -> Finding:
    """Nothing to mend."""
    return Finding(what, found)


def warn(what: str, found: str, mend: str) -> Finding:
    """The run works all the same."""
    return Finding(what, found, WARN, mend)


def bad(what: str, found: str, mend: str) -> Finding:
    """The run would fail."""
    return Finding(what, found, BAD, mend)
