"""Texts to judge or train a draft: people's prompts, recordings, the target's own prompts.

A file of prompts is answered by the target at temperature 0; a recording (.npz) has its answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpissd.common.errors import ConfigError
from mpissd.engine.workload.replay import recording
from mpissd.learn.sample import ANSWER, USER, Sampler, Samples, blank
from mpissd.learn.template_parts import Chat, TemplateParts

OWN_WARMTH = 0.7  # temperature of the users' messages that the target writes


@dataclass(frozen=True)
class Exam:
    """One set of people's prompts: encoded prompts to be answered, or answers that are recorded."""

    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]] | None = None

    def longest(self, limit: int) -> int:
        """Returns the most tokens of a prompt and an answer of at most `limit` tokens."""
        return max(map(len, self.prompts), default=0) + limit

    def part(self, rank: int, size: int) -> Exam:
        """Returns every size-th prompt from the rank-th on; all of them if there are fewer."""
        if len(self.prompts) < size:
            return self
        mine = slice(rank, None, size)
        return Exam(self.prompts[mine], None if self.answers is None else self.answers[mine])


def read_exams(
    names: str | None, tokenizer: Chat, vocab: int, flag: str = "prompts"
) -> dict[str, Exam]:
    """Returns {stem: exam} of a flag's files, a comma between: prompts (.jsonl), recordings
    (.npz)."""
    exams = {}
    for name in filter(None, (names or "").split(",")):
        is_recorded = Path(name).suffix == ".npz"
        exam = _recorded(flag, name, vocab) if is_recorded else _asked(flag, name, tokenizer)
        exams[Path(name).stem] = exam
    return exams


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
    recorded = recording.load(name)
    if recorded.vocab != vocab:
        why = f"a recording of {recorded.vocab} tokens, the target has {vocab}"
        raise ConfigError(f"{flag}={name!r}: {why}: allowed: one of this target")
    parts = recorded.sequences
    return Exam([p.prompt.tolist() for p in parts], [p.tokens[: p.end].tolist() for p in parts])


def answered(
    sampler: Sampler, exam: Exam, template: TemplateParts, limit: int, room: int, deadline: float
) -> Samples:
    """Returns an exam's answers at temperature 0, at most `limit` tokens each.

    room: a sequence's longest length; prompts that leave no room for an answer are left out.
    deadline: of time.monotonic(), at which all answers are cut.
    """
    if exam.answers is None:
        kept = [prompt for prompt in exam.prompts if len(prompt) + limit <= room]
        device = sampler.cos.device
        given = blank(kept, max(map(len, kept)) + limit, device)
        cold = torch.zeros(len(kept), device=device)
        written = sampler.write(given, template, ANSWER, (cold, cold), deadline=deadline)
        return first_answers(written, template.end, limit)
    rows = [
        (len(prompt), [*prompt, *answer[:limit]])
        for prompt, answer in zip(exam.prompts, exam.answers, strict=True)
    ]
    tokens = blank([row for _, row in rows], max(len(row) for _, row in rows), sampler.cos.device)
    mask = tokens >= 0
    for number, (start, _) in enumerate(rows):
        mask[number, :start] = False
    return Samples(tokens.clamp(min=0).int(), mask)


def own(
    sampler: Sampler, num: int, length: int, template: TemplateParts, limit: int, deadline: float
) -> Samples:
    """Returns first answers at temperature 0 to prompts that the target writes at OWN_WARMTH."""
    device = sampler.cos.device
    given = blank([template.before] * num, length, device)
    cold = torch.zeros(num, device=device)
    warm = cold + OWN_WARMTH
    written = sampler.write(given, template, USER, (warm, cold), deadline=deadline)
    return first_answers(written, template.end, limit)


def first_answers(samples: Samples, end: int, limit: int) -> Samples:
    """Returns the samples with only each one's first answer marked, its stop token included."""
    answered: Any = samples.answered
    ends = (answered & (samples.tokens == end)).int()
    is_first = ends.cumsum(-1) - ends == 0
    return Samples(samples.tokens, answered & is_first & (answered.cumsum(-1) <= limit))
