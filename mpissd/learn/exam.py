"""Held-out answers: of the target's own conversations, and of people's prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mpissd.common.errors import ConfigError
from mpissd.learn.mould import Chat, Mould
from mpissd.learn.sample import ANSWER, USER, Sampler, Samples, blank

OWN_WARMTH = 0.7


def read_prompts(names: str | None, tokenizer: Chat) -> dict[str, list[list[int]]]:
    """Returns {stem: encoded prompts} of JSONL files; names: the files, separated by commas."""
    found = {}
    for name in filter(None, (names or "").split(",")):
        try:
            lines = [json.loads(line) for line in Path(name).read_text("utf-8").splitlines()]
            texts = [str(line["prompt"]) for line in lines]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f'prompts={name!r}: allowed: lines {{"prompt": …}}: {error}'
            ) from error
        messages = [[{"role": "user", "content": text}] for text in texts]
        found[Path(name).stem] = [tokenizer.chat(message) for message in messages]
    return found


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
