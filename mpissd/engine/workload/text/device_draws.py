"""Tokens of a draft and verdicts on them, drawn where the logits are: see model.draws.

The host draws the uniforms, by the same keys, and both compute the same law; a token is another one
only where u is within rounding of a bound between two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mpissd.common.errors import ProtocolError
from mpissd.common.rounds import Ints
from mpissd.engine.model.forwards import Draws, Judging
from mpissd.engine.spec import sampling
from mpissd.engine.workload.sampled import Case


def judged(draws: Draws, cases: Sequence[Case], ids: Ints | None) -> list[tuple[int, int]]:
    """Returns (k, t*) of each sequence, as sampling.judge; raises as it does.

    One launch judges all rows of all sequences; one more for a rejected token whose row must be
    known. ids: the token of each entry of a draft's rows (None: entry t is token t).
    """
    asked = [_asked(case) for case in cases]
    verdicts = iter(draws.judge([one for every in asked for one in every], ids))
    found = []
    for case, every in zip(cases, asked, strict=True):
        mine = [next(verdicts) for _ in every]
        for i, verdict in enumerate(mine):
            if verdict.needs_row:
                row = _kept(draws, case, i, ids)
                (mine[i],) = draws.judge([replace(every[i], kept=row)], ids)
            if mine[i].is_replaced or i == len(case.tokens):
                found.append((i, mine[i].token))
                break
    return found


def _asked(case: Case) -> list[Judging]:
    """Returns what is asked of a sequence's rows; the last one's token is the target's own."""
    told = case.request.temperature, case.u
    every = zip(case.tokens, case.q, case.coins, strict=False)
    found = []
    for i, (token, q, coin) in enumerate(every):
        if not 0 < q <= 1:
            raise ProtocolError(f"token {token} was proposed with probability {q}")
        found.append(Judging(case.start + i, *told, token, q, coin))
    return [*found, Judging(case.start + len(found), *told)]


def _kept(draws: Draws, case: Case, i: int, ids: Ints | None) -> Any:
    """Returns the row that token i was drafted from, on the device."""
    row: Any = case.proposal(i)
    if hasattr(row, "total"):  # it never left the device
        return row
    return draws.keep(row, sampling.checked_total(row, case.tokens[i], case.q[i], ids))
