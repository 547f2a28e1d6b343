"""The batch that every rank keeps by applying the same outcomes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpissd.common.errors import ProtocolError
from mpissd.common.rounds import Batch, Event, Ints, Outcome, Request, Speculation, verify_rows

COMMIT, ADMIT, RELEASE = Event.COMMIT, Event.ADMIT, Event.RELEASE


def outcome(round_: int, *rows: tuple[int, int, int, int, int]) -> Outcome:
    """Rows of (id, epoch, event, k, t*)."""
    return Outcome(round_, np.array(rows, np.int32).reshape(-1, Outcome.WIDTH))


def speculation(round_: int, lookahead: int, *rows: list[int]) -> Speculation:
    """A row is its draft tokens; the columns behind them hold junk."""
    table = np.full((len(rows), Speculation.HEAD + lookahead), -7, np.int32)
    for row, tokens in zip(table, rows, strict=True):
        row[:3] = 1, 0, len(tokens)
        row[3 : 3 + len(tokens)] = tokens
    return Speculation(round_, table)


def state(batch: Batch) -> list[list[int]]:
    columns = (batch.ids, batch.epochs, batch.slots, batch.lengths, batch.last_tokens)
    return [column.tolist() for column in columns]


@dataclass
class Model:
    """What a batch must do, one dictionary a sequence."""

    capacity: int
    live: list[dict[str, int]] = field(default_factory=list)

    def apply(self, rows: Ints) -> None:
        table = rows.tolist()
        for sequence, row in zip(list(self.live), table, strict=False):
            if row[2] == RELEASE:
                self.live.remove(sequence)
            sequence["length"] += row[3] + 1
            sequence["last"] = row[4]
        for id_, epoch, event, _, token in table:
            if event == ADMIT:
                self.live.append({"id": id_, "epoch": epoch, "length": 1, "last": token})


def next_rows(data: st.DataObject, model: Model, new_id: int) -> Ints:
    """An outcome that fits the model: some go, some come."""
    rows = [
        (s["id"], s["epoch"], data.draw(st.sampled_from((COMMIT, COMMIT, RELEASE))), k, k + 50)
        for s in model.live
        for k in [data.draw(st.integers(0, 5))]
    ]
    room = model.capacity - sum(row[2] == COMMIT for row in rows)
    for n in range(data.draw(st.integers(0, room))):
        rows.append((new_id + n, data.draw(st.integers(0, 2)), ADMIT, 0, n + 10))
    return np.array(rows, np.int32).reshape(-1, Outcome.WIDTH)


@given(st.data(), st.integers(1, 5), st.integers(1, 8))
def test_a_batch_follows_its_outcomes(data: st.DataObject, capacity: int, rounds: int) -> None:
    batch, model, slot_of, new_id = Batch(capacity), Model(capacity), dict[int, int](), 0
    for round_ in range(rounds):
        rows = next_rows(data, model, new_id)
        new_id += capacity
        admissions = batch.apply(Outcome(round_, rows))
        model.apply(rows)
        ids = [s["id"] for s in model.live]
        assert batch.ids.tolist() == ids and len(batch) == len(ids)
        assert batch.epochs.tolist() == [s["epoch"] for s in model.live]
        assert batch.lengths.tolist() == [s["length"] for s in model.live]
        assert batch.last_tokens.tolist() == [s["last"] for s in model.live]
        for slot, request in admissions:
            assert request in [Request(r[0], r[4], r[1]) for r in rows.tolist() if r[2] == ADMIT]
            slot_of[request.request_id] = slot
        # A sequence keeps the slot that it was given, and shares it with nobody alive.
        assert batch.slots.tolist() == [slot_of[id_] for id_ in ids]
        assert len(set(batch.slots.tolist())) == len(ids)
        assert all(0 <= slot < capacity for slot in batch.slots.tolist())


@given(st.data(), st.integers(1, 4))
def test_the_short_cut_of_a_steady_round_changes_nothing(data: st.DataObject, size: int) -> None:
    batches = [Batch(size), Batch(size)]
    first = Outcome.admission(-1, [Request(n, n) for n in range(size)])
    for batch in batches:
        batch.apply(first)
    for round_ in range(4):
        ks = data.draw(st.lists(st.integers(0, 7), min_size=size, max_size=size))
        rows = [(n, 0, COMMIT, k, 9 * k) for n, k in enumerate(ks)]
        batches[1]._steady = b"never"  # takes the long way
        admitted = [list(batch.apply(outcome(round_, *rows))) for batch in batches]
        assert admitted == [[], []]
        assert state(batches[0]) == state(batches[1])


@pytest.mark.parametrize(
    "rows",
    [
        [(1, 0, COMMIT, 0, 5)],  # one is missing
        [(2, 0, COMMIT, 0, 5), (1, 0, COMMIT, 0, 5)],  # in another order
        [(1, 0, COMMIT, 0, 5), (3, 0, COMMIT, 0, 5)],  # another id
        [(1, 0, COMMIT, 0, 5), (2, 1, COMMIT, 0, 5)],  # another epoch
        [(1, 0, COMMIT, 0, 5), (2, 0, ADMIT, 0, 5)],  # admitted twice
        [(1, 0, COMMIT, 0, 5), (2, 0, COMMIT, 0, 5), (3, 0, COMMIT, 0, 5)],  # never admitted
        [(1, 0, COMMIT, 0, 5), (2, 0, COMMIT, 0, 5), (3, 0, RELEASE, 0, 5)],
        [(1, 0, COMMIT, 0, 5), (2, 0, COMMIT, 0, 5), (3, 0, ADMIT, 0, 5), (4, 0, ADMIT, 0, 5)],
        [],
    ],
)
def test_an_outcome_of_other_sequences_is_refused_and_changes_nothing(
    rows: list[tuple[int, int, int, int, int]],
) -> None:
    batch = Batch(3)
    batch.apply(Outcome.admission(-1, [Request(1), Request(2)]))
    before = state(batch)
    with pytest.raises(ProtocolError, match="round 8"):
        batch.apply(outcome(8, *rows))
    assert state(batch) == before
    assert batch.apply(outcome(8, (1, 0, COMMIT, 3, 5), (2, 0, COMMIT, 0, 6))) == ()
    assert batch.lengths.tolist() == [5, 2]


@given(st.data(), st.integers(0, 4), st.integers(1, 4))
def test_what_the_target_verifies(data: st.DataObject, lookahead: int, size: int) -> None:
    drafts = st.lists(st.integers(0, 99), max_size=lookahead)
    rows = data.draw(st.lists(drafts, min_size=size, max_size=size))
    last = np.arange(100, 100 + size, dtype=np.int32)
    flat = [token for n, tokens in enumerate(rows) for token in [100 + n, *tokens]]
    found = speculation(3, lookahead, *rows)
    verified = verify_rows(last, found)
    assert verified.dtype == np.int32 and verified.tolist() == flat
    assert found.num_rows == len(flat)
