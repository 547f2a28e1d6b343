"""The advice of `plan`, and its text: lines for a terminal, and JSON.

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
from mpissd.common.real_pairs import DEFAULT_SOURCE
from mpissd.common.rivals import Family
from mpissd.engine.backend.profile import Profile
from mpissd.engine.spec.hits import hit_law_of
from mpissd.lab.predict.advisor import Advice, ExtraGpu
from mpissd.lab.predict.costs import HostCosts
from mpissd.lab.predict.imposed import imposed_hits, price_of
from mpissd.lab.predict.places import Survey, job_of
from mpissd.lab.predict.search import Choice, Placement
from mpissd.lab.predict.uses import Gain, Use, frontier, gain_of

# Errors of predictions for an H200: 2.8% (median), 8.5% (p95); see docs/predictions.md.
ERROR = 0.05
_LEGEND = "SSD's line: K, --fan_out, --backup (what drafts a miss: jit or fast), K_b (its tokens)"


def heading(run: RunConfig, profile: Profile, gpus: int) -> str:
    """Returns the first line: the machine, the pair, and the assumptions about both.

    A second line marks a profile from a datasheet.
    """
    terms = [
        run.pair,
        run.acceptance_text,
        *(["fused"] if run.fuse else []),
        "LM head" if run.lm_head else "no LM head",
        f"context {run.context}",
        f"hits {_hits(run)}",
    ]
    line = f"on {gpus} × {profile.device_name}, {', '.join(map(str, terms))}:"
    if profile.sources["read_bytes_per_s"].startswith("datasheet"):
        line += "\n   datasheet profile, never measured; no host or link cost"
    return line


def _hits(run: RunConfig) -> str:
    """Returns the hit model of a plan, and whether it was given or the pair of its measurement."""
    if any(v is not None for v in (run.p_hit, run.hit_law)):
        return f"given {hit_law_of(run, 1).label}"
    if run.laws:
        return "of the same file"
    return f"as {DEFAULT_SOURCE} ({hit_law_of(run, 1).label})"


def gain_text(gain: float) -> str:
    """Returns a predicted gain as text, marked if it is within the predictor's error."""
    near = abs(math.log(gain)) <= math.log1p(ERROR)
    none = f" (no difference within the predictor's error of {ERROR:.0%})"
    return f"{gain:.3f}×{none * near}"


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
    lines += [f" {'→' if choice == best else ' '} {_line(choice)}" for choice in advice.judged]
    legend = [_LEGEND] if advice.extra_gpu is not None else []
    notes = [*_sources(advice.judged), *_left_out(advice, survey), *_verdict(advice, gpus)]
    fastest = [] if best is None else [_fastest(best)]
    return "\n".join([*lines, *(f"   {line}" for line in (*fastest, *said, *legend, *notes))])


def _fastest(best: Choice) -> str:
    """Returns the meaning of the arrow: the use whose one batch advances fastest, on its GPUs."""
    what = f"batch of {best.batch_size} sequences" if best.batch_size > 1 else "single sequence"
    rate = f"{best.tok_per_s:.1f} tok/s{_mark(bool(best.derived))}"
    return f"→ fastest {what}: {Family.of(best)} on {gpus_text(best.gpus)}, {rate}"


def gpus_text(count: int) -> str:
    """Returns a number of GPUs as text."""
    return f"{count} GPU{'s' * (count > 1)}"


def _sources(judged: Sequence[Choice]) -> list[str]:
    """Returns a line for each source of derived times, with the uses that rest on it."""
    uses: dict[str, list[str]] = {}
    for choice in judged:
        if choice.derived:
            uses.setdefault(choice.derived, []).append(str(Family.of(choice)))
    return [f"{', '.join(of)}: {source}" for source, of in uses.items()]


def _left_out(advice: Advice, survey: Survey) -> list[str]:
    large = ", ".join(map(str, survey.too_large))
    parts = [f"does not fit: {large}"] if large else []
    return parts


def _line(choice: Choice) -> str:
    how = "" if choice.mode == "ar" else f" K={choice.lookahead}"
    if choice.fan_out is not None:
        how += f" {choice.fan_out} {choice.backup} K_b={choice.backup_lookahead}"
    rate = f"{choice.tok_per_s:8.1f} tok/s {choice.tok_per_s_per_gpu:8.1f} a GPU"
    return f"{Family.of(choice)!s:15}{rate} {how}{_mark(bool(choice.derived))}".rstrip()


def pays(advice: Advice) -> str:
    """Returns a line on whether a draft pays: its fastest use over the fastest without one."""
    drafting = next((choice for choice in advice.judged if choice.mode != "ar"), None)
    alone = next((choice for choice in advice.judged if choice.mode == "ar"), None)
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


def _verdict(advice: Advice, gpus: int) -> list[str]:
    lines = []
    if not any(family.mode != advice.best.mode for family in advice.missing):
        lines += _over_asked(advice.best, advice, gpus)
    if advice.extra_gpu is not None:
        lines += _of_ssd(advice.extra_gpu, advice, gpus)
    rates = ("alpha", advice.break_even_alpha), ("p_hit", advice.break_even_p_hit)
    for what, value in rates:
        if value is not None or not advice.missing:
            known = "none" if value is None else f"{value:.3f}"
            lines.append(
                f"break-even {what}: {known}{_mark(any(c.derived for c in advice.judged))}"
            )
    return lines


def _of_ssd(extra: ExtraGpu, advice: Advice, gpus: int) -> list[str]:
    """Returns lines on SSD's gains over the best other uses of its N GPUs, and of N − 1 GPUs.

    If the user asked for more than N GPUs, a line compares SSD with the best other use of them all.
    """
    ssd, lines = extra.ssd, []
    if extra.otherwise is not None and (ssd.gpus < gpus or ssd != advice.best):
        lines.append(_over(ssd, extra.otherwise, f"the best other use of {ssd.gpus}"))
    if ssd.gpus < gpus and ssd != advice.best and not advice.missing:
        lines += _over_asked(ssd, advice, gpus)
    if extra.without is not None and extra.gain_per_gpu is not None:
        line = _over(ssd, extra.without, "one GPU fewer")
        lines.append(f"{line}; in tok/s a GPU: {gain_text(extra.gain_per_gpu)}")
    return lines


def _over_asked(choice: Choice, advice: Advice, gpus: int) -> list[str]:
    """Returns a line comparing a choice with the best other mode on the GPUs asked for, if any."""
    others = (other for other in advice.judged if other.mode != choice.mode)
    asked = f"the best other use of the {gpus} asked for"
    return [_over(choice, other, asked) for other in others][:1]


def _over(choice: Choice, other: Choice, what: str) -> str:
    held = f"{Family.of(choice)} ({gpus_text(choice.gpus)})"
    gain = gain_text(choice.tok_per_s / other.tok_per_s)
    mark = _mark(bool(choice.derived or other.derived))
    return f"{held} over {what}, {Family.of(other)}: {gain}{mark}"


def _mark(derived: bool) -> str:
    return " (derived)" * derived


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


def most_lines(use: Use | None, gpus: int) -> list[str]:
    """Returns the line that names the most tok/s of N GPUs; none without a use, or of one GPU."""
    if use is None or gpus == 1:
        return []
    targets, mark = use.targets * use.copies, " (derived)" * bool(use.choice.derived)
    each = f", {use.tok_per_s / targets:.1f} for each of {targets} targets" * (targets > 1)
    return [f"most tok/s of all {gpus_text(gpus)}: {use}, {use.tok_per_s:.1f} tok/s{each}{mark}"]


def pool_lines(uses: Sequence[Use], gpus: int) -> list[str]:
    """Returns the lines of a plan; none without a pool."""
    if not any(use.is_pool for use in uses):
        return []
    best = frontier(uses)
    batch = best[0].choice.batch_size
    each = f"{batch} sequence{'s' * (batch > 1)}"
    text = [
        f"equal copies on {gpus} GPUs, {each} a target, all that no other beats in both, from the "
        "most tok/s to the earliest tokens:"
    ]
    text += [_use_line(use, gpus) for use in best]
    gains = [gain_of(use, uses) for use in best if use.is_pool]
    if not gains:
        return [*text, "no pool is among them: a draft that targets share does not pay here"]
    return text + [_gain_line(gain) for gain in gains]


def _use_line(use: Use, gpus: int) -> str:
    choice = use.choice
    how = "" if choice.mode == "ar" else f"  K={choice.lookahead}"
    if choice.fan_out is not None:
        how += f" {choice.fan_out} {choice.backup} K_b={choice.backup_lookahead}"
    idle = gpus - use.gpus
    rate = f"{use.tok_per_s:9.1f} tok/s {use.tok_per_s / gpus:8.1f} a GPU"
    wait = f"  ({idle} idle)" * bool(idle)
    return f"  {use!s:22}{rate} {use.token_s * 1e3:7.2f} ms a token{how}{wait}"


def _gain_line(gain: Gain) -> str:
    parts = []
    if gain.in_time is not None:
        ratio = gain_text(gain.pool.tok_per_s / gain.in_time.tok_per_s)
        parts.append(f"the most with tokens no later, {gain.in_time}: {ratio}")
    if gain.most is not None and gain.most is not gain.in_time:
        ratio = gain_text(gain.pool.tok_per_s / gain.most.tok_per_s)
        later = gain.most.token_s / gain.pool.token_s
        parts.append(f"the most, {gain.most}, {later:.2f}× later: {ratio}")
    if gain.each is not None and gain.each is not gain.in_time:
        ratio = gain_text(gain.pool.tok_per_s / gain.each.tok_per_s)
        parts.append(f"a draft each, {gain.each}: {ratio}")
    mark = " (derived)" * gain.is_derived
    return f"{gain.pool} over {'; over '.join(parts)}{mark}"


def price_line(config: RunConfig, ssd: Choice | None, places: Sequence[Placement]) -> str:
    """Returns the line on the price of an imposed p_hit at the best SSD; "" if none is imposed."""
    if ssd is None or config.p_hit is None:
        return ""
    place = next(place for place in places if place.tp == ssd.tp)
    host = place.host(ssd.method, HostCosts())
    return price_of(imposed_hits(job_of(config, ssd), place.device, host), ssd.tok_per_s)
