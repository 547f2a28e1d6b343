"""Gates on rows of target groups that share a draft: ranks, digests, walls and first rounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mpissd.common.records import is_first_round
from tests.common.clean_row import Line, N, Rounds, judge, make, make_row

FIRST = 120  # rounds of the first group; the second has the others


def pooled() -> tuple[Line, Rounds]:
    """Two groups of one rank with a draft; the second group's rounds follow the first's."""
    _, rounds = make()
    rows = rounds["sequences"]
    rows[FIRST:, 1] = 1
    rows[FIRST, 5:7] = 2, 0  # the second group's first round is a miss
    rounds["draft_rounds"][FIRST, 1] = 3.5e-4
    row = make_row(rounds)
    parts = rounds["round_s"][:FIRST], rounds["round_s"][FIRST:]
    wall_s = max(float(part.sum()) for part in parts)
    rate = row["num_tokens"] / wall_s
    row |= {
        "groups": 2,
        "world_size": 3,
        "wall_s": wall_s,
        "tok_per_s": rate,
        "tok_per_s_per_gpu": rate / 3,
        "hit_rate": round(float(rows[~is_first_round(rows), 6].mean()), 5),
        "per_group": [{"num_rounds": FIRST}, {"num_rounds": N - FIRST}],
        "rank_digests": [5, 7, 5, 7],
        "provenance": {"ranks": [{"host": "node1"}] * 3},
    }
    return row, rounds


def spoil(key: str, value: object) -> Callable[[Line], None]:
    return lambda row: row.update({key: value})


def test_a_clean_row_of_two_groups_passes() -> None:
    assert judge(*pooled()) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (spoil("world_size", 4), "world_size is 4, groups · tp + num_drafts is 3"),
        (spoil("rank_digests", [5, 7, 5]), "rank_digests has 3"),
        (spoil("rank_digests", [5, 7, 5, 5]), "rank 1 heard 7, rank 2 heard 5"),
        (spoil("rank_digests", [5, 7, 7, 7]), "rank 0 heard 5, rank 2 heard 7"),
        (spoil("wall_s", 0.6), "wall_s is 0.6, Σ round_s"),
        (spoil("per_group", [{"num_rounds": 20}, {"num_rounds": N - 20}]), "Σ round_s"),
        (spoil("groups", None), "world_size is 3, tp + num_drafts is 2"),
    ],
)
def test_a_spoiled_one_is_caught(change: Callable[[Line], None], found: str) -> None:
    row, rounds = pooled()
    change(row)
    assert any(found in line for line in judge(row, rounds)), judge(row, rounds)


def test_groups_of_several_ranks_hear_their_own_outcomes() -> None:
    """T = 2: targets 0, 1 and 2, 3, and the draft's digest for each group."""
    row, rounds = pooled()
    row |= {"tp": 2, "num_drafts": 1, "world_size": 5, "tok_per_s_per_gpu": row["tok_per_s"] / 5}
    row["provenance"] = {"ranks": [{"host": "node1"}] * 5}
    row["rank_digests"] = [5, 5, 7, 7, 5, 7]
    assert judge(row, rounds) == []
    for place in range(6):
        spoiled = {**row, "rank_digests": [9 if n == place else d for n, d in enumerate(
            row["rank_digests"])]}  # fmt: skip
        assert any("heard 9" in line for line in judge(spoiled, rounds)), place
