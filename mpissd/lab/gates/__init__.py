"""Consistency gates: check a result row against its raw rounds, and both against physics.

    lines = violations(row, rounds)     one line each, "gate: the fault, with both numbers"

row is the JSON of `run`, rounds the arrays of OUT/rounds/RUN_ID.npz. A null or missing value is
unknown, and gates ignore it except for the few numbers that every row has. Keys of a row that only
gates need:

    floor_bytes    bytes that a verification of b(K+1) rows reads on a target rank: weights and KV
    floor_flops    its operations there (missing in old rows: their floor is only of bytes)
    cache_bytes    the lead's last-level cache (null: unknown, or emulated)
    token_limit    --num_tokens (null: none)
    rank_digests   by world rank, the digest of the outcomes it received (null: unknown)
"""

from __future__ import annotations

from mpissd.common.row import Row
from mpissd.lab.gates.decided import counts, decisions, finite, missing, ranks, tokens
from mpissd.lab.gates.read import Gate, Rounds
from mpissd.lab.gates.timed import (
    clock,
    device,
    floor,
    forwards,
    ledger,
    prediction,
    speed,
    sub_phases,
    walls,
)

GATES: tuple[Gate, ...] = (
    missing,
    finite,
    clock,
    ranks,
    floor,
    device,
    sub_phases,
    counts,
    tokens,
    decisions,
    speed,
    walls,
    ledger,
    forwards,
    prediction,
)


def violations(row: Row, rounds: Rounds) -> list[str]:
    """Returns every contradiction in a row, one line each; empty if the row is sound."""
    messages = []
    for gate in GATES:
        try:
            messages += [f"{gate.__name__}: {message}" for message in gate(row, rounds)]
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # A row or array of the wrong shape is reported as a violation, too.
            messages.append(f"{gate.__name__}: cannot be judged: {error!r}")
    return messages
