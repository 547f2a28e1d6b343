"""Held-out answers: of the target's own conversations, and of people's prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpissd.learn.asked import Exam
from mpissd.learn.mould import Mould
from mpissd.learn.sample import ANSWER, USER, Sampler, Samples, blank

OWN_WARMTH = 0.7


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
