"""The megakernel of a forward on a processor (tests/emulator), and which models use it. The
chain and exchange kernels on a processor, against NumPy; no GPU.

Blocks, warps, rings, late copies and the inboxes of several ranks are emulated thread by
thread in random order. Only a GPU can test its instructions, and its memory's own ordering.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpissd.engine.backend import chain_plan
from mpissd.engine.backend.chain_plan import ChainGeometry, Multiplication, Operand
from mpissd.engine.model.shard import TransformerShard
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.checkpoint import (
    EMBEDDING,
    ArrayTensor,
    random_checkpoint,
    tensors,
)
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.cupy_ops import ops as cupy_ops
from mpissd.engine.model.transformer.cupy_ops.megakernel import MegakernelOps, chosen
from mpissd.engine.model.transformer.sources import config_of
from mpissd.engine.model.transformer.stack import load_weights
from tests.emulator.launcher import EmulatedGpu, aligned, build
from tests.gpu.agreement import relative_error, tolerance
from tests.gpu.inboxes import PEERS, Inboxes
from tests.gpu.transformer_rig import (
    HEADS,
    Rig,
    check_tree,
    joined,
    prompt,
    tiny,
    uneven,
    use_megakernel,
)
from tests.thread_group import ThreadGroup, on_ranks
from tests.transformer_reference import stored

ROOM, SMALL = 227 << 10, 99 << 10  # bytes of shared memory that a block may have
TOKENS = [5, 9, 2]


def num_whole(gpu: EmulatedGpu) -> int:
    """How many forwards have been one kernel so far."""
    return gpu.launcher(early=False).launches.count("whole")


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows of models of any width use the megakernel."""
    use_megakernel(monkeypatch, is_on=True)


@pytest.mark.slow
def test_one_kernel_has_the_bits_of_many(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One and two tiles of rows, and so one and two teams that attend."""
    found, before, most = [], num_whole(gpu), 12
    for whole in (False, True):
        monkeypatch.setattr(MegakernelOps, "most_rows", 24 if whole else 0)
        rig = Rig(gpu, tiny("smollm2", layers=1), max_rows=most)
        found.append(rig.fill(prompt(rig, 130), most))
    assert np.array_equal(*found)
    assert num_whole(gpu) - before == -(-130 // most)
    check_tree(Rig(gpu, tiny("smollm2", layers=1), num_lanes=8), 3)


@pytest.mark.slow
def test_inputs_of_several_slots_arrive(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three slots of the hidden vector, two of the FFN's, of which some units have copies early."""
    shape = replace(tiny("llama").shape, hidden=1056, ffn=544)
    found, before = [], num_whole(gpu)
    for most_rows in (0, 24):
        monkeypatch.setattr(MegakernelOps, "most_rows", most_rows)
        rig = Rig(gpu, replace(tiny("llama"), shape=shape))
        found.append(rig.fill(prompt(rig, 6), 3))
    assert np.array_equal(*found) and num_whole(gpu) - before == 2


@pytest.mark.slow
def test_many_sequences_have_the_bits_of_separate_kernels(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A team of warps attends more tasks than it knows at a time, and merges three splits."""
    found, slots = [], 22
    places = joined(*(trunk_rows(slot, 260 + slot, 261 + slot) for slot in range(slots)))
    for most_rows in (0, 24):
        monkeypatch.setattr(MegakernelOps, "most_rows", most_rows)
        rig = Rig(gpu, tiny("llama", layers=2), max_rows=slots, capacity=300, slots=slots)
        rig.ops.clear(rig.stack.cache)
        tokens = prompt(rig, 2 * slots)
        found += [rig.forward(tokens[:slots], places), rig.forward(tokens[slots:], places)]
    assert np.array_equal(found[0], found[2]) and np.array_equal(found[1], found[3])


def in_memory(name: str, matrix: Any) -> ArrayTensor:
    return ArrayTensor(matrix)


@pytest.mark.parametrize("head", [32, 64])
@pytest.mark.parametrize("is_random", [True, False])
def test_rotated_pairs_share_a_tile_and_are_unpacked_in_their_own_order(
    gpu: Any, head: int, is_random: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of a recipe, and of a file: two heads at a time."""
    monkeypatch.setattr(cupy_ops, "_STAGING_ELEMENTS", 2 * head * 64 + 1)
    config = tiny("llama" if head == 32 else "smollm2", layers=1)
    ops = chosen(gpu, config, heads=HEADS[config.family][0], kv_heads=1, page=128)
    checkpoint, name = random_checkpoint(config, 4), "model.layers.0.self_attn.q_proj.weight"
    assert isinstance(ops, MegakernelOps)
    given = checkpoint if is_random else stored(checkpoint, in_memory)
    packed = ops.qkv_matrix([given.part(name)])
    expected = checkpoint.read(name).astype(np.float16)
    assert packed.head == head and packed.columns == len(expected)
    # As skinny.cu reads it: [head, tile, 32 inputs, 2, column of 8, 4, 2, half of the head, 2].
    halves = np.asarray(packed.values).view(np.float16)
    halves = halves.reshape(len(expected) // head, head // 16, -1, 2, 8, 4, 2, 2, 2)
    rows = halves.transpose(0, 7, 1, 4, 2, 5, 3, 6, 8)
    assert np.array_equal(rows.reshape(expected.shape), expected)


@pytest.mark.slow
def test_a_swap_of_weights_reaches_every_cache(gpu: Any) -> None:
    """Two stacks over the same weights have the bits of a model that was loaded anew."""
    config = tiny("qwen2", 1)
    old, new = random_checkpoint(config, 3), random_checkpoint(config, 9)
    weights = load_weights(gpu, old, TransformerShard(config), max_rows=8, page=128)
    assert isinstance(weights.ops, MegakernelOps)
    rigs = [
        Rig(gpu, config, weights=weights, checkpoint=old, max_rows=8, **more)
        for more in ({}, {"capacity": 512, "slots": 1})
    ]
    before = [rig.forward(TOKENS, trunk_rows(0, 0, 3)) for rig in rigs]
    arrays = {name: new.read(name) for name, _ in tensors(config) if name != EMBEDDING}
    for _ in rigs[0].stack.reload(arrays):
        pass
    after = [rig.forward(TOKENS, trunk_rows(0, 0, 3)) for rig in rigs]
    anew = replace(
        new, by_name={**stored(new, in_memory).by_name, EMBEDDING: old.by_name[EMBEDDING]}
    )
    expected = Rig(gpu, config, checkpoint=anew, max_rows=8).forward(TOKENS, trunk_rows(0, 0, 3))
    assert np.array_equal(*before) and not np.array_equal(before[0], expected)
    assert all(np.array_equal(found, expected) for found in after)


def device(capability: str = "9.0", room: int = ROOM) -> Any:
    return SimpleNamespace(
        info=SimpleNamespace(compute_capability=capability),
        launcher=lambda *, early: SimpleNamespace(shared_bytes=room),
    )


def model(**changed: Any) -> TransformerConfig:
    """Llama-3.2-1B, with other sizes of its shape or other properties."""
    config = config_of("llama-3.2-1b")
    shape = {name: changed.pop(name) for name in set(changed) & set(vars(config.shape))}
    return replace(config, shape=replace(config.shape, **shape), **changed)


def test_the_gpu_and_the_model_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for capability, room, expected in (
        ("8.0", ROOM, False),
        ("9.0", ROOM, True),
        ("10.0", ROOM, True),
        ("12.0", SMALL, False),  # no room for a ring of weights
    ):
        assert MegakernelOps.suits(device(capability, room), model()) == expected
    others: tuple[dict[str, Any], ...] = {"hidden": 2016}, {"qk_norm": True}, {"kind": "eagle"}
    for changed in others:
        assert not MegakernelOps.suits(device(), model(**changed))


def test_a_gpu_under_mps_takes_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert MegakernelOps.suits(device(), model())
    (tmp_path / "control").touch()
    assert not MegakernelOps.suits(device(), model())


ROOT = Path(__file__).parents[2]
BLOCKS, GRID, DONE_COUNTS = 4, 2, 8
FOREVER_NS, ROUNDS = 10**15, 200_000


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    """The emulated kernels for so many row tiles; a small ring, so that all of it is reused."""
    folder, built = tmp_path_factory.mktemp("kernels"), {}

    def opened(row_tiles: int) -> Any:
        if row_tiles not in built:
            path = folder / f"chain_{row_tiles}.so"
            geometry = ChainGeometry(row_tiles, 6, slots=3, ahead=3, flying=3)
            macros = [f"-D{name}={value}" for name, value in geometry.macros]
            include = f"-I{ROOT / 'mpissd/engine/backend/kernels'}"
            build(path, "-shared", *macros, include, str(ROOT / "tests/emulator/kernels.cpp"))
            built[row_tiles] = ctypes.CDLL(str(path))
            assert built[row_tiles].chain_bytes() == geometry.shared_bytes
        return built[row_tiles]

    return opened


class Memory:
    """Arrays at 16-byte addresses, kept alive."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._kept: list[Any] = []

    def held(self, values: Any, dtype: Any = np.float16) -> Any:
        self._kept.append(aligned(np.shape(values), dtype))
        self._kept[-1][...] = values
        return self._kept[-1]

    def zeros(self, count: int, dtype: Any) -> Any:
        return self.held(np.zeros(count), dtype)

    def random(self, rows: int, columns: int, scale: float = 1.0) -> NDArray[np.float16]:
        return self.held(self._rng.standard_normal((rows, columns)) * scale)

    def poisoned(self, rows: int, columns: int) -> NDArray[np.float16]:
        return self.held(np.full((rows, columns), np.nan))

    def packed(self, weight: NDArray[np.float16]) -> NDArray[np.float16]:
        return self.held(chain_plan.pack(weight))


def operand(array: NDArray[Any]) -> Operand:
    return Operand(array.ctypes.data, *array.shape, array.strides[0] // 2)


class Rank:
    """One rank's memory, inbox and counters."""

    def __init__(self, seed: int, size: int = 1, capacity: int = 0) -> None:
        self.memory = Memory(seed)
        self.inbox = self.memory.zeros(max(2, 2 * size * capacity), np.uint64)
        self.done = self.memory.zeros(DONE_COUNTS, np.uint32)
        self.peers = np.zeros(1, PEERS)
        self.stop = self.memory.zeros(1, np.int32)

    def introduce(self, rank: int, ranks: list[Rank], capacity: int) -> None:
        self.peers["inbox"][0, : len(ranks)] = [other.inbox.ctypes.data for other in ranks]
        self.peers["done"], self.peers["capacity"] = self.done.ctypes.data, capacity
        self.peers["rank"], self.peers["size"] = rank, len(ranks)


def pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def queue(kernels: Any, rank: Rank, table: NDArray[Any], finished: NDArray[Any],
          limit: int = FOREVER_NS) -> None:  # fmt: skip
    exchanges = int((table["exchange"] > 0).sum())
    kernels.queue_chain(
        BLOCKS, pointer(table), len(table), pointer(finished), pointer(rank.peers), exchanges,
        DONE_COUNTS, pointer(rank.stop), ctypes.c_uint64(limit),
    )  # fmt: skip


def run(kernels: Any, seed: int = 1) -> None:
    assert kernels.run_queued(ctypes.c_uint64(ROUNDS), seed), "not over"


CASES = [  # row tiles, rows, shapes
    (1, 1, [(64, 48), (32, 80), (64, 16)]),
    (1, 5, [(1120, 96), (96, 1056), (1056, 64)]),  # depths of several slots, and a rest
    (2, 13, [(96, 640), (640, 32)]),  # 10 tiles a block: two units
    pytest.param(3, 24, [(64, 448), (448, 64)], marks=pytest.mark.long),
    pytest.param(4, 70, [(64, 192), (192, 64)], marks=pytest.mark.long),  # three groups of rows
]


@pytest.mark.slow
@pytest.mark.parametrize("row_tiles, rows, shapes", CASES)
def test_a_chain_is_numpys(
    library: Any, row_tiles: int, rows: int, shapes: list[tuple[int, int]]
) -> None:
    kernels, rank = library(row_tiles), Rank(rows)
    widths = [shapes[0][0]] + [columns for _, columns in shapes]
    buffers = [rank.memory.poisoned(rows, width + 16) for width in widths]
    inputs = [rank.memory.random(rows, widths[0]) for _ in range(2)]
    weights = [rank.memory.random(*shape, shape[0] ** -0.5) for shape in shapes]
    packed = [rank.memory.packed(weight) for weight in weights]
    chain = [
        Multiplication(
            packed[i].ctypes.data,
            operand(buffers[i][:, : shapes[i][0]]),  # a prefix, as q is of qkv
            operand(buffers[i + 1][:, : widths[i + 1]]),
        )
        for i in range(len(shapes))
    ]
    table = chain_plan.plan(chain)
    assert chain_plan.row_tiles(table) <= row_tiles
    finished = rank.memory.zeros(len(table) + 1, np.uint32)
    for launch, x in enumerate(inputs):  # the counters of one launch must serve the next
        buffers[0][:, : widths[0]] = x
        for buffer in buffers[1:]:
            buffer[...] = np.nan
        queue(kernels, rank, table, finished)
        run(kernels, seed=launch)
        expected = x.astype(np.float32)
        for buffer, weight in zip(buffers[1:], weights, strict=True):
            product = expected[:, : len(weight)] @ weight.astype(np.float32)
            expected = product.astype(np.float16).astype(np.float32)
            found = buffer[:, : weight.shape[1]]
            assert relative_error(found, expected) <= tolerance(len(shapes))
            assert np.isnan(buffer[:, weight.shape[1] :]).all()
    assert finished[-1] == len(inputs)
    assert (finished[:-1] == table["awaited"] * len(inputs) * BLOCKS).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, row_tiles", [(2, 1), (2, 2), pytest.param(4, 1, marks=pytest.mark.long)]
)
def test_ranks_add_up_within_a_chain(library: Any, size: int, row_tiles: int) -> None:
    """Four exchanges a launch, two launches: slots of the inboxes are used again and again."""
    kernels, rows, width, capacity = library(row_tiles), 8 * row_tiles - 1, 96, 4096
    ranks = [Rank(10 + number, size, capacity) for number in range(size)]
    jobs = []
    for number, rank in enumerate(ranks):
        rank.introduce(number, ranks, capacity)
        weights = [rank.memory.random(width, width, width**-0.5) for _ in range(4)]
        ping, pong = (rank.memory.poisoned(rows, width) for _ in range(2))
        chain, x, out = [], ping, pong
        for weight in weights:
            place = rank.memory.packed(weight).ctypes.data
            chain.append(Multiplication(place, operand(x), operand(out), summed=True))
            x, out = out, x
        table = chain_plan.plan(chain)
        assert table["exchange"].tolist() == [1, 2, 3, 4]
        jobs.append((rank, weights, ping, table, rank.memory.zeros(len(table) + 1, np.uint32)))
    for launch in range(2):
        x = Memory(launch).random(rows, width)
        for rank, _, ping, table, finished in jobs:
            ping[...] = x
            queue(kernels, rank, table, finished)
        run(kernels, seed=launch)
        expected = x.astype(np.float32)
        for step in range(4):
            parts = [expected @ job[1][step].astype(np.float32) for job in jobs]
            total = sum(part.astype(np.float16).astype(np.float32) for part in parts)
            expected = total.astype(np.float16).astype(np.float32)
        for rank, _, ping, _, _ in jobs:
            assert relative_error(ping, expected) <= tolerance(8)
            assert np.array_equal(ping, jobs[0][2])  # to the bit
            assert (rank.done == 4 * (launch + 1)).all()


@pytest.mark.slow
@pytest.mark.parametrize("size, words", [(2, 1), (2, 255), (4, 1300)])
def test_ranks_add_up_and_gather(library: Any, size: int, words: int) -> None:
    kernels, capacity = library(1), 2048
    ranks = [Rank(20 + number, size, capacity) for number in range(size)]
    for number, rank in enumerate(ranks):
        rank.introduce(number, ranks, capacity)
    for launch in range(3):
        mine = [rank.memory.random(1, 2 * words)[0] for rank in ranks]
        gathered = [rank.memory.zeros(size * words, np.uint32) for rank in ranks]
        sums = [values.copy() for values in mine]
        for out, mode in ((sums, 0), (gathered, 1)):
            for rank, values, to in zip(ranks, mine, out, strict=True):
                source = to if mode == 0 else values  # sums are made in place
                kernels.queue_exchange(
                    GRID, 32, pointer(rank.peers), pointer(source), pointer(to),
                    ctypes.c_longlong(words), mode, pointer(rank.stop), ctypes.c_uint64(FOREVER_NS),
                )  # fmt: skip
            run(kernels, seed=launch)
        expected = sum(values.astype(np.float32) for values in mine).astype(np.float16)
        for values, words_found in zip(sums, gathered, strict=True):
            assert np.array_equal(values, expected)
            assert np.array_equal(words_found, np.concatenate([v.view(np.uint32) for v in mine]))


@pytest.mark.slow
def test_a_peer_that_never_comes_poisons_the_sum(library: Any) -> None:
    kernels, capacity, width = library(1), 256, 32
    ranks = [Rank(number, 2, capacity) for number in range(2)]
    ranks[0].introduce(0, ranks, capacity)
    rank = ranks[0]
    x, out = rank.memory.random(1, width), rank.memory.random(1, width)
    place = rank.memory.packed(rank.memory.random(width, width)).ctypes.data
    table = chain_plan.plan([Multiplication(place, operand(x), operand(out), summed=True)])
    queue(kernels, rank, table, rank.memory.zeros(2, np.uint32), limit=10**6)
    run(kernels)
    assert rank.stop[0] == 1 and np.isnan(out).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, name", [(2, "five"), pytest.param(3, "three", marks=pytest.mark.long)]
)
def test_one_kernel_over_ranks_has_the_bits_of_many(tmp_path: Path, size: int, name: str) -> None:
    """Unequal shares, of heads or the vocabulary; no rank, all or only the first in one kernel: the
    words that it sends are those of the kernel `exchange`. Twelve rows are two rounds of sums."""

    def play(group: ThreadGroup) -> Any:
        gpu = EmulatedGpu(tmp_path / str(group.rank))
        found, inboxes = [], Inboxes(gpu, group.size, group.rank, blocks=GRID, threads=32)
        inboxes.connect(int(at) for at in group.everyone(np.array(inboxes.inbox)))
        for in_one in (range(0), range(size), range(1)):
            rig = Rig(gpu, uneven(name), max_rows=12, group=inboxes)
            assert isinstance(rig.ops, MegakernelOps)
            rig.ops.most_rows = 24 if group.rank in in_one else 0
            tokens = prompt(rig, 14)
            found.append(
                np.concatenate([rig.fill(tokens[:12], 12), rig.fill(tokens[12:], 1, start=12)])
            )
        assert num_whole(gpu) == (6 if group.rank == 0 else 3)
        assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
        return found[0], rig.reference(tokens)

    parts = on_ranks(size, play, 300)
    found = np.concatenate([logits for logits, _ in parts], axis=1)
    assert relative_error(found, parts[0][1]) < 8e-3


def test_who_waits_for_whom() -> None:
    """q, k and v read one buffer and write columns of another; o reads only q."""
    hidden, qkv, out = (
        Operand(at << 20, 8, width, width) for at, width in ((1, 64), (2, 96), (3, 64))
    )

    def columns(array: Operand, start: int, width: int) -> Operand:
        return Operand(array.address + 2 * start, array.rows, width, array.step)

    q, k, v = columns(qkv, 0, 64), columns(qkv, 64, 16), columns(qkv, 80, 16)
    chain = [Multiplication(0, hidden, part) for part in (q, k, v)]
    chain += [Multiplication(0, q, out, summed=True), Multiplication(0, out, hidden)]
    chain += [Multiplication(0, hidden, part) for part in (q, k)]
    table = chain_plan.plan(chain)
    assert table["after"].tolist() == [-1, -1, -1, 0, 3, 4, 4]
    assert table["awaited"].tolist() == [1, 0, 0, 1, 1, 0, 1]
    assert table["before"].tolist() == [0, 4, 5, 0, 0, 0, 4]
    assert table["group_tiles"].tolist() == [6, 6, 6, 4, 4, 5, 5]


@pytest.mark.parametrize("shape", [(32, 16), (64, 48), (96, 160)])
def test_a_weight_is_unpacked_as_it_was_packed(shape: tuple[int, int]) -> None:
    values = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    packed = chain_plan.pack(values)
    assert np.array_equal(chain_plan.unpack(packed), values) and not np.array_equal(packed, values)
