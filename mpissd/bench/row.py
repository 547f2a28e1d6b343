"""The result row: every key of the contract, from raw rounds. Unknown is None."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.bench.ab import Overhead
from mpissd.bench.calibrate import JobProfile
from mpissd.bench.provenance import provenance
from mpissd.bench.session import Session
from mpissd.decode.draft import Drafter
from mpissd.job import Job
from mpissd.model.shard import Shard
from mpissd.predict import jobfile
from mpissd.predict.row import predict_row
from mpissd.records import (
    SCHEMA,
    RoundRecords,
    is_stable,
    median,
    outcome_digest,
    percentiles_us,
    token_digest,
)

_STABLE = {"gpu": 0.01, "cpu": 0.10, "emulated": 0.10}


@dataclass
class Measured:
    """Raw results of one configuration, all ranks."""

    records: RoundRecords
    wall_s: float
    ledger: NDArray[np.int64]  # lead: round, wall_ns, phase_ns…
    phases: list[str]
    draft_rounds: NDArray[Any] | None  # Drafter.COLUMNS
    draft_ledger: NDArray[np.int64] | None
    draft_phases: list[str]
    profile: JobProfile
    messages_per_round: float
    bytes_per_round: float
    rank_digests: list[int]  # by world rank: of the outcomes it heard
    ledger_overhead: Overhead | None


def make_row(session: Session, measured: Measured) -> dict[str, Any]:
    """The row of the contract, schema 1."""
    job, config = session.job, session.job.config
    sequences = measured.records.sequences()
    return {
        "schema": SCHEMA,
        "run_id": f"{config.mode}-{config.digest[:8]}-{time.time_ns() // 1000:x}-{os.getpid()}",
        "mode": config.mode,
        "workload": config.workload,
        "backend": session.backend.name,
        "device_name": session.backend.info.name,
        "world_size": job.world_size,
        "tp": job.tp,
        "num_drafts": config.drafts,
        "target": job.target.name,
        "draft": None if job.draft is None else job.draft.name,
        "dtype": session.backend.dtype_name,
        "lookahead": job.lookahead,
        "fan_out": list(job.fan_out) or None,
        "branch_budget": sum(job.fan_out) or None,
        "acceptance": None if job.draft is None else config.acceptance_text,
        "hit_law": job.hit_law.label if job.fan_out else None,
        "batch_size": config.batch_size,
        **_options(session),
        **_throughput(session, measured, sequences),
        **_speculation(session, sequences),
        **_times(session, measured),
        **_prediction(session, measured, sequences),
        **_digests(session, measured, sequences),
        "messages_per_round": round(measured.messages_per_round, 2),
        "bytes_per_round": round(measured.bytes_per_round, 1),
        "rank_digests": measured.rank_digests,
        "ledger_overhead": _overhead(measured.ledger_overhead),
        "stable": is_stable(measured.records.round_s, _STABLE[session.backend.info.kind]),
        "config_digest": config.digest,
        "provenance": provenance(session.infos, session.topology.hosts, _mpi_library()),
    }


def _options(session: Session) -> dict[str, Any]:
    config, job = session.job.config, session.job
    return {
        "inline_draft": job.inline,
        "all_reduce": session.group.name,
        "graph": session.backend.capture and session.group.capturable,
        "fuse": config.fuse,
        "lm_head": config.lm_head,
        "context": config.context,
        "on_late": config.on_late if job.fan_out else None,
        "backup": config.backup if job.draft else None,  # SD drafts by its backup alone
        "backup_lookahead": job.backup_lookahead if job.draft else None,
        "acceptance_fast": config.acceptance_fast if config.backup == "fast" else None,
        "num_layers": job.target.num_layers,
        "full_num_layers": job.full_target.num_layers,
        "seed": config.seed,
    }


def _throughput(
    session: Session, measured: Measured, sequences: NDArray[np.int64]
) -> dict[str, Any]:
    num_tokens = _num_tokens(sequences, session.job.config.num_tokens)
    rate = num_tokens / measured.wall_s
    walls = measured.ledger[:, 1] * 1e-9
    phases = measured.ledger[:, 2:]
    closure = phases.sum(axis=1) * 1e-9 / np.asarray(measured.records.round_s)
    return {
        "num_rounds": len(measured.records),
        "token_limit": session.job.config.num_tokens,
        "num_tokens": num_tokens,
        "wall_s": round(measured.wall_s, 6),
        "tok_per_s": round(rate, 3),
        "tok_per_s_per_gpu": round(rate / session.job.world_size, 3),
        "round_us": percentiles_us(walls.tolist()),
        "phases_us": {
            "lead": _phase_means(measured.ledger, measured.phases),
            "draft": _phase_means(measured.draft_ledger, measured.draft_phases),
        },
        "ledger_closure": round(float(np.percentile(np.minimum(closure, 2 - closure), 1)), 5),
    }


def _num_tokens(sequences: NDArray[np.int64], enough: int | None) -> int:
    """Tokens of all sequences; what a sequence emits past num_tokens doesn't count."""
    total = 0
    for request_id in np.unique(sequences[:, 1]):
        count = int((sequences[sequences[:, 1] == request_id, 3] + 1).sum())
        total += count if enough is None else min(count, enough)
    return total


def _phase_means(
    ledger: NDArray[np.int64] | None, names: list[str]
) -> dict[str, float] | None:
    """Mean microseconds a round of each phase: they add up to the mean round."""
    if ledger is None or not len(ledger):
        return None
    means = ledger[:, 2:].mean(axis=0) * 1e-3
    return {name: round(float(mean), 3) for name, mean in zip(names, means, strict=True)}


def _speculation(session: Session, sequences: NDArray[np.int64]) -> dict[str, Any]:
    lookahead = session.job.lookahead
    accepted = sequences[:, 3]
    counted = sequences[:, 0] > 0  # a sequence's first round is a forced miss
    hits = sequences[counted, 6]
    return {
        "acceptance_length": round(float(accepted.mean() + 1), 5),
        "accept_histogram": np.bincount(accepted, minlength=lookahead + 1).tolist(),
        "hit_rate": round(float(hits.mean()), 5) if session.job.fan_out and len(hits) else None,
    }


def _times(session: Session, measured: Measured) -> dict[str, Any]:
    job, records = session.job, measured.records
    full = records.num_rows() == job.verify_rows
    t_target = median(np.asarray(records.t_target_s)[full])
    t_draft = _t_draft(job, measured)
    t_growth = None
    if measured.draft_rounds is not None and job.fan_out:
        t_growth = median(measured.draft_rounds[:, Drafter.COLUMNS.index("t_growth_s")])
    read_bytes_per_s = measured.profile.read_bytes_per_s
    floor_bytes = _floor_bytes(session)
    floor_s = None if read_bytes_per_s is None else floor_bytes / read_bytes_per_s
    timed = t_target is not None and t_target > 0
    return {
        "t_target_s": t_target,
        "t_draft_s": t_draft,
        "t_growth_s": t_growth,
        "T_SD": t_draft / t_target if timed and t_draft is not None and t_target else None,
        "floor_us": None if floor_s is None else round(floor_s * 1e6, 3),
        "floor_fraction": round(floor_s / t_target, 4) if timed and floor_s and t_target else None,
        "floor_bytes": floor_bytes,
        "cache_bytes": session.backend.info.cache_bytes,
        "read_bytes_per_s": read_bytes_per_s,
        "t_target_full_depth_s": _full_depth(session, t_target),
    }


def _t_draft(job: Job, measured: Measured) -> float | None:
    """p50 of K sequential steps: of the measured full misses, else of the calibrated forward."""
    if measured.draft_rounds is not None:
        times = measured.draft_rounds[:, Drafter.COLUMNS.index("t_draft_s")]
        if np.isfinite(times).sum() >= 10:
            return median(times)
    if job.draft is None:
        return None
    step = measured.profile.device.draft_s(job.config.batch_size) + measured.profile.host.step
    return float(job.lookahead * step)


def _floor_bytes(session: Session) -> int:
    """What a verification must read on a target rank: weights and KV (THEORY, floors)."""
    job = session.job
    shard = Shard(job.target, job.tp)
    itemsize = session.backend.itemsize
    cost = shard.cost(job.verify_rows, job.config.batch_size, itemsize, job.options)
    return cost.weight_bytes + cost.kv_bytes


def _full_depth(session: Session, t_target: float | None) -> float | None:
    """A depth-scaled target's forward, times the layers left out; None at full depth."""
    job = session.job
    if t_target is None or job.target.num_layers == job.full_target.num_layers:
        return None
    return t_target * job.full_target.num_layers / job.target.num_layers


def _prediction(
    session: Session, measured: Measured, sequences: NDArray[np.int64]
) -> dict[str, Any]:
    """What this job's own profile foretold for these very draws, and measured / predicted - 1."""
    profile = measured.profile
    found = predict_row(session.job, profile.device, profile.host, len(measured.records))
    rate = found["tok_per_s"]
    measured_rate = _num_tokens(sequences, session.job.config.num_tokens) / measured.wall_s
    return {
        "predicted_tok_per_s": rate,
        "predicted_round_us": found["round_us"],
        "prediction_error": None if not rate else round(measured_rate / rate - 1, 5),
        "expected_tok_per_s": found["expected_tok_per_s"],
        "sampling_error": found["sampling_error"],
        "sampling_sd": found["sampling_sd"],
    }


def _digests(
    session: Session, measured: Measured, sequences: NDArray[np.int64]
) -> dict[str, Any]:
    """token_digest covers the tokens that every mode has emitted by then: num_tokens a sequence,
    or one a round."""
    config = session.job.config
    first = config.num_tokens or config.max_rounds or 0
    if config.num_tokens and config.rounds:
        first = min(config.num_tokens, config.rounds)
    return {
        "outcome_digest": outcome_digest(sequences),
        "token_digest": token_digest(measured.records.tokens(), first),
    }


def _mpi_library() -> str:
    from mpi4py import MPI

    return str(MPI.Get_library_version()).strip("\x00").splitlines()[0].strip()


def _overhead(found: Overhead | None) -> dict[str, float] | None:
    """A/B of the ledger: median round with it over without, less one, and its 95% interval."""
    if found is None:
        return None
    return {"overhead": found.overhead, "low": found.low, "high": found.high}


def round_arrays(measured: Measured) -> dict[str, NDArray[Any]]:
    """The raw rounds, as they are saved."""
    arrays: dict[str, NDArray[Any]] = {
        "round_s": np.asarray(measured.records.round_s),
        "t_target_s": np.asarray(measured.records.t_target_s),
        "sequences": measured.records.sequences(),
        "lead_ledger_ns": measured.ledger,
        "lead_phases": np.asarray(measured.phases),
    }
    if measured.draft_rounds is not None and measured.draft_ledger is not None:
        arrays["draft_rounds"] = measured.draft_rounds
        arrays["draft_columns"] = np.asarray(Drafter.COLUMNS)
        arrays["draft_ledger_ns"] = measured.draft_ledger
        arrays["draft_phases"] = np.asarray(measured.draft_phases)
    return arrays


def write_row(
    session: Session,
    row: dict[str, Any],
    arrays: Mapping[str, NDArray[Any]],
    profile: JobProfile,
    violations: list[str],
) -> None:
    """Raw rounds to OUT/rounds/RUN_ID.npz, the job's profile to OUT/profiles/RUN_ID.json, then the
    row to OUT/runs.jsonl (OUT/flagged.jsonl where a gate failed); none by halves."""
    out = Path(session.job.config.out)
    path = out / "rounds" / f"{row['run_id']}.npz"
    half = path.with_suffix(".part")
    with half.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    half.rename(path)
    saved = json.dumps(_job_file(session, row["num_rounds"], profile), indent=1) + "\n"
    (out / "profiles" / f"{row['run_id']}.json").write_text(saved)
    name = "flagged.jsonl" if violations else "runs.jsonl"
    kept = {**row, "gates": violations} if violations else row
    with (out / name).open("a") as file:
        file.write(json.dumps(kept) + "\n")


def _job_file(session: Session, num_rounds: int, profile: JobProfile) -> dict[str, Any]:
    costs = profile.device, profile.host, profile.read_bytes_per_s
    return jobfile.to_dict(session.job, session.backend.name, num_rounds, *costs)
