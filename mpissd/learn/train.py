"""Training a draft on the target's distributions over its own answers.

The loss is the Kullback-Leibler divergence first; then mostly total variation, which is what
decides acceptance: a token is accepted with probability 1 − TV (2211.17192, corollary 3.6).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mpissd.learn.config import DistillConfig
from mpissd.learn.draft import Draft
from mpissd.learn.sample import OutOfTime, Samples
from mpissd.learn.sample import until as interrupted

WAIT_S = 300  # for the slowest process, whose first steps may still compile
WARM_UP = 100  # steps until the learning rate is at its highest
LEVEL, LAST_RATE = 0.3, 0.01  # share of the time at the full learning rate; its last value
VARIATION_FROM = 0.5  # share of the time after which total variation is added
CHECK = 10  # compiled steps between two looks at the clock, at which the processes agree
EVERY, WATCHED = 50, 250  # steps between two points of the curves, and with held-out figures
NAMES = ("cross_entropy", "tv", "agreement", "state_error")
REGRESSION = 0.5  # weight of the states' relative error, if a draft has states
UNTIMED = 5  # first steps of a compiled training, which are not timed: they wait for the compiler


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


def batches(parts: Sequence[Samples], size: int, seed: int) -> Iterator[Samples]:
    """Yields batches epoch after epoch; each is drawn from one part of the samples."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        epoch = []
        for part in parts:
            order = torch.randperm(len(part.tokens), generator=generator)
            epoch += [(part, rows) for rows in order.split(size) if len(rows) == size]
        for place in reversed(torch.randperm(len(epoch), generator=generator).tolist()):
            part, rows = epoch[place]
            yield part.take(rows.to(part.tokens.device))


def learn(
    draft: Draft,
    parts: Sequence[Samples],
    plan: DistillConfig,
    observe: Callable[[dict[str, Any]], None],
    *,
    save: Callable[[Any], object] = lambda draft: None,
    held: Samples | None = None,
    group: Group | None = None,
    until: float = float("inf"),
    cut: float = float("inf"),
) -> Any:
    """Trains a draft in place and returns it without gradients.

    parts: samples of equal numbers of sequences. plan: the training's length (without the first
    steps, which wait for the compiler), steps, batch, rates and copies. observe: receives the
    points of the curves. save: receives copies of the draft so far. held: sequences whose losses
    are in the curves and that are not trained on. until: when the training has to be over, in
    seconds of time.monotonic(); cut: when a step that still runs is interrupted. An error of the
    device after the first point, or `cut`, ends the training early: the draft that it has reached
    is returned, and the last point has the reason.
    """
    group = group or Group()
    training = _Training(draft, parts, plan, group)
    try:  # a process that stops while others wait for its gradients would end them all
        with interrupted(cut if group.size == 1 else float("inf")):
            for point in training.points(save, held, until):
                observe(point)
    except RuntimeError as error:
        if training.step < EVERY:
            raise
        observe({"stopped": str(error).partition("\n")[0]})
    except OutOfTime:
        observe({"step": training.step, "stopped": "its time is over"})
    return draft.mapped(lambda tensor: tensor.detach())


class _Training:
    """One training's clock, gradients and optimiser."""

    def __init__(
        self, draft: Draft, parts: Sequence[Samples], plan: DistillConfig, group: Group
    ) -> None:
        self.draft, self.plan, self.group, tensors = draft, plan, group, draft.trained
        self.optimizer = draft.optimizer(plan.optimizer)
        size = min(plan.batch, *(len(part.tokens) for part in parts))
        shares = [float(part.answered.float().mean()) for part in parts]
        positions = size * (parts[0].tokens.shape[1] - 1)
        self.num_rows = max(1, int(positions * sum(shares) / len(shares)))
        self.batches = batches(parts, size, plan.seed + group.rank)
        sizes = [tensor.numel() for tensor in tensors]
        self.flat = torch.zeros(sum(sizes), device=tensors[0].device)  # all gradients
        for tensor, part in zip(tensors, self.flat.split(sizes), strict=True):
            tensor.grad = part.view_as(tensor)
        self.step = 0

    def points(
        self, save: Callable[[Any], object], held: Samples | None, until: float
    ) -> Iterator[dict[str, Any]]:
        """Trains until the share of its time that is gone is 1; yields a point every few steps."""
        plan, group, device = self.plan, self.group, self.flat.device
        untimed, check = (UNTIMED, CHECK) if self.draft.compiled else (0, 1)
        begun, share, seconds, saved = time.monotonic(), 0.0, 0.0, 0.0
        while share < 1:
            falling = 1.0 if share < LEVEL else max(LAST_RATE, (1 - share) / (1 - LEVEL))
            rate = plan.learning_rate * (min(1.0, (self.step + 1) / WARM_UP) * falling)
            losses = self._learn(rate, late=share >= VARIATION_FROM)
            self.step += 1
            if self.step == untimed:
                group.largest(float(self.flat[0]), device)  # waits for all devices
                begun = time.monotonic()
            if self.step % check == 0 or self.step >= plan.steps:
                seconds = time.monotonic() - begun if self.step >= untimed else 0.0
                allowed = max(min(plan.seconds_training, until - begun), 1e-9)
                share = group.largest(max(seconds / allowed, self.step / plan.steps), device)
                if seconds - saved >= plan.save_every and share < 1:
                    saved = seconds
                    save(self.draft.mapped(lambda tensor: tensor.detach()))
            if self.step % EVERY == 0 or share >= 1:
                point: dict[str, Any] = {"step": self.step, "seconds": round(seconds, 1)}
                point |= {"rate": rate, **_rounded(losses)}
                is_watched = self.step % WATCHED == 0 or self.step == EVERY or share >= 1
                if held is not None and is_watched:
                    some = held.take(slice(0, plan.batch))
                    # With gradients, for which the losses are compiled.
                    point["held"] = _rounded(self.draft.losses(some, self.num_rows))
                yield point

    def _learn(self, rate: float, *, late: bool) -> tuple[Any, ...]:
        """Takes one step; returns its losses. late: whether total variation counts."""
        losses = self.draft.losses(next(self.batches), self.num_rows)
        loss = 0.3 * losses[0] + 3 * losses[1] if late else losses[0]
        if len(losses) > 3:
            loss = loss + REGRESSION * losses[3]
        self.flat.zero_()
        loss.backward()
        self.group.add(self.flat)
        self.flat /= self.flat.norm().clamp(min=self.group.size)  # the mean, of norm 1 at most
        self.optimizer.step(rate)
        return losses


def _rounded(losses: Sequence[Any]) -> dict[str, Any]:
    return {n: round(float(value.detach()), 5) for n, value in zip(NAMES, losses, strict=False)}
