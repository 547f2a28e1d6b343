"""Builds a run's result row from what the ranks report on the measured rounds, and writes the
files: the row, the raw rounds and, for runs on text, the answers. Unknown values are None."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.output import append_row, whole_file
from mpissd.common.records import (
    RoundRecords,
    is_first_round,
    median,
    outcome_digest,
    percentiles_us,
    token_digest,
)
from mpissd.common.row import SCHEMA, Row
from mpissd.common.trace import DraftLog
from mpissd.engine.backend.base import DeviceInfo
from mpissd.engine.features.learning import Updates
from mpissd.engine.features.pool import GroupForwards, SharedForwards
from mpissd.engine.job import Job
from mpissd.engine.model.transformer.sources import made_for, open_checkpoint
from mpissd.engine.oracle.logits import TextWorkload
from mpissd.engine.oracle.workload import ROW_FIELDS
from mpissd.engine.round.draft import Drafter
from mpissd.engine.session.session import Session, distinct_gpus
from mpissd.engine.text.answer import SOURCES, AnswerText
from mpissd.engine.text.tokenizer import tokenizer_digest
from mpissd.lab.measure.calibrate import JobProfile, WarmUp, chosen
from mpissd.lab.measure.provenance import provenance
from mpissd.lab.predict.simulation import expected, follow, is_followable, is_predictable

_FEWEST_WARM = 8  # With fewer warm-up rounds than this, the row has no prediction.


@dataclass(frozen=True)
class LeadReport:
    """What the first rank of a target group (the ranks that share one target model) reports on the
    measured rounds, whose numbers are first_round … last_round − 1. ledger: see Ledger.table."""

    records: RoundRecords
    first_round: int
    last_round: int
    wall_s: float
    ledger: NDArray[np.int64]
    phases: list[str]
    warm_up: WarmUp
    messages_per_round: float
    bytes_per_round: float
    prefill_s: float  # seconds spent on storing prompts in the KV cache
    all_reduce_s: float | None  # seconds spent in all-reduces; None on a GPU
    draft_lost_round: int | None  # first measured round without the draft rank
    learner: dict[str, Any] | None = None  # report of the rank that trains the draft
    kernel: str | None = None  # names of the kernels that read the target's weights
    draws: str = "host"  # where sampled tokens are drawn: the host or the device


@dataclass(frozen=True)
class DraftReport:
    """What a draft rank reports on the measured rounds. ledger: see Ledger.table."""

    rounds: NDArray[Any]  # table with a line for each round and the columns DraftLog.COLUMNS
    ledger: NDArray[np.int64]
    phases: list[str]
    learned: dict[str, Any]  # counts of how high the draft model ranked the target's tokens
    warm_up: WarmUp
    forwards: NDArray[np.int64] | None = None  # one row for each forward that several groups share
    updates: dict[str, list[Any]] | None = None  # reports on new draft weights

    def column(self, name: str) -> NDArray[np.float64]:
        return np.asarray(self.rounds[:, DraftLog.COLUMNS.index(name)], np.float64)


@dataclass(frozen=True)
class Measured:
    """All that was measured in a run: the reports of ranks, and the job's durations (profile)."""

    lead: LeadReport
    draft: DraftReport | None  # report of the first draft rank; None in AR or if that rank was lost
    profile: JobProfile
    rank_digests: list[int | None]  # for each rank, a digest of the acceptance results it got
    groups: Sequence[LeadReport] = ()  # reports of all target groups, if several


def joined_leads(leads: Sequence[LeadReport]) -> LeadReport:
    """Returns one report on the rounds of several target groups (each has its own copy of the
    target), numbered group after group. All begin together, so the slowest sets the wall time."""
    counts = [len(lead.records) for lead in leads]
    total = max(1, sum(counts))

    def mean(values: Sequence[float]) -> float:
        return sum(n * value for n, value in zip(counts, values, strict=True)) / total

    reduced = [lead.all_reduce_s for lead in leads if lead.all_reduce_s is not None]
    return replace(
        leads[0],
        records=RoundRecords.joined([lead.records for lead in leads]),
        first_round=0,
        last_round=total,
        wall_s=max(lead.wall_s for lead in leads),
        ledger=_renumbered([lead.ledger for lead in leads]),
        messages_per_round=mean([lead.messages_per_round for lead in leads]),
        bytes_per_round=mean([lead.bytes_per_round for lead in leads]),
        prefill_s=max(lead.prefill_s for lead in leads),
        all_reduce_s=sum(reduced) if len(reduced) == len(leads) else None,
    )


def draft_report(
    drafters: Sequence[Drafter], spans: Sequence[tuple[int, int]], updates: Updates | None
) -> DraftReport | None:
    """Returns this rank's report on the rounds in which it was a draft, for all target groups that
    it served; None if this rank does not draft. drafters: its draft loops, one for each group.
    spans: the first measured round of each group, and the round after its last. updates: the
    receiver of new draft weights, if the draft is trained while decoding."""
    pairs = list(zip(drafters, spans, strict=False))
    if not pairs:
        return None
    log = drafters[0].log
    report = DraftReport(
        _renumbered([d.log.table(*span) for d, span in pairs]),
        _renumbered([d.log.ledger.table(*span) for d, span in pairs]),
        log.ledger.names,
        log.ranks.to_dict() if log.ranks is not None and len(pairs) == 1 else {},
        warm_up=WarmUp.of_draft(log, spans[0][0]),
        updates=None if updates is None else updates.report,
    )
    view = drafters[0].worker.stepper
    if len(pairs) == 1 or not isinstance(view, GroupForwards):
        return report
    # After the rows of the forwards, a last row has the begin and the end of the measured rounds.
    slices = [part for d, span in pairs if len(part := d.log.ledger.slices(*span))]
    begin = min(int(part[0, 2]) for part in slices)
    end = max(int(part[-1, 3]) for part in slices)
    forwards = view.shared.log()
    inside = forwards[(forwards[:, 0] >= begin) & (forwards[:, 0] < end)]
    return replace(report, forwards=np.concatenate([inside, [[begin, end, 0, 0]]]))


def _renumbered(tables: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Concatenates tables of rounds; if there are several, numbers their first column from 0."""
    if len(tables) == 1:
        return tables[0]
    joined = np.concatenate(tables)
    joined[:, 0] = np.arange(len(joined))
    return joined


def make_row(session: Session, measured: Measured, sweep: dict[str, Any] | None = None) -> Row:
    """Returns the result row of a measured job. sweep: the name of the sweep and its task, which
    becomes the row's provenance.sweep (None: the run is not part of a sweep)."""
    job = session.job
    config = job.config
    lead = measured.lead
    backend = session.backend
    topology = session.topology
    draft = measured.draft
    sharing = len(session.infos) - len({*distinct_gpus(session.infos, topology.hosts)})
    num_gpus = job.world_size - sharing - (shares_gpu_of(measured, session.infos) is not None)
    if backend.name == "cupy" and config.draft_backend == "numpy":
        num_gpus -= topology.num_drafts  # they draft on host cores
    decoded = _decoded(lead, job)
    # A group has no accept_histogram of its own, because the row has one for all groups.
    groups: list[Mapping[str, Any]] = [
        {name: value for name, value in _decoded(of, job).items() if name != "accept_histogram"}
        for of in measured.groups
    ]
    # token_digest covers as many tokens of a sequence as every mode is sure to emit.
    num_digested = config.token_limit or config.max_rounds or 0
    if config.token_limit and config.rounds:
        num_digested = min(config.token_limit, config.rounds)
    return Row(
        schema=SCHEMA,
        run_id=f"{config.mode}-{config.digest[:8]}-{time.time_ns() // 1000:x}-{os.getpid()}",
        mode=config.mode,
        workload=config.workload,
        backend=backend.name,
        device_name=backend.info.name,
        draft_device_name=(
            session.infos[topology.first_draft].name if topology.num_drafts else None
        ),
        draft_backend=(config.draft_backend or backend.name) if topology.num_drafts else None,
        world_size=job.world_size,
        tp=job.tp,
        num_drafts=config.drafts,
        groups=config.groups,
        target=job.target.name,
        draft=None if job.draft is None else job.draft.name,
        dtype=backend.dtype_name,
        lookahead=job.lookahead,
        tree_nodes=job.verified if config.tree and job.lookahead else None,
        tree_shape=config.tree_shape if config.tree and job.lookahead else None,
        parallel_drafting=config.parallel_drafting if job.lookahead else None,
        shard_draft=config.shard_draft if job.lookahead else None,
        fan_out=list(job.fan_out) or None,
        branch_budget=sum(job.fan_out) or None,
        fan_out_miss=list(job.fan_out_miss) or None,
        cache=job.config.cache if job.fan_out else None,
        batch_size=config.batch_size,
        inline_draft=job.inline,
        all_reduce=session.group.name,
        graph=backend.capture and session.group.capturable,
        fuse=config.fuse,
        lm_head=job.options.lm_head,
        context=config.context,
        on_late="finish" if job.fan_out else None,
        backup=config.backup if job.draft else None,
        backup_lookahead=job.backup_lookahead if job.draft else None,
        num_layers=job.target.num_layers,
        seed=config.seed,
        stop_token=config.stop_token,
        token_limit=config.token_limit,
        **_weights(job),
        **{**dict.fromkeys(ROW_FIELDS), **session.workload.row_fields()},
        t_prefill_s=round(lead.prefill_s, 9) if config.is_text else None,
        time_to_first_token_s=(
            round(float(lead.records.round_s[0]), 9) if config.is_text else None
        ),
        **decoded,
        tok_per_s_per_gpu=round(decoded["num_tokens"] / lead.wall_s / num_gpus, 3),
        per_group=groups or None,
        pool=_pool(draft),
        phases_us={"lead": _phase_means(lead), "draft": _phase_means(draft)},
        device_us=device_means(measured),
        draft_lost_round=lead.draft_lost_round,
        learned=None if draft is None else draft.learned or None,
        **_learner(session, measured),
        **_device_times(session, measured),
        **_prediction(job, measured, decoded),
        token_digest=token_digest(lead.records.token_arrays(), num_digested),
        messages_per_round=round(lead.messages_per_round, 2),
        bytes_per_round=round(lead.bytes_per_round, 1),
        rank_digests=measured.rank_digests,
        config_digest=config.digest,
        provenance={
            **provenance(session.infos, topology.hosts),
            "calibrated_at": measured.profile.calibrated_at,
            "kernel": lead.kernel,
            "draws": lead.draws if job.workload.samples else None,
            "chosen": chosen(session),
            "sweep": sweep,
        },
    )


def _decoded(lead: LeadReport, job: Job) -> dict[str, Any]:
    """Returns the result row's values on decoded tokens, rounds and rates, as {key: value}. lead:
    the report of one target group, or the joined report of all groups."""
    sequences = lead.records.sequences()
    limit = job.config.token_limit
    counts = [len(tokens) for tokens in lead.records.token_arrays().values()]
    num_tokens = sum(count if limit is None else min(count, limit) for count in counts)
    looked_up = ~is_first_round(sequences)
    if lead.draft_lost_round is not None:
        looked_up &= sequences[:, 0] < lead.draft_lost_round
    hits = sequences[looked_up, 6]
    return {
        "num_rounds": len(lead.records),
        "num_tokens": num_tokens,
        "wall_s": round(lead.wall_s, 9),
        "tok_per_s": round(num_tokens / lead.wall_s, 3),
        "round_us": percentiles_us(lead.ledger[:, 1] * 1e-9),
        "acceptance_length": round(float(sequences[:, 3].mean() + 1), 5),
        "accept_histogram": np.bincount(sequences[:, 3], minlength=job.lookahead + 1).tolist(),
        "hit_rate": round(float(hits.mean()), 5) if job.fan_out and len(hits) else None,
        "outcome_digest": outcome_digest(sequences),
    }


def _phase_means(report: LeadReport | DraftReport | None) -> dict[str, float] | None:
    """Returns {phase: mean µs in a round} of a report; the values add up to the mean duration of a
    round. None if there is no report, or if no round was measured."""
    if report is None or not len(report.ledger):
        return None
    means = report.ledger[:, 2:].mean(axis=0) * 1e-3
    return {name: round(float(mean), 3) for name, mean in zip(report.phases, means, strict=True)}


def device_means(measured: Measured) -> dict[str, float | None]:
    """Returns how the device of rank 0 spends a mean round, as {key: µs} (None: unknown): "forward"
    is the target's forward without all-reduces ("all_reduce"), and "idle" the rest."""
    lead = measured.lead
    busy = float(np.mean(lead.records.t_target_s)) * 1e6
    reduce_s = measured.profile.all_reduce_s  # seconds of all-reduces in a full verification
    if lead.all_reduce_s is not None:
        reduce_s = lead.all_reduce_s / len(lead.records)
    reduced = None if reduce_s is None else min(busy, reduce_s * 1e6)
    return {
        "forward": None if reduced is None else round(busy - reduced, 3),
        "all_reduce": None if reduced is None else round(reduced, 3),
        "idle": round(float(lead.ledger[:, 1].mean()) * 1e-3 - busy, 3),
    }


def _prediction(job: Job, measured: Measured, decoded: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the result row's predicted rate and its error, as {key: value}; {} if the job cannot
    be predicted. The rate comes from a simulation with the recorded acceptance and the durations of
    forwards and host work. If acceptance is drawn from a model, the long-run mean is added."""
    lead = measured.lead
    profile = measured.profile
    if job.config.groups > 1 or lead.draft_lost_round is not None:
        return {}  # The simulation covers neither several target groups nor a lost draft rank.
    if job.config.warmup_rounds < _FEWEST_WARM or not is_followable(job):
        return {}
    round_s = follow(job, profile.device, profile.host, lead.records.sequences())
    wall_s = float(round_s.sum()) + lead.prefill_s
    keys = dict[str, Any]()
    rate = decoded["num_tokens"] / wall_s if wall_s else None
    if is_predictable(job):
        mean = float(expected(job, profile.device, profile.host).tok_per_s[0]) if rate else None
        keys["expected_tok_per_s"] = mean
        keys["sampling_error"] = rate / mean - 1 if rate and mean else None
    error = round(decoded["num_tokens"] / lead.wall_s / rate - 1, 5) if rate else None
    return {"predicted_tok_per_s": rate, "prediction_error": error, **keys}


def _weights(job: Job) -> dict[str, Any]:
    """Returns the result row's keys `forward` ("gemm" for bare matrix products, or "transformer")
    and `weights` (names and digests of the weights)."""
    if not job.config.is_transformer:
        return {"forward": "gemm", "weights": None}
    drafts = {"draft": job.draft_where} if job.drafts_by_transformer else {}
    weights: dict[str, dict[str, str | bool | None]] = {}
    for which, name in {"target": job.target_where, **drafts}.items():
        of = open_checkpoint(name, target=job.target_where)
        weights[which] = {"name": of.name, "sha256": of.sha256, "sha256_of": of.sha256_of}
    for which, name in drafts.items():
        weights[which]["made_for_target"] = made_for(name, job.target_where)
    if job.config.is_text:
        weights["target"]["tokenizer_sha256"] = tokenizer_digest(job.target_where)
    return {"forward": "transformer", "weights": weights}


def _device_times(session: Session, measured: Measured) -> dict[str, Any]:
    """Returns the result row's times of forwards, as {key: value}: those of verifying, of drafting
    K tokens, and of growing branches, in s; and the shortest time of a verification that the
    hardware allows. t_draft_s is measured if in at least 10 rounds no sequence hit the speculation
    cache; otherwise it is computed from the time of one draft step."""
    job = session.job
    records = measured.lead.records
    draft = measured.draft
    # A round counts only if every sequence had K drafted tokens.
    full = records.num_rows() == job.config.batch_size * (job.lookahead + 1)
    t_target = median(np.asarray(records.t_target_s)[full])
    t_draft = t_growth = None
    if job.draft is not None and not job.config.is_lookup:
        rows = job.config.batch_size * job.step_rows
        step = measured.profile.device.draft_s(rows) + measured.profile.host.step
        t_draft = float(job.num_forwards(job.lookahead) * step)
    if draft is not None:
        times = draft.column("t_draft_s")
        t_draft = median(times) if np.isfinite(times).sum() >= 10 else t_draft
        t_growth = median(draft.column("t_growth_s")) if job.fan_out else None
    names = ("read_bytes_per_s", "peak_flops_per_s")
    rates = {name: getattr(measured.profile, name) for name in names}
    floor, floor_s = floor_of(job, session.backend.itemsize, rates)
    return {
        "t_target_s": t_target,
        "t_draft_s": t_draft,
        "t_growth_s": t_growth,
        "T_SD": t_draft / t_target if t_target and t_draft is not None else None,
        "floor_us": None if floor_s is None else round(floor_s * 1e6, 3),
        "floor_fraction": round(floor_s / t_target, 4) if t_target and floor_s else None,
        **floor,
        "cache_bytes": session.backend.info.cache_bytes,
    }


def floor_of(
    job: Job, itemsize: int, rates: Mapping[str, float | None]
) -> tuple[dict[str, float | None], float | None]:
    """Computes the shortest possible time of a verification (its floor): the time to read the bytes
    of a target rank, or to compute its flops, whichever is longer. Returns ({key of the result row:
    value}, floor in s or None if unknown). itemsize: bytes of a weight. rates: {"read_bytes_per_s":
    …, "peak_flops_per_s": …} of the device."""
    cost = job.target_shard.cost(job.verify_rows, job.config.batch_size, itemsize, job.options)
    size = cost.weight_bytes + cost.kv_bytes
    read, peak = rates.values()
    floor_s = max(size / read, cost.flops / peak) if read and peak else None
    return {"floor_bytes": size, "floor_flops": cost.flops, **rates}, floor_s


def _pool(draft: DraftReport | None) -> dict[str, float | int] | None:
    """Returns the result row's key `pool`, on draft forwards that serve several target groups at
    once: the number of forwards, the mean rows and sequences of a forward, and the share of time in
    which the device computes them. None if no forward serves several groups."""
    if draft is None or draft.forwards is None:
        return None
    forwards = draft.forwards[:-1]
    begin, end = draft.forwards[-1, :2].tolist()
    columns = dict(zip(SharedForwards.COLUMNS, forwards.T, strict=True))
    means = {
        name: round(float(columns[name].mean()), 3) if len(forwards) else 0.0
        for name in ("rows", "seats")
    }
    busy = float(columns["device_ns"].sum()) / max(1, end - begin)
    return {"forwards": len(forwards), **means, "busy": round(busy, 5)}


def shares_gpu_of(measured: Measured, infos: Sequence[DeviceInfo]) -> int | None:
    """Returns the first rank whose GPU is also used by the rank that trains the draft while
    decoding; None if no rank shares it. infos: the devices of all ranks but the training one."""
    gpu = (measured.lead.learner or {}).get("gpu")
    ranks = (rank for rank, info in enumerate(infos) if gpu is not None and info.uuid == gpu)
    return next(ranks, None)


def _learner(session: Session, measured: Measured) -> dict[str, Any]:
    """Returns the result row's values on training the draft while decoding, as {key: value}; {} if
    the draft was not trained."""
    lead = measured.lead
    if lead.learner is None:
        return {}
    updates = None if measured.draft is None else measured.draft.updates
    report = {key: value for key, value in lead.learner.items() if key != "state"}
    report["shares_gpu_of"] = shares_gpu_of(measured, session.infos)
    return {
        "learners": session.job.config.learners,
        "learner_state": lead.learner["state"],
        "draft_versions": 0 if updates is None else len(updates["swaps"]),
        "learner": {**report, **(updates or {})},
        "acceptance_by_version": [
            {
                **{"version": version, "rounds": rounds, "drafted": drafted, "accepted": accepted},
                "acceptance_length": round(1 + accepted / rounds, 4),
            }
            for version, rounds, drafted, accepted in lead.records.by_version()
        ],
    }


def round_arrays(measured: Measured) -> dict[str, NDArray[Any]]:
    """Returns {name: array} of a run's raw rounds, as stored in OUT/rounds/RUN_ID.npz. The array
    `tokens` holds the emitted token ids of all requests, one request after the other."""
    lead = measured.lead
    draft = measured.draft
    emitted = [tokens for _, tokens in sorted(lead.records.token_arrays().items())]
    arrays: dict[str, NDArray[Any]] = {
        "round_s": np.asarray(lead.records.round_s),
        "t_target_s": np.asarray(lead.records.t_target_s),
        "sequences": lead.records.sequences(),
        "tokens": np.concatenate([np.zeros(0, np.int32), *emitted]),
        "token_counts": np.array([len(tokens) for tokens in emitted], np.int32),
        "lead_ledger_ns": lead.ledger,
        "lead_phases": np.asarray(lead.phases),
    }
    if draft is not None:
        arrays["draft_rounds"] = draft.rounds
        arrays["draft_columns"] = np.asarray(DraftLog.COLUMNS)
        arrays["draft_ledger_ns"] = draft.ledger
        arrays["draft_phases"] = np.asarray(draft.phases)
    return arrays


def write_row(
    session: Session,
    row: Row,
    measured: Measured,
    arrays: Mapping[str, NDArray[Any]],
    violations: Sequence[str],
) -> None:
    """Writes the answers of a run on text to OUT/text/RUN_ID.jsonl, the raw rounds to
    OUT/rounds/RUN_ID.npz, and the result row to OUT/runs.jsonl, or to OUT/flagged.jsonl if the row
    has faults (violations). A file is written completely or not at all. Raises OSError."""
    out = Path(session.job.config.out)
    if isinstance(session.workload, TextWorkload):
        _write_text(session.workload, measured.lead, row.run_id, violations)
    with whole_file(out / "rounds" / f"{row.run_id}.npz") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    name = "flagged.jsonl" if violations else "runs.jsonl"
    gates = {"gates": violations} if violations else {}
    append_row(out / name, {**row.to_dict(), **gates})


def answers_file(out: str, run_id: str) -> Path:
    return Path(out, "text", f"{run_id}.jsonl")


def _write_text(
    workload: TextWorkload, lead: LeadReport, run_id: str, faults: Sequence[str]
) -> None:
    """Writes each answer that was begun as a JSON line, in the order of the prompts. The keys are
    those of the prompt's own line, and: text, the answer without stop token or stop string (null
    without a tokenizer); tokens, the emitted ids, including a stop token; sources, what drafted
    each token; ended, which is "stop_token", "stop" (a stop string), "length" (--num_tokens or the
    context was reached) or "rounds" (the run ended first); gates, the faults of the row, if any."""
    records = lead.records
    config = workload.job.config
    sources = records.source_arrays()
    limit = config.token_limit
    flagged = {"gates": list(faults)} if faults else {}
    path = answers_file(config.out, run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        for request_id, emitted in sorted(records.token_arrays().items()):
            tokens = emitted[:limit].tolist()
            shown = None
            is_over = request_id in records.ends or len(tokens) == limit
            ended = "length" if is_over else "rounds"
            if tokens[-1] in workload.stop_ids:
                ended = "stop_token"
            prompt = workload.prompts[request_id]
            origins = sources[request_id].tolist()
            if workload.tokenizer is not None:
                tokenizer = workload.tokenizer
                text = AnswerText(tokenizer, config.stop_strings, workload.stop_ids, prompt.tokens)
                shown = "".join([text.push(token) for token in tokens]) + text.flush()
                ended = text.ended or ended
            answer = {
                **prompt.entry,
                "text": shown,
                "prompt_tokens": list(prompt.tokens),
                "tokens": tokens,
                "sources": [SOURCES[source] for source in origins[: len(tokens)]],
                "ended": ended,
                **flagged,
            }
            file.write(f"{json.dumps(answer, ensure_ascii=False)}\n".encode())
