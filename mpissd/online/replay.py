"""Replays learning schedules over stored answers: acceptance over tokens seen.

A quarter of a stage's prompts is held out of every schedule; all points are measured on it. The
online draft sees each of the others once, in order, and goes on from stage to stage. The offline
draft starts from the same weights at each stage and sees the stage's prompts several times: it is
the most that this learner gets from them, the ceiling. The static draft is the one it starts from.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpissd.learn.llama import Llama
from mpissd.learn.rounds import rounds_of
from mpissd.online.config import OnlineConfig
from mpissd.online.examples import Example, epoch
from mpissd.online.judging import Counted, counted, paired
from mpissd.online.learner import Learner, LearnerPlan, State
from mpissd.online.student import Student

HELD_OUT = 4  # one prompt in so many
LOOKAHEADS = (4, 7)
Point = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One stage of the stream: what is learned from, and what points are measured on."""

    name: str
    seen: Sequence[Example]
    held: Sequence[Example]


def parts_of(stages: Mapping[str, Sequence[Example]], seed: int) -> list[Part]:
    """Returns the stages in order, each shuffled, with a quarter held out."""
    found = []
    for name, examples in stages.items():
        order = list(examples)
        random.Random(f"{seed}, {name}").shuffle(order)
        count = len(order) // HELD_OUT
        found.append(Part(name, order[count:], order[:count]))
    return found


class Replay:
    """Replays schedules of one draft over the stages."""

    def __init__(self, student: Student, config: OnlineConfig) -> None:
        self.student, self.config = student, config
        self._start = student.copy()
        self._first: dict[str, Counted] = {}  # of the static draft, by stage
        self._used: dict[str, Point] = {}  # figures of the version in use, of the last stage

    def static(self, parts: Sequence[Part]) -> Iterator[Point]:
        """Yields one point a stage, of the draft as it is."""
        self.student.restore(self._start)
        for part in parts:
            yield {"schedule": "static", "prompts": 0, "tokens": 0, **self._judged(part)}

    def online(self, parts: Sequence[Part]) -> Iterator[Point]:
        """Yields points of a draft that learns from every prompt as it comes.

        A point's figures are those of the version in use; `trained` has those of the weights that
        were offered as the next one, None where they are not finite. A later stage begins with a
        point at 0 prompts.
        """
        self.student.restore(self._start)
        config = self.config
        learner = Learner(self.student, LearnerPlan(config.batch, config.steps, seed=config.seed))
        spent, self._used = 0.0, {}
        for part in parts:
            tokens = 0
            if learner.counts.steps:  # what earlier stages taught is not learned from this one
                yield self._point(part, learner, (0, 0, spent), is_offered=False)
            for number, example in enumerate(part.seen, 1):
                began = time.perf_counter()
                learner.add(self._learned(example, learner.in_use))
                while learner.is_due:
                    learner.learn()
                spent += time.perf_counter() - began
                tokens += len(example.at)
                if number % config.every == 0 or number == len(part.seen):
                    yield self._point(part, learner, (number, tokens, spent))

    def _point(
        self, part: Part, learner: Learner, seen: tuple[int, int, float], is_offered: bool = True
    ) -> Point:
        """Returns a point of the online draft, whose weights are offered as the next version.

        seen: prompts and tokens of the stage, and seconds spent. `published` is None where nothing
        is offered, or too little is held out to judge it.
        """
        point: Point = {"schedule": "online", "prompts": seen[0], "tokens": seen[1]}
        point |= {"steps": learner.counts.steps, "learning_s": round(seen[2], 1)}
        trained = self._judged(part)
        point["published"] = learner.publish() if is_offered else None
        if point["published"]:
            self._used = {part.name: trained}
        elif part.name not in self._used:
            with self.student.using(learner.in_use):
                self._used = {part.name: self._judged(part)}
        told = {name: trained[name] for name in ("agreement", "alpha")}
        is_number = learner.state is not State.DIVERGED
        return {**point, **self._used[part.name], "trained": told if is_number else None}

    def offline(self, parts: Sequence[Part]) -> Iterator[Point]:
        """Yields points of drafts that are distilled on one stage each, epoch by epoch.

        They learn from every position: their text is at hand before anything is drafted.
        """
        for part in parts:
            self.student.restore(self._start)
            for number in range(self.config.epochs):
                for batch in epoch(part.seen, self.config.batch, number):
                    self.student.step(batch)
                tokens = sum(len(one.at) for one in part.seen)
                point = {"schedule": "offline", "epoch": number + 1, "prompts": len(part.seen)}
                yield {**point, "tokens": tokens, **self._judged(part)}

    def _learned(self, example: Example, in_use: Llama) -> Example:
        """Returns the positions of an answer that the online draft learns from."""
        if self.config.learn_from == "all":
            return example
        with self.student.using(in_use):
            (judged,) = self.student.judge([example])
        return example.take(rejected([rank for rank, _ in judged], self.config.lookahead))

    def _judged(self, part: Part) -> Point:
        """Returns the figures on the stage's held-out prompts of the draft as it is stored.

        gain, gain_error: of agreement over the static draft, paired over prompts (`paired`).
        """
        judged = self._judge(part)
        pairs = [pair for answer in judged for pair in answer]
        found: Point = {"stage": part.name, "held_out": len(judged), "positions": len(pairs)}
        found["agreement"] = round(sum(rank == 0 for rank, _ in pairs) / len(pairs), 5)
        gained = paired(counted(judged), self._static(part))
        found["gain"], found["gain_error"] = (round(value, 5) for value in gained)
        found["alpha"] = round(sum(overlap for _, overlap in pairs) / len(pairs), 5)
        for lookahead in LOOKAHEADS:
            ranks = [[rank for rank, _ in answer] for answer in judged]
            rounds = [one for answer in ranks for one in rounds_of(answer, lookahead)]
            emitted = sum(k + (rank is not None) for k, rank in rounds)
            found[f"tokens_per_round_{lookahead}"] = round(emitted / len(rounds), 4)
        return found

    def _judge(self, part: Part) -> list[list[tuple[int, float]]]:
        with self.student.stored():
            return self.student.judge(part.held)

    def _static(self, part: Part) -> Counted:
        """Returns what the static draft counts on the stage's held-out prompts."""
        if part.name not in self._first:
            with self.student.using(self._start):
                self._first[part.name] = counted(self._judge(part))
        return self._first[part.name]


def rejected(ranks: Sequence[int], lookahead: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Returns the positions of an answer at which a drafted token is rejected, int32.

    ranks: how many tokens the draft finds likelier than the target's, by position.
    """
    found, at = [], 0
    for accepted, rank in rounds_of(ranks, lookahead):
        if accepted < lookahead and rank is not None:
            found.append(at + accepted)
        at += accepted + 1
    return np.array(found, np.int32)
