"""What `plan` says of an advice: lines for a terminal, and JSON.

Every use that was judged is listed, derived ones labelled. Where one could not be judged the first
line names it, and nothing is called best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mpissd.common.rivals import Family
from mpissd.lab.predict.advisor import Advice
from mpissd.lab.predict.places import Survey
from mpissd.lab.predict.search import Choice


def render(advice: Advice, heading: str, survey: Survey) -> str:
    """The lines, with what the survey left out."""
    best = None if advice.missing else advice.best
    lines = [heading]
    if advice.missing:
        names = ", ".join(map(str, advice.missing))
        missing = f"not judged: {names}, so nothing here is called best: "
        lines = [missing + "; ".join(dict.fromkeys(survey.unjudged.values())), heading]
    lines += [f" {'→' if choice == best else ' '} {_line(choice)}" for choice in advice.judged]
    told = [*_sources(advice.judged), *_left_out(advice, survey), *_verdict(advice)]
    return "\n".join([*lines, *(f"   {line}" for line in told)])


def _sources(judged: Sequence[Choice]) -> list[str]:
    """From what each derived use is."""
    uses: dict[str, list[str]] = {}
    for choice in judged:
        if choice.derived:
            uses.setdefault(choice.derived, []).append(str(Family.of(choice)))
    return [f"{', '.join(of)}: {source}" for source, of in uses.items()]


def _left_out(advice: Advice, survey: Survey) -> list[str]:
    large = ", ".join(map(str, survey.too_large))
    told = [f"does not fit: {large}"] if large else []
    more = any(2 in place.num_drafts for place in survey.placements)
    if more and any(choice.mode == "ssd" for choice in advice.judged):
        told.append("SSD is judged at D = 1")
    return told


def _line(choice: Choice) -> str:
    how = "" if choice.mode == "ar" else f" K={choice.lookahead}"
    if choice.fan_out is not None:
        how += f" {choice.fan_out} {choice.backup} K_b={choice.backup_lookahead} {choice.on_late}"
    rate = f"{choice.tok_per_s:8.1f} tok/s {choice.tok_per_s_per_gpu:8.1f} a GPU"
    return f"{Family.of(choice)!s:15}{rate} {how}{_mark(bool(choice.derived))}".rstrip()


def _verdict(advice: Advice) -> list[str]:
    extra = advice.extra_gpu
    gains = [("best over the best other use of as many GPUs", advice.gain, advice.is_derived)]
    if extra is not None:
        gains += [
            (what, gain, extra.is_derived)
            for what, gain in (
                ("SSD's extra GPU, raw", extra.gain),
                ("the same per GPU", extra.gain_per_gpu),
                ("SSD against the best other use of as many GPUs", extra.gain_at_equal_gpus),
            )
        ]
    told = [f"{what}: {gain:.3f}×{_mark(of)}" for what, gain, of in gains if gain is not None]
    rates = ("alpha", advice.break_even_alpha), ("p_hit", advice.break_even_p_hit)
    for what, value in rates:
        if value is not None or not advice.missing:
            known = "none" if value is None else f"{value:.3f}"
            told.append(f"break-even {what}: {known}{_mark(any(c.derived for c in advice.judged))}")
    return told


def _mark(derived: bool) -> str:
    return " (derived)" * derived


def to_dict(advice: Advice, survey: Survey) -> dict[str, Any]:
    """As JSON; best is null where a use could not be judged, and judged begins with the fastest."""
    extra = advice.extra_gpu
    gains = ("gain", "gain_per_gpu", "gain_at_equal_gpus", "gain_over_replicas")
    return {
        "best": None if advice.missing else asdict(advice.best),
        "judged": [asdict(choice) for choice in advice.judged],
        "unjudged": [{**asdict(f), "why": survey.unjudged[f]} for f in advice.missing],
        "too_large": [asdict(family) for family in survey.too_large],
        "by_method": [asdict(choice) for choice in advice.by_method],
        "alternatives": [asdict(choice) for choice in advice.alternatives],
        "gain": advice.gain,
        "break_even_alpha": advice.break_even_alpha,
        "break_even_p_hit": advice.break_even_p_hit,
        "extra_gpu": None if extra is None else {name: getattr(extra, name) for name in gains},
        "num_evaluated": advice.num_evaluated,
    }
