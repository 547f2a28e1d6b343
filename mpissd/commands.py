"""The commands that need no MPI: predict, plan, why, tables. Each prints, and returns its code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from mpissd.backend.profile import load_profile
from mpissd.config import PlanConfig, PredictConfig, RunConfig, TablesConfig, WhyConfig
from mpissd.errors import ConfigError
from mpissd.job import Job, resolve
from mpissd.predict import jobfile
from mpissd.predict.advisor import Advice, placements, plan
from mpissd.predict.costs import DeviceCosts, HostCosts
from mpissd.predict.row import predict_row
from mpissd.predict.search import Choice
from mpissd.predict.why import gaps
from mpissd.tables import load_profiles, load_rows, render

_ALTERNATIVES = ("pair", "target", "draft"), ("alpha", "acceptance"), ("p_hit", "hit_a", "hit_r")


def predict(config: PredictConfig, given: AbstractSet[str] = frozenset()) -> int:
    """Prints what a run of these flags would report, from a profile alone."""
    if config.profile is None:
        raise ConfigError("profile: needed: a job's OUT/profiles/RUN_ID.json, or a device's")
    job, device, host, num_rounds = _costs(config, config.profile, given)
    found = predict_row(job, device, host, num_rounds)
    rate, rounds = found["tok_per_s"], found["round_us"]
    print(f"   tok/s  {_number(rate)}   (the laws' mean: {_number(found['expected_tok_per_s'])})")
    print(f"   round  p50 {rounds['p50']:.1f} µs   p99 {rounds['p99']:.1f} µs")
    print(json.dumps(found))
    return 0


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f}"


def _costs(
    config: PredictConfig, name: str, given: AbstractSet[str]
) -> tuple[Job, DeviceCosts, HostCosts, int | None]:
    """The job, its costs, and how many rounds it took (None: what the flags say).

    given: flags that override a job's own. ConfigError where the profile does not cover them.
    """
    found = jobfile.load(name)
    if found is None:
        profile = load_profile(name)
        run = _run_config(config, {}, given)
        memory = profile.memory_bytes
        job = resolve(run, config.tp or 1, backend="emulated", memory_bytes=memory)
        return job, DeviceCosts.from_profile(profile, job), HostCosts(), None
    backend = found.backend
    base = _run_config(config, found.config, frozenset())
    measured = resolve(base, found.tp, backend=backend, memory_bytes=None)
    run, tp = _run_config(config, found.config, given), config.tp or found.tp
    job = resolve(run, tp, backend=backend, memory_bytes=None)
    _check_covered(name, job, measured, found.device)
    overridden = given - {"profile", "tp"}
    return job, found.device, found.host, None if overridden else found.num_rounds


def _check_covered(name: str, job: Job, measured: Job, device: DeviceCosts) -> None:
    """ConfigError where a job's profile says nothing of what is asked for."""
    pairs = (
        ("tp", job.tp, measured.tp),
        ("target", job.target.name, measured.target.name),
        ("fuse, lm_head, context", job.options, measured.options),
        ("batch_size", job.config.batch_size, measured.config.batch_size),
    )
    for what, asked, known in pairs:
        if asked != known:
            raise ConfigError(f"profile {name!r} covers {what}={known}, not {asked}")
    if job.draft is None:
        return
    if measured.draft is None or device.draft is None:
        raise ConfigError(f"profile {name!r} covers no draft: allowed: mode=ar")
    if job.draft != measured.draft or job.inline != measured.inline:
        raise ConfigError(f"profile {name!r} covers the draft {measured.draft.name} as it ran")
    if job.fan_out and not measured.fan_out:
        raise ConfigError(f"profile {name!r} is of a run that grew nothing: allowed: mode=ar, sd")
    for what, rows, table in (
        ("target", job.target_buckets(), device.verify),
        ("draft", job.draft_buckets(), device.draft),
    ):
        if rows[-1] > table.rows[-1]:
            raise ConfigError(
                f"profile {name!r} covers {what} forwards of at most {table.rows[-1]} rows, "
                f"not {rows[-1]}"
            )


def _run_config(
    config: PredictConfig, base: Mapping[str, Any], given: AbstractSet[str]
) -> RunConfig:
    """The job's own flags, overridden by those that the user gave."""
    names = [f.name for f in dataclasses.fields(RunConfig)]
    said = {name: getattr(config, name) for name in names if name in given}
    known = dict(base)
    for alternatives in _ALTERNATIVES:
        if set(alternatives) & set(said):  # one way to say it replaces the others
            known |= dict.fromkeys(alternatives)
    if said.get("mode", "ssd") != "ssd":  # what only SSD has does not come along
        known |= {"backup": "jit", "backup_lookahead": None}
    return RunConfig(**{**known, **said, "dry_run": True, "world_size": None})


def advise(config: PlanConfig) -> int:
    """Prints which configuration to run on at most so many GPUs."""
    profile = load_profile(config.profile)
    fields = {f.name for f in dataclasses.fields(RunConfig)}
    flags = {k: v for k, v in dataclasses.asdict(config).items() if k in fields}
    run = RunConfig(**{**flags, "pair": config.pair or "8b/1b"})
    advice = plan(run, HostCosts(), placements(run, profile, config.gpus), config.gpus)
    print(f"on {config.gpus} × {profile.device_name}, {run.pair}, {run.acceptance_text}:")
    for choice in advice.by_method:
        mark = "→" if choice == advice.best else " "
        print(f" {mark} {_choice(choice)}")
    print(_verdict(advice))
    print(f"   run it: {_command(run, advice.best)}")
    print(json.dumps(_advice(advice)))
    return 0


def _choice(choice: Choice) -> str:
    where = f"T={choice.tp} D={choice.num_drafts}"
    how = "" if choice.mode == "ar" else f" K={choice.lookahead}"
    if choice.fan_out is not None:
        how += f" {choice.fan_out} {choice.backup} K_b={choice.backup_lookahead} {choice.on_late}"
    rate = f"{choice.tok_per_s:8.1f} tok/s {choice.tok_per_s_per_gpu:8.1f} a GPU"
    return f"{choice.mode.upper():3} {where:8}{rate}  {how}"


def _verdict(advice: Advice) -> str:
    lines = []
    if advice.gain is not None:
        lines.append(f"best over the best other mode on as many GPUs: {advice.gain:.3f}×")
    extra = advice.extra_gpu
    if extra is not None:
        lines += [
            f"{what}: {gain:.3f}×"
            for what, gain in (
                ("SSD's extra GPU, raw", extra.gain),
                ("the same per GPU", extra.gain_per_gpu),
                ("SSD against the best other use of as many GPUs", extra.gain_at_equal_gpus),
            )
            if gain is not None
        ]
    for what, value in (
        ("alpha", advice.break_even_alpha),
        ("p_hit", advice.break_even_p_hit),
    ):
        lines.append(f"break-even {what}: {'none' if value is None else f'{value:.3f}'}")
    return "\n".join(f"   {line}" for line in lines)


def _command(run: RunConfig, choice: Choice) -> str:
    """The line that runs a choice under the laws and options that were planned for."""
    flags = {"pair": run.pair or "", **choice.flags(), "acceptance": run.acceptance_text}
    defaults = {f.name: f.default for f in dataclasses.fields(RunConfig)}
    for name in _PLANNED:
        if getattr(run, name) != defaults[name]:
            flags[name] = str(getattr(run, name))
    text = " ".join(f"--{name}={value}" for name, value in flags.items())
    return f"mpirun -np {choice.gpus} python -m mpi4py -m mpissd run {text}"


_PLANNED = (
    "acceptance_fast",
    "p_hit",
    "hit_a",
    "hit_r",
    "batch_size",
    "fuse",
    "lm_head",
    "context",
)


def _advice(advice: Advice) -> dict[str, Any]:
    return {
        "best": dataclasses.asdict(advice.best),
        "by_method": [dataclasses.asdict(choice) for choice in advice.by_method],
        "gain": advice.gain,
        "break_even_alpha": advice.break_even_alpha,
        "break_even_p_hit": advice.break_even_p_hit,
        "extra_gpu": None
        if advice.extra_gpu is None
        else {
            "gain": advice.extra_gpu.gain,
            "gain_per_gpu": advice.extra_gpu.gain_per_gpu,
            "gain_at_equal_gpus": advice.extra_gpu.gain_at_equal_gpus,
            "gain_over_replicas": advice.extra_gpu.gain_over_replicas,
        },
        "num_evaluated": advice.num_evaluated,
    }


def why(config: WhyConfig) -> int:
    """Prints the three largest gaps between a row and its floor."""
    row = _find_row(config)
    found = gaps(row)
    floor = "unknown" if row.get("floor_us") is None else f"{row['floor_us']:.1f} µs"
    print(f"{row.get('run_id')}: round {row['round_us']['mean']:.1f} µs, floor {floor}")
    for gap in found:
        print(f"{gap.us:10.1f} µs  {gap.share:6.1%}  {gap.name}\n{'':23}{gap.advice}")
    return 0


def _find_row(config: WhyConfig) -> dict[str, Any]:
    """The row of a run id, or the last one of a file."""
    named = config.result or ""
    path = Path(named) if named.endswith(".jsonl") else Path(config.out, "runs.jsonl")
    rows = load_rows([path])
    if named and not named.endswith(".jsonl"):
        rows = [row for row in rows if row.get("run_id") == named]
    if not rows:
        raise ConfigError(f"result {named or str(path)!r}: no such row in {str(path)!r}")
    return dict(rows[-1])


def tables(config: TablesConfig) -> int:
    """Prints the milestone report's tables from the rows that are there."""
    named = config.results
    folders = [Path(named)] if named else [p for p in (Path("results"), Path("out")) if p.exists()]
    paths = [p for folder in folders for p in _row_files(folder)]
    if named and not paths:
        raise ConfigError(f"results {named!r}: no runs*.jsonl there")
    rows = load_rows(paths)
    print(render(rows, load_profiles(paths, rows)))
    return 0


def _row_files(folder: Path) -> list[Path]:
    return [folder] if folder.is_file() else sorted(folder.glob("**/runs*.jsonl"))
