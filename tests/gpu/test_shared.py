"""Seats of one model on a GPU: candidates and logits of a model of their own, within float16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpissd.engine.model.shared import SharedForwards
from mpissd.engine.model.transformer.cupy_ops.attention import SPLIT
from tests.engine.test_shared import LANES, SEATS, SLOTS, WAITER, V, results, stepper, work
from tests.gpu.agreement import relative_error
from tests.tiny_pair import TinyPair, tiny_pair

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    folder: Path = tmp_path_factory.mktemp("pair")
    return tiny_pair(folder, vocab=V, heads=4, kv_heads=2, head_dim=32, noise=0.1)


def test_seats_compute_what_a_model_of_their_own_does(backend: Any, pair: TinyPair) -> None:
    whole = stepper(pair, SEATS, backend, page=SPLIT)
    shared = SharedForwards(whole, SEATS, slots=SLOTS, lanes=LANES)
    alone = [stepper(pair, 1, backend, page=SPLIT) for _ in range(SEATS)]
    for step in range(3):
        for seat, forwards in enumerate(shared.seats):
            tokens, places, lists = work(seat)[step]
            forwards.upload(len(tokens), tokens, places, lists=lists)
            forwards.launch()
        shared.wait(WAITER)
        for seat, own in enumerate(alone):
            tokens, places, lists = work(seat)[step]
            own.upload(len(tokens), tokens, places, lists=lists)
            own.launch()
            own.wait(WAITER)
            (_, values, logits), (_, wanted, own_logits) = map(results, (shared.seats[seat], own))
            assert relative_error(logits, own_logits) < 5e-3
            assert relative_error(values, wanted[..., : values.shape[-1]]) < 5e-3
    assert (shared.log()[:, 1] > 0).all() and shared.log()[:, 3].tolist() == [SEATS] * 3
    for model in (whole, *alone):
        model.close()
