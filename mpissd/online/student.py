"""The learner's own copy of the draft: it is trained, judged, and handed on as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from mpissd.engine.model.transformer.checkpoint import (
    EMBEDDING,
    HEAD,
    Checkpoint,
    new_version,
    quantize,
)
from mpissd.engine.model.transformer.sources import open_checkpoint
from mpissd.learn.llama import (
    Llama,
    Tensor,
    angles,
    blocks_of,
    load,
    load_trunk,
    mapped,
    named,
)
from mpissd.learn.muon import optimizer_for, parameters
from mpissd.learn.pair import distance
from mpissd.learn.shape import trained
from mpissd.online.examples import Example

CROSS_ENTROPY, VARIATION = 0.3, 3.0  # weights of the loss: as in the late steps of learn.train
DITHER = 0  # seed of the numbers that weights are rounded by
Arrays = dict[str, NDArray[Any]]


def product_dtype(device: str) -> Any:
    """Returns the type of the layers' products: bfloat16 if the device has such products.

    On a CPU that has them they take a fifth of the time (AMD EPYC, one core: 121 instead of 26
    GFLOP/s).
    """
    has = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return torch.bfloat16 if device != "cpu" or has() else torch.float32


@dataclass(frozen=True)
class Step:
    """Mean losses over the positions of one step, before it."""

    cross_entropy: float
    variation: float
    agreement: float

    @property
    def is_finite(self) -> bool:
        """Whether the losses are numbers."""
        return bool(np.isfinite([self.cross_entropy, self.variation]).all())


class Student:
    """A draft that is trained on examples."""

    def __init__(
        self, draft: str, target: str, *, seed: int = 0, device: str = "cpu",
        rate: float = 1e-4, longest: int = 1024, exact: bool = False,
    ) -> None:  # fmt: skip
        """Reads the weights. draft, target: names for open_checkpoint.

        seed: of random weights. rate: the learning rate, reached over the first ten steps. longest:
        positions of a sequence that are used. exact: publishes weights in float16 even if the
        draft's files are int8, for a draft whose device computes with float16 (CuPy).
        """
        self.source: Checkpoint = open_checkpoint(draft, seed, target)
        config = self.source.config
        self.device, self.rate, self.longest = device, rate, longest
        self._int8 = config.int8 and not exact
        self.blocks = blocks_of(config, product_dtype(device))
        self.table = angles(config, longest, device)
        loaded = load(self.source, device, torch.float32)
        self.shares_head = config.tied or self.source.shares_head
        self._frozen = loaded
        ids = self.source.head_ids
        ids = np.arange(config.head_vocab, dtype=np.int32) if ids is None else ids
        self.head_ids = torch.from_numpy(np.asarray(ids, np.int64)).to(device)
        self.places = torch.full((config.shape.vocab_size,), -1, device=device)
        self.places[self.head_ids] = torch.arange(len(ids), device=device)
        self.draft: Llama = self._restored(loaded)

    def _restored(self, weights: Llama) -> Llama:
        """Makes these weights the ones that are trained, with a new optimiser."""
        draft = mapped(weights, trained)._replace(embedding=self._frozen.embedding)
        if self.shares_head:
            draft = draft._replace(head=self._frozen.head)
        self.draft, self._steps = draft, 0
        self.optimizer = optimizer_for("adamw", parameters(draft))
        return draft

    def copy(self) -> Llama:
        """Returns a copy of the weights as they are."""
        return mapped(self.draft, lambda tensor: tensor.detach().clone())

    def restore(self, weights: Llama) -> None:
        """Goes back to weights that `copy` returned, and forgets the optimiser's state."""
        self._restored(weights)

    def step(self, examples: Sequence[Example]) -> Step:
        """Takes one step on the examples' positions; returns their losses before it.

        A loss that is not finite changes nothing.
        """
        losses = self._losses(examples)
        told = Step(*(float(part.detach()) for part in losses))
        if not told.is_finite:
            return told
        tensors = parameters(self.draft)
        for tensor in tensors:
            tensor.grad = None
        (CROSS_ENTROPY * losses[0] + VARIATION * losses[1]).backward()
        torch.nn.utils.clip_grad_norm_(tensors, 1.0)
        self._steps += 1
        self.optimizer.step(self.rate * min(1.0, self._steps / 10))
        return told

    def _losses(self, examples: Sequence[Example]) -> tuple[Tensor, ...]:
        """Returns mean cross-entropy, total variation and greedy agreement (pair.distance)."""
        logits, ids, logs = self._forward(examples)
        p_logits = torch.full_like(logits, -torch.inf)
        places = self.places[ids]
        known = places >= 0
        rows = torch.arange(len(ids), device=self.device)[:, None].expand_as(ids)
        p_logits[rows[known], places[known]] = logs[known]
        nothing, ones = logs.new_zeros(len(logs)), logs.new_ones(len(logs))
        return distance(p_logits, nothing, ids[:, 0], logits, self.head_ids, ones)

    def _forward(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the draft's logits [rows, columns], and the target's ids and logs of the rows."""
        kept = [one.take(one.at < self.longest) for one in examples]
        length = max(int(one.at[-1]) + 1 if len(one.at) else 1 for one in kept)
        tokens = torch.zeros(len(kept), length, dtype=torch.int64)
        for row, one in enumerate(kept):
            part = torch.from_numpy(one.tokens[:length].astype(np.int64))
            tokens[row, : len(part)] = part
        rows = np.concatenate([row * length + one.at for row, one in enumerate(kept)])
        table = [part[:length] for part in self.table]
        hidden = self.blocks.hidden(self.draft, tokens.to(self.device), *table)
        chosen = hidden.flatten(0, 1)[torch.from_numpy(rows).long().to(self.device)]
        logits = F.linear(chosen, self.draft.head)  # bfloat16 would make ties
        ids = torch.from_numpy(np.concatenate([one.ids for one in kept])).long()
        logs = torch.from_numpy(np.concatenate([one.logs for one in kept])).float()
        return logits, ids.to(self.device), logs.to(self.device)

    def judge(self, examples: Sequence[Example], at_once: int = 8) -> list[list[tuple[int, float]]]:
        """Returns, by example and position, (rank of the target's best token, sum of min(p, q)).

        The rank counts the tokens that the draft finds likelier, and of equally likely ones those
        before it, which a draft takes; V for a token that it cannot name, and where one of its
        logits is not finite.
        """
        found: list[list[tuple[int, float]]] = []
        for start in range(0, len(examples), at_once):
            part = [one for one in examples[start : start + at_once] if len(one.at)]
            if not part:
                continue
            with torch.no_grad():
                rows = self._judged(part)
            for one in part:
                count = int((one.at < self.longest).sum())
                found.append(rows[:count])
                rows = rows[count:]
        return found

    def _judged(self, examples: Sequence[Example]) -> list[tuple[int, float]]:
        logits, ids, logs = self._forward(examples)
        places = self.places[ids]
        known = places >= 0
        own = logits.gather(1, places.clamp(min=0))
        sound = torch.isfinite(logits).all(-1)  # comparisons with NaN are never true
        before = torch.arange(logits.shape[1], device=logits.device) < places[:, :1]
        ahead = (logits > own[:, :1]) | ((logits == own[:, :1]) & before)
        ranks = ahead.sum(-1)
        ranks = torch.where(known[:, 0] & sound, ranks, len(self.places))
        known = known & sound[:, None]
        q = (own - logits.logsumexp(-1, keepdim=True)).exp()
        overlap = torch.where(known, torch.minimum(q, logs.exp()), 0).sum(-1)
        return list(zip(ranks.tolist(), overlap.tolist(), strict=True))

    @contextmanager
    def using(self, weights: Llama) -> Iterator[None]:
        """Judges other weights inside the block."""
        own, self.draft = self.draft, weights
        try:
            yield
        finally:
            self.draft = own

    @contextmanager
    def stored(self) -> Iterator[None]:
        """Inside the block the weights equal the draft's: from `arrays`, in int8 or float16, bit
        for bit. Raises ProtocolError if one is not finite."""
        version = new_version(self.source, self.arrays())
        weights = load_trunk(version, self.draft, torch.float32)
        if not self.shares_head:
            head = torch.from_numpy(version.read(HEAD))
            weights = weights._replace(head=head.to(self.device))
        with self.using(weights):
            yield

    def agreement(self, examples: Sequence[Example]) -> float:
        """Returns the share of positions at which the draft's best token is the target's."""
        ranks = [rank for one in self.judge(examples) for rank, _ in one]
        return sum(rank == 0 for rank in ranks) / max(1, len(ranks))

    @property
    def is_finite(self) -> bool:
        """Whether all weights are numbers, also as they are stored: matrices, or the scales of
        int8, which are a block's largest weight / 127, in float16."""
        widest = torch.finfo(torch.float16).max * (127 if self._int8 else 1)
        limits = {1: torch.finfo(torch.float32).max, 2: widest}
        return all(
            bool((tensor.abs() <= limits[tensor.ndim]).all()) for tensor in parameters(self.draft)
        )

    def arrays(self) -> Arrays:
        """Returns the trained tensors as a draft loads them: int8 with scales if it stores such, or
        float16; vectors in float32.

        Weights lie on int8's grid when training begins, and most move by less than half of its
        step: rounding to nearest would take them back. They are dithered, with the same numbers in
        every version: a weight that did not move keeps its value if the largest weight of its
        block, which sets the step, did not move either.
        """
        found: Arrays = {}
        draws = np.random.default_rng(DITHER)
        for name, tensor in named(self.draft, self.source.config).items():
            if name == EMBEDDING or (name == HEAD and self.shares_head):
                continue
            values = np.ascontiguousarray(tensor.detach().float().cpu().numpy())
            if values.ndim == 1:
                found[name] = values
            elif self._int8:
                scale = name.removesuffix("weight") + "scale"
                dither = draws.random(values.shape, np.float32)
                found[name], found[scale] = quantize(values, dither)
            else:
                found[name] = values.astype(np.float16)
        return found
