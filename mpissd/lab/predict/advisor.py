"""Finds which mode, T, D, K, fan-out and backup to run on given GPUs, and the gain of one more GPU.

`plan` searches the closed model coarsely, then finely around the best few; a test compares it with
the exhaustive search of FULL. All results come from costs and imposed models:

    profile = load_profile("h100")
    places = places.placements(config, profile, gpus=4)
    advice = plan(config, HostCosts(), places, gpus=4)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.rivals import Family, Others, other_uses
from mpissd.lab.predict.advice import Advice, ExtraGpu
from mpissd.lab.predict.breakeven import break_even_alpha, break_even_p_hit
from mpissd.lab.predict.costs import HostCosts
from mpissd.lab.predict.laws import MOST_LOOKAHEAD, Laws
from mpissd.lab.predict.search import (
    COARSE,
    FULL,
    ROUGH,
    Choice,
    Group,
    Placement,
    Space,
    ar_choice,
    cells_of,
    lookup_groups,
    sd_groups,
    ssd_groups,
)

_FEW = 8  # largest batch for which a configuration is cheap to evaluate
_REFINED = 3  # number of coarse SSD choices that the fine search starts from
_FINALISTS = 4  # choices of each use that are simulated for more rounds
_USES = ("ssd", "without", "otherwise")  # fields of an ExtraGpu that hold choices


def plan(
    config: RunConfig,
    host: HostCosts,
    places: Sequence[Placement],
    gpus: int,
    unjudged: Collection[Family] = (),
) -> Advice:
    """Returns the advice for one batch of config.batch_size on at most `gpus` GPUs.

    Only the imposed models and the batch size of `config` are used; the search finds mode, K,
    fan-out and backup. unjudged: further uses that would fit (places.survey). Raises ConfigError
    without placements or GPUs.
    """
    if gpus < 1 or not places:
        raise ConfigError(f"plan: {len(places)} placements on {gpus} GPUs: allowed: 1 or more")
    laws = Laws.of(config)
    search = Search(laws, config.batch_size, host, gpus)
    choices = search.run(places, COARSE if config.batch_size <= _FEW else ROUGH)
    for around in (_fan_outs, _policies):
        leaders = [c for c in by_speed(choices) if c.mode == "ssd"][:_REFINED]
        for tp, space in dict.fromkeys(step for leader in leaders for step in around(leader)):
            choices += search.ssd(next(p for p in places if p.tp == tp), space)
    choices = _finalists(choices, search, places)
    ranking = Ranked(by_speed(choices), tuple(sorted(unjudged)))
    return _labelled(_advice(ranking, laws, host, places, search.num_evaluated), places)


def _finalists(
    choices: Iterable[Choice], search: Search, places: Sequence[Placement]
) -> list[Choice]:
    """Returns the fastest choices of each use, one a K, simulated anew for more rounds."""
    place_of, counts = {place.tp: place for place in places}, Counter[Family]()
    finalists = list[Choice]()
    for choice in _firsts(by_speed(choices), lambda c: (Family.of(c), c.lookahead)):
        counts[Family.of(choice)] += 1
        if counts[Family.of(choice)] <= _FINALISTS:
            finalists.append(search.measured_again(choice, place_of[choice.tp]))
    return finalists


@dataclass(frozen=True)
class Ranked:
    """The choices of a search, fastest first, and the uses that could not be judged."""

    choices: Sequence[Choice]
    missing: tuple[Family, ...]

    def others(self, mode: str, gpus: int) -> Others[Choice]:
        """Returns the uses of this many GPUs in other modes."""
        return other_uses(mode, gpus, self.choices, self.missing)

    def first(self, *modes: str) -> Choice | None:
        """Returns the fastest choice in one of these modes; None if there is none."""
        return next((c for c in self.choices if c.mode in modes), None)


def _advice(
    ranked: Ranked,
    laws: Laws,
    host: HostCosts,
    places: Sequence[Placement],
    num_evaluated: int,
) -> Advice:
    """Derives the advice from ranked choices."""
    best = ranked.choices[0]
    same = [choice for choice in ranked.choices if choice.mode == best.mode]
    drafting, ssd = ranked.first("sd", "ssd"), ranked.first("ssd")
    alpha = p_hit = None
    if drafting is not None:
        mode, gpus = drafting.mode, drafting.gpus
        rivals = [c for c in ranked.choices if c.mode != mode and c.gpus <= gpus]
        if not ranked.others(mode, gpus).missing:
            alpha = break_even_alpha(drafting, rivals, laws, host, places)
    if ssd is not None:
        others = ranked.others("ssd", ssd.gpus)
        if not others.missing:
            p_hit = break_even_p_hit(ssd, others.best, laws, host, places)
    return Advice(
        best=best,
        judged=tuple(_firsts(ranked.choices, Family.of)),
        missing=ranked.missing,
        by_method=tuple(_firsts(ranked.choices, lambda c: (c.mode, c.num_drafts > 0))),
        alternatives=tuple(_firsts(same, lambda c: (c.tp, c.lookahead))[1:3]),
        rival=None if ranked.missing else ranked.others(best.mode, best.gpus).best,
        break_even_alpha=alpha,
        break_even_p_hit=p_hit,
        extra_gpu=None if ssd is None else _extra_gpu(ssd, ranked),
        num_evaluated=num_evaluated,
    )


def _labelled(advice: Advice, places: Sequence[Placement]) -> Advice:
    """Returns the advice, each of its choices labelled with the source of derived times."""
    labels = {place.tp: cache(place.label) for place in places}

    def labelled(value: Any) -> Any:
        if isinstance(value, Choice):
            return replace(value, derived=labels[value.tp](value))
        if isinstance(value, tuple):
            return tuple(map(labelled, value))
        if isinstance(value, ExtraGpu):
            return replace(value, **{name: labelled(getattr(value, name)) for name in _USES})
        return value

    return replace(advice, **{f.name: labelled(getattr(advice, f.name)) for f in fields(advice)})


@dataclass
class Search:
    laws: Laws
    batch: int
    host: HostCosts
    gpus: int
    num_evaluated: int = 0

    def run(self, places: Iterable[Placement], space: Space) -> list[Choice]:
        """Returns the fastest choice of each group of configurations, on every placement that fits.

        AR has one configuration a placement; SD, lookups and SSD have a group for each K.
        """
        choices = []
        for place in places:
            if place.tp > self.gpus:
                continue
            if place.judges(("ar", 0)):
                choices.append(ar_choice(place, self.batch, self.host))
            choices += self.sd(place)
            choices += self.lookups(place)
            choices += self.ssd(place, space)
        return choices

    def sd(self, place: Placement) -> list[Choice]:
        """Returns the fastest SD choice of each K, inline and on a draft rank."""
        lookaheads = range(1, MOST_LOOKAHEAD + 1)
        return self._bests(sd_groups(place, self.laws, self.batch, lookaheads))

    def lookups(self, place: Placement) -> list[Choice]:
        """Returns the fastest lookup of each K."""
        lookaheads = range(1, MOST_LOOKAHEAD + 1)
        return self._bests(lookup_groups(place, self.laws, self.batch, lookaheads))

    def measured_again(self, choice: Choice, place: Placement) -> Choice:
        """Returns a choice with rates of eight times as many simulated rounds."""
        if choice.mode == "ar":
            return choice
        cells = cells_of(choice, self.laws)
        return Group(choice.method, place, cells, (choice.fan_out,)).best(self.host)

    def ssd(self, place: Placement, space: Space) -> list[Choice]:
        """Returns the fastest SSD choice of each group of configurations in the space."""
        return self._bests(ssd_groups(place, self.laws, self.batch, space))

    def _bests(self, groups: Iterator[Group]) -> list[Choice]:
        choices = []
        for group in groups:
            if group.place.tp + group.method[1] <= self.gpus:
                self.num_evaluated += len(group.cells)
                choices.append(group.best(self.host))
        return choices


def _fan_outs(leader: Choice) -> list[tuple[int, Space]]:
    """Returns (T, space) pairs with every fan-out at a leader's K and K ± 1, and its backup."""
    near = (leader.lookahead - 1, leader.lookahead, leader.lookahead + 1)
    share = leader.backup_lookahead / leader.lookahead
    own = replace(FULL, backup_shares=(share,), fast=(leader.backup == "fast",))
    return [(leader.tp, replace(own, lookaheads=(k,))) for k in near if k in FULL.lookaheads]


def _policies(leader: Choice) -> list[tuple[int, Space]]:
    """Returns (T, space) pairs: every backup and K_b at a leader's K and fan-out."""
    assert leader.fan_out is not None, leader
    return [(leader.tp, Space((leader.lookahead,), (leader.fan_out,)))]


def by_speed(choices: Iterable[Choice]) -> list[Choice]:
    """Sorts choices, fastest first; ties (to five digits) by fewer GPUs, then by smaller K."""
    return sorted(choices, key=lambda c: (-float(f"{c.tok_per_s:.5g}"), c.gpus, c.lookahead))


def _firsts(choices: Iterable[Choice], kind: Callable[[Choice], Hashable]) -> list[Choice]:
    """Returns the first choice of each kind, in order; kind maps a choice to its kind."""
    first: dict[Hashable, Choice] = {}
    for choice in choices:
        first.setdefault(kind(choice), choice)
    return list(first.values())


def _extra_gpu(ssd: Choice, ranked: Ranked) -> ExtraGpu:
    count = ssd.gpus
    without, otherwise = (ranked.others("ssd", gpus) for gpus in (count - 1, count))
    copies = [(count // c.gpus) * c.tok_per_s for c in otherwise.judged]
    return ExtraGpu(
        ssd=ssd,
        without=without.best,
        otherwise=otherwise.best,
        replicas_tok_per_s=None if otherwise.missing else max(copies, default=None),
    )
