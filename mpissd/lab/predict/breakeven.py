"""Where a choice and its rivals tie: the break-even acceptance rate and the break-even hit rate.

101 rates are tried and the crossing is interpolated between two of them. The choice keeps its own
parameters; its rivals among AR and SD are tuned anew at each rate, an SSD rival keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from mpissd.common.theory import expected_tokens, expected_tokens_from_rates
from mpissd.lab.predict.closed import Cells, expect
from mpissd.lab.predict.costs import Floats, HostCosts
from mpissd.lab.predict.laws import MOST_LOOKAHEAD, Laws
from mpissd.lab.predict.search import Choice, Placement, cells_of, sd_groups

_GRID = np.linspace(0.0, 1.0, 101)


def break_even_alpha(
    choice: Choice,
    rivals: Sequence[Choice],
    laws: Laws,
    host: HostCosts,
    places: Sequence[Placement],
) -> float | None:
    """The alpha, one for every drafted token, from which on `choice` beats what it can't beat.

    Where it wins under the laws given: the rate below which it stops winning (0.0: it never does);
    where it loses: the rate above which it wins (None: there is none). rivals: other modes.
    """
    own = _rates(_with_alpha(cells_of(choice, laws)), choice, host, places)
    best = np.zeros(len(_GRID))
    for rates in _rival_rates(choice, rivals, laws, host, places):
        best = np.maximum(best, rates)
    hazards = laws.hazards[: choice.lookahead]
    tokens = expected_tokens_from_rates(hazards)
    lengths = [expected_tokens(alpha, len(hazards)) for alpha in _GRID]
    return _crossing(np.log(own / best), int(np.abs(np.array(lengths) - tokens).argmin()))


def break_even_p_hit(
    ssd: Choice,
    rival: Choice | None,
    laws: Laws,
    host: HostCosts,
    places: Sequence[Placement],
) -> float | None:
    """The hit rate, whatever k, from which on `ssd` beats `rival`; 0.0: always, None: never."""
    if rival is None:
        return 0.0
    cells = _widened(cells_of(ssd, laws))
    p_hits = np.tile(_GRID[:, None, None], (1, 2, ssd.lookahead + 1))
    tried = replace(cells, p_hits=p_hits, p_hits_miss=p_hits)
    return _crossing(np.log(_rates(tried, ssd, host, places) / rival.tok_per_s), 0)


def _rival_rates(
    choice: Choice,
    rivals: Sequence[Choice],
    laws: Laws,
    host: HostCosts,
    places: Sequence[Placement],
) -> Iterator[Floats]:
    """tok/s of each rival over the grid of alphas."""
    for rival in rivals:
        if rival.mode == "ar":
            yield np.full(len(_GRID), rival.tok_per_s)
        elif rival.mode == "ssd":
            yield _rates(_with_alpha(cells_of(rival, laws)), rival, host, places)
    if choice.mode == "sd":
        return
    for place in places:
        for group in sd_groups(place, laws, choice.batch_size, range(1, MOST_LOOKAHEAD + 1)):
            drafts = group.method[1]
            if drafts <= 1 and place.tp + drafts <= choice.gpus:
                known = place.host(group.method, host)
                yield expect(_with_alpha(group.cells), place.device, known).tok_per_s


def _rates(cells: Cells, choice: Choice, host: HostCosts, places: Sequence[Placement]) -> Floats:
    """tok/s of cells on the placement of a choice."""
    place = next(p for p in places if p.tp == choice.tp)
    return expect(cells, place.device, place.host(choice.method, host)).tok_per_s


def _with_alpha(cells: Cells) -> Cells:
    """One cell under every alpha of the grid."""
    return replace(_widened(cells), hazards=np.tile(_GRID[:, None], (1, cells.lookahead)))


def _widened(cells: Cells) -> Cells:
    return cells.take(np.zeros(len(_GRID), np.int64))


def _crossing(advantage: Floats, now: int) -> float | None:
    """Where the advantage turns positive: the last such place up to `now`, or the first after."""
    wins = advantage > 0
    if wins[now]:
        losses = np.flatnonzero(~wins[:now])
        return _tie(advantage, int(losses[-1])) if len(losses) else 0.0
    later = np.flatnonzero(wins[now:])
    return _tie(advantage, now + int(later[0]) - 1) if len(later) else None


def _tie(advantage: Floats, index: int) -> float:
    """The rate between grid points `index` (not ahead) and the next (ahead) where they tie."""
    behind, ahead = -advantage[index], advantage[index + 1]
    share = behind / (behind + ahead)
    return float(_GRID[index] + share * (_GRID[index + 1] - _GRID[index]))
