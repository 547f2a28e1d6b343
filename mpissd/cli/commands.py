"""The commands that need no MPI: predict and plan. Each prints and returns its
exit code."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from mpissd.cli.configs import PlanConfig, PredictConfig
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.flags import flags_of, said
from mpissd.common.presets import has_weights, split_pair
from mpissd.common.rivals import Family
from mpissd.engine.backend.profile import Profile, known_profiles, load_profile, role_profiles
from mpissd.engine.job import Job, resolve
from mpissd.lab.pools import advice as pool_advice
from mpissd.lab.pools import search as pool_search
from mpissd.lab.pools.durations import Pool
from mpissd.lab.pools.predict import check_pool, predict_pool
from mpissd.lab.predict import advice as advice_text
from mpissd.lab.predict import jobfile, real_hits
from mpissd.lab.predict.accuracy import judge, profile_of_another_job
from mpissd.lab.predict.advisor import plan
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.coverage import check_device, check_job, covered
from mpissd.lab.predict.hosts import host_of
from mpissd.lab.predict.laws import cut_law
from mpissd.lab.predict.places import runnable, survey
from mpissd.lab.predict.recorded import predict_replay
from mpissd.lab.predict.row import predict_row
from mpissd.lab.predict.search import Choice
from mpissd.lab.tables import (
    load_rows,
)

_HITS = ("p_hit", "hit_law")
_ALTERNATIVES = ("pair", "target", "draft"), ("alpha", "acceptance"), _HITS


def predict(config: PredictConfig, given: AbstractSet[str] = frozenset()) -> int:
    """Prints the predicted row of a run with these flags, using only a profile.

    With `rows` it prints the errors of such predictions instead.
    """
    if config.rows is not None:
        return _judge(config, config.rows)
    if config.profile is None:
        raise ConfigError("profile: needed: a job's OUT/profiles/RUN_ID.json, or a device's")
    if config.run.groups > 1:
        return _predict_pool(config, config.profile, given)
    job, device, host, num_rounds = _costs(config, config.profile, given)
    if job.config.workload == "replay":
        row, mean = predict_replay(job, device, host), ""
    else:
        row = predict_row(job, device, host, num_rounds)
        mean = f"   (the laws' mean: {_number(row['expected_tok_per_s'])})"
    rounds = row["round_us"]
    print(f"   tok/s  {_number(row['tok_per_s'])}{mean}")
    print(f"   round  p50 {rounds['p50']:.1f} µs   p99 {rounds['p99']:.1f} µs")
    print(json.dumps(row))
    return 0


def _predict_pool(config: PredictConfig, name: str, given: AbstractSet[str]) -> int:
    """Prints the predicted row of a run whose groups share a draft, from a device's profile."""
    if jobfile.load(name) is not None:
        raise ConfigError(f"predict groups={config.run.groups}: allowed: a device's profile")
    one = dataclasses.replace(config, run=dataclasses.replace(config.run, groups=1))
    job, _, host, _ = _costs(one, name, given - {"groups"})
    check_pool(job)
    row = predict_pool(Pool.of(job, config.run.groups, load_profile(name), host))
    means = f"{_number(row['expected_tok_per_s'])}, by theory {_number(row['theory_tok_per_s'])}"
    print(f"   tok/s  {_number(row['tok_per_s'])}   (the laws' mean: {means})")
    rounds = row["round_us"]
    print(f"   round  p50 {rounds['p50']:.1f} µs   p99 {rounds['p99']:.1f} µs")
    print(json.dumps(row))
    return 0


def _judge(config: PredictConfig, rows: str) -> int:
    """Prints the three errors of predictions over rows; the last line is JSON."""
    for name in filter(None, [*(config.profile or "").split(","), config.host]):
        _check_there(name)
    paths = [path for part in rows.split(",") for path in _run_files(Path(part))]
    if not paths:
        raise ConfigError(f"rows {rows!r}: no runs there")
    text, numbers = judge(load_rows(paths), profile_of_another_job(config.profile, config.host))
    print(f"{text}\n{json.dumps(numbers)}")
    return 0


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f}"


def _costs(
    config: PredictConfig, name: str, given: AbstractSet[str]
) -> tuple[Job, DeviceCosts, HostCosts, int | None]:
    """Returns the job, its costs, and its number of rounds (None: the flags').

    given: flags that override a job's own. Raises ConfigError if the profile lacks them.
    """
    _check_there(name)
    file = jobfile.load(name)
    if file is None:
        profile, drafts = role_profiles(name, config.run.draft_device)
        run = _run_config(config, covered(profile, config.run.forward), given)
        job = resolve(
            run,
            config.tp or 1,
            backend="emulated",
            memory_bytes=profile.memory_bytes,
            draft_memory_bytes=drafts.memory_bytes,
        )
        check_device(profile, job, drafts)
        device = DeviceCosts.from_profile(profile, job, drafts)
        return job, device, host_of(profile, job), None
    backend = file.backend
    base = _run_config(config, file.config, frozenset())
    measured = resolve(base, file.tp, backend=backend, memory_bytes=None)
    run, tp = _run_config(config, file.config, given), config.tp or file.tp
    job = resolve(run, tp, backend=backend, memory_bytes=None)
    check_job(name, job, measured, file.device)
    overridden = given - {"profile", "tp"}
    return job, file.device, file.host, None if overridden else file.num_rounds


def _check_there(name: str) -> None:
    """Raises ConfigError if a profile's file does not exist."""
    if name not in known_profiles() and name.endswith(".json") and not Path(name).exists():
        raise ConfigError(
            f"profile {name!r}: no such file: allowed: what `probe` saved, a job's "
            f"OUT/profiles/RUN_ID.json, or {', '.join(known_profiles())}"
        )


def _run_config(
    config: PredictConfig, base: Mapping[str, Any], given: AbstractSet[str]
) -> RunConfig:
    """Returns the job's own flags, overridden by those that the user gave."""
    flags = {name: getattr(config.run, name) for name in flags_of(RunConfig) if name in given}
    known = dict(base)
    for alternatives in _ALTERNATIVES:
        if set(alternatives) & set(flags):  # alternative flags for one quantity
            known |= dict.fromkeys(alternatives)
    if "laws" in flags:  # instead of the job's own token models
        known |= dict.fromkeys((*_HITS, "alpha", "acceptance"))
    if flags.get("mode", "ssd") != "ssd":  # leave out flags that only SSD has
        known |= {"backup": "jit", "backup_lookahead": None}
    if flags.get("mode") == "ar" or flags.get("num_drafts") == 0:
        known |= {"draft_device": None}
    return RunConfig(**{**known, **flags, "dry_run": True})


def advise(config: PlanConfig, given: AbstractSet[str] = frozenset()) -> int:
    """Prints the best configuration for at most --gpus GPUs."""
    _check_there(config.profile)
    profile = load_profile(config.profile)
    run = _planned(config, profile, given)
    placed = survey(run, profile, config.gpus)
    asked = run, HostCosts(), placed.placements, config.gpus, placed.unjudged
    advice, real = plan(*asked), real_hits.real_hits(*asked)
    uses = pool_search.pools(run, profile, placed.placements, HostCosts(), config.gpus)
    uses += pool_search.replicas(advice.judged, config.gpus)
    most = None if advice.missing else pool_advice.most(uses)
    heading = advice_text.heading(run, profile, config.gpus)
    said = pool_advice.most_lines(most, config.gpus)
    print(advice_text.render(advice, heading, placed, config.gpus, said))
    ssd = next((choice for choice in advice.by_method if choice.mode == "ssd"), None)
    if run.laws is not None:
        print(f"   {advice_text.pays(advice)}")
    price = real_hits.price_line(run, ssd, placed.placements)
    for line in filter(None, (price and f"hits {price}", *real_hits.lines(real))):
        print(f"   {line}")
    for use in () if advice.missing else advice.to_probe:
        print(f"   → probe first, {Family.of(use)} is derived: {_probe(run, use)}")
    if not advice.missing and not advice.to_probe:
        print(f"   → run it: {_command(run, advice.best)}")
    if most is not None and most.copies * most.targets > 1 and not most.choice.derived:
        command = _command(run, most.choice, most.targets)
        print(f"   most tok/s, {most.copies} such job{'s' * (most.copies > 1)}: {command}")
    for line in pool_advice.lines(uses, config.gpus):
        print(f"   {line}")
    pool = pool_advice.best_pool(uses)
    if pool is not None and pool != most and not pool.choice.derived:
        print(
            f"   run the pool that gains most, {pool}: {_command(run, pool.choice, pool.targets)}"
        )
    summary = {
        **advice_text.to_dict(advice, placed),
        "most_tok_per_s": None if most is None else pool_advice.to_dict(most),
        "real_hits": [hits.to_dict() for hits in real],
        "pools": pool_advice.summary(uses),
    }
    print(json.dumps(summary))
    return 0


def _planned(config: PlanConfig, profile: Profile, given: AbstractSet[str]) -> RunConfig:
    """Returns the run's configuration; flags not given take the values of the profile's probe."""
    known = covered(profile, config.run.forward)
    probed = {k: v for k, v in known.items() if k not in given}
    return dataclasses.replace(config.run, **{"pair": config.run.pair or "8b/1b", **probed})


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


def _run_files(folder: Path) -> list[Path]:
    """Returns the files of rows in a folder and its subfolders that have rounds."""
    if folder.is_file():
        return [folder]
    found = sorted(folder.glob("**/*.jsonl"))
    return [path for path in found if '"num_rounds"' in path.open().readline()]
