"""The answers of a text job: OUT/text/RUN_ID.jsonl, one line a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpissd.common.atomic_file import whole_file
from mpissd.engine.session.session import Session
from mpissd.engine.workload.text.stops import SOURCES, AnswerText
from mpissd.engine.workload.text.workload import TextWorkload
from mpissd.lab.measure.reports import LeadReport


def answers_file(out: str, run_id: str) -> Path:
    """Returns the file of a run's answers."""
    return Path(out, "text", f"{run_id}.jsonl")


def write_answers_of(
    session: Session, lead: LeadReport, run_id: str, faults: Sequence[str] = ()
) -> None:
    """Writes the answers of a text job, completely or not at all; raises OSError.

    faults: the gates that the run failed, which every line then has as "gates", as the row does.
    """
    workload = session.workload
    if not isinstance(workload, TextWorkload):
        return
    flagged = {"gates": list(faults)} if faults else {}
    path = answers_file(session.job.config.out, run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        for answer in answers(workload, lead):
            file.write(f"{json.dumps({**answer, **flagged}, ensure_ascii=False)}\n".encode())


def answers(workload: TextWorkload, lead: LeadReport) -> Iterator[dict[str, Any]]:
    """Yields the answer to each prompt whose sequence began, in the prompts' order.

    The prompt as it was given, and: text, without the stop token, and cut in front of a stop string
    (None without a tokenizer). prompt_tokens. tokens: those emitted, up to and including the one
    that ended the answer. sources: the origin of each: "cache", "jit" or "fast", or "bonus" for the
    target's own. ended: "stop_token", "stop" (a stop string), "length" (num_tokens, or the model's
    context), or "rounds" if the run ended first.
    """
    tokenizer, config, records = workload.tokenizer, workload.job.config, lead.records
    sources, limit = records.source_arrays(), config.token_limit
    for request_id, emitted in sorted(records.token_arrays().items()):
        tokens = emitted[:limit].tolist()
        ended = "length" if request_id in records.ends or len(tokens) == limit else "rounds"
        if tokens[-1] in workload.stop_ids:
            ended = "stop_token"
        shown = None
        if tokenizer is not None:
            text = AnswerText(tokenizer, config.stop_strings, workload.stop_ids)
            shown = "".join([text.push(token) for token in tokens]) + text.flush()
            ended = text.ended or ended
        prompt = workload.prompts[request_id]
        yield {
            **prompt.entry,
            "text": shown,
            "prompt_tokens": list(prompt.tokens),
            "tokens": tokens,
            "sources": [SOURCES[source] for source in sources[request_id][: len(tokens)].tolist()],
            "ended": ended,
        }
