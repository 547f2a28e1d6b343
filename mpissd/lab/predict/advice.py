"""The text of `plan`'s advice, and its JSON.

Every use that was judged is listed, and derived ones are labelled. If a use could not be judged,
the first line names it, and nothing is called best. Gains within ERROR of 1 are shown as no
difference.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mpissd.common.config import RunConfig
from mpissd.common.flags import DRAFTING, said
from mpissd.common.presets import has_weights, split_pair
from mpissd.common.real_pairs import DEFAULT_SOURCE
from mpissd.common.rivals import Family
from mpissd.engine.backend.profile import Profile
from mpissd.engine.spec.acceptance import hit_law_of
from mpissd.lab.predict.advisor import Advice, Use, best_pool, frontier, rivals_of, summary
from mpissd.lab.predict.row import imposed_hits, price_of
from mpissd.lab.predict.search import Choice, Survey, cut_law, job_of, runnable

# Errors of predictions for an H200: 2.8% (median), 8.4% (p95); see docs/predictions.md.
ERROR = 0.05
_LEGEND = "SSD's line: K, --fan_out, --backup (what drafts a miss: jit or fast), K_b (its tokens)"
_FORWARD = ("batch_size", "forward", "fuse", "lm_head", "context")


def report(
    run: RunConfig,
    profile: Profile,
    gpus: int,
    placed: Survey,
    advice: Advice,
    uses: Sequence[Use],
) -> tuple[list[str], dict[str, Any]]:
    """Returns the lines of the advice for at most `gpus` GPUs, and its JSON.

    uses: the copies and pools that N GPUs can hold. `judged` of the JSON is sorted, fastest first;
    its best is null if a use that would fit could not be judged.
    """
    best = None if advice.missing else advice.best
    most = None if advice.missing else next(iter(frontier(uses)), None)
    lines = heading(run, profile, gpus)
    if advice.missing:
        names = ", ".join(map(str, advice.missing))
        missing = f"not judged: {names}, so nothing here is called best: "
        lines = [missing + "; ".join(dict.fromkeys(placed.unjudged.values())), *lines]
    for choice in advice.judged:
        rate = f"{choice.tok_per_s:8.1f} tok/s {choice.tok_per_s_per_gpu:8.1f} a GPU"
        line = f"{Family.of(choice)!s:15}{rate} {_how(choice)}{_mark(choice)}".rstrip()
        lines.append(f" {'→' if choice == best else ' '} {line}")
    notes = [*_notes(advice, placed, gpus, most), *_comparisons(advice, gpus)]
    for what in ("alpha", "p_hit"):
        value = getattr(advice, f"break_even_{what}")
        if value is not None or not advice.missing:
            known = "none" if value is None else f"{value:.3f}"
            notes.append(f"break-even {what}: {known}{_mark(*advice.judged)}")
    if run.laws is not None:
        notes.append(pays(advice))
    ssd = advice.first("ssd")
    if ssd is not None and run.p_hit is not None:
        place = next(place for place in placed.placements if place.tp == ssd.tp)
        host = place.host(ssd.method)
        assert host is not None, "judged without host costs"
        price = imposed_hits(job_of(run, ssd), place.device, host)
        notes += [f"hits {text}"] if (text := price_of(price, ssd.tok_per_s)) else []
    if not advice.missing:
        notes += [
            f"→ probe first, {Family.of(use)} is derived: {_probe(run, use)}"
            for use in advice.to_probe
        ] or [f"→ run it: {_command(run, advice.best)}"]
    if most is not None and most.copies * most.targets > 1 and not most.choice.derived:
        command = _command(run, most.choice, most.targets)
        jobs = f"{most.copies} such job{'s' * (most.copies > 1)}"
        notes.append(f"most tok/s, {jobs}: {command}")
    notes += _pool_lines(uses, gpus)
    pool = best_pool(uses)
    if pool is not None and pool != most and not pool.choice.derived:
        command = _command(run, pool.choice, pool.targets)
        notes.append(f"run the pool that gains most, {pool}: {command}")
    numbers = {
        "best": None if best is None else asdict(best),
        "judged": [asdict(choice) for choice in advice.judged],
        "unjudged": [{**asdict(f), "why": placed.unjudged[f]} for f in advice.missing],
        "too_large": [asdict(family) for family in placed.too_large],
        "probe_first": [asdict(Family.of(choice)) for choice in advice.to_probe],
        "gain": advice.gain,
        "break_even_alpha": advice.break_even_alpha,
        "break_even_p_hit": advice.break_even_p_hit,
        "extra_gpu": advice.extra_gpu(),
        "most_tok_per_s": None if most is None else most.to_dict(),
        "pools": summary(uses),
    }
    return [*lines, *(f"   {note}" for note in notes)], numbers


def heading(run: RunConfig, profile: Profile, gpus: int) -> list[str]:
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
    lines = [f"on {gpus} × {profile.device_name}, {', '.join(map(str, terms))}:"]
    if profile.sources["read_bytes_per_s"].startswith("datasheet"):
        lines.append("   datasheet profile, never measured; no host or link cost")
    return lines


def gain_text(gain: float) -> str:
    """Returns a predicted gain as text, marked if it is within the predictor's error."""
    near = abs(math.log(gain)) <= math.log1p(ERROR)
    none = f" (no difference within the predictor's error of {ERROR:.0%})"
    return f"{gain:.3f}×{none * near}"


def _gpus_text(count: int) -> str:
    return f"{count} GPU{'s' * (count > 1)}"


def _how(choice: Choice) -> str:
    """Returns K, and SSD's fan-out, backup and K_b."""
    text = "" if choice.mode == "ar" else f" K={choice.lookahead}"
    if choice.fan_out is not None:
        text += f" {choice.fan_out} {choice.backup} K_b={choice.backup_lookahead}"
    return text


def _mark(*choices: Choice) -> str:
    return " (derived)" * any(choice.derived for choice in choices)


def _notes(advice: Advice, placed: Survey, gpus: int, most: Use | None) -> list[str]:
    """Returns the fastest use, the use with the most tok/s, and the origin of derived times."""
    notes, best = [], advice.best
    if not advice.missing:
        batch = best.batch_size
        what = f"batch of {batch} sequences" if batch > 1 else "single sequence"
        rate = f"{best.tok_per_s:.1f} tok/s{_mark(best)}"
        notes.append(f"→ fastest {what}: {Family.of(best)} on {_gpus_text(best.gpus)}, {rate}")
    if most is not None and gpus > 1:
        targets = most.targets * most.copies
        each = f", {most.tok_per_s / targets:.1f} for each of {targets} targets" * (targets > 1)
        rate = f"{most.tok_per_s:.1f} tok/s{each}{_mark(most.choice)}"
        notes.append(f"most tok/s of all {_gpus_text(gpus)}: {most}, {rate}")
    if advice.first("ssd") is not None:
        notes.append(_LEGEND)
    sources: dict[str, list[str]] = {}
    for choice in advice.judged:
        if choice.derived:
            sources.setdefault(choice.derived, []).append(str(Family.of(choice)))
    notes += [f"{', '.join(names)}: {source}" for source, names in sources.items()]
    if placed.too_large:
        notes.append(f"does not fit: {', '.join(map(str, placed.too_large))}")
    return notes


def _comparisons(advice: Advice, gpus: int) -> list[str]:
    """Returns lines that compare the best choice and the best SSD with other uses of their GPUs.

    They are compared with the best other mode on the GPUs asked for; SSD also with the best other
    uses of its own N GPUs and of N − 1.
    """

    def over(choice: Choice, other: Choice, what: str) -> str:
        name = f"{Family.of(choice)} ({_gpus_text(choice.gpus)})"
        gain = gain_text(choice.tok_per_s / other.tok_per_s)
        return f"{name} over {what}, {Family.of(other)}: {gain}{_mark(choice, other)}"

    lines, best, ssd = [], advice.best, advice.first("ssd")
    asked = f"the best other use of the {gpus} asked for"
    other = next((c for c in advice.judged if c.mode != best.mode), None)
    if other is not None and not any(family.mode != best.mode for family in advice.missing):
        lines.append(over(best, other, asked))
    if ssd is None:
        return lines
    fewer, equal = (advice.other("ssd", ssd.gpus - less) for less in (1, 0))
    if equal is not None and (ssd.gpus < gpus or ssd != best):
        lines.append(over(ssd, equal, f"the best other use of {ssd.gpus}"))
    rival = next((c for c in advice.judged if c.mode != "ssd"), None)
    if ssd.gpus < gpus and ssd != best and rival is not None and not advice.missing:
        lines.append(over(ssd, rival, asked))
    if fewer is not None:
        per_gpu = gain_text(ssd.tok_per_s_per_gpu / fewer.tok_per_s_per_gpu)
        lines.append(f"{over(ssd, fewer, 'one GPU fewer')}; in tok/s a GPU: {per_gpu}")
    return lines


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
    ssd = advice.first("ssd")
    equal = None if ssd is None else advice.other("ssd", ssd.gpus)
    if ssd is not None and equal is not None:
        gain = ssd.tok_per_s / equal.tok_per_s
        line += f"; its speculation cache: {gain_text(gain)} of the best other use of {ssd.gpus}"
    return line


def _pool_lines(uses: Sequence[Use], gpus: int) -> list[str]:
    """Returns the lines of a plan on equal copies and pools; none without a pool."""
    if not any(use.is_pool for use in uses):
        return []
    best = frontier(uses)
    batch = best[0].choice.batch_size
    each = f"{batch} sequence{'s' * (batch > 1)}"
    lines = [
        f"equal copies on {gpus} GPUs, {each} a target, all that no other beats in both, from the "
        "most tok/s to the earliest tokens:"
    ]
    for use in best:
        rate = f"{use.tok_per_s:9.1f} tok/s {use.tok_per_s / gpus:8.1f} a GPU"
        idle = f"  ({gpus - use.gpus} idle)" * (use.gpus < gpus)
        how = f" {_how(use.choice)}" if use.choice.lookahead else ""
        lines.append(f"  {use!s:22}{rate} {use.token_s * 1e3:7.2f} ms a token{how}{idle}")
    pools = [use for use in best if use.is_pool]
    for pool in pools:
        rivals = rivals_of(pool, uses)
        in_time, most, own = rivals["in_time"], rivals["most"], rivals["each"]
        parts = []
        if in_time is not None:
            parts.append((f"the most with tokens no later, {in_time}", in_time))
        if most is not None and most is not in_time:
            parts.append((f"the most, {most}, {most.token_s / pool.token_s:.2f}× later", most))
        if own is not None and own is not in_time:
            parts.append((f"a draft each, {own}", own))
        texts = [f"{name}: {gain_text(pool.tok_per_s / use.tok_per_s)}" for name, use in parts]
        named = (use.choice for use in (pool, in_time, most, own) if use is not None)
        lines.append(f"{pool} over {'; over '.join(texts)}{_mark(*named)}")
    return lines if pools else [*lines, "no pool is among them: a shared draft does not pay here"]


def _command(run: RunConfig, choice: Choice, groups: int = 1) -> str:
    """Returns the command line that runs a choice under the planned token models and options.

    groups: targets that share its draft.
    """
    flags = {"pair": run.pair or "", **choice.flags()}
    if groups > 1:
        flags["groups"] = str(groups)
    given = said(run)
    if choice.mode != "ar":
        if run.laws is None or run.acceptance is not None or run.alpha is not None:
            flags["acceptance"] = cut_law(run.acceptance_text, choice.lookahead)
        if "acceptance_fast" in given:
            flags["acceptance_fast"] = cut_law(run.acceptance_fast, choice.lookahead)
        flags |= {name: given[name] for name in ("p_hit", "hit_law", "laws") if name in given}
    flags |= {name: given[name] for name in _FORWARD if name in given}
    if "forward" not in flags and has_weights(split_pair(flags["pair"])[0]):
        flags["workload"] = "gemm"  # with weights, imposed tokens need this flag
    return _mpirun(groups * choice.tp + choice.num_drafts, "run", flags)


def _probe(run: RunConfig, choice: Choice) -> str:
    """Returns the command line that measures a choice's forwards and host costs."""
    given = said(runnable(run, choice.tp))
    flags = {"pair": run.pair or "", "num_drafts": str(choice.num_drafts)}
    flags |= {name: given[name] for name in _FORWARD if name in given}
    return _mpirun(choice.gpus, "probe", flags)


def _mpirun(ranks: int, command: str, flags: dict[str, str]) -> str:
    text = " ".join(f"--{name}={shlex.quote(value)}" for name, value in flags.items())
    return f"mpirun -np {ranks} python -m mpi4py -m mpissd {command} {text}"
