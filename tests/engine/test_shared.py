"""Seats of one model compute the same as a model of their own, whatever the other seats do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Backend
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.model.forwards import Forwards, Places, Results
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stepper import ModelSource, SharedForwards, Stepper
from mpissd.engine.model.transformer.shard import TransformerShard
from mpissd.engine.model.transformer.sources import config_of
from tests.tiny_pair import TinyPair, tiny_pair

WAITER = Waiter(10.0, spin=False)
V, SLOTS, LANES, SEATS = 61, 2, 4, 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_pair(tmp_path_factory.mktemp("pair"), vocab=V, heads=4, kv_heads=2, noise=0.1)


def stepper(
    pair: TinyPair, seats: int, backend: Backend | None = None, *, page: int = 16
) -> Stepper:
    where = str(pair.draft)
    options = ForwardOptions(
        lm_head=True, values=True, top_k=3, capacity=64, lanes=seats * LANES, steps=4
    )
    return Stepper(
        backend or NumpyBackend(), SoloGroup(), TransformerShard(config_of(where)), options,
        buckets=[1, 2, 4, 8, 8 * seats], num_sequences=seats * SLOTS, seed=0,
        model=ModelSource(where, page=page),
    )  # fmt: skip


def trunk(slot: int, start: int, count: int) -> Places:
    positions = np.arange(start, start + count, dtype=np.int32)
    same = np.full(count, slot, np.int32)
    return Places(same, positions, np.full(count, -1, np.int32), positions)


def lanes(slot: int, behind: int, ids: range) -> Places:
    count = len(ids)
    at = np.full(count, behind, np.int32)
    return Places(np.full(count, slot, np.int32), at, np.array(ids, np.int32), at)


def work(seat: int) -> list[tuple[np.ndarray[Any, Any], Places, bool]]:
    """Uploads of one seat: a prompt, later rows with lists, and lanes that differ by seat."""
    tokens = (np.arange(40) * (seat + 3) % V).astype(np.int32)
    return [
        (tokens[: 3 + seat], trunk(seat % SLOTS, 0, 3 + seat), False),
        (tokens[10:12], trunk(seat % SLOTS, 3 + seat, 2), True),
        (tokens[20 : 22 + seat], lanes(seat % SLOTS, 5 + seat, range(2 + seat)), False),
    ]


def results(forwards: Forwards) -> list[Any]:
    found: Results = forwards.results()
    assert found.values is not None
    return [found.ids.copy(), found.values.copy(), forwards.logits([0, 1]).copy()]


def test_seats_compute_what_a_model_of_their_own_does(pair: TinyPair) -> None:
    shared = SharedForwards(stepper(pair, SEATS), SEATS, slots=SLOTS, lanes=LANES)
    assert shared.most_rows == 8
    alone = [stepper(pair, 1) for _ in range(SEATS)]
    for step in range(3):
        for seat, forwards in enumerate(shared.seats):
            tokens, places, lists = work(seat)[step]
            forwards.upload(len(tokens), tokens, places, lists=lists)
            forwards.launch()
            assert not forwards.done()
        shared.seats[step].wait(WAITER)
        assert all(seat.done() for seat in shared.seats)
        for seat, own in enumerate(alone):
            tokens, places, lists = work(seat)[step]
            own.upload(len(tokens), tokens, places, lists=lists)
            own.launch()
            own.wait(WAITER)
            for mine, wanted in zip(results(shared.seats[seat]), results(own), strict=True):
                assert mine.tobytes() == wanted[..., : mine.shape[-1]].tobytes()
                assert mine.shape == wanted.shape
    log = shared.log()
    assert log[:, 3].tolist() == [SEATS] * 3 and log[:, 2].tolist() == [12, 6, 9]
    assert (np.diff(log[:, 0]) > 0).all() and (log[:, 1] > 0).all()


def test_a_seat_that_works_alone_disturbs_nobody(pair: TinyPair) -> None:
    shared = SharedForwards(stepper(pair, 2), 2, slots=SLOTS, lanes=LANES)
    own = stepper(pair, 1)
    one, other = shared.seats
    for forwards in (one, own):
        forwards.upload(3, np.array([5, 6, 7], np.int32), trunk(0, 0, 3))
        forwards.launch()
        forwards.wait(WAITER)
    other.upload(2, np.array([9, 9], np.int32), trunk(0, 0, 2))
    other.launch()
    other.wait(WAITER)
    other.release([0, 1])  # only its own slots
    for forwards in (one, own):
        forwards.upload(1, np.array([8], np.int32), trunk(0, 3, 1))
        forwards.launch()
        forwards.wait(WAITER)
    assert one.logits([0]).tobytes() == own.logits([0]).tobytes()
    assert shared.log()[:, 3].tolist() == [1, 1, 1]
