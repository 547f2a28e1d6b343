"""The two workers of a workload; the loops in `decode` know nothing else of a model.

Workers start forwards and say when they are over; they never send, wait for a peer or look at a
clock. Every rank's worker sees the same batch, kept by applying the same outcomes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mpissd.rounds import Batch, Ints, Request, Source, Speculation
from mpissd.wait import Waiter

Admissions = Sequence[tuple[int, Request]]


class Worker(ABC):
    """What both sides have in common: sequences come and go, forwards run and end."""

    @abstractmethod
    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        """Follows an applied outcome: takes new sequences into their slots (a slot taken again
        forgets its last tenant) and makes what the round will need available."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the launched forward is over (never blocks)."""

    @abstractmethod
    def wait(self, waiter: Waiter) -> None:
        """Returns when the launched forward is over."""

    @abstractmethod
    def elapsed_s(self) -> float:
        """Device time of the last finished forward."""

    @abstractmethod
    def close(self) -> None:
        """Frees the forwards; before the group's communicator."""


class TargetWorker(Worker):
    """One target rank's share of the target model."""

    @abstractmethod
    def launch(self, batch: Batch, speculation: Speculation) -> None:
        """Starts the forward over Σ(num_draft+1) rows (collective over the target ranks)."""

    @abstractmethod
    def judge(self, batch: Batch, speculation: Speculation) -> tuple[Ints, Ints]:
        """Applies the acceptance rule to the finished forward: (num_accepted, bonus), both [b]."""


class Rollout:
    """Lanes that a draft grows together, one token a lane a step.

    tokens: int32 [lanes, K], columns up to `steps` are grown. rows: the batch row of each lane;
    empty while several lanes grow for one sequence and nobody knows which will win.
    """

    def __init__(self, rows: NDArray[np.int64], first: Ints, tokens: Ints) -> None:
        self.rows = rows
        self.first = first  # [lanes] the token that each lane starts from
        self.tokens = tokens
        self.steps = 0

    def __len__(self) -> int:
        return len(self.first)

    @property
    def inputs(self) -> Ints:
        """The token that each lane's next step reads."""
        return self.tokens[:, self.steps - 1] if self.steps else self.first

    def keep(self, lanes: Sequence[int], rows: Sequence[int]) -> None:
        """Prunes to `lanes`, which won for batch rows `rows`; what the others grew is given up."""
        chosen = np.array(lanes, np.int64)
        self.rows = np.array(rows, np.int64)
        self.first, self.tokens = self.first.take(chosen), self.tokens.take(chosen, axis=0)


class DraftWorker(Worker):
    """The draft model of one draft rank (or inline, on the lead)."""

    @abstractmethod
    def launch_glue(self, batch: Batch, speculation: Speculation) -> None:
        """Starts the (K+1)-row forward a sequence that scores the trunk just served."""

    @abstractmethod
    def branches(self, batch: Batch, speculation: Speculation) -> tuple[Ints, Rollout]:
        """After the glue: a lane for each bonus candidate, sequence by sequence, row by row.

        Returns (k [ΣF], the accepted count each of a sequence's lanes stands for, and the rollout
        of b·ΣF lanes, whose `first` are the candidates t*).
        """

    @abstractmethod
    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Rollout:
        """Lanes that continue batch rows `rows` from their newest committed token."""

    @abstractmethod
    def launch_step(self, rollouts: Sequence[Rollout]) -> None:
        """Starts one forward that grows every lane of every rollout by one token."""

    @abstractmethod
    def collect_step(self, rollouts: Sequence[Rollout]) -> None:
        """Takes the tokens of the finished step into the rollouts."""
