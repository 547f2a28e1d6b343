"""Builds the result row, with every key of its schema, from raw rounds; unknown values are None."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.atomic_file import whole_file
from mpissd.common.output import append_row
from mpissd.common.records import (
    RoundRecords,
    is_stable,
    outcome_digest,
    percentiles_us,
    token_digest,
)
from mpissd.common.row import SCHEMA, Row
from mpissd.engine.decode.draft import Drafter
from mpissd.engine.session.session import Session
from mpissd.lab.measure.answers import model_fields, prompt_times
from mpissd.lab.measure.calibrate import JobProfile
from mpissd.lab.measure.learning import learner_fields, shares_gpu_of
from mpissd.lab.measure.pool import draft_wait_us, of_each_group, pool_fields
from mpissd.lab.measure.provenance import provenance
from mpissd.lab.measure.reports import (
    DraftReport,
    LeadReport,
    Measured,
    hit_rate_of,
    num_tokens_of,
)
from mpissd.lab.measure.row_times import device_means, device_times, rates
from mpissd.lab.predict import jobfile
from mpissd.lab.predict.row import is_followable, is_predictable, predict_row
from mpissd.lab.predict.simulation import follow

_STABLE = {"gpu": 0.01, "cpu": 0.10, "emulated": 0.10}


def make_row(session: Session, measured: Measured, sweep: dict[str, Any] | None = None) -> Row:
    """Builds the result row of a measured job.

    sweep: the row's entry on its sweep; None without a sweep.
    """
    job, config, lead = session.job, session.job.config, measured.lead
    sequences = lead.records.sequences()
    return Row(
        schema=SCHEMA,
        run_id=f"{config.mode}-{config.digest[:8]}-{time.time_ns() // 1000:x}-{os.getpid()}",
        mode=config.mode,
        workload=config.workload,
        backend=session.backend.name,
        device_name=session.backend.info.name,
        world_size=job.world_size,
        tp=job.tp,
        num_drafts=config.drafts,
        groups=config.groups,
        target=job.target.name,
        draft=None if job.draft is None else job.draft.name,
        dtype=session.backend.dtype_name,
        lookahead=job.lookahead,
        fan_out=list(job.fan_out) or None,
        branch_budget=sum(job.fan_out) or None,
        fan_out_miss=list(job.fan_out_miss) or None,
        batch_size=config.batch_size,
        draft_device_name=_draft_device(session),
        **_options(session),
        **model_fields(session),
        **prompt_times(session, lead),
        **asdict(session.workload.row_fields()),
        **_throughput(session, measured),
        **_pool(session, measured),
        **_speculation(session, sequences, lead.draft_lost_round),
        draft_lost_round=lead.draft_lost_round,
        learned=None if measured.draft is None else measured.draft.learned or None,
        **learner_fields(measured, config.learners, session.infos),
        **device_times(session, measured),
        **_prediction(session, measured),
        **_digests(session, measured, sequences),
        messages_per_round=round(lead.messages_per_round, 2),
        bytes_per_round=round(lead.bytes_per_round, 1),
        proposal_bytes_per_round=round(lead.proposals[0], 1),
        proposal_wait_us=round(lead.proposals[1], 3),
        rank_digests=measured.rank_digests,
        stable=is_stable(lead.records.round_s, _STABLE[session.backend.info.kind]),
        config_digest=config.digest,
        provenance={
            **provenance(session.infos, session.topology.hosts, _mpi_library()),
            "calibrated_at": measured.profile.calibrated_at,
            "kernel": lead.kernel,
            "draws": lead.draws if job.workload.samples else None,
            "sweep": sweep,
        },
    )


def _options(session: Session) -> dict[str, Any]:
    config, job = session.job.config, session.job
    return {
        "inline_draft": job.inline,
        "all_reduce": session.group.name,
        "graph": session.backend.capture and session.group.capturable,
        "fuse": config.fuse,
        "lm_head": job.options.lm_head,
        "context": config.context,
        "on_late": "finish" if job.fan_out else None,  # as in older rows
        "backup": config.backup if job.draft else None,  # SD drafts only with its backup
        "backup_lookahead": job.backup_lookahead if job.draft else None,
        "num_layers": job.target.num_layers,
        "seed": config.seed,
        "stop_token": config.stop_token,
    }


def _draft_device(session: Session) -> str | None:
    """Returns the name of the first draft rank's device; None without a draft rank."""
    topology = session.topology
    return session.infos[topology.first_draft].name if topology.num_drafts else None


def _pool(session: Session, measured: Measured) -> dict[str, Any]:
    """Returns the keys of the waits for draft ranks, and of target groups that share them."""
    job, leads, draft = session.job, measured.groups, measured.draft
    shared = None if draft is None else draft.forwards
    each = of_each_group(leads, job.config.token_limit, grows=bool(job.fan_out))
    return {
        "draft_wait_us": draft_wait_us(measured.lead) if job.config.drafts else None,
        "per_group": each or None,
        "pool": None if shared is None else pool_fields(shared),
    }


def _throughput(session: Session, measured: Measured) -> dict[str, Any]:
    lead, limit = measured.lead, session.job.config.token_limit
    gpus = session.job.world_size - (shares_gpu_of(measured, session.infos) is not None)
    num_tokens = num_tokens_of(lead.records, limit)
    rate = num_tokens / lead.wall_s
    closure = lead.ledger[:, 2:].sum(axis=1) * 1e-9 / np.asarray(lead.records.round_s)
    return {
        "num_rounds": len(lead.records),
        "token_limit": limit,
        "num_tokens": num_tokens,
        "wall_s": round(lead.wall_s, 9),
        "tok_per_s": round(rate, 3),
        "tok_per_s_per_gpu": round(rate / gpus, 3),
        "round_us": percentiles_us(lead.ledger[:, 1] * 1e-9),
        "phases_us": {
            "lead": _phase_means(lead),
            "draft": None if measured.draft is None else _phase_means(measured.draft),
        },
        "device_us": device_means(measured),
        "ledger_closure": round(float(np.percentile(np.minimum(closure, 2 - closure), 1)), 5),
    }


def _phase_means(report: LeadReport | DraftReport) -> dict[str, float] | None:
    """Returns the mean µs a round of each phase; together they are the mean round."""
    if not len(report.ledger):
        return None
    means = report.ledger[:, 2:].mean(axis=0) * 1e-3
    return {name: round(float(mean), 3) for name, mean in zip(report.phases, means, strict=True)}


def _speculation(
    session: Session, sequences: NDArray[np.int64], lost_round: int | None
) -> dict[str, Any]:
    lookahead = session.job.lookahead
    accepted = sequences[:, 3]
    hit_rate = hit_rate_of(sequences, lost_round) if session.job.fan_out else None
    return {
        "acceptance_length": round(float(accepted.mean() + 1), 5),
        "accept_histogram": np.bincount(accepted, minlength=lookahead + 1).tolist(),
        "hit_rate": hit_rate,
    }


def _prediction(session: Session, measured: Measured) -> dict[str, Any]:
    """Returns the prediction for these draws from the job's own profile; empty if there is none."""
    job, profile, lead = session.job, measured.profile, measured.lead
    if job.config.groups > 1:  # no recurrence of rounds is known if groups share a draft
        return {}
    if lead.draft_lost_round is None and is_followable(job):
        return _followed(session, measured)
    if not is_predictable(job) or lead.draft_lost_round is not None:
        return {}
    count = len(lead.records)
    predicted = predict_row(job, profile.device, profile.host, count)
    rate = predicted["tok_per_s"]
    same = ("expected_tok_per_s", "sampling_error", "sampling_sd", "imposed_hits")
    return {
        "predicted_tok_per_s": rate,
        "predicted_round_us": predicted["round_us"],
        "prediction_error": _prediction_error(measured, rate, job.config.token_limit),
        **{name: predicted[name] for name in same},
    }


def _followed(session: Session, measured: Measured) -> dict[str, Any]:
    """Returns the prediction of a text job from its own acceptance and hits.

    The time of its prompts is added as measured. There is no mean: text has no imposed model.
    """
    job, profile, lead = session.job, measured.profile, measured.lead
    rounds = follow(job, profile.device, profile.host, lead.records.sequences())
    wall_s = float(rounds.round_s.sum()) + lead.prefill_s
    rate = num_tokens_of(lead.records, job.config.token_limit) / wall_s
    return {
        "predicted_tok_per_s": rate,
        "predicted_round_us": rounds.round_us(),
        "prediction_error": _prediction_error(measured, rate, job.config.token_limit),
    }


def _prediction_error(measured: Measured, rate: float | None, limit: int | None) -> float | None:
    if not rate:
        return None
    measured_rate = num_tokens_of(measured.lead.records, limit) / measured.lead.wall_s
    return round(measured_rate / rate - 1, 5)


def _digests(session: Session, measured: Measured, sequences: NDArray[np.int64]) -> dict[str, Any]:
    """Returns the row's digests of the emitted tokens.

    token_digest covers only tokens that every mode has emitted: num_tokens a sequence, or one token
    a round if there is no such limit.
    """
    config = session.job.config
    first = config.token_limit or config.max_rounds or 0
    if config.token_limit and config.rounds:
        first = min(config.token_limit, config.rounds)
    return {
        "outcome_digest": outcome_digest(sequences),
        "token_digest": token_digest(measured.lead.records.token_arrays(), first),
    }


def _mpi_library() -> str:
    from mpi4py import MPI

    return str(MPI.Get_library_version()).strip("\x00").splitlines()[0].strip()


def _tokens(records: RoundRecords) -> dict[str, NDArray[np.int32]]:
    """Returns the emitted token ids by sequence, in the order of their request ids."""
    tokens = records.token_arrays()
    emitted = [tokens[request_id] for request_id in sorted(tokens)]
    return {
        "tokens": np.concatenate([np.zeros(0, np.int32), *emitted]),
        "token_counts": np.array([len(tokens) for tokens in emitted], np.int32),
    }


def round_arrays(measured: Measured) -> dict[str, NDArray[Any]]:
    """Returns the raw rounds as the named arrays that are saved to OUT/rounds."""
    lead, draft = measured.lead, measured.draft
    arrays: dict[str, NDArray[Any]] = {
        "round_s": np.asarray(lead.records.round_s),
        "t_target_s": np.asarray(lead.records.t_target_s),
        "sequences": lead.records.sequences(),
        **_tokens(lead.records),
        "lead_ledger_ns": lead.ledger,
        "lead_phases": np.asarray(lead.phases),
    }
    if draft is not None:
        arrays["draft_rounds"] = draft.rounds
        arrays["draft_columns"] = np.asarray(Drafter.COLUMNS)
        arrays["draft_ledger_ns"] = draft.ledger
        arrays["draft_phases"] = np.asarray(draft.phases)
    return arrays


def write_row(
    session: Session,
    row: Row,
    arrays: Mapping[str, NDArray[Any]],
    profile: JobProfile,
    violations: list[str],
) -> None:
    """Writes the raw rounds, the job's profile and the row, each file completely or not at all.

    They go to OUT/rounds/RUN_ID.npz, OUT/profiles/RUN_ID.json, and OUT/runs.jsonl, or
    OUT/flagged.jsonl if a gate failed.
    """
    out = Path(session.job.config.out)
    with whole_file(out / "rounds" / f"{row.run_id}.npz") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    saved = json.dumps(_job_file(session, row.num_rounds, profile), indent=1) + "\n"
    with whole_file(out / "profiles" / f"{row.run_id}.json") as file:
        file.write(saved.encode())
    name = "flagged.jsonl" if violations else "runs.jsonl"
    gates = {"gates": violations} if violations else {}
    append_row(out / name, {**row.to_dict(), **gates})


def _job_file(session: Session, num_rounds: int, profile: JobProfile) -> dict[str, Any]:
    costs = profile.device, profile.host, rates(profile)
    return jobfile.to_dict(session.job, session.backend.name, num_rounds, *costs)
