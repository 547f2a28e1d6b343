"""The text of `plan`'s advice, its JSON, and the choice of --tree=auto.

Every use that was judged is listed, and derived ones are labelled. If a use could not be judged,
the first line names it, and nothing is called best. Gains within ERROR of 1 are shown as no
difference, and so are those that measured rows of the same case contradict. With a real pair's
models (--laws) the last lines are verdicts, whose intervals hold the sampling error of its prompts.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpissd.common.compare import jackknife
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.flags import DRAFTING, said
from mpissd.common.presets import has_weights, split_pair
from mpissd.common.real_pairs import DEFAULT_SOURCE
from mpissd.common.rivals import TREE, Family
from mpissd.common.rounds import Source
from mpissd.common.row import Row
from mpissd.engine.backend.profile import Profile, device_kind, known_profiles
from mpissd.engine.spec.acceptance import hit_law_of, load_laws
from mpissd.lab.predict.advisor import Advice, most_in_all
from mpissd.lab.predict.derive import shipped_profiles, with_hosts
from mpissd.lab.predict.search import (
    LOOKUP,
    Choice,
    Space,
    Survey,
    candidates,
    cut_law,
    job_of,
    placed,
    runnable,
    weigh,
)
from mpissd.lab.tables.best import Use as Measured
from mpissd.lab.tables.best import method_of, mode_of
from mpissd.lab.tables.load import of_one_group

# Errors of predictions for an H200, of which the p95 are 8.4% and 19.9%; see docs/predictions.md.
MEDIAN, DERIVED_MEDIAN = "2.8% in the median", "11%"
ERROR, DERIVED_ERROR = 0.05, 0.2  # differences that count as none
FEW_HITS = "smollm2"  # the hit model if a pair's file has too few outcomes for its own
FEWEST_PROMPTS = 8  # for a verdict on a pair
_LEGEND = "SSD's line: K, --fan_out, --backup (what drafts a miss: jit or fast), K_b (its tokens)"
_GAIN = 1.03  # --tree=auto: a tree must promise so many times the best chain's rate
_FORWARD = ("batch_size", "forward", "fuse", "lm_head", "context")


def report(
    run: RunConfig,
    profile: Profile,
    gpus: int,
    placed: Survey,
    advice: Advice,
    rows: Sequence[Row] = (),
) -> tuple[list[str], dict[str, Any]]:
    """Returns the lines of the advice for at most `gpus` GPUs, and its JSON.

    rows: measured; those of the planned case are shown next to the predictions. `judged` of the
    JSON is sorted, fastest first; its best is null if a use that would fit could not be judged.
    """
    best = None if advice.missing else advice.best
    lines = heading(run, profile, gpus)
    if advice.missing:
        names = ", ".join(map(str, advice.missing))
        missing = f"not judged: {names}, so nothing here is called best: "
        lines = [missing + "; ".join(dict.fromkeys(placed.unjudged.values())), *lines]
    measured = measured_uses(run, profile, advice, rows)
    level = [] if best is None else level_with(best, advice, measured)
    for choice in advice.judged:
        rate = f"{choice.tok_per_s:8.1f} tok/s {choice.tok_per_s_per_gpu:8.1f} a GPU"
        line = f"{Family.of(choice)!s:15}{rate} {_how(choice)}{_mark(choice)}".rstrip()
        if (use := measured.get(Family.of(choice))) is not None:
            off = use.tok_per_s / choice.tok_per_s - 1
            count = _counted(len(use.rows), "row")
            line += f"   measured {use.tok_per_s:.1f} ({off:+.0%}; {count})"
        mark = "≈" if choice in level else " "
        lines.append(f" {'→' if choice == best and not level else mark} {line}")
    notes = _notes(advice, placed)
    if best is not None and gpus > 1:
        most, copies = most_in_all(advice.judged, gpus)
        each = f", {most.tok_per_s:.1f} for each of {copies} copies" * (copies > 1)
        name = f"{Family.of(most)}" + f" × {copies}" * (copies > 1)
        rate = f"{copies * most.tok_per_s:.1f} tok/s{each}{_mark(most)}"
        notes.insert(0, f"most tok/s of all {_counted(gpus, 'GPU')}: {name}, {rate}")
    if level:
        names = ", ".join(str(Family.of(choice)) for choice in level)
        notes.insert(0, f"≈ no difference, by the predictor's error or measured rows: {names}")
    if not advice.missing:
        notes += [
            f"→ probe first, {Family.of(use)} is derived: {_probe(run, use)}"
            for use in advice.to_probe
        ] or [f"→ run it: {_command(run, advice.best)}"]
    notes += verdicts(run, profile, placed, advice, measured)
    numbers = {
        "best": None if best is None else asdict(best),
        "judged": [asdict(choice) for choice in advice.judged],
        "unjudged": [{**asdict(f), "why": placed.unjudged[f]} for f in advice.missing],
        "level": [asdict(Family.of(choice)) for choice in level],
        "measured": {str(family): use.tok_per_s for family, use in measured.items()},
        "too_large": [asdict(family) for family in placed.too_large],
        "probe_first": [asdict(Family.of(choice)) for choice in advice.to_probe],
    }
    return [*lines, *(f"   {note}" for note in notes)], numbers


def heading(run: RunConfig, profile: Profile, gpus: int) -> list[str]:
    """Returns the first line: the machine, the pair, and the assumptions about both.

    A second line marks a profile from a datasheet.
    """
    law = hit_law_of(run, 1).label
    if run.laws is not None and run.hit_law == FEW_HITS:
        hits = f"as {DEFAULT_SOURCE}, for want of outcomes ({law})"
    elif any(v is not None for v in (run.p_hit, run.hit_law)):
        hits = f"given {law}"
    else:
        hits = "of the same file" if run.laws else f"as {DEFAULT_SOURCE} ({law})"
    accepted = run.acceptance_text
    if accepted.startswith("laws:"):
        counts = np.array(load_laws(str(run.laws)).at[-1].accepted)
        right = counts @ np.arange(len(counts))
        accepted = f"alpha {right / (right + counts[:-1].sum()):.3f} of {run.laws}"
    elif run.acceptance is None and run.alpha is None:
        accepted += " (not measured)"
    terms = [
        accepted,
        *(["fused"] if run.fuse else []),
        "LM head" if run.lm_head or run.is_transformer else "no LM head",
        f"context {run.context}",
        f"hits {hits}",
        f"lookups {run.acceptance_fast_text}",
        "whole transformers" if run.is_transformer else "matrix products only",
    ]
    pair = run.pair or "/".join(Path(str(name)).name for name in (run.target, run.draft))
    lines = [f"on {gpus} × {profile.device_name}, {pair}, assuming {', '.join(terms)}:"]
    if profile.sources["read_bytes_per_s"].startswith("datasheet"):
        lines.append("   datasheet profile, never measured; no host or link cost")
    return lines


def with_laws(run: RunConfig, has_context: bool) -> RunConfig:
    """Returns a configuration with --laws at the context of its prompts, if it gives none, and with
    the default hit model if the prompts do not determine theirs."""
    laws, known = load_laws(str(run.laws)), dict[str, Any]()
    if run.is_transformer and not has_context:
        known["context"] = max(int(of.get("context") or 0) for of in laws.about["sources"])
    fits = [of for of in laws.at if of.lookahead <= laws.longest_fitted]
    if run.p_hit is None is run.hit_law and not all(of.rejected and of.complete for of in fits):
        known["hit_law"] = FEW_HITS
    return replace(run, **known)


def measured_uses(
    run: RunConfig, profile: Profile, advice: Advice, rows: Sequence[Row]
) -> dict[Family, Measured]:
    """Returns the fastest measured configuration of each use that was judged, in the planned case:
    on the same device, with the same models, acceptance and hits."""
    kept = [
        row
        for row in of_one_group(rows)
        if row.backend != "emulated" and row.other_draft_device is None
        if (row.forward == "transformer") == run.is_transformer
        if device_kind(row.device_name) == profile.kind
    ]
    names = ("batch_size", "context", *(() if run.is_transformer else ("fuse", "lm_head")))
    shared = {"workload": "gemm", "schedule": None, **{name: getattr(run, name) for name in names}}
    fastest = {}
    for choice in advice.judged:
        job, use = job_of(run, choice), Family.of(choice)
        case = {**shared, "target": job.target.name}
        if choice.mode == LOOKUP:
            case["acceptance_fast"] = job.acceptance[Source.FAST].label
        elif job.draft is not None:
            case |= {"draft": job.draft.name, "acceptance": job.acceptance[Source.CACHE].label}
        case |= {"hit_law": job.hit_law.label} if choice.mode == "ssd" else {}
        alike: dict[tuple[str, int], list[Row]] = {}
        for row in kept:
            family = Family(mode_of(row), int(row.tp), int(row.world_size - row.tp))
            is_alike = family == use and bool(row.tree_nodes) == (choice.tree is not None)
            if is_alike and all(row.get(k) == v for k, v in case.items()):
                alike.setdefault((method_of(row), int(row.lookahead)), []).append(row)
        if alike:
            fastest[use] = max(map(Measured.of, alike.values()), key=lambda one: one.tok_per_s)
    return fastest


def level_with(best: Choice, advice: Advice, measured: Mapping[Family, Measured]) -> list[Choice]:
    """Returns the uses that are no slower than the best one for sure, with it; none if it wins.

    They are within the predictor's error, or were measured no slower.
    """
    own, level = measured.get(Family.of(best)), []
    for choice in advice.judged:
        other = measured.get(Family.of(choice))
        contradicted = own and other and other.tok_per_s > own.tok_per_s
        error = DERIVED_ERROR if best.derived or choice.derived else ERROR
        if choice != best and (contradicted or best.tok_per_s <= (1 + error) * choice.tok_per_s):
            level.append(choice)
    return [best, *level] if level else []


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _how(choice: Choice) -> str:
    """Returns K, and SSD's fan-out, backup and K_b."""
    text = "" if choice.mode == "ar" else f" K={choice.lookahead}"
    text += "" if choice.tree is None else f" tree={choice.tree}"
    if choice.fan_out is not None:
        text += f" {choice.fan_out} {choice.backup} K_b={choice.backup_lookahead}"
    return text


def _mark(*choices: Choice) -> str:
    return " (derived)" * any(choice.derived for choice in choices)


def _notes(advice: Advice, placed: Survey) -> list[str]:
    """Returns the legend of SSD, the origin of derived times, and the uses that do not fit."""
    notes = []
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


def verdicts(
    run: RunConfig,
    profile: Profile,
    placed: Survey,
    advice: Advice,
    measured: Mapping[Family, Measured],
) -> list[str]:
    """Returns whether a draft pays, whether a GPU of its own for it does, and what this rests on.

    The fastest use with a draft is compared with the fastest one without, such as a lookup, and SSD
    with the fastest other use of as many GPUs.
    """
    drafting, ssd = advice.first(*DRAFTING, TREE), advice.first("ssd")
    alone = next((choice for choice in advice.judged if choice.mode not in (*DRAFTING, TREE)), None)
    if drafting is None or alone is None or advice.missing:
        return ["does this draft pay here? Not judged: a use that fits is not known"]
    lines = [f"does this draft pay here? {_verdict(run, placed, measured, drafting, alone)}"]
    if ssd is not None and (equal := advice.other("ssd", ssd.gpus)) is not None:
        answer = _verdict(run, placed, measured, ssd, equal)
        lines.append(f"does a GPU of its own for the draft pay? {answer}")
    models = "on assumed acceptance and hits"
    if run.laws is not None:
        sources = load_laws(run.laws).about["sources"]
        models = f"on {', '.join(str(of['file']) for of in sources)} (in brackets: 95%)"
    read = profile.sources["read_bytes_per_s"].partition(",")[0]
    lines.append(f"the answers rest {models}, and on profile {profile.name} ({read})")
    level = f"within {ERROR:.0%}, or {DERIVED_ERROR:.0%} if derived, there is no difference"
    return [*lines, f"predictions err by {MEDIAN}, derived ones by {DERIVED_MEDIAN}: {level}"]


def _verdict(
    run: RunConfig,
    placed: Survey,
    measured: Mapping[Family, Measured],
    use: Choice,
    other: Choice,
) -> str:
    """Returns whether a use beats another one beyond the predictor's error.

    With --laws the gain's 95% interval has to, by a jackknife over the prompts. Few prompts, or an
    interval that is wider than the predictor's error and decides nothing, give no verdict, nor does
    a prediction that measured rows of both uses contradict.
    """
    gain, derived = math.log(use.tok_per_s / other.tok_per_s), use.derived or other.derived
    error, half, sampled, prompts = math.log1p(DERIVED_ERROR if derived else ERROR), 0.0, "", None
    if run.laws is not None:
        laws, logs = load_laws(run.laws), list[float]()
        with suppress(ConfigError, IndexError):  # a group is all that determines the hits
            for part in laws.without_each:
                rates = weigh([use, other], replace(run, laws=part), placed.placements)
                logs.append(math.log(rates[0].tok_per_s / rates[1].tok_per_s))
        is_whole = len(logs) == len(laws.without_each) > 1
        half = float(jackknife(np.array(logs))) if is_whole else math.inf
        prompts = int(laws.about.get("prompts", 0))
        rounds = sum(laws.behind(max(use.lookahead, other.lookahead)).accepted)
        of = _counted(prompts, "prompt") if prompts else "unknown prompts (measure them again)"
        spread = f"; ±{math.expm1(half):.0%}" if half < 5 else ""
        sampled = f": {_counted(rounds, 'round')} of {of}{spread}"
    answer = "yes" if gain - half > error else "no" if gain + half < -error else "no difference"
    gained = f"{math.exp(gain):.2f}×"
    if 0 < half < 5:
        gained += f" ({math.exp(gain - half):.2f}–{math.exp(gain + half):.2f})"
    both = [measured.get(Family.of(each)) for each in (use, other)]
    if both[0] is not None and both[1] is not None:
        seen = both[0].tok_per_s / both[1].tok_per_s
        gained += f", measured {seen:.2f}×"
        if answer != "no difference" and (seen > 1) != (gain > 0):
            answer = "measured rows contradict it"
    is_wide = half > error and answer == "no difference"
    if run.laws is not None and (is_wide or (prompts or 0) < FEWEST_PROMPTS):
        answer = "too few"
    elif derived:
        answer = f"probe first; by derived times {answer}"
    names = [f"{Family.of(each)} {each.tok_per_s:.1f}" for each in (use, other)]
    return f"{answer}{sampled}: {names[0]} tok/s over {names[1]}, {gained}"


def _command(run: RunConfig, choice: Choice) -> str:
    """Returns the command line that runs a choice under the planned token models and options."""
    flags = {**_models(run), **choice.flags()}
    given = said(run)
    if choice.mode != "ar":
        if run.laws is None or run.acceptance is not None or run.alpha is not None:
            flags["acceptance"] = cut_law(run.acceptance_text, choice.lookahead)
        if "acceptance_fast" in given:
            flags["acceptance_fast"] = cut_law(run.acceptance_fast, choice.lookahead)
        flags |= {name: given[name] for name in ("p_hit", "hit_law", "laws") if name in given}
    flags |= {name: given[name] for name in _FORWARD if name in given}
    target = run.target or split_pair(str(run.pair))[0]
    if "forward" not in flags and has_weights(target):
        flags["workload"] = "gemm"  # with weights, imposed tokens need this flag
    return _mpirun(choice.gpus, "run", flags)


def _probe(run: RunConfig, choice: Choice) -> str:
    """Returns the command line that measures a choice's forwards and host costs."""
    given = said(runnable(run, choice.tp))
    flags = {**_models(run), "num_drafts": str(choice.num_drafts)}
    flags |= {name: given[name] for name in _FORWARD if name in given}
    return _mpirun(choice.gpus, "probe", flags)


def _models(run: RunConfig) -> dict[str, str]:
    return {n: v for n in ("pair", "target", "draft") if (v := getattr(run, n)) is not None}


def _mpirun(ranks: int, command: str, flags: dict[str, str]) -> str:
    text = " ".join(f"--{name}={shlex.quote(value)}" for name, value in flags.items())
    return f"mpirun -np {ranks} python -m mpi4py -m mpissd {command} {text}"


def profile_of(device_name: str) -> Profile:
    """Returns the shipped profile of a device; raises ConfigError if there is none."""
    kind = device_kind(device_name)
    if (profile := shipped_profiles().get(kind)) is not None:
        return profile
    known = ", ".join(known_profiles())
    raise ConfigError(f"tree=auto on {kind}: no profile of it: allowed: tree=1..256, or on {known}")


def with_best_tree(
    config: RunConfig, profile: Profile, tp: int, levels: int | None = None
) -> tuple[RunConfig, dict[str, Any]]:
    """Returns a configuration of --tree=auto with the fastest tree, or chain, and their rates.

    levels: K, if it is given (None: any). A chain stays unless the best tree is _GAIN as fast.
    Raises ConfigError if laws, forwards or host costs are not known, or for SSD.
    """
    if config.mode == "ar":
        return replace(config, tree=None), {}
    if config.mode == "ssd":
        raise ConfigError(
            "tree=auto with mode=ssd: predictions err by more than a tree gains: allowed: mode=sd"
        )
    if config.workload not in ("gemm", "text", "replay"):
        raise ConfigError(f"tree=auto with workload={config.workload}: allowed: gemm, text, replay")
    if config.workload != "gemm" and config.laws is None:
        raise ConfigError(
            f"tree=auto with workload={config.workload}: needs laws: a file of `mpissd pair`"
        )
    whole = "transformer" if config.is_transformer else config.forward
    imposed = replace(config, tree=None, workload="gemm", recording=None, forward=whole)
    if config.laws is not None:
        imposed = with_laws(imposed, config.context > 0)
    place = placed(imposed, with_hosts(profile), tp, tp + config.drafts)
    every = candidates(imposed, place, tp + config.drafts, Space((), ()), trees=True)
    choices = [
        choice
        for choice in every
        if choice.mode in ("sd", "tree") and choice.num_drafts == config.drafts
        if levels in (None, choice.lookahead)
    ]
    weighed = weigh(choices, imposed, [place])
    chains = [choice for choice in weighed if choice.tree is None]
    if not chains:
        raise ConfigError(
            f"tree=auto: profile {profile.name!r} has no host costs of SD, D={config.drafts}, or "
            "no forwards of so many rows: allowed: tree=1..256"
        )
    chain, best = (max(those, key=lambda one: one.tok_per_s) for those in (chains, weighed))
    if best.tok_per_s < _GAIN * chain.tok_per_s:
        best = chain
    chosen = {
        "tree": best.tree,
        "lookahead": best.lookahead,
        "tok_per_s": best.tok_per_s,
        "chain": {"lookahead": chain.lookahead, "tok_per_s": chain.tok_per_s},
        "profile": profile.name,
        "acceptance": imposed.acceptance_text,
    }
    return replace(config, tree=best.tree, lookahead=best.lookahead), chosen
