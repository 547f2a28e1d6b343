"""Renders the findings as a table with the verdict below."""

from __future__ import annotations

from collections.abc import Sequence

from mpissd.ops.doctor.finding import BAD, WARN, Finding


def render(findings: Sequence[Finding]) -> str:
    """Returns a line for each finding, a line with its fix where it has one, and the verdict."""
    width = max((len(finding.what) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict:4}  {finding.what:{width}}  {_line(finding.detail)}")
        if finding.fix:
            lines.append(f"{'':4}  {'':{width}}  → {_line(finding.fix)}")
    return "\n".join([*lines, "", verdict(findings), ""])


def verdict(findings: Sequence[Finding]) -> str:
    """Returns one line that says whether the run works, or else what to fix first."""
    faults = [finding for finding in findings if finding.verdict == BAD]
    warnings = sum(finding.verdict == WARN for finding in findings)
    noted = f"; {warnings} warning{'s' * (warnings != 1)}" if warnings else ""
    if not faults:
        return f"doctor: this run works{noted}"
    first = faults[0]
    count = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"doctor: this run fails: {first.what}{count}{noted}. To fix: {_line(first.fix)}"


def _line(text: str) -> str:
    return " ".join(text.split())
