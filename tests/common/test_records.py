"""Raw rows, digests and medians."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from mpissd.common.records import RoundRecords, is_stable, token_digest
from mpissd.common.rounds import Outcome, Speculation

K = 2
Floats = NDArray[np.float64]


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


def rounds(seed: int, count: int, level_s: float = 1.0, noise: float = 0.01) -> Floats:
    """Seconds a round with independent noise."""
    return np.asarray(level_s * (1 + noise * np.random.default_rng(seed).normal(size=count)))


@pytest.mark.parametrize("count", [50, 60, 200, 1000])
def test_what_the_blocks_share_is_stable(count: int) -> None:
    """A drift of 30%, a step of 2%, a burst, rare outliers: in all blocks alike."""
    line = np.linspace(1, 1.3, count)
    late = np.where(np.arange(count) < 0.8 * count, 1.0, 1.02)
    burst = np.where(np.arange(count) // 10 == 2, 9.0, 1.0)
    for seconds in (late, burst, np.tile([1.0, 9.0, 1.0], count)[:count]):
        assert is_stable(seconds.tolist(), 0.01) is True
    assert is_stable(line.tolist(), 0.03) is True


def test_a_median_that_would_not_come_again_is_not_stable() -> None:
    """Each round has one of two levels by chance, so a block's median has, too (seeds 0 … 19)."""
    found = []
    for seed in range(20):
        slow = np.random.default_rng(seed).random(200) < 0.5
        found.append(is_stable(np.where(slow, 1.1, 1.0).tolist(), 0.01))
    assert found.count(False) >= 18
