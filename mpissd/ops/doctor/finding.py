"""The lines of the doctor's table."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, BAD = "ok", "warn", "BAD"


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    what: the thing that was examined. detail: its state. verdict: ok; warn for a run that works but
    is slower or less trustworthy; BAD for a run that fails. fix: what repairs it, "" where it is
    ok.
    """

    what: str
    detail: str
    verdict: str = OK
    fix: str = ""

    def __post_init__(self) -> None:
        assert (self.verdict == OK) == (not self.fix), f"{self.what}: a fix for what is not ok"


def ok(what: str, detail: str) -> Finding:
    """Returns a finding without a fault."""
    return Finding(what, detail)


def warn(what: str, detail: str, fix: str) -> Finding:
    """Returns a finding about a fault with which the run still works."""
    return Finding(what, detail, WARN, fix)


def ok_if(is_ok: bool, what: str, detail: str, fix: str) -> Finding:
    """Returns a finding without a fault if `is_ok`, else a warning."""
    return ok(what, detail) if is_ok else warn(what, detail, fix)


def bad(what: str, detail: str, fix: str) -> Finding:
    """Returns a finding about a fault with which the run fails."""
    return Finding(what, detail, BAD, fix)
