"""The answers of a text job, and its row's fields on prompts and weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpissd.common.rounds import Source
from mpissd.engine.model.transformer.sources import made_for, open_checkpoint
from mpissd.engine.session.doubts import drafts_of
from mpissd.engine.session.session import Session
from mpissd.engine.workload.text.answers import BONUS, Answer, answer_of, write_answers
from mpissd.engine.workload.text.stops import AnswerText
from mpissd.engine.workload.text.tokenizer import tokenizer_digest
from mpissd.engine.workload.text.workload import TextWorkload
from mpissd.lab.measure.reports import LeadReport

_SOURCES = {int(source): source.name.lower() for source in Source} | {int(Source.NONE): BONUS}


def write_answers_of(
    session: Session, lead: LeadReport, run_id: str, faults: Sequence[str] = ()
) -> None:
    """Writes OUT/text/RUN_ID.jsonl for a text job; raises OSError.

    faults: the gates that the run failed, which every line then names.
    """
    workload = session.workload
    if isinstance(workload, TextWorkload):
        write_answers(session.job.config.out, run_id, answers(workload, lead), faults)


def answers(workload: TextWorkload, lead: LeadReport) -> list[Answer]:
    """Returns the answer to each prompt whose sequence began, in the prompts' order."""
    records, limit = lead.records, workload.job.config.token_limit
    sources = records.source_arrays()
    return [
        _answer(workload, lead, request_id, tokens[:limit].tolist(), sources[request_id].tolist())
        for request_id, tokens in sorted(records.token_arrays().items())
    ]


def _answer(
    workload: TextWorkload, lead: LeadReport, request_id: int, tokens: list[int], sources: list[int]
) -> Answer:
    tokenizer, config = workload.tokenizer, workload.job.config
    text = None
    if tokenizer is not None:
        text = AnswerText(tokenizer, config.stop_strings, workload.stop_ids)
    limit = config.token_limit
    is_over = request_id in lead.records.ends or len(tokens) == limit
    ended = "length" if is_over else "rounds"
    if tokens[-1] in workload.stop_ids:
        ended = "stop_token"
    named = [_SOURCES[source] for source in sources[: len(tokens)]]
    return answer_of(workload.prompts[request_id], tokens, named, text, ended)


def model_fields(session: Session) -> dict[str, Any]:
    """Returns the row's keys of the models' forwards and weights."""
    job = session.job
    if not job.config.is_transformer:
        return {"forward": "gemm", "weights": None}
    drafts = drafts_of(job)
    names = {"target": job.target_where, **drafts}
    every = {which: open_checkpoint(name, target=job.target_where) for which, name in names.items()}
    weights: dict[str, dict[str, str | bool | None]] = {
        which: {"name": opened.name, "sha256": opened.sha256, "sha256_of": opened.sha256_of}
        for which, opened in every.items()
    }
    for which, name in drafts.items():
        weights[which]["made_for_target"] = made_for(name, job.target_where)
    if job.config.is_text:
        weights["target"]["tokenizer_sha256"] = tokenizer_digest(job.target_where)
    return {"forward": "transformer", "weights": weights}


def prompt_times(session: Session, lead: LeadReport) -> dict[str, Any]:
    """Returns the row's times of prompts, in seconds; None for sequences without one."""
    if not session.job.config.is_text:
        return {"t_prefill_s": None, "time_to_first_token_s": None}
    return {
        "t_prefill_s": round(lead.prefill_s, 9),
        "time_to_first_token_s": round(float(lead.records.round_s.read()[0]), 9),
    }
