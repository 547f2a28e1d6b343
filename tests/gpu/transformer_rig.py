"""Forwards of small transformers on a backend, with the reference's logits."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from mpissd.common.presets import ModelShape
from mpissd.common.rounds import Outcome, Request
from mpissd.common.wait import Waiter
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.law.tree import BranchLayout, Shape
from mpissd.engine.model.forwards import Places
from mpissd.engine.model.shard import ForwardOptions, StateShard, TransformerShard
from mpissd.engine.model.stacks import Best
from mpissd.engine.model.stepper import ModelSource, Stepper
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.checkpoint import random_checkpoint
from mpissd.engine.model.transformer.config import Llama3Scaling, TransformerConfig
from mpissd.engine.model.transformer.cupy_ops.megakernel import MegakernelOps
from mpissd.engine.model.transformer.device_rounds import (
    BEFORE,
    POSITION,
    SLOT,
    Copying,
    Ends,
    RoundStage,
    Sheet,
)
from mpissd.engine.model.transformer.growing import GrowthSheet
from mpissd.engine.model.transformer.sources import config_of
from mpissd.engine.model.transformer.stack import TransformerStack, load_weights
from mpissd.engine.model.transformer.trees import CHOICES, COPY, PLANT, SURE, Shapes, Size
from mpissd.engine.round.sequence import Placement
from mpissd.engine.trees import TreeBatch
from tests import transformer_reference

PAGE = 128
FORKED = Shape((0, 0, 0, 2, 2, 4, 4))
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 32), "rope_theta": 1e4},
    "smollm2": {"tied": True, "rope_theta": 1e5},
    "qwen2": {"qkv_bias": True, "rope_theta": 1e6, "norm_eps": 1e-6},
    "qwen3": {"qk_norm": True, "rope_theta": 1e6, "norm_eps": 1e-6},
}
HEADS = {"llama": (4, 2, 32), "smollm2": (3, 1, 64), "qwen2": (6, 2, 32), "qwen3": (4, 2, 64)}

_SUITS = MegakernelOps.suits  # the method, which a test may have replaced before
UNEVEN = {  # (family, query heads, KV heads, head_dim, ffn)
    "five": ("llama", 10, 5, 32, 192),
    "three": ("qwen2", 6, 3, 64, 192),
}


def use_megakernel(monkeypatch: pytest.MonkeyPatch, *, is_on: bool) -> None:
    """Computes up to 24 rows of models of any width by the megakernel, or none."""
    monkeypatch.setattr(MegakernelOps, "suits", _SUITS if is_on else lambda *_, **__: False)
    monkeypatch.setattr(MegakernelOps, "least_hidden", 0)


def tiny(family: str, layers: int = 2) -> TransformerConfig:
    """A model of few weights; q is wider than the hidden vector where the family allows."""
    heads, kv_heads, head_dim = HEADS[family]
    shape = ModelShape(f"tiny-{family}", layers, 64, heads, kv_heads, head_dim, 96, True, 101)
    return TransformerConfig(shape, family, **FAMILIES[family])


def uneven(name: str) -> TransformerConfig:
    """A model of two layers whose heads two ranks cannot split evenly."""
    family, heads, kv_heads, head_dim, ffn = UNEVEN[name]
    shape = ModelShape(f"uneven-{name}", 2, 64, heads, kv_heads, head_dim, ffn, True, 101)
    return replace(tiny(family), shape=shape)


def lanes(slot: int, trunks: Sequence[int], step: int) -> Places:
    """Rows of step `step` of a slot's first lanes, each after a trunk of its own length."""
    count, trunk = len(trunks), np.array(trunks, np.int32)
    numbers = np.arange(count, dtype=np.int32)
    return Places(np.full(count, slot, np.int32), trunk + np.int32(step), numbers, trunk)


def joined(*parts: Places) -> Places:
    """The rows of several places, concatenated."""
    names = "slots", "positions", "lanes", "trunks"
    return Places(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


class Rig:
    """One model on one backend; equal seeds give equal weights."""

    def __init__(
        self,
        backend: Any,
        config: TransformerConfig,
        *,
        max_rows: int = 8,
        capacity: int = 256,
        slots: int = 2,
        num_lanes: int = 4,
        steps: int = 8,
        page: int | None = PAGE,
        checkpoint: Any = None,
        weights: Any = None,
        group: Any = None,
    ) -> None:
        self.backend, self.checkpoint = backend, checkpoint or random_checkpoint(config, seed=3)
        group = group or SoloGroup()
        shard = TransformerShard(config, group.size, group.rank)
        options = ForwardOptions(
            lm_head=True, top_k=3, values=True, capacity=capacity, lanes=num_lanes, steps=steps
        )
        if weights is None:
            weights = load_weights(backend, self.checkpoint, shard, max_rows=max_rows, page=page)
        self.stack = TransformerStack(
            backend, group, shard, options, weights, max_rows=max_rows, max_sequences=slots
        )
        self.ops: Any = weights.ops
        self._cost = shard.cost(1, 1, 2, options)
        self._programs: dict[int, Any] = {}

    def forward(self, tokens: Sequence[int], places: Places, bucket: int | None = None) -> Any:
        """Returns the rows' logits, of this rank's part of the vocabulary."""
        self.start(tokens, places, bucket)
        return self.finish(len(tokens), bucket)

    def prepare(self, rows: int) -> None:
        """Compiles the forward of so many rows, and runs it once."""
        if rows not in self._programs:
            body, capturable = self.stack.body(rows), self.stack.group.capturable
            self._programs[rows] = self.backend.program(body, self._cost, capturable=capturable)

    def start(self, tokens: Sequence[int], places: Places, bucket: int | None = None) -> None:
        self.prepare(bucket or len(tokens))
        self.stack.buffers.tokens[: len(tokens)] = tokens
        self.stack.place(places)
        self._programs[bucket or len(tokens)].launch()

    def finish(self, count: int, bucket: int | None = None) -> Any:
        self._programs[bucket or count].wait(Waiter(60.0, spin=True))
        return self.stack.logits(range(count))

    def candidates(self, rows: int) -> tuple[Any, Any]:
        """Returns the (ids, logits) of the last forward's rows."""
        ids, values = self.stack.read(rows)
        return ids[0, 0], values[0, 0]

    def fill(self, tokens: Sequence[int], chunk: int, slot: int = 0, start: int = 0) -> Any:
        """Runs the tokens as trunk rows in chunks; returns all their logits."""
        every = [np.empty((0, self.stack.shard.vocab), np.float32)]
        for first in range(0, len(tokens), chunk):
            part = tokens[first : first + chunk]
            at = start + first
            every.append(self.forward(part, trunk_rows(slot, at, at + len(part))))
        return np.concatenate(every)

    def reference(self, tokens: Sequence[int]) -> Any:
        return transformer_reference.logits(self.checkpoint, tokens)


def state_steppers(
    backend: Any, target: str, draft: str, capacity: int = 64
) -> tuple[Stepper, Stepper]:
    """A target, and a draft that reads its hidden states."""
    options = ForwardOptions(lm_head=True, values=True, capacity=capacity, states=True)
    told = {"buckets": [1, 8, 64], "num_sequences": 2, "seed": 3}
    whole = Stepper(
        backend, SoloGroup(), TransformerShard(config_of(target)), options,
        model=ModelSource(target), **told,
    )  # fmt: skip
    return whole, Stepper(
        backend, SoloGroup(), StateShard(config_of(draft, target)), options,
        model=ModelSource(draft, target), source=whole, **told,
    )  # fmt: skip


def prompt(rig: Rig, count: int, seed: int = 1) -> list[int]:
    """Random tokens of the rig's vocabulary."""
    vocab = rig.checkpoint.config.shape.vocab_size
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocab, count)]


def check_rows_alone(rig: Rig, count: int, chunks: Sequence[int]) -> None:
    """Every row has the logits of the same row in a forward of its own, bit for bit."""
    tokens = prompt(rig, count)
    alone = rig.fill(tokens, 1)
    for slot, chunk in enumerate(chunks):
        found = rig.fill(tokens, chunk, slot=slot % 2)
        assert np.array_equal(found, alone), f"chunks of {chunk}"


def check_lanes(rig: Rig, trunk: int, grown: int) -> None:
    """Rows in lanes have the logits that they would have as rows of the trunk, bit for bit.

    Lane l grows the tokens of its own sequence after a common trunk without its last l tokens; a
    trunk row of another sequence, and padding, are in the same forward.
    """
    count = rig.stack.options.lanes
    cuts = [max(min(1, trunk), trunk - lane) for lane in range(count)]
    common, other = prompt(rig, trunk), prompt(rig, 4, seed=7)
    tails = [prompt(rig, grown, seed=10 + lane) for lane in range(count)]
    whole = [(common[:cut] + tail, cut) for cut, tail in zip(cuts, tails, strict=True)]
    expected = [rig.fill(tokens, 8, slot=1)[cut:] for tokens, cut in whole]
    beside = rig.fill(other, 1, slot=1)[3]
    rig.fill(common, 8)
    for step in range(grown):
        rows = [tail[step] for tail in tails]
        places = joined(lanes(0, cuts, step), trunk_rows(1, 3, 4))
        found = rig.forward([*rows, other[3]], places, bucket=count + 3)
        for lane in range(count):
            assert np.array_equal(found[lane], expected[lane][step]), f"lane {lane}, step {step}"
        assert np.array_equal(found[count], beside)


def check_tree(rig: Rig, trunk: int) -> None:
    """Rows of a tree have the logits that their paths have in the trunk, bit for bit, and so have
    the first rows of branches after them, and the row after a path that moved there."""
    common, tokens = prompt(rig, trunk + 1), prompt(rig, 7, seed=9)
    tails = [[tokens[column] for column in path] for path in FORKED.paths]
    expected = [rig.fill([*common, *tail, 7], 8, slot=1)[-2:] for tail in tails]
    rig.fill(common[:-1], 8)
    batch = TreeBatch(1, Placement(), None, FORKED)
    batch.apply(Outcome.admission(-1, [Request(0, common[-1], prompt=tuple(common))]))
    for batch.layout in (None, BranchLayout(FORKED, [1] * 8)):
        batch.filled[0] = trunk
        found = rig.forward([common[-1], *tokens], batch.trunk(np.array([7], np.int32)))
        for node, (own, _) in enumerate(expected):
            assert np.array_equal(found[node], own), f"node {node}"
    zeros = np.zeros(8, np.int32)
    nodes = np.arange(8, dtype=np.int32)
    branches = batch.grown_ahead(zeros.astype(np.int64), nodes, zeros, zeros, zeros[:, None])
    found = rig.forward([7] * 8, batch.step(branches.places, 0))
    for node, (_, after) in enumerate(expected):
        assert np.array_equal(found[node], after), f"a branch after node {node}"
    ((lane, gap),) = batch.apply(Outcome(0, np.array([[0, 0, 0, 7, 7]], np.int32))).moves
    moves = rig.backend.host_ints(4).reshape(1, 4)
    moves[0] = lane, gap.slot, gap.start, gap.size
    ways = partial(rig.stack.move, lane, *gap), partial(rig.ops.adopt, rig.stack.cache, moves)
    for move in ways:
        rig.fill(tokens[:3], 3, start=trunk + 1)  # another path is in the trunk
        move()
        after = rig.forward([7], batch.trunk(np.array([0], np.int32)))
        assert np.array_equal(after[0], expected[7][1])


STAGES = pytest.mark.parametrize(
    ("tree", "dynamic", "masks"),
    [
        (tree, dynamic, range(101, 100 + tree.depth) if has_masks else range(0))
        for tree, dynamic in (
            (Shape(range(3)), None),
            (FORKED, None),
            (Shape(range(4)), Size(15, 4)),
        )
        for has_masks in (False, True)
    ],
    ids=lambda value: f"{len(value)} masks" if isinstance(value, range) else None,
)


COPIES = pytest.mark.parametrize("depth", [1, 4, 7])


def check_stages(
    backend: Any, tree: Shape, dynamic: Size | None, masks: range, *, copies: bool = False
) -> None:
    """Every stage of a chained round writes on the device what its twin writes on the host.

    In the last turn, on a rank that does not draft. copies: whether a lookup drafts.
    """
    draft, target = (Rig(backend, tiny(family), max_rows=64) for family in ("llama", "smollm2"))
    rng, ids = np.random.default_rng(0), np.arange(101, dtype=np.int32)[::-1].copy()
    copying = Copying(3, 2 if tree.depth == 4 else -1, 20) if copies else None
    sheet = Sheet(backend.host_ints, 4, tree, dynamic, masks, copying)
    k, kept, twin, shapes = 3, list[Any](), None, None
    if dynamic:
        k, shapes = CHOICES, Shapes.made(dynamic, 4, target.ops.ids)
        kept, twin = [shapes.nodes, shapes.copies, shapes.tables], Shapes.made(dynamic, 4, np.array)
    parts = [sheet.ints]
    for rig in (draft, target):
        parts += [rig.stack.buffers.tokens, rig.stack.pages.row_places.rows]
    firsts = np.array([0, 40], np.int32)  # as if the target had two ranks
    both, wide = (Best(*backend.top_buffers(2 * 64, n), None, None) for n in (1, k))
    ends = replace(Ends.of(draft.stack), best=wide), replace(Ends.of(target.stack), best=both)
    tables = [target.ops.ids(values) for values in (sheet.table, firsts, ids)]
    shared = None if dynamic else np.array([0, 50], np.int32)  # as if the draft had two, too
    shards = None if shared is None else target.ops.ids(shared)
    numbers = [*range(tree.depth + 1), *[PLANT][: dynamic is not None], tree.depth + 1]
    if copies:
        numbers = [0, *[COPY] * 20, tree.depth + 1]
    for turn, number in product(range(3), numbers):
        drafts = turn < 2 and not copies
        if 0 < number <= tree.depth and (not drafts or (masks and number > 1)):
            continue
        sheet.state[...] = rng.integers(5, 9, sheet.state.shape)
        sheet.state[:, SLOT] = rng.permutation(4) - 1
        sheet.state[:, BEFORE:] = rng.integers(-1, 2, (4, sheet.back))
        if copies:
            sheet.state[:, POSITION] = rng.integers(0, 12, 4)
        sheet.history[...] = rng.integers(0, 3, sheet.history.shape)
        sheet.forced[...] = np.where(rng.random(sheet.forced.shape) < 0.5, -1, 1)
        if dynamic:  # parents
            nodes = sheet.nodes
            above = rng.integers(0, np.arange(1, nodes + 1), (3, 4, nodes))
            sheet.forced[:, :, nodes : 2 * nodes] = above
        sheet.decided[...] = rng.integers(0, 3, sheet.decided.shape)
        twins = []
        for one in ends:
            values = rng.integers(-2, 3, one.best.values.shape).astype(np.float32)
            if masks and k == CHOICES and one is ends[0]:  # no two sums are nearly equal
                values = rng.normal(size=values.shape).astype(np.float32)
                values[:, 2] = values[:, 1]
            values = -np.sort(-values, axis=1)
            values[rng.random(values.shape) < 0.02] = np.inf
            backend.from_host(rng.integers(0, 3, values.shape), one.best.ids)
            backend.from_host(values, one.best.values)
            on_host = [backend.to_host(part) for part in (one.best.ids, one.best.values)]
            twins.append(replace(one, best=replace(one.best, ids=on_host[0], values=on_host[1])))
        before = [part.copy() for part in parts]
        target.ops.run_stage(
            RoundStage(
                number, turn, sheet, ends[0] if drafts else None, ends[1], *tables, shapes, shards
            )
        )
        backend.synchronize()
        found = [part.copy() for part in parts]
        for part, value in zip(parts, before, strict=True):
            part[...] = value
        of = twins[0] if drafts else None
        RoundStage(number, turn, sheet, of, twins[1], None, firsts, ids, twin, shared).run()
        assert all(map(np.array_equal, found, parts)), f"stage {number}"
        if twin is None:
            continue
        for name, one in zip(("nodes", "copies", "tables"), kept, strict=True):
            expected, known = getattr(twin, name), backend.to_host(one)
            if name == "nodes":
                sure = known[:, SURE].view(np.float32), expected[:, SURE].view(np.float32)
                assert np.allclose(*sure, rtol=1e-5, atol=1e-5), f"stage {number}"
                known[:, SURE] = expected[:, SURE]
            assert np.array_equal(known, expected), f"{name}, stage {number}"


def check_growing(backend: Any) -> None:
    """Every stage of chained growth writes on the device what its twin writes on the host."""
    rig, rng = Rig(backend, tiny("llama"), max_rows=16), np.random.default_rng(0)
    sheet = GrowthSheet(backend.host_ints(1 + 9 * 11), 9)
    ids = np.arange(101, dtype=np.int32)[::-1].copy()
    parts = sheet.ints, rig.stack.pages.row_places.rows, rig.stack.buffers.tokens
    for k, known in product((1, 3), (None, ids)):
        ends = Ends.of(rig.stack, k)
        best = rng.permuted(np.tile(np.arange(4, dtype=np.int32), (16, 1)), axis=1)[:, :k]
        backend.from_host(best, ends.best.ids)
        sheet.tokens[...] = rng.integers(-1, 2, sheet.tokens.shape)
        sheet.picks[...] = rng.integers(0, [[9], [max(1, k - 1)], [4]], sheet.picks.shape)
        sheet.picks[2] = -1 if k == 1 else sheet.picks[2]
        sheet.step[0] = k
        before = [part.copy() for part in parts]
        rig.ops.grow(sheet, 8, ends, known if known is None else rig.ops.ids(known))
        backend.synchronize()
        found = [part.copy() for part in parts]
        for part, value in zip(parts, before, strict=True):
            part[...] = value
        on_host = replace(ends.best, ids=backend.to_host(ends.best.ids))
        sheet.run(8, replace(ends, best=on_host), known)
        assert all(map(np.array_equal, found, parts)), (k, known)


def check_rollback(rig: Rig, count: int) -> None:
    """Rows written over others keep no trace of them."""
    tokens, wrong = prompt(rig, count), prompt(rig, count, seed=5)
    alone = rig.fill(tokens, 4)
    kept = count // 2
    rig.fill(tokens[:kept] + wrong[kept:], 4)
    again = rig.fill(tokens[kept:], 3, start=kept)
    assert np.array_equal(again, alone[kept:])
