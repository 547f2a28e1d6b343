"""Any workload over a transformer's forward decides what it decides over products alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.records import outcome_digest
from mpissd.common.rounds import Batch, Outcome, Request
from mpissd.engine import Decoder
from mpissd.engine.job import Job, resolve
from mpissd.engine.model.shard import Shard
from mpissd.engine.model.transformer.cache import CacheSizes, PageTable, RowPlaces
from mpissd.engine.model.transformer.shard import TransformerShard
from mpissd.engine.workload.placement import Placement

MODEL = "gen:layers=2,hidden=64,ffn=128,heads=4,kv_heads=2,head_dim=16,vocab=97"
CASES: list[tuple[str, dict[str, Any]]] = [
    ("ar", {}),
    ("sd", {"num_drafts": 0, "alpha": 0.9}),
    ("sd", {"batch_size": 3}),
    ("sd", {"backup": "fast"}),
    ("ssd", {"batch_size": 3, "context": 70}),
    ("ssd", {"batch_size": 2, "lookahead": 3}),
    ("ssd", {"workload": "markov", "vocab": 20, "temperature": 0.8, "batch_size": 2}),
]


def config(mode: str, **flags: Any) -> RunConfig:
    models = {"target": MODEL, "draft": MODEL, "backend": "numpy", "rounds": 5}
    return RunConfig(mode=mode, **{**models, **flags})


def job_of(mode: str, tp: int = 1, **flags: Any) -> Job:
    return resolve(config(mode, **flags), tp, backend="numpy", memory_bytes=None)


def digest(told: RunConfig) -> str:
    """Of 40 rounds, eight times the tokens after which positions begin again."""
    with Decoder(told) as decoder:
        for _ in range(40):
            decoder.step()
        return outcome_digest(decoder.records.sequences())


@pytest.mark.parametrize(("mode", "flags"), CASES, ids=lambda told: str(told))
def test_outcomes_do_not_depend_on_the_forward(mode: str, flags: dict[str, Any]) -> None:
    assert digest(config(mode, forward="transformer", **flags)) == digest(config(mode, **flags))


def test_a_job_s_shards_and_costs_are_those_of_its_forward() -> None:
    products = job_of("ssd", context=500, lm_head=True)
    whole = job_of("ssd", context=500, forward="transformer")
    assert isinstance(products.target_shard, Shard) and isinstance(products.draft_shard, Shard)
    assert isinstance(whole.target_shard, TransformerShard)
    assert isinstance(whole.draft_shard, TransformerShard)
    assert products.options.capacity == 0 and products.placement(drafts=False) is None
    # Five rounds of at most K + 1 tokens behind the context, and one verification.
    assert whole.longest == 525 and whole.capacity == 530 == whole.options.capacity
    # Of .8, .8², … some 2.4 are accepted: three tokens a round, half of them on average; of AR one.
    assert whole.options.context == 500 + 5 * 3 // 2 and whole.options.lm_head
    assert job_of("ar", context=500, forward="transformer").options.context == 500 + 5 // 2
    assert (whole.draft_options.lanes, whole.draft_options.steps) == (15, 4)
    assert whole.draft_options.top_k == 4 and whole.draft_options.own_tokens == 3
    costs = [
        job.target_shard.cost(5, 1, 4, job.options).kv_bytes  # float32, and the rows' own tokens
        for job in (whole, job_of("ssd", context=1000, forward="transformer"))
    ]
    token = 2 * 2 * 2 * 16 * 4
    assert costs == [token * (507 + 5), token * (1007 + 5)]


def test_shares_may_be_uneven_but_not_empty() -> None:
    model = MODEL.replace("heads=4,kv_heads=2", "heads=6,kv_heads=3")
    for tp in (1, 2, 3):
        shard = job_of("ar", tp, target=model, forward="transformer").target_shard
        assert isinstance(shard, TransformerShard) and shard.kv_heads == -(-3 // tp)
    with pytest.raises(ConfigError, match=r"tp=4 .*: allowed: at most its 3 KV heads"):
        job_of("ar", 4, target=model, forward="transformer")
    with pytest.raises(ConfigError, match="num_heads=6 is not divisible by tp=4"):
        job_of("ar", 4, target=model)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"fuse": True}, "fuse with forward=transformer: allowed: forward=gemm"),
        ({"draft": f"eagle:{MODEL}"}, "with forward=transformer: allowed: a whole model"),
    ],
)
def test_what_a_transformer_cannot_do_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job_of("ssd", forward="transformer", **flags)


def test_text_needs_a_transformer_that_computes() -> None:
    with pytest.raises(ConfigError, match="forward=gemm with workload=text: allowed: transformer"):
        config("ar", workload="text", forward="gemm")
    with pytest.raises(ConfigError, match="workload=text with backend=emulated: allowed: numpy"):
        told = config("ar", workload="text", prompt_ids="1")
        resolve(told, 1, backend="emulated", memory_bytes=None)


def admitted(*requests: Request) -> Batch:
    batch = Batch(2)
    batch.apply(Outcome.admission(-1, requests))
    return batch


def test_positions_without_a_prompt_begin_behind_the_context_and_begin_again() -> None:
    placement, batch = Placement(2, context=100, window=6), admitted(Request(0), Request(1))
    for slot in range(2):
        placement.admit(slot, Request(slot))
    seen = []
    for round_ in range(5):
        seen.append(placement.last(batch).tolist())
        batch.apply(Outcome(round_, np.array([[0, 0, 0, 1, 3], [1, 0, 0, 0, 3]], np.int32)))
        placement.roll_back(batch)
    assert seen == [[100, 100], [102, 101], [104, 102], [100, 103], [102, 104]]


def test_a_prompt_is_missing_until_it_is_filled() -> None:
    told = Request(0, 7, 0, (5, 6, 7)), Request(1, 9, 0, (9,))
    placement, batch = Placement(2), admitted(*told)
    for slot, request in enumerate(told):
        placement.admit(slot, request)
    rows = np.arange(2)
    gaps = placement.gaps(batch, rows)
    assert gaps == [(0, 0, 2)] and placement.gaps(batch, rows, spare=2) == []
    places = placement.fill(gaps)
    assert (places.slots.tolist(), places.positions.tolist()) == ([0, 0], [0, 1])
    assert placement.gaps(batch, rows) == []
    trunk = placement.trunk(batch, np.array([2, 0], np.int32))
    assert trunk.slots.tolist() == [0, 0, 0, 1] and trunk.positions.tolist() == [2, 3, 4, 0]
    assert (trunk.lanes == -1).all() and placement.filled.tolist() == [5, 1]
    lanes = placement.lanes(batch, np.array([0, 0, 1]), np.array([0, 2, 0], np.int32))
    step = placement.step(lanes, 1)
    assert step.positions.tolist() == [4, 6, 2] and step.trunks.tolist() == [3, 5, 1]
    assert step.lanes.tolist() == [0, 1, 2] and placement.filled.tolist() == [5, 1]
    kept = placement.step(lanes.keep(np.array([1])), 2)
    assert (kept.lanes.tolist(), kept.positions.tolist()) == ([1], [7])
    placement.roll_back(batch)
    assert placement.filled.tolist() == [2, 0]


@pytest.mark.parametrize("window", [None, 6])
def test_a_sequence_has_the_same_places_alone_as_beside_another(window: int | None) -> None:
    """A batch of one takes a path of its own: round by round its rows are those of the first."""

    def rounds(*told: Request) -> list[tuple[list[Any], int]]:
        placement, batch = Placement(2, context=100, window=window), admitted(*told)
        for slot, request in enumerate(told):
            placement.admit(slot, request)
        found = []
        for round_, (drafted, accepted) in enumerate([(2, 1), (0, 0), (3, 3), (1, 0)]):
            places = placement.trunk(batch, np.array([drafted] * len(told), np.int32))
            mine = places.slots == 0
            parts = places.slots, places.positions, places.lanes, places.trunks
            assert {part.dtype for part in parts} == {np.dtype(np.int32)}
            found.append(([part[mine].tolist() for part in parts], int(placement.filled[0])))
            rows = [[request.request_id, 0, 0, accepted, 3] for request in told]
            batch.apply(Outcome(round_, np.array(rows, np.int32)))
            placement.roll_back(batch)
        return found

    assert rounds(Request(0)) == rounds(Request(0), Request(1))
    placement, batch = Placement(2), admitted(Request(0, 7, 0, (5, 6, 7)))
    placement.admit(0, Request(0, 7, 0, (5, 6, 7)))
    with pytest.raises(AssertionError, match="behind tokens that are missing"):
        placement.trunk(batch, np.array([1], np.int32))


def test_branches_behind_a_short_trunk_stay_within_its_pages() -> None:
    """A backup served one of K = 2 tokens and the trunk ends with a page; laws grow K + 1 rows."""
    request = Request(0, 7, 0, tuple(range(15)))
    sizes = CacheSizes(1, 1, 16, slots=1, capacity=64, page=16, lanes=3, steps=2)
    pages = PageTable(RowPlaces(np.zeros(RowPlaces.size(16, sizes), np.int32), 16, sizes), sizes)
    placement, batch = Placement(1), admitted(request)
    placement.admit(0, request)
    pages.place(placement.fill(placement.gaps(batch, np.arange(1))))
    pages.place(placement.trunk(batch, np.array([1], np.int32)))
    assert pages.held == [1] and placement.filled.tolist() == [16]
    lanes = placement.lanes(batch, np.zeros(3, np.int64), np.arange(3, dtype=np.int32))
    assert lanes.first.tolist() == [15, 16, 16]  # the third can never hit
    pages.place(placement.step(lanes, 0))
    assert pages.held == [1]


def test_a_cache_of_text_has_room_to_warm_up_and_to_verify() -> None:
    told = {"workload": "text", "prompt_ids": "1", "context": 20, "rounds": None}
    assert job_of("ar", **told).capacity == 20 + 1 > 8 + 10 + 1
    assert job_of("sd", **told).longest == 20
    assert job_of("sd", **told).capacity == 8 + 10 * 5 + 5
