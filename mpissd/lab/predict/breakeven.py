"""The break-even acceptance rate and hit rate, at which a choice and its best rival tie.

101 rates are tried, and the crossing is interpolated between two of them. The choice keeps its own
parameters. AR and SD rivals are tuned anew at each rate; an SSD rival keeps its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from mpissd.common.theory import expected_tokens, expected_tokens_from_rates
from mpissd.lab.predict.costs import Floats, HostCosts
from mpissd.lab.predict.laws import MOST_LOOKAHEAD, Laws
from mpissd.lab.predict.search import Choice, Placement, cells_of, sd_groups
from mpissd.lab.predict.simulation import Cells, expect

_GRID = np.linspace(0.0, 1.0, 101)


def break_even_alpha(
    choice: Choice,
    rivals: Sequence[Choice],
    laws: Laws,
    host: HostCosts,
    places: Sequence[Placement],
) -> float | None:
    """Returns the alpha, one for every drafted token, above which `choice` beats its rivals.

    If it wins under the given models, that is the rate below which it stops winning (0.0: it always
    wins); if it loses, the rate above which it wins (None: it never does). rivals: choices of other
    modes.
    """
    own = _rates(_with_alpha(cells_of(choice, laws)), choice, host, places)
    best = np.zeros(len(_GRID))
    for rates in _rival_rates(choice, rivals, laws, host, places):
        best = np.maximum(best, rates)
    hazards = laws.hazards[choice.lookahead - 1]
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
    """Returns the hit rate, for every k, above which `ssd` beats `rival`; 0.0: always, None:
    never."""
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
    """Yields the tok/s of each rival over the grid of alphas."""
    for rival in rivals:
        if rival.mode in ("ar", "lookup"):
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
    """Returns the tok/s of cells on the placement of a choice."""
    place = next(p for p in places if p.tp == choice.tp)
    costs = place.host(choice.method, host)
    return expect(cells, place.device, costs, precise=True).tok_per_s


def _with_alpha(cells: Cells) -> Cells:
    """Repeats one cell for every alpha of the grid."""
    return replace(_widened(cells), hazards=np.tile(_GRID[:, None], (1, cells.lookahead)))


def _widened(cells: Cells) -> Cells:
    return cells.take(np.zeros(len(_GRID), np.int64))


def _crossing(advantage: Floats, now: int) -> float | None:
    """Returns where the advantage turns positive: last before `now` if winning there, or first
    after."""
    wins = advantage > 0
    if wins[now]:
        losses = np.flatnonzero(~wins[:now])
        return _tie(advantage, int(losses[-1])) if len(losses) else 0.0
    later = np.flatnonzero(wins[now:])
    return _tie(advantage, now + int(later[0]) - 1) if len(later) else None


def _tie(advantage: Floats, index: int) -> float:
    """Interpolates the tie between grid point `index`, which loses, and the next one, which
    wins."""
    behind, ahead = -advantage[index], advantage[index + 1]
    share = behind / (behind + ahead)
    return float(_GRID[index] + share * (_GRID[index + 1] - _GRID[index]))
