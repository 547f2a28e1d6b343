"""Batches of a training: sequences, and the rows whose next token the target answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpissd.learn.sample import Samples, States

Tensor = Any
Make = Callable[[Samples, int], Any]


@dataclass(frozen=True)
class Batch:
    """tokens: [b, n]. rows: positions in the flattened tokens. weights: [rows], 0 for one that does
    not count. states: what the target computed at these rows ([rows, …] each)."""

    tokens: Tensor
    rows: Tensor
    weights: Tensor
    states: States | None


def batch_of(samples: Samples, num_rows: int) -> Batch:
    """Returns a batch of all these sequences with `num_rows` rows, drawn among the answered."""
    counts = samples.answered[:, 1:].flatten().float()
    rows = (counts + 0.5 * torch.rand_like(counts)).topk(min(num_rows, len(counts))).indices
    states = samples.states
    if states is not None:
        states = States(
            states.hidden[:, :-1].flatten(0, 1)[rows],
            states.total[:, :-1].flatten()[rows],
            states.best[:, :-1].flatten()[rows].long(),
        )
    return Batch(samples.tokens[:, :-1].long(), rows, counts[rows], states)


class Batches:
    """Batches in epochs: each is drawn from one part of the samples."""

    def __init__(
        self, parts: Sequence[Samples], size: int, seed: int, make: Make = batch_of
    ) -> None:
        """Takes the samples and what makes a batch of some of them and a number of rows."""
        self.make = make
        self.parts, self.size = parts, min(size, *(len(part.tokens) for part in parts))
        self.random = torch.Generator().manual_seed(seed)
        self.order: list[tuple[Samples, Tensor]] = []
        shares = [float(part.answered.float().mean()) for part in parts]
        positions = self.size * (parts[0].tokens.shape[1] - 1)
        self.num_rows = max(1, int(positions * sum(shares) / len(shares)))

    def next(self) -> Any:
        """Returns the next batch; starts a new epoch where the last one is over."""
        if not self.order:
            self.order = self._epoch()
        part, rows = self.order.pop()
        return self.make(part.take(rows.to(part.tokens.device)), self.num_rows)

    def _epoch(self) -> list[tuple[Samples, Tensor]]:
        found = []
        for part in self.parts:
            order = torch.randperm(len(part.tokens), generator=self.random)
            found += [(part, rows) for rows in order.split(self.size) if len(rows) == self.size]
        places = torch.randperm(len(found), generator=self.random).tolist()
        return [found[place] for place in places]
