"""Sequences that end make room for the next ones, and a row's counts of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpissd.common import workloads
from mpissd.common.records import is_first_round
from mpissd.common.rounds import Request
from mpissd.engine import Decoder, RunConfig
from mpissd.engine.workload.base import Endings
from tests.loop.test_third_workload import Counting, V

COUNT, STOP = 7, 40
MACHINE = {"pair": "toy", "backend": "emulated", "device": "null", "workload": "queueing"}


class Queueing(Counting):
    """Seven sequences, the n-th after token 3·n; each ends at token 40."""

    num_sequences = COUNT

    def endings(self) -> Endings:
        return Endings(STOP)

    def requests(self, first_id: int, count: int) -> list[Request]:
        return [Request(n, first_token=3 * (n % COUNT)) for n in range(first_id, first_id + count)]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "_KNOWN", dict(workloads._KNOWN))
    workloads.register("queueing", f"{__name__}:Queueing", "vocab")


def decode(**flags: Any) -> Decoder:
    with Decoder(RunConfig(vocab=V, **MACHINE, **flags)) as decoder:
        while not decoder.is_over:
            decoder.step()
    return decoder


@pytest.mark.parametrize("batch", [1, 3, 7])
@pytest.mark.parametrize(("mode", "drafts"), [("ar", 0), ("sd", 0), ("ssd", 1)])
def test_every_sequence_is_decoded_to_its_end(mode: str, drafts: int, batch: int) -> None:
    decoder = decode(mode=mode, num_drafts=drafts, batch_size=batch)
    assert decoder.tokens == {n: list(range(3 * n + 1, STOP + 1)) for n in range(COUNT)}
    rows = decoder.records.sequences()
    live = np.bincount(rows[:, 0])
    assert live.max() == batch == live[0]
    begun = rows[is_first_round(rows)]
    assert sorted(begun[:, 1].tolist()) == list(range(COUNT))
    assert not begun[:, 6].any(), "nothing was grown for a sequence that had no round"
    if mode == "ssd":
        assert rows[~is_first_round(rows), 6].all()


def test_a_limit_makes_room_as_well() -> None:
    decoder = decode(mode="sd", batch_size=2, num_tokens=10)
    assert {n: tokens[:10] for n, tokens in decoder.tokens.items()} == {
        n: list(range(3 * n + 1, 3 * n + 11)) for n in range(COUNT)
    }
