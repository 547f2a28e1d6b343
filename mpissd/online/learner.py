"""Trains a draft on the target's distributions as they come, and says what may be published.

Nothing is published whose losses or weights are not finite, or that agrees with the target clearly
less often than the published version does, on sequences that neither was trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mpissd.online.examples import Example, Memory
from mpissd.online.student import Step, Student

FALL = 0.02  # of held-out agreement, up to which a version may be published
PATIENCE = 3  # versions in a row that are refused before training begins again from the last one


class State(str, Enum):
    """What a learner does; `diverged` and `refused` describe its last version."""

    LEARNING = "learning"
    DIVERGED = "diverged"  # a loss or a weight was not finite: it went back to the last version
    REFUSED = "refused"  # held-out agreement fell


@dataclass(frozen=True)
class LearnerPlan:
    """batch: sequences of a step. steps: steps for each new sequence. capacity: sequences that are
    kept to train on. min_held: held-out sequences before which nothing is judged by them."""

    batch: int = 4
    steps: int = 1
    capacity: int = 4096
    min_held: int = 2
    seed: int = 0


@dataclass
class Counts:
    """What a learner did so far; `tokens` of all sequences, prompts included."""

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
        self.memory = Memory(plan.capacity, held=16, seed=plan.seed)
        self.state, self.counts = State.LEARNING, Counts()
        self.agreement: float | None = None  # held-out, of the last candidate
        self._good = student.copy()
        self._new = self._due = self._bad = 0

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
        return self._due > 0 and bool(self.memory.trained)

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
        self.state, self._due = State.DIVERGED, 0
        self.counts.diverged += 1
        self.student.restore(self._good)

    def publish(self) -> bool:
        """Returns whether the weights are a version to publish, which they then are."""
        if not self.student.is_finite:
            self._go_back()
            return False
        if not self._is_good():
            self.state = State.REFUSED
            self.counts.refused += 1
            self._bad += 1
            if self._bad >= PATIENCE:
                self._bad = 0
                self.student.restore(self._good)
            return False
        self.state, self._bad = State.LEARNING, 0
        self._good = self.student.copy()
        self.counts.published += 1
        return True

    def _is_good(self) -> bool:
        """Whether held-out agreement did not fall by more than FALL."""
        held = self.memory.held
        if len(held) < self.plan.min_held:
            return True
        mine = self.student.draft
        self.agreement = self._stored_agreement()
        self.student.draft = self._good
        before = self._stored_agreement()
        self.student.draft = mine
        return self.agreement >= before - FALL

    def _stored_agreement(self) -> float:
        """Returns the held-out agreement of the student's weights as a draft computes with them."""
        with self.student.stored():
            return self.student.agreement(self.memory.held)
