"""Steps a model: row buckets, one compiled program a bucket, tokens in, ids out.

A bucket's program is compiled once, before the first round: compiling is collective over the
target ranks, so every rank prepares the same buckets in the same order.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Iterable

import numpy as np

from mpissd.common.rounds import Ints
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Backend, Cost, Program
from mpissd.engine.comm.group import Group
from mpissd.engine.model.forwards import Places, Results, merged
from mpissd.engine.model.gemm_stack import GemmStacks
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.engine.model.stacks import Stacks, Weights

_PRODUCTS = GemmStacks()


class Stepper:
    """One model on one rank. Launches are asynchronous; one is in flight at a time."""

    def __init__(
        self,
        backend: Backend,
        group: Group,
        shard: Shard,
        options: ForwardOptions,
        *,
        buckets: Iterable[int],
        num_sequences: int,
        seed: int,
        stacks: Stacks = _PRODUCTS,
        weights: Weights | None = None,
        compiled: bool = True,
    ) -> None:
        """Makes the stack and its programs.

        stacks: which kind of model. weights: to stand on, made by `stacks` (None: its own).
        compiled=False: the caller will call compile.
        """
        self.backend, self.shard, self.options = backend, shard, options
        self._num_sequences = num_sequences
        self._buckets = sorted(set(buckets))
        self._shares = False
        most = self._buckets[-1]
        weights = weights or stacks.weights(backend, shard, options, max_rows=most, seed=seed)
        parts = backend, group, shard, options, weights
        self.stack = stacks.stack(*parts, max_rows=most, max_sequences=num_sequences)
        self._programs: dict[int, Program] = {}
        self._uploaded: tuple[int, Ints] = 0, np.zeros(0, np.int32)
        self._current: Program
        if compiled:
            self.compile()

    def compile(self) -> None:
        """Makes the programs; collective over the group."""
        capturable = self.stack.group.capturable
        self._programs = {rows: self._compile(rows, capturable) for rows in self._buckets}
        self._current = self._programs[self._buckets[0]]

    def only(self, buckets: Iterable[int]) -> Stepper:
        """These programs alone, shared: it rounds rows up as a stepper made for them would.

        Whoever made this stepper closes it; closing what `only` returns does nothing.
        """
        part = copy.copy(self)
        part._buckets = sorted(set(buckets))
        part._shares = True
        part._current = self._programs[part._buckets[0]]
        return part

    def _compile(self, rows: int, capturable: bool) -> Program:
        body = self.stack.body(rows)
        return self.backend.program(body, self.cost(rows), capturable=capturable)

    @property
    def buckets(self) -> list[int]:
        """The compiled row counts, rising."""
        return list(self._buckets)

    def cost(self, rows: int) -> Cost:
        """Cost of a forward of `rows` rows on this rank."""
        itemsize, most = self.backend.itemsize, self.stack.weights.max_rows
        return self.shard.cost(rows, self._num_sequences, itemsize, self.options, most)

    def bucket(self, rows: int) -> int:
        """The smallest compiled row count that holds `rows`."""
        assert rows <= self._buckets[-1], f"{rows} rows, the largest bucket is {self._buckets[-1]}"
        return self._buckets[bisect.bisect_left(self._buckets, rows)]

    def upload(self, rows: int, tokens: Ints, places: Places | None = None) -> None:
        """Makes the next forward one of `rows` rows; `tokens` [<= rows] feed the first of them.

        The device reads them from the (page-locked) host buffer when the forward begins. Where the
        rows stand is the stack's affair.
        """
        self.stack.buffers.tokens[: len(tokens)] = tokens
        if places is not None:
            self.stack.place(places)
        self._uploaded = rows, tokens
        self._current = self._programs[self.bucket(rows)]

    def launch(self) -> None:
        """Starts the forward that was last uploaded."""
        self._current.launch()

    def done(self) -> bool:
        """Whether the last launched forward is over."""
        return self._current.done()

    def wait(self, waiter: Waiter) -> None:
        """Returns when the last launched forward is over."""
        self._current.wait(waiter)

    def elapsed_s(self) -> float:
        """Device time of the last finished forward."""
        return self._current.elapsed_s()

    def results(self) -> Results:
        """Returns what the last finished forward read out, of the rows that were last uploaded.

        Raises NotImplementedError on the emulated backend, and for several shards whose values were
        not asked for: their candidates cannot be told apart.
        """
        if self.backend.info.kind == "emulated":
            raise NotImplementedError("the emulated backend holds no numbers")
        rows, tokens = self._uploaded
        ids, values = self.stack.read(self.bucket(rows))
        if ids.shape[1] > 1 and values is None:
            raise NotImplementedError("the best of several shards need ForwardOptions.values")
        ids = ids[:, :, : len(tokens)]
        if values is None:
            return Results(ids[:, 0])
        return merged(ids, values[:, :, : len(tokens)], self.shard.vocab)

    def close(self) -> None:
        """Destroys the programs: a graph that outlives its communicator hangs the teardown."""
        if self._shares:
            return
        for program in self._programs.values():
            program.close()
