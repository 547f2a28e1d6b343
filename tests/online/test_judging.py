"""What is ahead of what, by how much, and how sure: rules and formulas without PyTorch."""

from __future__ import annotations

import numpy as np

from mpissd.online.judging import gap_of, gaps_closed, is_ahead, paired


def test_a_gain_is_judged_by_its_standard_error_over_sequences() -> None:
    before = np.array([[5, 10], [12, 20], [0, 5]], float)
    after = before + np.array([[3, 0], [3, 0], [1, 0]])
    gain, error = paired(after, before)
    assert gain == 7 / 35
    residuals = np.array([3 - 2, 3 - 4, 1 - 1])
    assert np.isclose(error, np.sqrt((residuals**2).sum() * 3 / 2) / 35)
    assert paired(before, before) == (0, 0)


def test_a_version_is_not_published_by_luck_more_often_than_told() -> None:
    """Versions that gain nothing, on 32 and on 8 held-out sequences of an answer's length each."""
    draws = np.random.default_rng(0)
    for held, most in ((32, 0.035), (8, 0.06)):
        passed = 0
        for _ in range(2000):
            sizes = draws.integers(30, 128, held)
            changed = draws.binomial(sizes, 0.06)
            before = np.stack([0.8 * sizes, sizes], 1)
            after = before.copy()
            after[:, 0] += changed - draws.binomial(sizes, 0.06)
            passed += is_ahead(*paired(after, before))
        assert 0.01 < passed / 2000 < most


def test_the_gap_ends_at_the_best_offline_draft_and_counts_online_s_last_point() -> None:
    told = {"static": [0.5], "online": [0.59, 0.55], "offline": [0.6, 0.58]}
    points = [
        {"stage": "a", "schedule": name, "agreement": value}
        for name, values in told.items()
        for value in values
    ]
    assert gaps_closed(points) == {"a": 0.5} and gap_of(points) == (0.5, 0.6)
    assert gaps_closed(points[:3]) == {}
    without = {**points[0], "schedule": "offline"}
    assert gaps_closed([*points[:3], without]) == {"a": None}
