"""Training a draft on the target's distributions over its own answers.

The loss is the Kullback-Leibler divergence first; then mostly total variation, which is what
decides acceptance: a token is accepted with probability 1 − TV (2211.17192, corollary 3.6).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mpissd.learn.config import DistillConfig
from mpissd.learn.draft import Draft
from mpissd.learn.sample import Samples

WAIT_S = 300  # seconds to wait for the slowest process, whose first steps may still compile
WARM_UP = 100  # steps until the learning rate is at its highest
LEVEL = 0.3  # share of the training time at the full learning rate
LAST_RATE = 0.01  # share of the full learning rate that is left in the end
CHECK = 10  # With compiled losses, the processes compare their times only every 10 steps.
EVERY = 50  # steps between two points of the training curves
REGRESSION = 0.5  # weight in the loss of the relative error of predicted hidden states
AT_ONCE = 8  # most conversations in one forward on a CPU, so that training ends in time
STEPS = 20  # After 1/STEPS of the training time, a step of several forwards starts no further one.
UNTIMED = 5  # first steps of a compiled training, which are not timed: they wait for the compiler


@dataclass(frozen=True)
class ProcessGroup:
    """One of the `size` processes that train together; nothing is sent if size is 1."""

    rank: int = 0
    size: int = 1

    def add(self, tensor: Any) -> Any:
        """Sums a tensor over the processes in place and returns it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, value: float, device: Any) -> float:
        if self.size == 1:
            return value
        largest = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)


def join(rank: int, size: int, place: str, gpu: bool, busy_s: float) -> ProcessGroup:
    """Joins this process to those that meet at the file `place`, over NCCL or, without a GPU, Gloo.
    busy_s: how long one process may work while the others wait, in seconds."""
    if size > 1:
        if gpu:
            torch.cuda.set_device(rank)
        where = {"init_method": f"file://{place}", "rank": rank, "world_size": size}
        wait = timedelta(seconds=WAIT_S + min(busy_s, 86400.0))
        dist.init_process_group("nccl" if gpu else "gloo", timeout=wait, **where)
    return ProcessGroup(rank, size)


def batches(parts: Sequence[Samples], size: int, seed: int) -> Iterator[Samples]:
    """Yields batches of `size` sequences without end; each is drawn from one element of `parts`."""
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
    group: ProcessGroup | None = None,
    until: float = float("inf"),
) -> Any:
    """Trains a draft in place and returns it without gradients. A device error after the first
    point of the curves ends training early, and the last point tells the reason.

    parts: samples of equal numbers of sequences. plan: duration (without the first steps, which
    compile), steps, batch and rates. observe: receives points of the curves. save: receives the
    draft every `plan.save_every` seconds. until: end of training in seconds of time.monotonic().
    """
    group = group or ProcessGroup()
    tensors = draft.trained
    optimizer = draft.optimizer(plan.optimizer)
    device = tensors[0].device
    size = min(plan.batch, *(len(part.tokens) for part in parts))
    shares = [float(part.answered.float().mean()) for part in parts]
    positions = size * (parts[0].tokens.shape[1] - 1)
    untimed, check, chunk = (UNTIMED, CHECK, size) if draft.compiled else (0, 1, AT_ONCE)
    num_rows = max(1, int(positions * sum(shares) / len(shares)) * min(chunk, size) // size)
    stream = batches(parts, size, plan.seed + group.rank)
    sizes = [tensor.numel() for tensor in tensors]
    flat = torch.zeros(sum(sizes), device=device)  # all gradients
    for tensor, gradient in zip(tensors, flat.split(sizes), strict=True):
        tensor.grad = gradient.view_as(tensor)
    step = 0
    begun = time.monotonic()
    share = seconds = saved = 0.0
    try:  # a process that fails while others wait for its gradients ends them all
        while share < 1:
            falling = 1.0 if share < LEVEL else max(LAST_RATE, (1 - share) / (1 - LEVEL))
            rate = plan.learning_rate * (min(1.0, (step + 1) / WARM_UP) * falling)
            late = share >= plan.variation_from
            batch = next(stream)
            now = time.monotonic()
            done = 0
            step_s = min(plan.seconds_training, until - begun) / STEPS
            flat.zero_()
            while done * chunk < size and (not done or time.monotonic() < now + step_s):
                part = slice(done * chunk, (done + 1) * chunk)
                losses = draft.losses(batch.take(part), num_rows)
                loss = losses.cross_entropy
                loss = 0.3 * loss + 3 * losses.tv if late else loss
                if losses.state_error is not None:
                    loss = loss + REGRESSION * losses.state_error
                loss.backward()
                done += 1
            group.add(flat)
            flat /= flat.norm().clamp(min=group.size * done)  # mean gradient, clipped to norm 1
            optimizer.step(rate)
            step += 1
            if step == untimed:
                group.largest(float(flat[0]), device)  # waits for all devices
                begun = time.monotonic()
            if step % check == 0 or step >= plan.steps:
                seconds = time.monotonic() - begun if step >= untimed else 0.0
                allowed = max(min(plan.seconds_training, until - begun), 1e-9)
                share = group.largest(max(seconds / allowed, step / plan.steps), device)
                if seconds - saved >= plan.save_every and share < 1:
                    saved = seconds
                    save(draft.mapped(lambda tensor: tensor.detach()))
            if step % EVERY == 0 or share >= 1:
                point: dict[str, Any] = {"step": step, "seconds": round(seconds, 1), "rate": rate}
                observe(point | losses.told())
    except RuntimeError as error:
        if step < EVERY:
            raise
        observe({"stopped": str(error).partition("\n")[0]})
    return draft.mapped(lambda tensor: tensor.detach())
