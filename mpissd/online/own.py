"""Stages whose prompts the target writes itself, and its answers to them.

own:asking and own:coding: the target goes on behind the opening of a user's message; the shipped
draft was made of such conversations. own:working and own:editing: a message asks for work on a
text or on code that the target wrote before, in answer to a message of the other two kinds.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import torch

from mpissd.common.errors import ConfigError
from mpissd.learn import exam
from mpissd.learn.mould import Mould
from mpissd.learn.openings import Openings, Words
from mpissd.learn.sample import USER, Sampler, Samples, blank

USER_TOKENS = 128  # most tokens of a prompt that the target writes, its template's included
PASSAGE_TOKENS = 160  # most tokens of the answer that a passage is taken from
SPARE = 2  # answers that are written for each passage: some hold none
SHORTEST = 80  # characters of a passage
ABOUT = {"working": "asking", "editing": "coding"}  # kinds, and of what their passages are answers
# Of the answers of own:coding one in four has a function.
_FOR_CODE = ("Write a Python function", "Write a function", "Write a class")
Ids = tuple[int, ...]
_CODE = re.compile(r"```(?:python)?\n(.*?)(?:```|$)", re.DOTALL)


class OwnPrompts:
    """Writes prompts with a target, and answers them at temperature 0."""

    def __init__(self, sampler: Sampler, tokenizer: Words, mould: Mould, seed: int) -> None:
        self._sampler, self._tokenizer, self._mould = sampler, tokenizer, mould
        self._openings, self._seed = Openings(tokenizer), seed

    def answered(self, kind: str, count: int, limit: int, room: int) -> Samples:
        """Returns answers of at most `limit` tokens to at most `count` prompts of a kind.

        room: a sequence's longest length. Raises ConfigError for a kind that is not known.
        """
        if kind in ABOUT:
            prompts = self.about_passages(kind, count)
            return exam.answers(self._sampler, prompts, self._mould, limit, room)
        if kind not in ABOUT.values():
            known = ", own:".join(self._openings.beginnings)
            raise ConfigError(f"own:{kind}: allowed: own:{known}")
        return self._conversations(self._openings.beginnings[kind], kind, count, limit, 0.0)

    def about_passages(self, kind: str, count: int) -> list[list[int]]:
        """Returns at most `count` prompts, an opening and a passage each, as token ids."""
        about = ABOUT[kind]
        beginnings = self._openings.beginnings[about]
        if kind == "editing":
            beginnings = [tuple(self._tokenizer.encode(text)) for text in _FOR_CODE]
        written = self._conversations(
            beginnings, f"passages of {about}", SPARE * count, PASSAGE_TOKENS, exam.OWN_WARMTH
        )
        found = passage_of_text if kind == "working" else passage_of_code
        rows = zip(written.tokens, written.answered, strict=True)
        texts = [self._tokenizer.decode(row[mask].tolist()) for row, mask in rows]
        passages = [passage for passage in map(found, texts) if len(passage) >= SHORTEST]
        choose, mould = random.Random(f"{self._seed}, {kind}"), self._mould
        openings = [self._opening(ids) for ids in self._openings.beginnings[kind]]
        messages = [choose.choice(openings) + passage for passage in passages[:count]]
        return [
            [*mould.before, *self._tokenizer.encode(message), mould.end, *mould.between]
            for message in messages
        ]

    def _opening(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids).removesuffix("def")

    def _conversations(
        self, beginnings: Sequence[Ids], name: str, count: int, limit: int, warmth: float
    ) -> Samples:
        """Returns first answers, at this temperature, to messages of OWN_WARMTH.

        beginnings: of the messages; a word stands behind each. name: of the random draws.
        """
        choose, words = random.Random(f"{self._seed}, {name}"), self._openings.words
        starts = [
            (*self._mould.before, *choose.choice(beginnings), *choose.choice(words))
            for _ in range(count)
        ]
        device: Any = self._sampler.cos.device
        given = blank(starts, USER_TOKENS + limit, device)
        warm = torch.full((len(starts),), exam.OWN_WARMTH, device=device)
        told = warm, torch.full_like(warm, warmth)
        written = self._sampler.write(given, self._mould, USER, told)
        return exam.first_answers(written, self._mould.end, limit)


def passage_of_text(answer: str) -> str:
    """Returns an answer's whole sentences: what stands behind the last full stop is left out."""
    return answer[: answer.rfind(".") + 1].strip()


def passage_of_code(answer: str) -> str:
    """Returns the first block of code of an answer that defines a function; "" without one."""
    found = _CODE.search(answer)
    return found[1].rstrip() if found and "def " in found[1] else ""
