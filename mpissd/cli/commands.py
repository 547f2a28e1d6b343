"""The command `plan`, without MPI: it advises, predicts one configuration, or judges rows."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Set as AbstractSet
from pathlib import Path

from mpissd.cli.arguments import PLANNED, PlanConfig
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.flags import said
from mpissd.common.output import json_line
from mpissd.common.presets import has_weights, split_pair
from mpissd.common.rivals import Family
from mpissd.engine.backend.profile import Profile, known_profiles, load_profile, role_profiles
from mpissd.engine.job import resolve
from mpissd.lab.predict import advice as text
from mpissd.lab.predict import uses
from mpissd.lab.predict.accuracy import judge, profile_of_another_job
from mpissd.lab.predict.advisor import plan as advice_of
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.coverage import check_device, covered
from mpissd.lab.predict.derive import with_derived
from mpissd.lab.predict.hosts import host_of
from mpissd.lab.predict.places import runnable, survey
from mpissd.lab.predict.row import predict_pool, predict_row
from mpissd.lab.predict.search import Choice, cut_law
from mpissd.lab.tables.load import load_rows

_HITS = ("p_hit", "hit_law")


def plan(config: PlanConfig, given: AbstractSet[str] = frozenset()) -> int:
    """Prints the best configuration for at most --gpus GPUs; the last line is JSON.

    With `mode` it predicts the one configuration that the flags fix, and with `rows` it prints the
    errors of such predictions.
    """
    for name in filter(None, [*(config.profile or "").split(","), config.host]):
        if name not in known_profiles() and name.endswith(".json") and not Path(name).exists():
            raise ConfigError(
                f"profile {name!r}: no such file: allowed: what `probe` saved, a run's "
                f"OUT/profiles/RUN_ID.json, or {', '.join(known_profiles())}"
            )
    if config.rows is not None:
        return _judge(config, config.rows)
    if "mode" in given:
        return _predict(config, given)
    if extra := sorted(given - set(PLANNED) - {"profile", "gpus"}):
        value = getattr(config, extra[0], None) or getattr(config.run, extra[0])
        raise ConfigError(f"{extra[0]}={value} without mode: allowed: with mode, for a prediction")
    return _advise(config, given)


def _predict(config: PlanConfig, given: AbstractSet[str]) -> int:
    """Prints the predicted row of a run with these flags."""
    profile, drafts = role_profiles(config.device, config.run.draft_device)
    run, groups = _planned(config, profile, given), config.run.groups
    job = resolve(
        dataclasses.replace(run, groups=1),
        config.tp or 1,
        backend="emulated",
        memory_bytes=profile.memory_bytes,
        draft_memory_bytes=drafts.memory_bytes,
    )
    profile = with_derived(profile, job.target_shard, job.config.batch_size, job.options)
    check_device(profile, job, drafts)
    device, host = DeviceCosts.from_profile(profile, job, drafts), host_of(profile, job)
    shared = predict_pool(job, groups, profile, host) if groups > 1 else None
    row = shared or predict_row(job, device, host)
    rate, rounds = row["tok_per_s"], row["round_us"]
    mean = row.get("expected_tok_per_s")
    known = "" if mean is None else f"   (long-run mean: {mean:.1f})"
    print(f"   tok/s  {'unknown' if rate is None else f'{rate:.1f}'}{known}")
    print(f"   round  p50 {rounds['p50']:.1f} µs   p99 {rounds['p99']:.1f} µs")
    print(json_line(row))
    return 0


def _judge(config: PlanConfig, rows: str) -> int:
    """Prints the three errors of predictions over rows; the last line is JSON."""
    paths = [path for part in rows.split(",") for path in _run_files(Path(part))]
    if not paths:
        raise ConfigError(f"rows {rows!r}: no runs there")
    table, numbers = judge(load_rows(paths), profile_of_another_job(config.profile, config.host))
    print(f"{table}\n{json_line(numbers)}")
    return 0


def _run_files(folder: Path) -> list[Path]:
    """Returns the files of rows in a folder and its subfolders that have rounds."""
    if folder.is_file():
        return [folder]
    found = sorted(folder.glob("**/*.jsonl"))
    return [path for path in found if '"num_rounds"' in path.open().readline()]


def _advise(config: PlanConfig, given: AbstractSet[str]) -> int:
    profile, gpus = load_profile(config.device), config.gpus
    run = _planned(config, profile, given)
    placed = survey(run, profile, gpus)
    advice = advice_of(run, HostCosts(), placed.placements, gpus, placed.unjudged)
    every = uses.pools(run, profile, placed.placements, gpus)
    every += uses.replicas(advice.judged, gpus)
    most = None if advice.missing else uses.most(every)
    heading = text.heading(run, profile, gpus)
    print(text.render(advice, heading, placed, gpus, text.most_lines(most, gpus)))
    if run.laws is not None:
        print(f"   {text.pays(advice)}")
    if price := text.price_line(run, advice.first("ssd"), placed.placements):
        print(f"   hits {price}")
    for use in () if advice.missing else advice.to_probe:
        print(f"   → probe first, {Family.of(use)} is derived: {_probe(run, use)}")
    if not advice.missing and not advice.to_probe:
        print(f"   → run it: {_command(run, advice.best)}")
    if most is not None and most.copies * most.targets > 1 and not most.choice.derived:
        command = _command(run, most.choice, most.targets)
        print(f"   most tok/s, {most.copies} such job{'s' * (most.copies > 1)}: {command}")
    for line in text.pool_lines(every, gpus):
        print(f"   {line}")
    pool = uses.best_pool(every)
    if pool is not None and pool != most and not pool.choice.derived:
        command = _command(run, pool.choice, pool.targets)
        print(f"   run the pool that gains most, {pool}: {command}")
    summary = {
        **text.to_dict(advice, placed),
        "most_tok_per_s": None if most is None else uses.to_dict(most),
        "pools": uses.summary(every),
    }
    print(json_line(summary))
    return 0


def _planned(config: PlanConfig, profile: Profile, given: AbstractSet[str]) -> RunConfig:
    """Returns the run's configuration; flags not given take the values of the profile's probe."""
    known = covered(profile, config.run.forward)
    probed = {k: v for k, v in known.items() if k not in given}
    if given & {"target", "draft"}:
        probed.pop("pair", None)
    elif "pair" not in given:
        probed = {"pair": "8b/1b", **probed}
    return dataclasses.replace(config.run, **probed)


def _command(run: RunConfig, choice: Choice, groups: int = 1) -> str:
    """Returns the command line that runs a choice under the planned token models and options.

    groups: targets that share its draft.
    """
    flags = {"pair": run.pair or "", **choice.flags()}
    if groups > 1:
        flags["groups"] = str(groups)
    flags_said = said(run)
    if choice.mode != "ar":
        if run.laws is None or run.acceptance is not None or run.alpha is not None:
            flags["acceptance"] = cut_law(run.acceptance_text, choice.lookahead)
        if "acceptance_fast" in flags_said:
            flags["acceptance_fast"] = cut_law(run.acceptance_fast, choice.lookahead)
        flags |= {name: flags_said[name] for name in (*_HITS, "laws") if name in flags_said}
    flags |= {name: flags_said[name] for name in _FORWARD if name in flags_said}
    if "forward" not in flags and has_weights(split_pair(flags["pair"])[0]):
        flags["workload"] = "gemm"  # with weights, imposed tokens need this flag
    text = " ".join(f"--{name}={shlex.quote(value)}" for name, value in flags.items())
    ranks = groups * choice.tp + choice.num_drafts
    return f"mpirun -np {ranks} python -m mpi4py -m mpissd run {text}"


def _probe(run: RunConfig, choice: Choice) -> str:
    """Returns the command line that measures a choice's forwards and host costs."""
    told = said(runnable(run, choice.tp))
    flags = {"pair": run.pair or "", "num_drafts": str(choice.num_drafts)}
    flags |= {name: told[name] for name in _FORWARD if name in told}
    text = " ".join(f"--{name}={shlex.quote(value)}" for name, value in flags.items())
    return f"mpirun -np {choice.gpus} python -m mpi4py -m mpissd probe {text}"


_FORWARD = ("batch_size", "forward", "fuse", "lm_head", "context")
