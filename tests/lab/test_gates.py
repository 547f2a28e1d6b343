"""Gates: a clean row passes, and every kind of fault is caught by its own gate."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpissd.common.records import median, percentiles_us
from mpissd.common.row import Row
from mpissd.common.trace import DraftPhase, LeadPhase
from mpissd.lab.gates import host_s, violations

Line = dict[str, Any]  # keys of a sound row, which tests spoil
Rounds = dict[str, NDArray[Any]]

K, N = 4, 200
LEAD = [phase.name.lower() for phase in LeadPhase if phase != LeadPhase.PREFILL]
DRAFT = [phase.name.lower() for phase in DraftPhase if phase.name != "PREFILL"]


def ledger(rng: np.random.Generator, us: list[float]) -> NDArray[np.int64]:
    """Rounds 10, 11, … whose phases last about so many microseconds."""
    phases = (np.array(us) * 1e3 * rng.uniform(0.95, 1.05, (N, len(us)))).astype(np.int64)
    return np.column_stack([np.arange(10, 10 + N), phases.sum(axis=1), phases])


def device_means(rounds: Rounds) -> dict[str, float]:
    """An eighth of the forward is all-reduces: 300 µs."""
    busy = float(rounds["t_target_s"].mean()) * 1e6
    idle = float(rounds["lead_ledger_ns"][:, 1].mean()) * 1e-3 - busy
    return {"forward": busy * 7 / 8, "all_reduce": busy / 8, "idle": idle}


def judge(line: Line, rounds: Rounds) -> list[str]:
    """The violations that the gates report."""
    return violations(Row.from_dict(line), rounds)


def make() -> tuple[Line, Rounds]:
    """A row of SSD on two GPUs and the rounds it was made of: 3 ms a round, b = 1."""
    rng = np.random.default_rng(4)
    accepted = rng.integers(0, K + 1, N)
    hit = np.where(np.arange(N) > 0, rng.integers(0, 2, N), 0)
    columns = [np.arange(N), np.zeros(N), np.zeros(N), accepted, rng.integers(0, 99, N), 2 - hit]
    sequences = np.column_stack([*columns, hit, np.full(N, K)]).astype(np.int64)
    lead = ledger(rng, [15, 10, 400, 20, 5, 25, 2400, 80, 10])
    draft = ledger(rng, [900, 12, 8, 350, 15, 300, 80, 1250, 6])
    round_s = lead[:, 1] * 1e-9 + rng.uniform(0, 2e-6, N)
    t_target = lead[:, 2 + LeadPhase.DEVICE_WAIT] * 1e-9 - 20e-6
    t_draft = np.where(hit, np.nan, rng.uniform(3e-4, 4e-4, N))
    t_growth = rng.uniform(1e-3, 1.1e-3, N)
    draft_rounds = np.column_stack([draft[:, 0], t_draft, t_growth, 1 - hit, hit])
    rounds = {
        "round_s": round_s,
        "t_target_s": t_target,
        "sequences": sequences,
        "lead_ledger_ns": lead,
        "lead_phases": np.array(LEAD),
        "draft_rounds": draft_rounds,
        "draft_columns": np.array("round t_draft_s t_growth_s num_jit steps_ready".split()),
        "draft_ledger_ns": draft,
        "draft_phases": np.array(DRAFT),
    }
    return make_row(rounds), rounds


SOUND: Line = {
    "schema": 1, "mode": "ssd", "backend": "cupy", "world_size": 2, "tp": 1, "num_drafts": 1,
    "lookahead": K, "batch_size": 1, "fan_out": [3, 3, 3, 3, 3], "backup_lookahead": K,
    "token_limit": None, "floor_bytes": 8.0e9, "floor_flops": 8e10, "peak_flops_per_s": 8e14,
    "cache_bytes": 5e7, "read_bytes_per_s": 4.5e12, "rank_digests": ["5f1c93a0", "5f1c93a0"],
}  # fmt: skip


def make_row(rounds: Rounds) -> Line:
    """The row that lab/measure/row.py makes of these rounds."""
    lead, rows, round_s = rounds["lead_ledger_ns"], rounds["sequences"], rounds["round_s"]
    count = len(round_s)
    num_tokens = int((rows[:, 3] + 1).sum())
    wall_s = round(float(round_s.sum()), 6)
    return {
        **SOUND,
        "num_rounds": count,
        "num_tokens": num_tokens,
        "wall_s": wall_s,
        "tok_per_s": round(num_tokens / wall_s, 3),
        "round_us": percentiles_us((lead[:, 1] * 1e-9).tolist()),
        "device_us": device_means(rounds),
        "accept_histogram": np.bincount(rows[:, 3], minlength=K + 1).tolist(),
        "t_target_s": median(rounds["t_target_s"]),
    }


Spoil = Callable[[Line, Rounds], None]


@pytest.fixture
def clean() -> tuple[Line, Rounds]:
    return make()


def put(path: str, value: Any) -> Spoil:
    """Replaces a number of the row."""

    def spoil(row: Line, rounds: Rounds) -> None:
        *above, last = path.split(".")
        for key in above:
            row = row[key]
        row[last] = value

    return spoil


def put_in(name: str, where: Any, value: Any) -> Spoil:
    """Replaces elements of an array."""

    def spoil(row: Line, rounds: Rounds) -> None:
        rounds[name][where] = value

    return spoil


def consistently(times: float) -> Spoil:
    """A forward so many times faster, in the row and in all rounds."""

    def spoil(row: Line, rounds: Rounds) -> None:
        rounds["t_target_s"] *= times
        row["t_target_s"] *= times
        row["device_us"] = device_means(rounds)

    return spoil


def lose(share: float) -> Spoil:
    """Rounds of which the ledger measured so much less than the wall clock."""

    def spoil(row: Line, rounds: Rounds) -> None:
        rounds["round_s"] /= 1 - share

    return spoil


def drop_a_round(row: Line, rounds: Rounds) -> None:
    rounds["lead_ledger_ns"] = np.delete(rounds["lead_ledger_ns"], 50, axis=0)


SPOILED: dict[str, tuple[str, Spoil, str]] = {
    # name: (the gate, the changed rounds, the message's text)
    "faster than its floor": ("floor", consistently(0.5), "of cache at 4500.0 GB/s take 1766.667"),
    "faster than its products": (
        "floor",
        put("floor_flops", 2e12),
        "2000.0 Gflop at 800000.0 Gflop/s take 2500.000 µs",
    ),
    "two ranks disagree": (
        "ranks",
        put("rank_digests", ["5f1c93a0", "11111111"]),
        "rank 0 heard 5f1c93a0, rank 1 heard 11111111",
    ),
    "a clock goes backwards": ("clock", put_in("round_s", 17, -0.002), "round 17 took -0.002 s"),
    "a round is gone": ("counts", drop_a_round, "num_rounds is 200, lead_ledger_ns has 199"),
    "rounds out of order": (
        "clock",
        put_in("draft_ledger_ns", (9, 0), 11),
        "round 11 follows round 18",
    ),
    "a result that is no number": ("finite", put("tok_per_s", math.nan), "tok_per_s is nan"),
    "a fan-out of another K": ("counts", put("fan_out", [5, 5, 5]), "is 4, fan_out has 3"),
    "a ledger that misses 2%": ("ledger", lose(0.02), "close to 0.9"),
    "a device slower than the wall": ("device", consistently(1.5), "within a launch and wait of 2"),
    "an idle device that takes less than nothing": (
        "device",
        put("device_us.idle", -50.0),
        "device_us.idle is -50: allowed: 0 or more",
    ),
    "an array of another shape": (
        "decisions",
        lambda row, rounds: rounds.update(sequences=np.zeros((3, 2), int)),
        "cannot be judged",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_row_is_caught_and_named(clean: tuple[Line, Rounds], name: str) -> None:
    row, rounds = clean
    gate, spoil, says = SPOILED[name]
    spoil(row, rounds)
    found = judge(row, rounds)
    assert any(line.startswith(f"{gate}: ") and says in line for line in found), found
    assert all("\n" not in line for line in found)


def test_what_is_unknown_is_judged_by_no_gate(clean: tuple[Line, Rounds]) -> None:
    row, rounds = clean
    consistently(0.5)(row, rounds)  # below the floor, if there is one
    for key in ("cache_bytes", "rank_digests"):
        row[key] = None
    assert judge(row, rounds) == []
    del row["token_limit"]
    assert judge(row, {}) == []


def test_the_floor_allows_for_caches_and_a_cpu_s_noise(clean: tuple[Line, Rounds]) -> None:
    row, rounds = clean
    consistently(1.7 / 2.38)(row, rounds)  # 1.70 ms, the cache allows 1.767
    assert [line[:20] for line in judge(row, rounds)] == ["floor: t_target_s is"]
    for change in (
        {"cache_bytes": 8e9},
        {"floor_bytes": None},
        {"read_bytes_per_s": None},
        {"backend": "numpy"},
    ):
        assert judge(row | change, rounds) == []
    row |= {"cache_bytes": 8e9, "floor_flops": 2e12}  # the cache saves no product: 2.5 ms
    assert [line[:20] for line in judge(row, rounds)] == ["floor: t_target_s is"]
    row["backend"] = "numpy"  # half of it may be noise
    assert judge(row, rounds) == []


@pytest.mark.parametrize(("limit", "counted"), [(None, 0), (10**6, 0), (500, -1), (3, -2)])
def test_the_limit_ends_counts(clean: tuple[Line, Rounds], limit: int | None, counted: int) -> None:
    row, rounds = clean
    total = row["num_tokens"]
    row["token_limit"] = limit
    row["num_tokens"] = {0: total, -1: 500, -2: 3}[counted]
    assert not [line for line in judge(row, rounds) if line.startswith("tokens")]
    row["num_tokens"] += 1
    assert [line for line in judge(row, rounds) if line.startswith("tokens")]


def test_time_between_the_two_clocks_is_not_lost(clean: tuple[Line, Rounds]) -> None:
    """A rank without its core for 1 ms, between the ledger's stamp and the wall's, twice."""
    _, rounds = clean
    for n in (50, 120):
        rounds["round_s"][n : n + 2] += [1e-3, -1e-3]
    row = make_row(rounds)
    assert judge(row, rounds) == []
    for n in (50, 51, 52, 120):  # that no phase saw
        rounds["round_s"][n] += 1e-3
    found = judge(make_row(rounds), rounds)
    assert len(found) == 1 and "close to 0." in found[0]


def test_a_few_rounds_are_judged_by_their_median(clean: tuple[Line, Rounds]) -> None:
    """One round that the system took away is no percentile of 50."""
    _, rounds = clean
    few = {k: v if v.dtype.kind == "U" else v[:50].copy() for k, v in rounds.items()}
    few["round_s"][7] *= 1.5
    assert judge(make_row(few), few) == []


FIRST = 120  # rounds of the first group; the second has the others


def pooled() -> tuple[Line, Rounds]:
    """Two groups of one rank with a draft; the second group's rounds follow the first's."""
    _, rounds = make()
    rows = rounds["sequences"]
    rows[FIRST:, 1] = 1
    rows[FIRST, 5:7] = 2, 0  # the second group's first round is a miss
    row = make_row(rounds)
    row |= {"groups": 2, "world_size": 3, "rank_digests": [5, 7, 5, 7]}
    return row, rounds


@pytest.mark.parametrize("sound", [make, pooled])
def test_a_clean_row_passes(sound: Callable[[], tuple[Line, Rounds]]) -> None:
    assert judge(*sound()) == []


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("world_size", 4, "world_size is 4, groups · tp + num_drafts is 3"),
        ("rank_digests", [5, 7, 5], "rank_digests has 3"),
        ("rank_digests", [5, 7, 5, 5], "rank 1 heard 7, rank 2 heard 5"),
        ("rank_digests", [5, 7, 7, 7], "rank 0 heard 5, rank 2 heard 7"),
        ("groups", None, "world_size is 3, tp + num_drafts is 2"),
    ],
)
def test_a_spoiled_row_of_two_groups_is_caught(key: str, value: Any, found: str) -> None:
    row, rounds = pooled()
    row[key] = value
    assert any(found in line for line in judge(row, rounds)), judge(row, rounds)


@pytest.mark.parametrize(
    ("lookup", "is_chained"), [(None, True), ("prompt", True), ("suffix", False)]
)
def test_a_chained_forward_may_begin_in_the_round_before(
    lookup: str | None, is_chained: bool
) -> None:
    """Rounds of 5 and 6 ms, of which rank 0 waits 3 and 4."""
    row = SimpleNamespace(
        graph=True, all_reduce="solo", num_drafts=0, temperature=0.0, forward="transformer",
        lookup=lookup,
    )  # fmt: skip
    ledger = np.array([[0, 5, 1, 2], [1, 6, 1, 3]]) * 1_000_000
    rounds = {"lead_phases": np.array(["launch", "device_wait"]), "lead_ledger_ns": ledger}
    assert host_s(row, rounds) == pytest.approx([3e-3, 4e-3 + 5e-3 * is_chained])  # type: ignore[arg-type]
