"""The lines of the doctor's table."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, BAD = "ok", "warn", "BAD"


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    what: the thing that was examined. found: its state. verdict: ok; warn for a run that works but
    is slower or less trustworthy; BAD for a run that fails. mend: how to fix it, "" where it is ok.
    """

    what: str
    found: str
    verdict: str = OK
    mend: str = ""

    def __post_init__(self) -> None:
        assert (self.verdict == OK) == (not self.mend), f"{self.what}: a mend for what is not ok"


def ok(what: str, found: str) -> Finding:
    """Returns a finding about something that is as it should be."""
    return Finding(what, found)


def warn(what: str, found: str, mend: str) -> Finding:
    """Returns a finding about something with which the run still works."""
    return Finding(what, found, WARN, mend)


def bad(what: str, found: str, mend: str) -> Finding:
    """Returns a finding about something with which the run fails."""
    return Finding(what, found, BAD, mend)
