"""Trains a draft on the target's distributions as they arrive, and decides what to publish.

A version is published only if its losses and weights are finite and some sequences are held out. On
the latest of these, which no version was trained on, it must agree with the target more often than
the version in use, by more than two standard errors. Luck passes that, too: one in forty of the
versions that gain nothing (docs/online.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from mpissd.learn.llama import Llama
from mpissd.online.examples import Example, Memory
from mpissd.online.student import Step, Student

ERRORS = 2.0  # standard errors by which a version must be ahead (docs/online.md)
FALL = 0.02  # of held-out agreement, up to which a version that is not published trains on
PATIENCE = 3  # versions in a row that fell further, before training begins again from the last one

Counted = NDArray[np.float64]


class State(str, Enum):
    """State of a learner; `diverged` and `refused` describe its last version."""

    LEARNING = "learning"
    DIVERGED = "diverged"  # a loss or a weight was not finite: it went back to the last version
    REFUSED = "refused"  # held-out agreement did not rise, or not surely


@dataclass(frozen=True)
class LearnerPlan:
    """batch: sequences of a step. steps: steps for each new sequence (.25: one for four of them);
    each is learned from batch · steps times. capacity: sequences that are kept to train on.
    min_held: held-out sequences, two or more, before which nothing is published."""

    batch: int = 4
    steps: float = 1.0
    capacity: int = 4096
    min_held: int = 8
    seed: int = 0


@dataclass
class Counts:
    """Counts of a learner's work; `tokens` of all sequences, prompts included."""

    sequences: int = 0
    tokens: int = 0
    positions: int = 0
    steps: int = 0
    published: int = 0
    refused: int = 0
    diverged: int = 0
    losses: list[Step] = field(default_factory=list)  # the last ones


class Learner:
    """A student with its memory, and its last version that was good enough."""

    def __init__(self, student: Student, plan: LearnerPlan) -> None:
        self.student, self.plan = student, plan
        self.memory = Memory(plan.capacity, seed=plan.seed)
        self.state, self.counts = State.LEARNING, Counts()
        self.agreement: float | None = None  # held-out, of the last candidate
        self.in_use = student.copy()
        self._new = self._bad = 0
        self._due = 0.0

    def add(self, example: Example) -> None:
        """Takes a finished sequence, for which `steps` steps are due."""
        self.counts.sequences += 1
        self.counts.tokens += len(example.tokens)
        self.counts.positions += len(example.at)
        if self.memory.add(example):
            self._new += 1
            self._due += self.plan.steps

    @property
    def is_due(self) -> bool:
        """Whether a step is due."""
        return self._due >= 1 and bool(self.memory.trained)

    def learn(self) -> Step:
        """Takes one step: on the sequences that came since the last one, and on earlier ones."""
        newest = min(max(1, self._new), self.plan.batch)
        self._new, self._due = 0, self._due - 1
        step = self.student.step(self.memory.batch(self.plan.batch, newest))
        self.counts.steps += 1
        self.counts.losses = [*self.counts.losses[-99:], step]
        if not step.is_finite:
            self._go_back()
        return step

    def _go_back(self) -> None:
        """Begins again from the last published version."""
        self.state, self._due = State.DIVERGED, 0.0
        self.counts.diverged += 1
        self.student.restore(self.in_use)

    def publish(self) -> bool | None:
        """Publishes the weights if their gain on held-out sequences is significant.

        Returns whether it did; None: too few sequences are held out yet to judge the weights.
        """
        if not self.student.is_finite:
            self._go_back()
            return False
        if len(self.memory.held) < self.plan.min_held:
            return None
        gain, error = self._gained()
        if not gain > ERRORS * error:
            self._refuse(gain)
            return False
        self.state, self._bad = State.LEARNING, 0
        self.in_use = self.student.copy()
        self.counts.published += 1
        return True

    def _refuse(self, gain: float) -> None:
        """Counts a version that is not published; training goes on, or back to the last one."""
        self.state = State.REFUSED
        self.counts.refused += 1
        self._bad = self._bad + 1 if gain < -FALL else 0
        if self._bad >= PATIENCE:
            self._bad = 0
            self.student.restore(self.in_use)

    def _gained(self) -> tuple[float, float]:
        """Returns the held-out gain of agreement over the version in use, and its error."""
        mine, before = self._right(self.student.draft), self._right(self.in_use)
        self.agreement = float(mine[:, 0].sum() / mine[:, 1].sum())
        return paired(mine, before)

    def _right(self, weights: Llama) -> Counted:
        """Returns (right, all) positions of each held-out sequence, of weights as a draft
        computes with them."""
        with self.student.using(weights), self.student.stored():
            return counted(self.student.judge(self.memory.held))


def counted(judged: Sequence[Sequence[tuple[int, float]]]) -> Counted:
    """Returns (right, all) positions of each sequence that `Student.judge` judged, [n, 2]."""
    return np.array([[sum(rank == 0 for rank, _ in one), len(one)] for one in judged], float)


def paired(mine: Counted, other: Counted) -> tuple[float, float]:
    """Returns the difference of two shares, and its standard error over the rows, two or more.

    mine, other: (counted, all) of the same rows, [n, 2]; the error is computed for a ratio's
    estimate with n − 1 degrees of freedom.
    """
    total, n = other[:, 1].sum(), len(other)
    gains = mine[:, 0] - other[:, 0]
    gain = gains.sum() / total
    squares = ((gains - gain * other[:, 1]) ** 2).sum() * n / (n - 1)
    return float(gain), float(np.sqrt(squares) / total)
