"""Forwards over a transformer's cache, and what a target and a draft say at temperature 0."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from mpissd.common.rounds import Ints
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Backend
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.model.forwards import Places
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.shard import TransformerShard
from mpissd.engine.model.transformer.sources import config_of
from mpissd.engine.model.transformer.stack import TransformerStacks

Tokens = Sequence[int]


class Model:
    """A whole model on one device; `feed` runs a forward and returns the likeliest tokens."""

    def __init__(
        self,
        backend: Backend,
        stacks: TransformerStacks,
        options: ForwardOptions,
        *,
        rows: int,
        slots: int,
        seed: int,
    ) -> None:
        """Reads the weights. rows: of the largest forward. slots: sequences in the cache."""
        shard = TransformerShard(config_of(stacks.where, stacks.target))
        self.rows, self._waiter = rows, Waiter(math.inf, spin=False)
        self._stepper = Stepper(
            backend,
            SoloGroup(),
            shard,
            options,
            buckets={min(slots, rows), rows},
            num_sequences=slots,
            seed=seed,
            stacks=stacks,
        )

    def feed(self, tokens: Tokens | Ints, places: Places) -> Ints:
        """Runs a forward of these rows; returns the likeliest tokens behind each, [n, top_k]."""
        self._stepper.upload(len(tokens), np.asarray(tokens, np.int32), places, lists=True)
        self._stepper.launch()
        self._stepper.wait(self._waiter)
        found: Ints = self._stepper.results().ids[0].copy()
        return found

    def read(self, slot: int, tokens: Tokens, first: int) -> Ints:
        """Fills a slot with tokens; returns the likeliest behind positions first … , [n, top_k]."""
        found = []
        for start in range(0, len(tokens), self.rows):
            stop = min(start + self.rows, len(tokens))
            reads = stop > first
            ids = self.feed(tokens[start:stop], trunk_rows(slot, start, stop, reads=reads))
            if reads:
                found.append(ids[max(0, first - start) :])
        return np.concatenate(found)

    def release(self, slots: Sequence[int]) -> None:
        """Frees the cache of these slots."""
        self._stepper.release(slots)

    def close(self) -> None:
        """Frees the forwards."""
        self._stepper.close()


def answered(
    model: Model, prompts: Sequence[Tokens], limit: int, stops: Collection[int], more: int
) -> list[tuple[list[int], int]]:
    """Returns (tokens, end) of the greedy answer to each prompt; at most one prompt a cache slot.

    end: tokens up to the stop token or the limit; `more` tokens follow behind it.
    """
    found: list[list[int]] = [[] for _ in prompts]
    ends = [limit] * len(prompts)

    def add(slot: int, token: int) -> None:
        found[slot].append(token)
        if ends[slot] == limit and token in stops:
            ends[slot] = min(limit, len(found[slot]))

    for slot, prompt in enumerate(prompts):
        add(slot, int(model.read(slot, prompt, len(prompt) - 1)[0, 0]))
    while live := [slot for slot, end in enumerate(ends) if len(found[slot]) < end + more]:
        length = [len(prompts[slot]) + len(found[slot]) - 1 for slot in live]
        slots, positions = np.array(live, np.int32), np.array(length, np.int32)
        none = np.full(len(live), -1, np.int32)
        ids = model.feed([found[s][-1] for s in live], Places(slots, positions, none, none))
        for slot, token in zip(live, ids[:, 0].tolist(), strict=True):
            add(slot, token)
    model.release(range(len(prompts)))
    return list(zip(found, ends, strict=True))


def drafted(model: Model, prompt: Tokens, answer: Tokens, lookahead: int) -> tuple[Ints, Ints]:
    """Returns (rollout [n, K], top [n, top_k]) behind each prefix of an answer of n tokens.

    The whole answer is no prefix. Prefixes grow together, a lane of the cache each.
    """
    top = model.read(0, [*prompt, *answer[:-1]], len(prompt) - 1)
    rollout = np.repeat(top[:, :1], lookahead, axis=1)
    for start in range(0, len(answer), model.rows):
        part = rollout[start : start + model.rows]
        count = len(part)
        slots, lanes = np.zeros(count, np.int32), np.arange(count, dtype=np.int32)
        trunks = len(prompt) + start + lanes
        for step in range(lookahead - 1):
            places = Places(slots, trunks + np.int32(step), lanes, trunks)
            part[:, step + 1] = model.feed(part[:, step], places)[:, 0]
    model.release([0])
    return rollout, top
