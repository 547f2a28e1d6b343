"""Joins the lessons of many rounds to sequences with the target's distributions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mpissd.common.rounds import Ints
from mpissd.engine.comm.logit_stream import Lesson
from mpissd.online.examples import KEPT, Example, Floats, compressed


@dataclass
class _Growing:
    """A sequence that is still answered."""

    tokens: list[int] = field(default_factory=list)
    prompt: int = 0
    at: list[int] = field(default_factory=list)
    ids: list[Ints] = field(default_factory=list)
    logs: list[Floats] = field(default_factory=list)


class Collector:
    """Keeps the sequences of the rounds, and yields each as it ends."""

    def __init__(self, stop_ids: Iterable[int] = (), kept: int = KEPT) -> None:
        """stop_ids: tokens that end an answer; what a round committed behind one is dropped."""
        self._stops, self._kept = frozenset(stop_ids), kept
        self._live: dict[tuple[int, int], _Growing] = {}
        self.dropped = 0  # sequences of which a round is missing

    def add(self, lessons: Sequence[Lesson]) -> list[Example]:
        """Takes a round's lessons; returns the sequences that are not in it any more."""
        names = {one.name for one in lessons}
        ended = [self._example(self._live.pop(n)) for n in [*self._live] if n not in names]
        for one in lessons:
            self._take(one)
        return ended

    def _take(self, lesson: Lesson) -> None:
        growing = self._live.setdefault(lesson.name, _Growing(prompt=lesson.prompt))
        if lesson.start != len(growing.tokens):
            self.dropped += lesson.start > 0
            growing = self._live[lesson.name] = _Growing(prompt=lesson.prompt)
            if lesson.start:
                return
        growing.tokens += lesson.tokens.tolist()
        if len(lesson.at):
            ids, logs = compressed(lesson.logits, self._kept)
            growing.at += lesson.at.tolist()
            growing.ids += list(ids)
            growing.logs += list(logs)

    def rest(self) -> list[Example]:
        """Returns the sequences that have not ended."""
        found = [self._example(growing) for growing in self._live.values()]
        self._live = {}
        return found

    def _example(self, growing: _Growing) -> Example:
        tokens, answer = growing.tokens, growing.tokens[growing.prompt :]
        stop = next((n for n, token in enumerate(answer) if token in self._stops), len(answer))
        end = growing.prompt + stop + 1  # the stop token included
        kept = sum(at + 1 < end for at in growing.at)
        width = len(growing.ids[0]) if kept else 0
        rows = np.array(growing.ids[:kept], np.int32).reshape(kept, width)
        logs = np.array(growing.logs[:kept], np.float16).reshape(kept, width)
        at = np.array(growing.at[:kept], np.int32)
        return Example(np.array(tokens[:end], np.int32), at, rows, logs)
