"""The answers of a run: OUT/text/RUN_ID.jsonl, one line a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpissd.common.output import whole_file
from mpissd.common.rounds import Source
from mpissd.engine.workload.text.prompts import Prompt
from mpissd.engine.workload.text.stops import AnswerText

BONUS = "bonus"


@dataclass(frozen=True)
class Answer:
    """The answer of the model to one prompt.

    entry: the prompt as it was given. tokens: those emitted, up to and including the one that ended
    the answer. sources: the origin of each: "cache", "jit" or "fast", or "bonus" for the target's
    own. text: without the stop token, and cut in front of a stop string. ended: "stop_token",
    "stop" (a stop string), "length" (num_tokens, or the model's context), or "rounds" if the run
    ended first.
    """

    entry: Mapping[str, Any]
    text: str | None  # None without a tokenizer (--prompt_ids)
    prompt_tokens: Sequence[int]
    tokens: Sequence[int]
    sources: Sequence[str]
    ended: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the line of the file."""
        return {
            **self.entry,
            "text": self.text,
            "prompt_tokens": list(self.prompt_tokens),
            "tokens": list(self.tokens),
            "sources": list(self.sources),
            "ended": self.ended,
        }


def answer_of(
    prompt: Prompt,
    tokens: Sequence[int],
    sources: Sequence[str],
    text: AnswerText | None,
    ended: str = "length",
) -> Answer:
    """Returns the answer of these tokens.

    text: an unused AnswerText with the run's stops; None without a tokenizer. ended: its finish
    reason without a stop.
    """
    shown = None if text is None else "".join([text.push(t) for t in tokens]) + text.flush()
    ended = (text and text.ended) or ended
    return Answer(prompt.entry, shown, prompt.tokens, tokens, sources, ended)


def sources_of(num_accepted: int, source: int) -> list[str]:
    """Returns the source of each token of one round: the accepted ones, then the target's."""
    return [Source(source).name.lower()] * num_accepted + [BONUS]


def answers_file(out: str, run_id: str) -> Path:
    """Returns the file of a run's answers."""
    return Path(out, "text", f"{run_id}.jsonl")


def write_answers(
    out: str, run_id: str, answers: Sequence[Answer], faults: Sequence[str] = ()
) -> Path:
    """Writes the file and returns its path; it appears whole or not at all. Raises OSError.

    faults: of a run whose row is flagged; each line has them as "gates", as the row has.
    """
    flagged = {"gates": list(faults)} if faults else {}
    path = answers_file(out, run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        for answer in answers:
            line = json.dumps({**answer.to_dict(), **flagged}, ensure_ascii=False)
            file.write(f"{line}\n".encode())
    return path
