"""The intervals of each level of compare, by simulated runs of a known truth (fixed seeds).

A run's coins are keyed by seed and position, as the program's are; its round times are
autocorrelated like an H200's, and each job has its own mean speed. Bands: 95% intervals cover the
truth 93 to 97 times in 100; for 1000 pairs ± 2 points are 2.9 standard errors.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpissd.common.compare import Comparison, How, Rounds, compare_blocks, compare_rows
from mpissd.common.row import Row
from mpissd.common.theory import expected_tokens

ALPHA, COUNT = 0.8, 400
Floats = NDArray[np.float64]


def coins(rng: np.random.Generator, runs: int) -> NDArray[np.bool_]:
    """Whether the token at each position would be accepted, [runs, positions]."""
    return rng.random((runs, 9 * COUNT)) < ALPHA


def lengths(accepted: NDArray[np.bool_], lookahead: int) -> Floats:
    """Tokens of each round, [runs, rounds], of jobs that draw these coins."""
    ahead = np.zeros((len(accepted), accepted.shape[1] + 1), np.int8)
    for p in range(accepted.shape[1] - 1, -1, -1):
        ahead[:, p] = np.where(accepted[:, p], np.minimum(ahead[:, p + 1] + 1, lookahead), 0)
    at, found = np.zeros(len(accepted), np.int64), []
    for _ in range(COUNT):
        found.append(ahead[np.arange(len(at)), at] + 1)
        at += found[-1]
    return np.array(found, float).T


def seconds(
    rng: np.random.Generator, runs: int, lookahead: int, spread: float, job: float
) -> Floats:
    """Of each round, [runs, rounds], with which every K emits 1 token a second in the long run."""
    noise = rng.normal(size=(runs, COUNT))
    for n in range(1, COUNT):
        noise[:, n] += 0.6 * noise[:, n - 1]
    jobs = np.exp(job * rng.normal(size=(runs, 1)))
    return np.asarray(expected_tokens(ALPHA, lookahead) * jobs * (1 + spread * noise))


def runs_of(
    seed: int, count: int, lookaheads: tuple[int, int], spread: float = 0.004, job: float = 0.0
) -> list[tuple[Rounds, Rounds]]:
    """Pairs of runs of one truth that share their coins."""
    rng = np.random.default_rng(seed)
    same = coins(rng, count)
    sides = [(lengths(same, k), seconds(rng, count, k, spread, job)) for k in lookaheads]
    return [
        (Rounds(sides[0][1][n], sides[0][0][n]), Rounds(sides[1][1][n], sides[1][0][n]))
        for n in range(count)
    ]


def row_of(run: Rounds, seed: int, lookahead: int, **told: Any) -> Row:
    """The row of such a run."""
    us = run.seconds * 1e6
    p50, p90, p99 = np.percentile(us, [50, 90, 99])
    counts = np.bincount(run.tokens.astype(int) - 1, minlength=lookahead + 1)
    line = {
        "run_id": f"{seed}-{id(run)}",
        "mode": "sd",
        "seed": seed,
        "workload": "gemm",
        "acceptance": f"alpha:{ALPHA}",
        "lookahead": lookahead,
        "num_rounds": len(us),
        "tok_per_s": float(run.tokens.sum() / run.seconds.sum()),
        "round_us": {"mean": us.mean(), "p50": p50, "p90": p90, "p99": p99, "n": len(us)},
        "accept_histogram": counts.tolist(),
        "sampling_sd": None,
    }
    return Row.from_dict(line | told)


def false_alarms(found: list[Comparison]) -> float:
    return sum(c.is_real for c in found) / len(found)


def by_seeds(pairs: list[tuple[Rounds, Rounds]], lookaheads: tuple[int, int]) -> list[Comparison]:
    """Five seeds at a time."""
    rows = [
        tuple(row_of(run, n % 5, k) for run, k in zip(pair, lookaheads, strict=True))
        for n, pair in enumerate(pairs)
    ]
    groups = [rows[n : n + 5] for n in range(0, len(rows), 5)]
    found = [compare_rows([a for a, _ in g], [b for _, b in g]) for g in groups]
    assert all(c.how is How.SEEDS and c.num_seeds == 5 and c.is_headline for c in found)
    return found


def independent(pairs: list[tuple[Rounds, Rounds]], lookaheads: tuple[int, int]) -> Any:
    """Comparisons of rows of two seeds, which cannot be paired."""
    return [
        compare_rows([row_of(a, 0, lookaheads[0])], [row_of(b, 1, lookaheads[1])]) for a, b in pairs
    ]


def test_pairs_of_seeds_hold_the_truth() -> None:
    """K = 3 against 6. Seed 21: jobs differ by .3% apart from their draws; 800 groups of five."""
    found = by_seeds(runs_of(21, 4000, (3, 6), job=0.003), (3, 6))
    assert 0.03 <= false_alarms(found) <= 0.07


def test_shared_luck_makes_a_small_gain_visible() -> None:
    """Seed 24: a gain of 2%. Pairs show it, independent runs of 400 rounds do not."""
    pairs = [(a, Rounds(b.seconds / 1.02, b.tokens)) for a, b in runs_of(24, 200, (4, 4))]
    blocks = [c for a, b in pairs if (c := compare_blocks(a, b))]
    assert false_alarms(independent(pairs, (4, 4))) <= 0.02  # the gain is not seen
    assert false_alarms(blocks) >= 0.99 and false_alarms(by_seeds(pairs, (4, 4))) == 1


def test_pairs_of_blocks_hold_the_truth() -> None:
    """K = 3 against 6. Seed 22: 1000 pairs of one job each."""
    found = [compare_blocks(a, b) for a, b in runs_of(22, 1000, (3, 6))]
    assert all(c is not None and c.how is How.BLOCKS for c in found)
    assert 0.03 <= false_alarms([c for c in found if c]) <= 0.07


def test_independent_runs_hold_the_truth() -> None:
    """Seed 23, by rounds and by rows. The first run of each pair against the second of the next
    pair: these two share no coins."""
    pairs = runs_of(23, 1001, (4, 4), spread=0.02)
    apart = [(a, b) for (a, _), (_, b) in pairwise(pairs)]
    by_rounds = []
    for n, (a, b) in enumerate(apart):
        rows = [row_of(a, n, 4, run_id="a"), row_of(b, n + 1, 4, run_id="b")]
        by_rounds.append(compare_rows(rows[:1], rows[1:], {"a": a, "b": b}))
    assert {c.how for c in by_rounds} == {How.BLOCKS}
    assert 0.03 <= false_alarms(by_rounds) <= 0.07
    by_rows = independent(apart, (4, 4))
    assert {c.how for c in by_rows} == {How.ROWS}
    assert 0.03 <= false_alarms(by_rows) <= 0.07


def kept(tokens: Floats, round_s: float) -> Rounds:
    return Rounds(np.full(len(tokens), round_s), tokens)


def test_the_level_is_chosen_by_what_the_rows_share() -> None:
    rng = np.random.default_rng(26)
    tokens = rng.integers(1, 6, 100).astype(float)
    a, b = kept(tokens, 0.02), kept(tokens, 0.01)
    one = row_of(a, 0, 4, run_id="a")
    rounds = {"a": a, "b": b}

    def how(other: Row, *more: Row) -> How:
        return compare_rows([one, *more], [other, *more], rounds).how

    same = row_of(b, 0, 4, run_id="b")
    assert how(same) is How.BLOCKS
    assert compare_rows([one], [same], rounds).speedup == pytest.approx(2)
    assert how(same | {"seed": 1, "mode": "ar"}) is How.BLOCKS
    assert compare_rows([one], [same], {"a": a}).how is How.ROWS
    assert how(same, row_of(a, 1, 4)) is How.ROWS  # two seeds are no sample
    assert how(same, row_of(a, 1, 4), row_of(a, 2, 4)) is How.SEEDS
    few = kept(tokens[:40], 0.01)
    rounds["b"] = few
    assert how(row_of(few, 0, 4, run_id="b")) is How.ROWS  # 40 rounds against 100


def rows_of(rates: list[float], num_rounds: int = 400, first: int = 0) -> list[Row]:
    return [
        Row.from_dict({"seed": first + n, "tok_per_s": rate, "num_rounds": num_rounds})
        for n, rate in enumerate(rates)
    ]


@pytest.mark.parametrize(
    ("seeds", "num_rounds", "is_headline"),
    [(5, 400, True), (4, 400, False), (5, 399, False)],
)
def test_a_headline_takes_five_seeds_of_400_rounds(
    seeds: int, num_rounds: int, is_headline: bool
) -> None:
    a = rows_of([100.0 + n for n in range(seeds)], num_rounds)
    b = [row | {"tok_per_s": 1.5 * row.tok_per_s} for row in a]
    found = compare_rows(a, b)
    assert found.is_headline == is_headline and found.is_real
    assert found.claim == ("1.50× (1.50–1.50)" if is_headline else "1.50–1.50 (few seeds)")
    assert compare_rows(a, a).claim == "no difference (1.00–1.00)"
