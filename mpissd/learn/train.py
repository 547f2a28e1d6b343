"""Training the draft on the target's distributions over its own answers.

The loss is the Kullback-Leibler divergence first; then mostly total variation, which is what
decides acceptance: a token is accepted with probability 1 − TV (2211.17192, corollary 3.6). Late
steps may be on states that the draft itself proposes (2306.13649, 2310.08461).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mpissd.learn.batches import Batches
from mpissd.learn.group import Group
from mpissd.learn.llama import Llama, Tensor
from mpissd.learn.pair import Losses, Pair
from mpissd.learn.sample import Samples

WARM_UP = 100  # steps until the learning rate is at its highest
LEVEL, LAST_RATE = 0.3, 0.01  # share of the time at the full learning rate; its last value
VARIATION_FROM = 0.5  # share of the time after which total variation is added
CHECK = 10  # steps between two looks at the clock, at which the processes agree
EVERY, WATCHED = 50, 250  # steps between two points of the curves, and with held-out figures
NAMES = ("cross_entropy", "tv", "agreement", "state_error")
REGRESSION = 0.5  # weight of the states' relative error, where a draft has states
UNTIMED = 5  # steps before the clock starts: they compile


@dataclass(frozen=True)
class Plan:
    """The duration and settings of a training.

    seconds: length of the training, without the first steps, which compile. until: when the
    training has to be over, in seconds of time.monotonic(). on_policy: the share of late steps on
    the draft's own proposals. save_every: seconds between two copies of the draft so far.
    """

    seconds: float
    until: float
    steps: int
    batch: int
    learning_rate: float
    seed: int
    compiled: bool
    optimizer: str = "adamw"
    on_policy: float = 0.0
    save_every: float = float("inf")


@dataclass(frozen=True)
class Told:
    """Who is told of a training: of each point of the curves, and of the draft so far."""

    point: Callable[[dict[str, Any]], None]
    copy: Callable[[Any], object] = lambda draft: None


class Learner(Protocol):
    """What is trained, and its losses on batches that it makes of samples."""

    @property
    def trained(self) -> list[Tensor]:
        """The tensors that are trained."""

    def optimizer(self, name: str) -> Any:
        """Returns their optimiser; name: "adamw" or "muon"."""

    def batch(self, samples: Samples, num_rows: int) -> Any:
        """Returns a batch of all these sequences, of about num_rows answered rows."""

    def proposed(self, batch: Any) -> Any:
        """Returns a batch in which some tokens are those that the draft proposes."""

    def of(self, batch: Any) -> tuple[Tensor, ...]:
        """Returns the losses of NAMES; those behind the third are optional."""

    def copy(self) -> Any:
        """Returns the draft so far, without gradients."""


def train(
    pair: Pair,
    parts: Sequence[Samples],
    plan: Plan,
    told: Told,
    *,
    held: Samples | None = None,
    group: Group | None = None,
) -> Llama:
    """Trains the pair's draft in place and returns it without gradients; see `learn`."""
    draft: Llama = learn(Losses(pair, plan.compiled), parts, plan, told, held=held, group=group)
    return draft


def learn(
    learner: Learner,
    parts: Sequence[Samples],
    plan: Plan,
    told: Told,
    *,
    held: Samples | None = None,
    group: Group | None = None,
) -> Any:
    """Trains a learner in place and returns its copy.

    parts: samples of equal numbers of sequences. held: sequences whose losses are told but not
    trained on. An error of the device behind the first point ends the training early: the draft
    that it has reached is returned, and the last point says what happened.
    """
    first = None
    try:
        for point in _Training(learner, parts, plan, told, group or Group()).points(held):
            first = first or point
            told.point(point)
    except RuntimeError as error:
        if first is None:
            raise
        told.point({"stopped": str(error).partition("\n")[0]})
    return learner.copy()


class _Training:
    """One training's clock, gradients and optimiser."""

    def __init__(
        self, learner: Learner, parts: Sequence[Samples], plan: Plan, told: Told, group: Group
    ) -> None:
        self.losses, self.plan, self.told, self.group = learner, plan, told, group
        self.trained = learner.trained
        self.optimizer = learner.optimizer(plan.optimizer)
        self.batches = Batches(parts, plan.batch, plan.seed + group.rank, learner.batch)
        sizes = [tensor.numel() for tensor in self.trained]
        self.flat = torch.zeros(sum(sizes), device=self.trained[0].device)  # all gradients
        for tensor, part in zip(self.trained, self.flat.split(sizes), strict=True):
            tensor.grad = part.view_as(tensor)
        self.step, self.share, self.seconds = 0, 0.0, 0.0
        self.started, self.allowed, self.saved = time.monotonic(), plan.seconds, 0.0

    def points(self, held: Samples | None) -> Iterator[dict[str, Any]]:
        """Trains; yields a point of the curves every few steps."""
        if self.plan.on_policy:
            self.losses.of(self.losses.proposed(self.batches.next()))  # compiles, untimed
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
        batch = self.batches.next()
        if late and _is_due(self.step, self.plan.on_policy):
            batch = self.losses.proposed(batch)
        divergence, variation, *others = self.losses.of(batch)
        loss = 0.3 * divergence + 3 * variation if late else divergence
        if len(others) > 1:  # behind the agreement
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
        if self.step == UNTIMED:
            self.group.largest(float(self.flat[0]), device)  # waits for all devices
            self.started = time.monotonic()
            self.allowed = max(min(plan.seconds, plan.until - self.started), 1e-9)
        if self.step % CHECK == 0 or self.step >= plan.steps:
            self.seconds = time.monotonic() - self.started if self.step >= UNTIMED else 0.0
            share = max(self.seconds / self.allowed, self.step / plan.steps)
            self.share = self.group.largest(share, device)
            if self.seconds - self.saved >= plan.save_every and self.share < 1:
                self.saved = self.seconds
                self.told.copy(self.losses.copy())

    def _watched(self, held: Samples) -> dict[str, float]:
        """Returns the mean losses on sequences that are not trained on."""
        size = min(self.plan.batch, len(held.tokens))
        batch = self.losses.batch(held.take(slice(0, size)), self.batches.num_rows)
        return _rounded(self.losses.of(batch))  # with gradients, for which it is compiled


def _is_due(step: int, share: float) -> bool:
    """Whether a step is one of the share that is spread evenly over all steps."""
    return int((step + 1) * share) > int(step * share)


def _rounded(found: Sequence[Any]) -> dict[str, float]:
    return {n: round(float(value.detach()), 5) for n, value in zip(NAMES, found, strict=False)}


def _rate(step: int, share: float) -> float:
    """Returns the learning rate's share of its highest: up, level, and down along a line."""
    falling = 1.0 if share < LEVEL else max(LAST_RATE, (1 - share) / (1 - LEVEL))
    return min(1.0, (step + 1) / WARM_UP) * falling
