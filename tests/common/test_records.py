"""Raw rows, digests and medians."""

from __future__ import annotations

import numpy as np
import pytest

from mpissd.common.records import RoundRecords, token_digest
from mpissd.common.rounds import Outcome, Speculation

K = 2


def add(records: RoundRecords, round_: int, *rows: tuple[int, int, int, int, list[int]]) -> None:
    """Rows of (id, k, t*, hit, drafts); the source is 1 for a hit and 2 for a miss."""
    outcomes = [(id_, 0, 0, k, bonus) for id_, k, bonus, _, _ in rows]
    heads = [(2 - hit, hit, len(d), *d, *[-1] * (K - len(d))) for *_, hit, d in rows]
    records.add(
        0.5,
        Speculation(round_, np.array(heads, np.int32)),
        Outcome(round_, np.array(outcomes, np.int32)),
    )


@pytest.fixture(params=[1, 2, 512], ids=lambda count: f"packed by {count}")
def shrinking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RoundRecords:
    """Two sequences, then one; the rounds of the run begin at 10."""
    monkeypatch.setattr("mpissd.common.records._PACKED_ROUNDS", request.param)
    records = RoundRecords(K)
    add(records, 10, (7, 2, 90, 0, [1, 2]), (3, 0, 91, 0, [3, 4]))
    add(records, 11, (7, 1, 92, 1, [5, 6]), (3, 1, 93, 0, [8]))
    add(records, 12, (3, 0, 94, 1, []))
    return records


def test_rows_name_round_sequence_outcome_and_source(shrinking: RoundRecords) -> None:
    assert shrinking.sequences().tolist() == [
        # round, id, epoch, k, t*, source, hit, num_draft
        [0, 7, 0, 2, 90, 2, 0, 2],
        [0, 3, 0, 0, 91, 2, 0, 2],
        [1, 7, 0, 1, 92, 1, 1, 2],
        [1, 3, 0, 1, 93, 2, 0, 1],
        [2, 3, 0, 0, 94, 1, 1, 0],
    ]
    assert len(shrinking) == 3
    assert shrinking.num_rows().tolist() == [6, 5, 1]


def test_a_token_digest_covers_the_first_tokens_of_every_sequence() -> None:
    digest = token_digest({0: [1, 2, 3], 1: [4, 5]}, 2)
    assert digest == token_digest({1: [4, 5, 6, 7], 0: [1, 2]}, 2)
    for other in ({0: [1, 2], 1: [4, 6]}, {0: [1, 2], 2: [4, 5]}, {0: [4, 5], 1: [1, 2]}):
        assert digest != token_digest(other, 2)
