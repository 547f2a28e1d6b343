"""Training a draft on the target's distributions over its own answers.

The loss is the Kullback-Leibler divergence first; then mostly total variation, which is what
decides acceptance: a token is accepted with probability 1 − TV (2211.17192, corollary 3.6).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mpissd.learn.llama import Tensor
from mpissd.learn.sample import OutOfTime, Samples, until

WAIT_S = 300  # for the slowest process, whose first steps may still compile


@dataclass(frozen=True)
class Group:
    """One of `size` processes; with size 1 nothing is sent."""

    rank: int = 0
    size: int = 1

    def add(self, tensor: Any) -> Any:
        """Sums a tensor over the processes in place and returns it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, value: float, device: Any) -> float:
        """Returns the largest of the processes' values."""
        if self.size == 1:
            return value
        largest = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)

    def close(self) -> None:
        """Leaves the group."""
        if self.size > 1:
            dist.destroy_process_group()


def join(rank: int, size: int, place: str, gpu: bool, busy_s: float) -> Group:
    """Joins the processes that meet at the file `place`, over NCCL or, without a GPU, Gloo.

    busy_s: how long one of them may work, while the others wait for it.
    """
    if size > 1:
        if gpu:
            torch.cuda.set_device(rank)
        where = {"init_method": f"file://{place}", "rank": rank, "world_size": size}
        wait = timedelta(seconds=WAIT_S + min(busy_s, 86400.0))
        dist.init_process_group("nccl" if gpu else "gloo", timeout=wait, **where)
    return Group(rank, size)


Make = Callable[[Samples, int], Any]


class Batches:
    """Batches in epochs: each is drawn from one part of the samples."""

    def __init__(self, parts: Sequence[Samples], size: int, seed: int, make: Make) -> None:
        """Takes the samples and the function that makes a batch of indices and a number of rows."""
        self.make = make
        self.parts, self.size = parts, min(size, *(len(part.tokens) for part in parts))
        self.random = torch.Generator().manual_seed(seed)
        self.order: list[tuple[Samples, Tensor]] = []
        shares = [float(part.answered.float().mean()) for part in parts]
        positions = self.size * (parts[0].tokens.shape[1] - 1)
        self.num_rows = max(1, int(positions * sum(shares) / len(shares)))

    def next(self) -> Any:
        """Returns the next batch; starts a new epoch when the last one is over."""
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


WARM_UP = 100  # steps until the learning rate is at its highest
LEVEL, LAST_RATE = 0.3, 0.01  # share of the time at the full learning rate; its last value
VARIATION_FROM = 0.5  # share of the time after which total variation is added
CHECK = 10  # compiled steps between two looks at the clock, at which the processes agree
EVERY, WATCHED = 50, 250  # steps between two points of the curves, and with held-out figures
NAMES = ("cross_entropy", "tv", "agreement", "state_error")
REGRESSION = 0.5  # weight of the states' relative error, if a draft has states
UNTIMED = 5  # first steps of a compiled training, which are not timed: they wait for the compiler


@dataclass(frozen=True)
class Plan:
    """The duration and settings of a training.

    seconds: length of the training, without the first steps, which wait for the compiler. until:
    when the training has to be over, in seconds of time.monotonic(); cut: when a step that still
    runs is interrupted, by the same clock. save_every: seconds between two copies of the draft.
    """

    seconds: float
    until: float
    steps: int
    batch: int
    learning_rate: float
    seed: int
    compiled: bool
    optimizer: str = "adamw"
    save_every: float = float("inf")
    cut: float = float("inf")


@dataclass(frozen=True)
class Observer:
    """Receives each point of a training's curves, and copies of the draft so far."""

    point: Callable[[dict[str, Any]], None]
    copy: Callable[[Any], object] = lambda draft: None


class Learner(Protocol):
    """The trained tensors, and their losses on batches made of samples."""

    @property
    def trained(self) -> list[Tensor]:
        """The tensors that are trained."""

    def optimizer(self, name: str) -> Any:
        """Returns their optimiser; name: "adamw" or "muon"."""

    def batch(self, samples: Samples, num_rows: int) -> Any:
        """Returns a batch of all these sequences, of about num_rows answered rows."""

    def of(self, batch: Any) -> tuple[Tensor, ...]:
        """Returns the losses of NAMES; the last one is optional."""

    def copy(self) -> Any:
        """Returns the draft so far, without gradients."""


def learn(
    learner: Learner,
    parts: Sequence[Samples],
    plan: Plan,
    observer: Observer,
    *,
    held: Samples | None = None,
    group: Group | None = None,
) -> Any:
    """Trains a learner in place and returns its copy.

    parts: samples of equal numbers of sequences. held: sequences whose losses are in the curves and
    that are not trained on. An error of the device after the first point, or `plan.cut`, ends the
    training early: the draft that it has reached is returned, and the last point has the reason.
    """
    first, group = None, group or Group()
    training = _Training(learner, parts, plan, observer, group)
    try:  # a process that stops while others wait for its gradients would end them all
        with until(plan.cut if group.size == 1 else float("inf")):
            for point in training.points(held):
                first = first or point
                observer.point(point)
    except RuntimeError as error:
        if first is None:
            raise
        observer.point({"stopped": str(error).partition("\n")[0]})
    except OutOfTime:
        observer.point({"step": training.step, "stopped": "its time is over"})
    return learner.copy()


class _Training:
    """One training's clock, gradients and optimiser."""

    def __init__(
        self,
        learner: Learner,
        parts: Sequence[Samples],
        plan: Plan,
        observer: Observer,
        group: Group,
    ) -> None:
        self.losses, self.plan, self.observer, self.group = learner, plan, observer, group
        self.trained = learner.trained
        self.optimizer = learner.optimizer(plan.optimizer)
        self.batches = Batches(parts, plan.batch, plan.seed + group.rank, learner.batch)
        sizes = [tensor.numel() for tensor in self.trained]
        self.flat = torch.zeros(sum(sizes), device=self.trained[0].device)  # all gradients
        for tensor, part in zip(self.trained, self.flat.split(sizes), strict=True):
            tensor.grad = part.view_as(tensor)
        self.step, self.share, self.seconds = 0, 0.0, 0.0
        self.untimed, self.check = (UNTIMED, CHECK) if plan.compiled else (0, 1)
        self.saved = 0.0
        self._start_clock()

    def _start_clock(self) -> None:
        self.started = time.monotonic()
        self.allowed = max(min(self.plan.seconds, self.plan.until - self.started), 1e-9)

    def points(self, held: Samples | None) -> Iterator[dict[str, Any]]:
        """Trains; yields a point of the curves every few steps."""
        while self.share < 1:
            rate = self.plan.learning_rate * _rate(self.step, self.share)
            found = self._learn(rate)
            self.step += 1
            self._look()
            if self.step % EVERY == 0 or self.share >= 1:
                point: dict[str, Any] = {"step": self.step}
                point |= {"seconds": round(self.seconds, 1), "rate": rate, **_rounded(found)}
                is_watched = self.step % WATCHED == 0 or self.step == EVERY or self.share >= 1
                if held is not None and is_watched:
                    point["held"] = self._watched(held)
                yield point

    def _learn(self, rate: float) -> tuple[Any, ...]:
        """Takes one step; returns its losses."""
        late = self.share >= VARIATION_FROM
        divergence, variation, *others = self.losses.of(self.batches.next())
        loss = 0.3 * divergence + 3 * variation if late else divergence
        if len(others) > 1:  # the agreement, and the states' error
            loss = loss + REGRESSION * others[1]
        self.flat.zero_()
        loss.backward()
        self.group.add(self.flat)
        self.flat /= self.flat.norm().clamp(min=self.group.size)  # the mean, of norm 1 at most
        self.optimizer.step(rate)
        return divergence, variation, *others

    def _look(self) -> None:
        """Reads the clock every few steps; the processes agree on the share of time gone."""
        plan, device = self.plan, self.flat.device
        if self.step == self.untimed:
            self.group.largest(float(self.flat[0]), device)  # waits for all devices
            self._start_clock()
        if self.step % self.check == 0 or self.step >= plan.steps:
            self.seconds = time.monotonic() - self.started if self.step >= self.untimed else 0.0
            share = max(self.seconds / self.allowed, self.step / plan.steps)
            self.share = self.group.largest(share, device)
            if self.seconds - self.saved >= plan.save_every and self.share < 1:
                self.saved = self.seconds
                self.observer.copy(self.losses.copy())

    def _watched(self, held: Samples) -> dict[str, float]:
        """Returns the mean losses on sequences that are not trained on."""
        size = min(self.plan.batch, len(held.tokens))
        batch = self.losses.batch(held.take(slice(0, size)), self.batches.num_rows)
        return _rounded(self.losses.of(batch))  # with gradients, for which it is compiled


def _rounded(found: Sequence[Any]) -> dict[str, float]:
    return {n: round(float(value.detach()), 5) for n, value in zip(NAMES, found, strict=False)}


def _rate(step: int, share: float) -> float:
    """Returns the learning rate's share of its highest: up, level, and down along a line."""
    falling = 1.0 if share < LEVEL else max(LAST_RATE, (1 - share) / (1 - LEVEL))
    return min(1.0, (step + 1) / WARM_UP) * falling
