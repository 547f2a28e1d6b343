"""What `plan` says of an advice: lines for a terminal, and JSON.

Every use that was judged is listed, derived ones labelled. Where one could not be judged the first
line names it, and nothing is called best.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mpissd.common.rivals import Family
from mpissd.lab.predict.advisor import Advice
from mpissd.lab.predict.search import Choice


def render(advice: Advice, heading: str, unjudged: Mapping[int, str]) -> str:
    """The lines; unjudged: why, by T (places.Survey)."""
    best = None if advice.missing else advice.best
    lines = [heading]
    if advice.missing:
        names = ", ".join(map(str, advice.missing))
        told = f"not judged: {names}, so nothing here is called best: "
        lines = [told + "; ".join(dict.fromkeys(unjudged.values())), heading]
    lines += [f" {'→' if choice == best else ' '} {_line(choice)}" for choice in advice.judged]
    sources = {choice.tp: choice.derived for choice in advice.judged if choice.derived}
    lines += [f"   T={tp} is {source}" for tp, source in sorted(sources.items())]
    return "\n".join([*lines, *(f"   {line}" for line in _verdict(advice))])


def _line(choice: Choice) -> str:
    how = "" if choice.mode == "ar" else f" K={choice.lookahead}"
    if choice.fan_out is not None:
        how += f" {choice.fan_out} {choice.backup} K_b={choice.backup_lookahead} {choice.on_late}"
    rate = f"{choice.tok_per_s:8.1f} tok/s {choice.tok_per_s_per_gpu:8.1f} a GPU"
    label = " (derived)" * bool(choice.derived)
    return f"{Family.of(choice)!s:15}{rate} {how}{label}".rstrip()


def _verdict(advice: Advice) -> list[str]:
    extra = advice.extra_gpu
    gains = [("best over the best other use of as many GPUs", advice.gain)]
    if extra is not None:
        gains += [
            ("SSD's extra GPU, raw", extra.gain),
            ("the same per GPU", extra.gain_per_gpu),
            ("SSD against the best other use of as many GPUs", extra.gain_at_equal_gpus),
        ]
    told = [f"{what}: {gain:.3f}×" for what, gain in gains if gain is not None]
    rates = ("alpha", advice.break_even_alpha), ("p_hit", advice.break_even_p_hit)
    for what, value in rates:
        if value is not None or not advice.missing:
            told.append(f"break-even {what}: {'none' if value is None else f'{value:.3f}'}")
    return told


def to_dict(advice: Advice, unjudged: Mapping[int, str]) -> dict[str, Any]:
    """As JSON; best is null where a use could not be judged, and judged begins with the fastest."""
    extra = advice.extra_gpu
    gains = ("gain", "gain_per_gpu", "gain_at_equal_gpus", "gain_over_replicas")
    return {
        "best": None if advice.missing else asdict(advice.best),
        "judged": [asdict(choice) for choice in advice.judged],
        "unjudged": [{**asdict(f), "why": unjudged[f.tp]} for f in advice.missing],
        "by_method": [asdict(choice) for choice in advice.by_method],
        "alternatives": [asdict(choice) for choice in advice.alternatives],
        "gain": advice.gain,
        "break_even_alpha": advice.break_even_alpha,
        "break_even_p_hit": advice.break_even_p_hit,
        "extra_gpu": None if extra is None else {name: getattr(extra, name) for name in gains},
        "num_evaluated": advice.num_evaluated,
    }
