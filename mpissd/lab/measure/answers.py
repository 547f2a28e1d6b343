"""The answers of a text job."""

from __future__ import annotations

from collections.abc import Sequence

from mpissd.common.rounds import Source
from mpissd.engine.session.session import Session
from mpissd.engine.workload.text.answers import BONUS, Answer, answer_of, write_answers
from mpissd.engine.workload.text.stops import AnswerText
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
