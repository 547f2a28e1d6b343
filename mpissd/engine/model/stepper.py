"""Runs a model's forwards with programs that are compiled for some row counts, the *buckets*.

Programs are compiled before the first round. Compiling is collective over the target ranks, so all
ranks prepare the same buckets in the same order. A bucket has one program that reads out the
likeliest token of each row, and another that reads out the top_k likeliest if top_k > 1.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Backend, Cost, Program
from mpissd.engine.comm.group import Group
from mpissd.engine.model.forwards import Forwards, Places, Results, merged
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.engine.model.stacks import AnyShard, GemmStack, GemmWeights, Stack
from mpissd.engine.model.transformer.cache import PageTable
from mpissd.engine.model.transformer.checkpoint import Arrays
from mpissd.engine.model.transformer.sources import open_checkpoint
from mpissd.engine.model.transformer.stack import (
    StateStack,
    TransformerStack,
    TransformerWeights,
    load_weights,
    open_stack,
)

Weights = GemmWeights | TransformerWeights


@dataclass(frozen=True)
class ModelSource:
    """Where a model's weights come from; equal sources make equal weights. where: a preset, folder
    or file that open_checkpoint takes; "": random weights of bare matrix products. target: the
    target's name, for a draft that reads the target's embedding. page: positions of a page of the
    KV cache (None: the backend's default). heads: how many Medusa heads a forward computes."""

    where: str = ""
    target: str | None = None
    page: int | None = None
    heads: int = 1

    def weights(
        self,
        backend: Backend,
        shard: AnyShard,
        options: ForwardOptions,
        *,
        max_rows: int,
        seed: int,
    ) -> Weights:
        """Returns one rank's weights for forwards of up to max_rows rows. seed: decides random
        weights. Raises MemoryError or ConfigError if the weights do not fit."""
        if isinstance(shard, Shard):
            return GemmWeights(backend, shard, options, max_rows=max_rows, seed=seed)
        checkpoint = open_checkpoint(self.where, seed, self.target)
        return load_weights(backend, checkpoint, shard, max_rows=max_rows, page=self.page)


_PRODUCTS = ModelSource()


class Stepper(Forwards):
    """Runs one model's forwards on one rank, asynchronously and one at a time, each padded to the
    next bucket. buckets: the row counts, rising. pages, draws: those of the Stack. current: the
    program that the next `launch` starts and `wait` waits for. tell: tells other ranks, which share
    the model, to call the method of this name with these arguments."""

    tell: Callable[..., None] | None = None

    def __init__(
        self,
        backend: Backend,
        group: Group,
        shard: AnyShard,
        options: ForwardOptions,
        *,
        buckets: Iterable[int],
        num_sequences: int,
        seed: int,
        model: ModelSource = _PRODUCTS,
        weights: Weights | None = None,
        source: Stepper | None = None,
        compiled: bool = True,
    ) -> None:
        """Allocates the model's buffers and compiles its forwards. shard: this rank's share of the
        model. buckets: the row counts to compile for. num_sequences: how many sequences the KV
        cache holds. seed: decides random weights. model: where the weights come from. weights:
        weights that another stepper has loaded (None: loads them from `model`). source: the
        target's stepper, for a draft that reads its target's hidden states. compiled: whether to
        compile now; if False, the caller calls `compile` later."""
        self.backend = backend
        self.shard = shard
        self.options = options
        self._num_sequences = num_sequences
        self.buckets = sorted(set(buckets))
        self._shares = False
        max_rows = self.buckets[-1]
        weights = weights or model.weights(backend, shard, options, max_rows=max_rows, seed=seed)
        sizes = {"max_rows": max_rows, "max_sequences": num_sequences}
        self.stack: Stack
        if isinstance(weights, GemmWeights):
            assert isinstance(shard, Shard)
            self.stack = GemmStack(backend, group, shard, options, weights, **sizes)
        else:
            self.stack = open_stack(weights, backend, group, shard, options, **sizes)
        self.source = source
        if source is not None:
            assert isinstance(self.stack, StateStack) and isinstance(source.stack, TransformerStack)
            self.stack.source_states = source.stack.states
        self.pages: PageTable | None = self.stack.pages
        self.draws = self.stack.draws
        self._programs: dict[tuple[int, int], Program] = {}  # by (rows, candidates)
        self._uploaded: tuple[int, int, Ints] = 0, 1, np.zeros(0, np.int32)
        self.current: Program
        if compiled:
            self.compile()

    def compile(self) -> None:
        """Compiles a program (such as a CUDA graph) for each row count in `buckets`, without and
        with top-k candidates. Collective over the model's ranks."""
        for rows in self.buckets:
            for k in sorted({1, self.options.top_k}):
                self._programs[rows, k] = self.backend.program(
                    self.stack.body(rows, k),
                    self.cost(rows, k),
                    capturable=self.stack.group.capturable,
                )
        self.current = self._programs[self.buckets[0], 1]

    def only(self, buckets: Iterable[int]) -> Stepper:
        """Returns a stepper that runs forwards at some of this stepper's row counts (buckets) only.
        The returned stepper uses the same compiled programs, and its `close` leaves them open."""
        part = copy.copy(self)
        part.buckets = sorted(set(buckets))
        part._shares = True
        part.current = self._programs[part.buckets[0], 1]
        return part

    @property
    def sizes(self) -> list[int]:
        """The row counts to which forwards are padded, rising; empty if they are not padded."""
        ops = getattr(self.stack.weights, "ops", None)
        return list(self.buckets) if ops is None or ops.computes_padding else []

    @property
    def most_rows(self) -> int:
        return self.buckets[-1]

    @property
    def kernel(self) -> str:
        """Names of the kernels that read the weights, joined by "+" if they differ."""
        kernel = str(self.stack.weights.kernel)
        return "cuda" if kernel == "whole" and not self.stack.group.in_kernels else kernel

    def cost(self, rows: int, k: int = 1) -> Cost:
        """Returns the cost of a forward of `rows` rows on this rank, with k candidates a row."""
        max_rows = self.stack.weights.max_rows
        options = replace(self.options, top_k=k)
        return self.shard.cost(rows, self._num_sequences, self.backend.itemsize, options, max_rows)

    def bucket(self, rows: int) -> int:
        """Returns the smallest compiled row count that is at least `rows`."""
        assert rows <= self.buckets[-1], f"{rows} rows, the largest bucket is {self.buckets[-1]}"
        return self.buckets[bisect.bisect_left(self.buckets, rows)]

    def upload(
        self, rows: int, tokens: Ints, places: Places | None = None, *, lists: bool = False
    ) -> None:
        if self.tell is not None:
            self.tell("upload", rows, tokens, places, lists=lists)
        # The device reads the tokens from this page-locked buffer when the forward begins.
        self.stack.buffers.tokens[: len(tokens)] = tokens
        self.stack.place(places)
        bucket = self.bucket(rows)
        k = self.options.top_k if lists else 1
        self._uploaded = bucket, k, tokens
        self.current = self._programs[bucket, k]

    def launch(self) -> None:
        if self.tell is not None:
            self.tell("launch")
        self.current.launch()

    def wait(self, waiter: Waiter) -> None:
        self.current.wait(waiter)

    def elapsed_s(self) -> float:
        return self.current.elapsed_s()

    def results(self) -> Results:
        """Returns the likeliest tokens of each uploaded row. Raises NotImplementedError on the
        emulated backend, and for several shards of the vocabulary without ForwardOptions.values,
        since candidates of different shards cannot be compared without their logits."""
        if self.backend.info.kind == "emulated":
            raise NotImplementedError("the emulated backend holds no numbers")
        bucket, k, tokens = self._uploaded
        ids, values = self.stack.read(bucket, k)
        ids = ids[:, :, : len(tokens)]
        if values is not None:
            return merged(ids, values[:, :, : len(tokens)])
        if ids.shape[1] > 1:
            raise NotImplementedError("the best of several shards need ForwardOptions.values")
        return Results(ids[:, 0])

    def logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        if self.backend.info.kind == "emulated":
            raise NotImplementedError("the emulated backend holds no numbers")
        return self.stack.logits(rows)

    def reload(self, arrays: Arrays | None) -> Iterator[None]:
        """Replaces a transformer's weights in place, as TransformerStack.reload does."""
        assert isinstance(self.stack, TransformerStack), "new weights of a stack of products"
        return self.stack.reload(arrays)

    def move(self, lane: int, slot: int, start: int, stop: int) -> None:
        assert isinstance(self.stack, TransformerStack), "lanes of a stack of products"
        self.stack.move(lane, slot, start, stop)

    def release(self, slots: Sequence[int]) -> None:
        if self.tell is not None:
            self.tell("release", slots)
        self.stack.release(slots)

    def close(self) -> None:
        """Destroys the programs: a CUDA graph that outlives its communicator hangs the teardown."""
        for program in () if self._shares else self._programs.values():
            program.close()
