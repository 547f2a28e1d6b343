"""People's prompts, by the names of their files: to be answered, or with recorded answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpissd.common.errors import ConfigError
from mpissd.engine.workload.replay import recording
from mpissd.learn.mould import Chat


@dataclass(frozen=True)
class Exam:
    """One set of people's prompts: encoded prompts to be answered, or answers that are recorded."""

    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]] | None = None

    def longest(self, limit: int) -> int:
        """Returns the most tokens of a prompt and an answer of at most `limit` tokens."""
        return max(map(len, self.prompts), default=0) + limit

    def part(self, rank: int, size: int) -> Exam:
        """Returns every size-th prompt from the rank-th on; all of them where there are fewer."""
        if len(self.prompts) < size:
            return self
        mine = slice(rank, None, size)
        return Exam(self.prompts[mine], None if self.answers is None else self.answers[mine])


def read_exams(
    names: str | None, tokenizer: Chat, vocab: int, flag: str = "prompts"
) -> dict[str, Exam]:
    """Returns {stem: exam} of a flag's files, a comma between: prompts (.jsonl), recordings
    (.npz)."""
    found = {}
    for name in filter(None, (names or "").split(",")):
        is_recorded = Path(name).suffix == ".npz"
        exam = _recorded(flag, name, vocab) if is_recorded else _asked(flag, name, tokenizer)
        found[Path(name).stem] = exam
    return found


def _asked(flag: str, name: str, tokenizer: Chat) -> Exam:
    try:
        lines = [json.loads(line) for line in Path(name).read_text("utf-8").splitlines()]
        texts = [str(line["prompt"]) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'{flag}={name!r}: allowed: lines {{"prompt": …}}: {error}') from error
    if not texts:
        raise ConfigError(f"{flag}={name!r}: no prompt: allowed: one or more")
    return Exam([tokenizer.chat([{"role": "user", "content": text}]) for text in texts])


def _recorded(flag: str, name: str, vocab: int) -> Exam:
    found = recording.load(name)
    if found.vocab != vocab:
        told = f"a recording of {found.vocab} tokens, the target has {vocab}"
        raise ConfigError(f"{flag}={name!r}: {told}: allowed: one of this target")
    parts = found.sequences
    return Exam([p.prompt.tolist() for p in parts], [p.tokens[: p.end].tolist() for p in parts])
