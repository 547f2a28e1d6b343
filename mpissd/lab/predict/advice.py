"""The text of `plan`'s advice, and its JSON.

Every use that was judged is listed, and derived ones are labelled. If a use could not be judged,
the first line names it, and nothing is called best. Gains within ERROR of 1 are shown as no
difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mpissd.common.config import RunConfig
from mpissd.common.flags import DRAFTING
from mpissd.common.real_pairs import DEFAULT_SOURCE
from mpissd.common.rivals import Family
from mpissd.engine.backend.profile import Profile
from mpissd.engine.spec.acceptance import hit_law_of
from mpissd.lab.predict.advisor import Advice
from mpissd.lab.predict.costs import HostCosts
from mpissd.lab.predict.places import Survey, job_of
from mpissd.lab.predict.row import imposed_hits, price_of
from mpissd.lab.predict.search import Choice, Placement
from mpissd.lab.predict.uses import Gain, Use, frontier, gain_of

# Errors of predictions for an H200: 2.8% (median), 8.4% (p95); see docs/predictions.md.
ERROR = 0.05
_LEGEND = "SSD's line: K, --fan_out, --backup (what drafts a miss: jit or fast), K_b (its tokens)"


def heading(run: RunConfig, profile: Profile, gpus: int) -> str:
    """Returns the first line: the machine, the pair, and the assumptions about both.

    A second line marks a profile from a datasheet.
    """
    law = hit_law_of(run, 1).label
    if any(v is not None for v in (run.p_hit, run.hit_law)):
        hits = f"given {law}"
    else:
        hits = "of the same file" if run.laws else f"as {DEFAULT_SOURCE} ({law})"
    terms = [
        run.pair,
        run.acceptance_text,
        *(["fused"] if run.fuse else []),
        "LM head" if run.lm_head else "no LM head",
        f"context {run.context}",
        f"hits {hits}",
    ]
    line = f"on {gpus} × {profile.device_name}, {', '.join(map(str, terms))}:"
    if profile.sources["read_bytes_per_s"].startswith("datasheet"):
        line += "\n   datasheet profile, never measured; no host or link cost"
    return line


def gain_text(gain: float) -> str:
    """Returns a predicted gain as text, marked if it is within the predictor's error."""
    near = abs(math.log(gain)) <= math.log1p(ERROR)
    none = f" (no difference within the predictor's error of {ERROR:.0%})"
    return f"{gain:.3f}×{none * near}"


def gpus_text(count: int) -> str:
    """Returns a number of GPUs as text."""
    return f"{count} GPU{'s' * (count > 1)}"


def render(
    advice: Advice, heading: str, survey: Survey, gpus: int, said: Sequence[str] = ()
) -> str:
    """Returns the advice as text, with the uses that the survey left out.

    gpus: the number of GPUs that the user asked for. said: lines to print right below the uses.
    """
    best = None if advice.missing else advice.best
    lines = [heading]
    if advice.missing:
        names = ", ".join(map(str, advice.missing))
        missing = f"not judged: {names}, so nothing here is called best: "
        lines = [missing + "; ".join(dict.fromkeys(survey.unjudged.values())), heading]
    for choice in advice.judged:
        rate = f"{choice.tok_per_s:8.1f} tok/s {choice.tok_per_s_per_gpu:8.1f} a GPU"
        line = f"{Family.of(choice)!s:15}{rate} {_how(choice)}{_mark(choice)}".rstrip()
        lines.append(f" {'→' if choice == best else ' '} {line}")
    notes = []
    if best is not None:
        batch = best.batch_size
        what = f"batch of {batch} sequences" if batch > 1 else "single sequence"
        rate = f"{best.tok_per_s:.1f} tok/s{_mark(best)}"
        notes.append(f"→ fastest {what}: {Family.of(best)} on {gpus_text(best.gpus)}, {rate}")
    notes += [*said, *([_LEGEND] if advice.extra_gpu is not None else [])]
    sources: dict[str, list[str]] = {}
    for choice in advice.judged:
        if choice.derived:
            sources.setdefault(choice.derived, []).append(str(Family.of(choice)))
    notes += [f"{', '.join(uses)}: {source}" for source, uses in sources.items()]
    if survey.too_large:
        notes.append(f"does not fit: {', '.join(map(str, survey.too_large))}")
    notes += _comparisons(advice, gpus)
    for what in ("alpha", "p_hit"):
        value = getattr(advice, f"break_even_{what}")
        if value is not None or not advice.missing:
            known = "none" if value is None else f"{value:.3f}"
            notes.append(f"break-even {what}: {known}{_mark(*advice.judged)}")
    return "\n".join([*lines, *(f"   {note}" for note in notes)])


def _comparisons(advice: Advice, gpus: int) -> list[str]:
    """Returns lines that compare the best choice and the best SSD with other uses of their GPUs.

    They are compared with the best other mode on the GPUs asked for; SSD also with the best other
    uses of its own N GPUs and of N − 1.
    """
    lines, best, extra = [], advice.best, advice.extra_gpu
    asked = f"the best other use of the {gpus} asked for"
    other = next((c for c in advice.judged if c.mode != best.mode), None)
    if other is not None and not any(family.mode != best.mode for family in advice.missing):
        lines.append(_over(best, other, asked))
    if extra is None:
        return lines
    ssd, is_other = extra.ssd, extra.ssd.gpus < gpus and extra.ssd != best
    if extra.otherwise is not None and (ssd.gpus < gpus or ssd != best):
        lines.append(_over(ssd, extra.otherwise, f"the best other use of {ssd.gpus}"))
    rival = next((c for c in advice.judged if c.mode != "ssd"), None)
    if is_other and rival is not None and not advice.missing:
        lines.append(_over(ssd, rival, asked))
    if extra.without is not None and extra.gain_per_gpu is not None:
        line = _over(ssd, extra.without, "one GPU fewer")
        lines.append(f"{line}; in tok/s a GPU: {gain_text(extra.gain_per_gpu)}")
    return lines


def _how(choice: Choice) -> str:
    """Returns K, and SSD's fan-out, backup and K_b."""
    text = "" if choice.mode == "ar" else f" K={choice.lookahead}"
    if choice.fan_out is not None:
        text += f" {choice.fan_out} {choice.backup} K_b={choice.backup_lookahead}"
    return text


def _over(choice: Choice, other: Choice, what: str) -> str:
    held = f"{Family.of(choice)} ({gpus_text(choice.gpus)})"
    gain = gain_text(choice.tok_per_s / other.tok_per_s)
    return f"{held} over {what}, {Family.of(other)}: {gain}{_mark(choice, other)}"


def _mark(*choices: Choice) -> str:
    return " (derived)" * any(choice.derived for choice in choices)


def pays(advice: Advice) -> str:
    """Returns a line on whether a draft pays: its fastest use over the fastest without one.

    A lookup has no draft.
    """
    drafting = advice.first(*DRAFTING)
    alone = next((choice for choice in advice.judged if choice.mode not in DRAFTING), None)
    if drafting is None or alone is None or advice.missing:
        return "does this draft pay here? Not judged: a use that fits is not known"
    gain = drafting.tok_per_s / alone.tok_per_s
    answer = "yes" if gain > 1 + ERROR else "no" if gain < 1 - ERROR else "it makes no difference"
    if drafting.derived or alone.derived:
        answer = "probe first"
    line = f"does this draft pay here? {answer}: {Family.of(drafting)} {drafting.tok_per_s:.1f}"
    line += f" tok/s over {Family.of(alone)} {alone.tok_per_s:.1f}, {gain_text(gain)}"
    extra = advice.extra_gpu
    if extra is not None and extra.gain_at_equal_gpus is not None:
        line += f"; its speculation cache: {gain_text(extra.gain_at_equal_gpus)} of the best other"
        line += f" use of {extra.ssd.gpus}"
    return line


def price_line(config: RunConfig, ssd: Choice | None, places: Sequence[Placement]) -> str:
    """Returns the line on the price of an imposed p_hit at the best SSD; "" if none is imposed."""
    if ssd is None or config.p_hit is None:
        return ""
    place = next(place for place in places if place.tp == ssd.tp)
    host = place.host(ssd.method, HostCosts())
    return price_of(imposed_hits(job_of(config, ssd), place.device, host), ssd.tok_per_s)


def most_lines(use: Use | None, gpus: int) -> list[str]:
    """Returns the line that names the most tok/s of N GPUs; none without a use, or of one GPU."""
    if use is None or gpus == 1:
        return []
    targets = use.targets * use.copies
    each = f", {use.tok_per_s / targets:.1f} for each of {targets} targets" * (targets > 1)
    rate = f"{use.tok_per_s:.1f} tok/s{each}{_mark(use.choice)}"
    return [f"most tok/s of all {gpus_text(gpus)}: {use}, {rate}"]


def pool_lines(uses: Sequence[Use], gpus: int) -> list[str]:
    """Returns the lines of a plan on equal copies and pools; none without a pool."""
    if not any(use.is_pool for use in uses):
        return []
    best = frontier(uses)
    batch = best[0].choice.batch_size
    each = f"{batch} sequence{'s' * (batch > 1)}"
    text = [
        f"equal copies on {gpus} GPUs, {each} a target, all that no other beats in both, from the "
        "most tok/s to the earliest tokens:"
    ]
    for use in best:
        rate = f"{use.tok_per_s:9.1f} tok/s {use.tok_per_s / gpus:8.1f} a GPU"
        wait = f"  ({gpus - use.gpus} idle)" * (use.gpus < gpus)
        how = f" {_how(use.choice)}" if use.choice.lookahead else ""
        text.append(f"  {use!s:22}{rate} {use.token_s * 1e3:7.2f} ms a token{how}{wait}")
    gains = [_gain_line(gain_of(use, uses)) for use in best if use.is_pool]
    return [*text, *(gains or ["no pool is among them: a shared draft does not pay here"])]


def _gain_line(gain: Gain) -> str:
    def over(use: Use) -> str:
        return gain_text(gain.pool.tok_per_s / use.tok_per_s)

    parts = []
    if gain.in_time is not None:
        parts.append(f"the most with tokens no later, {gain.in_time}: {over(gain.in_time)}")
    if gain.most is not None and gain.most is not gain.in_time:
        later = gain.most.token_s / gain.pool.token_s
        parts.append(f"the most, {gain.most}, {later:.2f}× later: {over(gain.most)}")
    if gain.each is not None and gain.each is not gain.in_time:
        parts.append(f"a draft each, {gain.each}: {over(gain.each)}")
    uses = (use for use in (gain.pool, gain.in_time, gain.most, gain.each) if use is not None)
    return f"{gain.pool} over {'; over '.join(parts)}{_mark(*(use.choice for use in uses))}"


def to_dict(advice: Advice, survey: Survey) -> dict[str, Any]:
    """Returns the advice as JSON; `judged` is sorted, fastest first.

    best is null if a use that would fit could not be judged.
    """
    extra = advice.extra_gpu
    gains = ("gain", "gain_per_gpu", "gain_at_equal_gpus")
    return {
        "best": None if advice.missing else asdict(advice.best),
        "judged": [asdict(choice) for choice in advice.judged],
        "unjudged": [{**asdict(f), "why": survey.unjudged[f]} for f in advice.missing],
        "too_large": [asdict(family) for family in survey.too_large],
        "probe_first": [asdict(Family.of(choice)) for choice in advice.to_probe],
        "gain": advice.gain,
        "break_even_alpha": advice.break_even_alpha,
        "break_even_p_hit": advice.break_even_p_hit,
        "extra_gpu": None if extra is None else {name: getattr(extra, name) for name in gains},
    }
