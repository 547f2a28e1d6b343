"""Held-out answers: of the target's own conversations, and of people's prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpissd.common.errors import ConfigError
from mpissd.engine.workload.replay import recording
from mpissd.learn.mould import Chat, Mould
from mpissd.learn.sample import ANSWER, USER, Sampler, Samples, blank

OWN_WARMTH = 0.7


@dataclass(frozen=True)
class Exam:
    """One set of people's prompts: encoded prompts to be answered, or answers that are recorded."""

    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]] | None = None

    def longest(self, limit: int) -> int:
        """Returns the most tokens of a prompt and an answer of at most `limit` tokens."""
        return max(map(len, self.prompts), default=0) + limit


def read_exams(names: str | None, tokenizer: Chat, vocab: int) -> dict[str, Exam]:
    """Returns {stem: exam} of files separated by commas: prompts (.jsonl), recordings (.npz)."""
    found = {}
    for name in filter(None, (names or "").split(",")):
        is_recorded = Path(name).suffix == ".npz"
        exam = _recorded(name, vocab) if is_recorded else _asked(name, tokenizer)
        found[Path(name).stem] = exam
    return found


def _asked(name: str, tokenizer: Chat) -> Exam:
    try:
        lines = [json.loads(line) for line in Path(name).read_text("utf-8").splitlines()]
        texts = [str(line["prompt"]) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'prompts={name!r}: allowed: lines {{"prompt": …}}: {error}') from error
    if not texts:
        raise ConfigError(f"prompts={name!r}: no prompt: allowed: one or more")
    return Exam([tokenizer.chat([{"role": "user", "content": text}]) for text in texts])


def _recorded(name: str, vocab: int) -> Exam:
    found = recording.load(name)
    if found.vocab != vocab:
        told = f"a recording of {found.vocab} tokens, the target has {vocab}"
        raise ConfigError(f"prompts={name!r}: {told}: allowed: one of this target")
    parts = found.sequences
    return Exam([p.prompt.tolist() for p in parts], [p.tokens[: p.end].tolist() for p in parts])


def answered(sampler: Sampler, exam: Exam, mould: Mould, limit: int, room: int) -> Samples:
    """Returns an exam's answers at temperature 0, at most `limit` tokens each.

    room: a sequence's longest length. Prompts that leave no room for an answer are left out.
    """
    if exam.answers is None:
        return answers(sampler, exam.prompts, mould, limit, room)
    rows = [
        (len(prompt), [*prompt, *told[:limit]])
        for prompt, told in zip(exam.prompts, exam.answers, strict=True)
    ]
    tokens = blank([row for _, row in rows], max(len(row) for _, row in rows), sampler.cos.device)
    mask = tokens >= 0
    for number, (start, _) in enumerate(rows):
        mask[number, :start] = False
    return Samples(tokens.clamp(min=0).int(), mask)


def answers(
    sampler: Sampler, prompts: Sequence[Sequence[int]], mould: Mould, limit: int, room: int
) -> Samples:
    """Returns the target's first answers at temperature 0, at most `limit` tokens each.

    room: a sequence's longest length. Prompts that leave no room for an answer are left out.
    """
    kept = [prompt for prompt in prompts if len(prompt) + limit <= room]
    device = sampler.cos.device
    given = blank(kept, max(map(len, kept)) + limit, device)
    cold = torch.zeros(len(kept), device=device)
    return first_answers(sampler.write(given, mould, ANSWER, (cold, cold)), mould.end, limit)


def own(sampler: Sampler, num: int, length: int, mould: Mould, limit: int) -> Samples:
    """Returns first answers at temperature 0 to prompts that the target writes at OWN_WARMTH."""
    device = sampler.cos.device
    given = blank([mould.before] * num, length, device)
    cold = torch.zeros(num, device=device)
    warm = cold + OWN_WARMTH
    return first_answers(sampler.write(given, mould, USER, (warm, cold)), mould.end, limit)


def first_answers(samples: Samples, end: int, limit: int) -> Samples:
    """Returns the samples with only each one's first answer marked, its stop token included."""
    answered: Any = samples.answered
    ends = (answered & (samples.tokens == end)).int()
    is_first = ends.cumsum(-1) - ends == 0
    return Samples(samples.tokens, answered & is_first & (answered.cumsum(-1) <= limit))
