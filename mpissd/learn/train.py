"""Training the draft on the target's distributions over its own answers.

The loss is the Kullback-Leibler divergence first; then mostly total variation, which is what
decides acceptance: a token is accepted with probability 1 − TV (2211.17192, corollary 3.6).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mpissd.learn.llama import Blocks, Llama, Tensor, mapped
from mpissd.learn.sample import Samples

WARM_UP = 100  # steps until the learning rate is at its highest
LEVEL, LAST_RATE = (
    0.4,
    0.01,
)  # share of the time at the full learning rate; its last value, relative
VARIATION_FROM = 0.5  # share of the time after which total variation is added
EVERY = 50  # steps between two points of the curves
UNTIMED = 5  # steps before the clock starts: they compile


@dataclass(frozen=True)
class Plan:
    """The duration and settings of a training.

    seconds: length of the training, without the first steps, which compile. until: when the
    training has to be over, in seconds of time.monotonic().
    """

    seconds: float
    until: float
    steps: int
    batch: int
    learning_rate: float
    seed: int
    compiled: bool


@dataclass(frozen=True)
class Pair:
    """The target, the draft, the draft's token ids, and what both compute with."""

    target: Llama
    draft: Llama
    head_ids: Tensor
    blocks: Blocks
    table: tuple[Tensor, Tensor]

    def losses(self, tokens: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        """Returns mean divergence, total variation and greedy agreement over chosen rows.

        tokens: [b, n]. rows: positions in the flattened tokens. weights: [rows], 0 for one that
        does not count. The target's probability outside the draft's vocabulary counts as lost.
        """
        cos, sin = (part[: tokens.shape[1]] for part in self.table)
        with torch.no_grad():
            hidden = self.blocks.hidden(self.target, tokens, cos, sin).flatten(0, 1)[rows]
            logits = self.blocks.product(hidden, self.target.head)
            total = logits.float().logsumexp(-1, keepdim=True)
            p = (logits[:, self.head_ids].float() - total).exp()
            is_best = self.head_ids[p.argmax(-1)] == logits.argmax(-1)
        mine = self.blocks.hidden(self.draft, tokens, cos, sin).flatten(0, 1)[rows]
        log_q = self.blocks.product(mine, self.draft.head).float().log_softmax(-1)
        agrees = is_best & (log_q.argmax(-1) == p.argmax(-1))
        told = -(p * log_q).sum(-1), 1 - torch.minimum(p, log_q.exp()).sum(-1), agrees.float()
        size = weights.sum().clamp(min=1)
        return tuple((part * weights).sum() / size for part in told)


def train(
    pair: Pair, samples: Samples, plan: Plan, keep: Callable[[dict[str, Any]], None]
) -> Llama:
    """Trains the pair's draft in place and returns it without gradients.

    keep: is called with each point of the curves. An error of the device behind the first point
    ends the training early: the draft that it has reached is returned, and the last point says
    what happened.
    """
    first = None
    try:
        for point in _steps(pair, samples, plan):
            first = first or point
            keep(point)
    except RuntimeError as error:
        if first is None:
            raise
        keep({"stopped": str(error).partition("\n")[0]})
    return mapped(pair.draft, lambda tensor: tensor.detach())


def _steps(pair: Pair, samples: Samples, plan: Plan) -> Iterator[dict[str, Any]]:
    """Trains; yields a point of the curves every few steps."""
    trained = [pair.draft.norm, pair.draft.head, *(t for w in pair.draft.layers for t in w)]
    optimizer = torch.optim.AdamW(
        trained, betas=(0.9, 0.95), weight_decay=0.01, fused=trained[0].is_cuda
    )
    losses: Any = torch.compile(pair.losses) if plan.compiled else pair.losses
    choose = _Batches(samples, plan)
    started, step, share, allowed = time.monotonic(), 0, 0.0, plan.seconds
    while share < 1:
        rate = plan.learning_rate * _rate(step, share)
        for group in optimizer.param_groups:
            group["lr"] = rate
        divergence, variation, agreement = losses(*choose.next())
        late = share >= VARIATION_FROM
        loss = 0.3 * divergence + 3 * variation if late else divergence
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step == UNTIMED:
            float(loss.detach())  # waits for the device
            started = time.monotonic()
            allowed = max(min(plan.seconds, plan.until - started), 1e-9)
        seconds = time.monotonic() - started if step >= UNTIMED else 0.0
        share = max(seconds / allowed, step / plan.steps)
        if step % EVERY == 0 or share >= 1:
            told = {"kl": divergence, "tv": variation, "agreement": agreement}
            values = {name: round(float(value.detach()), 5) for name, value in told.items()}
            yield {"step": step, "seconds": round(seconds, 1), "rate": rate, **values}


def _rate(step: int, share: float) -> float:
    """Returns the learning rate's share of its highest: up, level, and down along a line."""
    falling = 1.0 if share < LEVEL else max(LAST_RATE, (1 - share) / (1 - LEVEL))
    return min(1.0, (step + 1) / WARM_UP) * falling


class _Batches:
    """Batches of sequences in epochs, each with the rows whose next token was answered."""

    def __init__(self, samples: Samples, plan: Plan) -> None:
        self.samples, self.size = samples, min(plan.batch, len(samples.tokens))
        self.random = torch.Generator().manual_seed(plan.seed)
        self.order = torch.empty(0, dtype=torch.int64)
        share = float(samples.answered.float().mean())
        self.num_rows = max(1, int(self.size * (samples.tokens.shape[1] - 1) * share))

    def next(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns tokens [b, n − 1], row numbers and their weights."""
        if len(self.order) < self.size:
            self.order = torch.randperm(len(self.samples.tokens), generator=self.random)
        chosen, self.order = self.order[: self.size], self.order[self.size :]
        chosen = chosen.to(self.samples.tokens.device)
        tokens = self.samples.tokens[chosen].long()
        counts = self.samples.answered[chosen][:, 1:].flatten().float()
        rows = (counts + 0.5 * torch.rand_like(counts)).topk(self.num_rows).indices
        return tokens[:, :-1], rows, counts[rows]
