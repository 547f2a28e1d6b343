"""A result row without a flaw, and the raw rounds that it follows from."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.records import median, outcome_digest, percentiles_us
from mpissd.common.row import Row
from mpissd.common.trace import DraftPhase, LeadPhase
from mpissd.lab.gates import violations

Line = dict[str, Any]  # keys of a sound row, which tests spoil
Rounds = dict[str, NDArray[Any]]

K, N = 4, 200
LEAD = [phase.name.lower() for phase in LeadPhase if phase != LeadPhase.PREFILL]
DRAFT = [phase.name.lower() for phase in DraftPhase if phase.name != "PREFILL"]


def ledger(rng: np.random.Generator, us: list[float]) -> NDArray[np.int64]:
    """Rounds 10, 11, … whose phases last about so many microseconds."""
    phases = (np.array(us) * 1e3 * rng.uniform(0.95, 1.05, (N, len(us)))).astype(np.int64)
    return np.column_stack([np.arange(10, 10 + N), phases.sum(axis=1), phases])


def means(table: NDArray[np.int64], names: list[str]) -> dict[str, float]:
    found = table[:, 2:].mean(axis=0) * 1e-3
    return {name: round(float(mean), 3) for name, mean in zip(names, found, strict=True)}


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


def make_row(rounds: Rounds) -> Line:
    """The row that lab/measure/row.py makes of these rounds."""
    lead, rows, round_s = rounds["lead_ledger_ns"], rounds["sequences"], rounds["round_s"]
    count = len(round_s)
    num_tokens = int((rows[:, 3] + 1).sum())
    wall_s = round(float(round_s.sum()), 6)
    t_target, t_draft = median(rounds["t_target_s"]), median(rounds["draft_rounds"][:, 1])
    closure = lead[:, 2:].sum(axis=1) * 1e-9 / round_s
    rate = round(num_tokens / wall_s, 3)
    floor_bytes, read = 8.0e9, 4.5e12
    return {
        "schema": 1,
        "mode": "ssd",
        "backend": "cupy",
        "world_size": 2,
        "tp": 1,
        "num_drafts": 1,
        "lookahead": K,
        "batch_size": 1,
        "fan_out": [3, 3, 3, 3, 3],
        "branch_budget": 15,
        "backup_lookahead": K,
        "num_rounds": count,
        "num_tokens": num_tokens,
        "token_limit": None,
        "wall_s": wall_s,
        "tok_per_s": rate,
        "tok_per_s_per_gpu": round(rate / 2, 3),
        "round_us": percentiles_us((lead[:, 1] * 1e-9).tolist()),
        "phases_us": {"lead": means(lead, LEAD), "draft": means(rounds["draft_ledger_ns"], DRAFT)},
        "device_us": device_means(rounds),
        "ledger_closure": round(float(np.percentile(np.minimum(closure, 2 - closure), 1)), 5),
        "acceptance_length": round(num_tokens / count, 5),
        "accept_histogram": np.bincount(rows[:, 3], minlength=K + 1).tolist(),
        "hit_rate": round(float(rows[1:, 6].mean()), 5),
        "t_target_s": t_target,
        "t_draft_s": t_draft,
        "t_growth_s": median(rounds["draft_rounds"][:, 2]),
        "floor_bytes": floor_bytes,
        "floor_flops": 8e10,
        "peak_flops_per_s": 8e14,
        "cache_bytes": 5e7,
        "read_bytes_per_s": read,
        "outcome_digest": outcome_digest(rows),
        "rank_digests": ["5f1c93a0", "5f1c93a0"],
        "provenance": {"ranks": [{"host": "node1"}, {"host": "node1"}]},
    }
