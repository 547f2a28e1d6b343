"""After any outcomes the KV cache holds the committed tokens' K and V, bit for bit."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.common.rounds import Event, Outcome, Request, Source, Speculation
from mpissd.common.wait import Waiter
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.model.shard import ForwardOptions, TransformerShard
from mpissd.engine.model.stepper import ModelSource, Stepper
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.sources import config_of
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.sequence import Batch, Placement
from mpissd.engine.workload.text import LogitsDraft, LogitsTarget
from mpissd.engine.workload.workers import DraftWorker, TargetWorker
from tests.tiny_pair import tiny_pair

WAITER = Waiter(30.0, spin=False)
V, K, SLOTS, CAPACITY, PAGE, LANES, LONGEST = 31, 4, 3, 160, 16, 12, 70
ROUNDS = 400
Worker = TargetWorker | DraftWorker


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    return tiny_pair(folder, vocab=V, heads=4, kv_heads=2, hidden=32).target


def stepper_of(where: Path, rows: Sequence[int], slots: int = SLOTS) -> Stepper:
    sizes = {"capacity": CAPACITY, "lanes": LANES, "steps": K}
    options = ForwardOptions(lm_head=True, values=True, top_k=4, **sizes)
    return Stepper(
        NumpyBackend(), SoloGroup(), TransformerShard(config_of(str(where))), options,
        buckets=rows, num_sequences=slots, seed=0, model=ModelSource(str(where), page=PAGE),
    )  # fmt: skip


def cached(stepper: Stepper, slot: int, count: int) -> tuple[Any, Any]:
    """K and V of positions 0 … count − 1 of a slot, as bytes would compare."""
    stack: Any = stepper.stack
    keys, values, *_ = stack.cache.arrays
    pages = stack.pages.seats.pages[slot]
    at = [(pages[n // PAGE], n % PAGE) for n in range(count)]
    return (
        [keys[:, page, :, :, n].tobytes() for page, n in at],
        [values[:, page, :, n].tobytes() for page, n in at],
    )


@dataclass
class Walk:
    """Random outcomes of sequences that join, leave and restart in used slots."""

    batch: Batch
    seed: int
    served: Speculation = field(default_factory=lambda: Speculation.empty(-1, 0, K))
    born: int = 0

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)

    def outcome(self, round_: int) -> Outcome:
        dice, rows, requests = self.dice, [], []
        names = self.batch.identity[:, :2].tolist()
        for (id_, epoch), count in zip(names, self.served.num_draft.tolist(), strict=True):
            long = self.batch.lengths[len(rows)] + K + 2 > LONGEST
            event = Event.RELEASE if long or dice.random() < 0.04 else Event.COMMIT
            rows.append((id_, epoch, event, dice.randint(0, count), dice.randrange(V)))
        live = sum(row[2] == Event.COMMIT for row in rows)
        for _ in range(dice.randint(0, SLOTS - live) if rows else 1):
            prompt = tuple(dice.randrange(2) for _ in range(dice.randint(1, LONGEST)))
            requests.append(Request(self.born, prompt[-1], 0, prompt))
            self.born += 1
        old = np.array(rows, np.int32).reshape(-1, Outcome.WIDTH)
        new = Outcome.admission(round_, requests)
        return Outcome(round_, np.concatenate([old, new.rows]), new.prompts)

    def speculation(self, round_: int) -> Speculation:
        found = Speculation.empty(round_, len(self.batch), K)
        for row in found.rows:
            row[:3] = self.dice.choice([1, 2, 3]), 0, self.dice.randint(0, K)
            row[3:] = [self.dice.randrange(V) for _ in range(K)]
        self.served = found
        return found


def verify(worker: Worker, walk: Walk, speculation: Speculation) -> None:
    worker.fill(walk.batch, range(len(walk.batch)), WAITER)
    worker.upload(walk.batch, speculation)
    worker.launch()
    worker.wait(WAITER)


def draft(worker: Worker, walk: Walk, speculation: Speculation) -> None:
    """A draft's work in a round: it backs some rows up, which are then served, and has a glue or
    not; others served the other rows."""
    dice, batch = walk.dice, walk.batch
    rows = [row for row in range(len(batch)) if dice.random() < 0.5]
    if rows:
        worker.fill(batch, rows, WAITER, 1)
        backup = worker.restart(batch, rows, Source.JIT)
        grow(worker, batch, [backup], dice.randint(0, K))
        speculation.num_draft[rows], speculation.tokens[rows] = backup.steps, backup.tokens
    batch.serve(speculation)
    if len(batch) and dice.random() < 0.7:
        worker.fill(batch, range(len(batch)), WAITER)
        worker.launch_glue(batch, speculation)
        worker.wait(WAITER)
        fans = FanOuts((1, 1, 0, 0, 2), (0, 1, 2, 0, 1))
        found = worker.oracle.branches(batch, speculation, fans)
        worker.place_branches(batch, found)
        if len(found.rollout):
            grow(worker, batch, [found.rollout], dice.randint(0, K))


def grow(worker: DraftWorker, batch: Batch, rollouts: list[Any], steps: int) -> None:
    for _ in range(steps):
        worker.launch_step(batch, rollouts)
        worker.wait(WAITER)
        worker.collect_step(rollouts)


def check(worker: Worker, walk: Walk, scratch: Stepper) -> int:
    """Compares the stored tokens' KV with a cache that is filled from the beginning."""
    compared = 0
    batch = walk.batch
    for one, last in zip(batch.sequences, batch.last().tolist(), strict=True):
        assert len(one.tokens) == last + 1
        slot = one.slot
        stored = min(int(batch.filled[slot]), last)
        scratch.release([0])
        for start in range(0, stored, 16):
            stop = min(stored, start + 16)
            tokens = np.array(one.tokens[start:stop], np.int32)
            scratch.upload(stop - start, tokens, trunk_rows(0, start, stop))
            scratch.launch()
        assert cached(worker.stepper, slot, stored) == cached(scratch, 0, stored)
        compared += stored
    return compared


@pytest.mark.parametrize("part", ["target", "draft"])
def test_any_outcomes_leave_the_cache_that_a_fresh_one_would_be(where: Path, part: str) -> None:
    rows = [1, 2, 4, 8, SLOTS * (K + 1), 24]
    stepper = stepper_of(where, rows)
    worker: Worker
    if part == "target":
        worker = TargetWorker(stepper, LogitsTarget(stepper, 0), Placement())
    else:
        worker = DraftWorker(stepper, LogitsDraft(stepper, 0, K, FanOuts()), Placement())
    walk = Walk(worker.open_batch(SLOTS), seed=len(part))
    scratch = stepper_of(where, [16], slots=1)
    compared, most = 0, 0
    for round_ in range(ROUNDS):
        worker.enter(walk.batch, walk.batch.apply(walk.outcome(round_ - 1)))
        if round_ % 50 == 0:
            compared += check(worker, walk, scratch)
        (verify if part == "target" else draft)(worker, walk, walk.speculation(round_))
        most = max([most, *walk.batch.lengths.tolist()])
    assert compared > ROUNDS // 2 and most > 2 * PAGE
