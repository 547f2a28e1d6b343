"""Finds which mode, T, D, K, fan-out and backup to run on given GPUs, and what N GPUs give in all.

`plan` searches the simulation coarsely, then finely around the best few; a test compares it with
the exhaustive search of FULL. All results come from costs and imposed models:

    places = survey(config, load_profile("h100"), gpus=4).placements
    advice = plan(config, places, gpus=4)

N GPUs hold as many copies of a use as fit, each with a batch of its own, and the rest of them
idles; so all uses are also compared by the tokens a second of all copies, over the same N GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.rivals import TREE, Family
from mpissd.common.rounds import Source
from mpissd.common.theory import expected_tokens, expected_tokens_from_rates
from mpissd.engine.spec.tree import positional
from mpissd.lab.predict.costs import Floats
from mpissd.lab.predict.grid import Grid
from mpissd.lab.predict.search import (
    COARSE,
    FULL,
    LOOKUP,
    ROUGH,
    Choice,
    Placement,
    Space,
    candidates,
    grid_of,
    job_of,
    ssd_choices,
    weigh,
)
from mpissd.lab.predict.simulation import expect

_FEW = 8  # largest batch for which a configuration is cheap to evaluate
_REFINED = 3  # number of coarse SSD choices that the fine search starts from
_FINALISTS = 4  # choices of each use that are simulated for more rounds
_RATES = np.linspace(0.0, 1.0, 101)  # tried for a break-even


@dataclass(frozen=True)
class Advice:
    """The advice of `plan`; each choice records whether its times are derived.

    judged: the fastest choice of each mode, T and D, fastest first. missing: uses that would fit
    but could not be judged (plan's unjudged). break_even_alpha: for the best choice that drafts;
    break_even_p_hit: for the best SSD; each against the other uses of its GPUs.
    """

    judged: tuple[Choice, ...]
    missing: tuple[Family, ...] = ()
    break_even_alpha: float | None = None
    break_even_p_hit: float | None = None

    @property
    def best(self) -> Choice:
        """The choice with the most tok/s among those that could be judged."""
        return self.judged[0]

    def first(self, *modes: str) -> Choice | None:
        """Returns the fastest choice in one of these modes; None if there is none."""
        return next((c for c in self.judged if c.mode in modes), None)

    def others(self, mode: str, gpus: int) -> list[Choice] | None:
        """Returns the uses of at most so many GPUs in other modes, fastest first.

        Returns None if one of them that would fit could not be judged: it may be the fastest.
        """
        if any(family.mode != mode and family.gpus <= gpus for family in self.missing):
            return None
        return [c for c in self.judged if c.mode != mode and c.gpus <= gpus]

    def other(self, mode: str, gpus: int) -> Choice | None:
        """Returns the fastest of `others`; None if there is none, or if one was not judged."""
        return next(iter(self.others(mode, gpus) or ()), None)

    @property
    def rival(self) -> Choice | None:
        """The best other use of best's GPUs; None if any use is missing."""
        return None if self.missing else self.other(self.best.mode, self.best.gpus)

    @property
    def to_probe(self) -> tuple[Choice, ...]:
        """The uses with derived times among the two fastest uses and best's rival.

        If there are any, `plan` gives no command to run.
        """
        deciding = *self.judged[:2], self.rival
        return tuple(dict.fromkeys(use for use in deciding if use and use.derived))


def plan(
    config: RunConfig,
    places: Sequence[Placement],
    gpus: int,
    unjudged: Collection[Family] = (),
    trees: bool = False,
) -> Advice:
    """Returns the advice for one batch of config.batch_size on at most `gpus` GPUs.

    Only the imposed models and the batch size of `config` are used; the search finds mode, K,
    fan-out and backup. unjudged: further uses that would fit (search.survey). trees: whether SD's
    trees are uses, too. Raises ConfigError where rounds take no time.
    """
    by_tp = {place.tp: place for place in places}
    space = COARSE if config.batch_size <= _FEW else ROUGH
    every = (c for place in places for c in candidates(config, place, gpus, space, trees=trees))
    choices = weigh(every, config, places, quick=True)
    for spaces_around in (_fan_outs_around, _policies_around):
        leaders = [c for c in by_speed(choices) if c.mode == "ssd"][:_REFINED]
        steps = dict.fromkeys(
            (leader.tp, space) for leader in leaders for space in spaces_around(leader)
        )
        finer = (
            choice for tp, space in steps for choice in ssd_choices(config, by_tp[tp], gpus, space)
        )
        choices += weigh(finer, config, places, quick=True)
    # The fastest choices of each use, one a K.
    counts, finalists = Counter[Family](), list[Choice]()
    for choice in firsts(by_speed(choices), lambda c: (Family.of(c), c.lookahead)):
        counts[Family.of(choice)] += 1
        if counts[Family.of(choice)] <= _FINALISTS:
            finalists.append(choice)
    ranked = firsts(by_speed(weigh(finalists, config, places)), Family.of)
    if any(not choice.round_us for choice in ranked):
        raise ConfigError("plan: this profile's rounds take no time: allowed: one with durations")
    judged = (replace(choice, derived=by_tp[choice.tp].label(choice)) for choice in ranked)
    advice = Advice(tuple(judged), tuple(sorted(unjudged)))
    alpha = p_hit = None
    drafting, ssd = advice.first("sd", "ssd"), advice.first("ssd")
    if drafting is not None:
        rivals = advice.others(drafting.mode, drafting.gpus)
        alpha = None if rivals is None else _break_even_alpha(drafting, rivals, config, places)
    if ssd is not None:
        rivals = advice.others("ssd", ssd.gpus)
        p_hit = None if rivals is None else _break_even_p_hit(ssd, rivals, config, by_tp[ssd.tp])
    return replace(advice, break_even_alpha=alpha, break_even_p_hit=p_hit)


def _fan_outs_around(leader: Choice) -> list[Space]:
    """Returns spaces with every fan-out at a leader's K and K ± 1, and its backup."""
    near = (leader.lookahead - 1, leader.lookahead, leader.lookahead + 1)
    share = leader.backup_lookahead / leader.lookahead
    own = replace(FULL, backup_shares=(share,), fast=(leader.backup == "fast",))
    return [replace(own, lookaheads=(k,)) for k in near if k in FULL.lookaheads]


def _policies_around(leader: Choice) -> list[Space]:
    """Returns the space of every backup and K_b at a leader's K and fan-out."""
    assert leader.fan_out is not None, leader
    return [Space((leader.lookahead,), (leader.fan_out,))]


def by_speed(choices: Iterable[Choice]) -> list[Choice]:
    """Sorts choices, fastest first; ties (to five digits) by fewer GPUs, then by smaller K."""
    return sorted(choices, key=lambda c: (-float(f"{c.tok_per_s:.5g}"), c.gpus, c.lookahead))


def firsts(choices: Iterable[Choice], kind: Callable[[Choice], Hashable]) -> list[Choice]:
    """Returns the first choice of each kind, in order; kind maps a choice to its kind."""
    first: dict[Hashable, Choice] = {}
    for choice in choices:
        first.setdefault(kind(choice), choice)
    return list(first.values())


def _repeated(choice: Choice, config: RunConfig, place: Placement) -> Grid:
    """Returns a choice once for each of the rates that are tried."""
    return grid_of([job_of(config, choice)] * len(_RATES), place, choice.method)


def _over_alpha(choice: Choice, config: RunConfig, places: Sequence[Placement]) -> Floats:
    """Returns the tok/s of a choice at each tried alpha, one rate for every drafted token."""
    if choice.mode in ("ar", LOOKUP):
        return np.full(len(_RATES), choice.tok_per_s)
    if choice.mode == "sd":
        tokens = np.array([expected_tokens(rate, choice.lookahead) for rate in _RATES])
        return np.asarray(choice.batch_size * tokens / (choice.round_us * 1e-6))
    grid = _repeated(choice, config, next(place for place in places if place.tp == choice.tp))
    hazards = np.tile(_RATES[:, None], (1, choice.lookahead))
    if choice.mode == TREE:
        job = job_of(config, choice)
        laws = (positional((rate,) * job.lookahead, job.hit_law, job.tree.width) for rate in _RATES)
        hazards = np.array([job.tree.rates(law) for law in laws])
    return expect(replace(grid, hazards=hazards)).tok_per_s


def _break_even_alpha(
    choice: Choice, rivals: Sequence[Choice], config: RunConfig, places: Sequence[Placement]
) -> float | None:
    """Returns the alpha, one for every drafted token, above which `choice` beats its rivals.

    If it wins under the given models, that is the rate below which it stops winning (0.0: it
    always wins); if it loses, the rate above which it wins (None: it never does). The choice
    and rivals of SSD keep their parameters; SD has its best K at each rate.
    """
    if choice.mode != "sd":
        tuned = (
            sd
            for place in places
            for sd in candidates(config, place, choice.gpus, FULL)
            if sd.mode == "sd"
        )
        rivals = [*(rival for rival in rivals if rival.mode != "sd"), *weigh(tuned, config, places)]
    if not rivals:
        return 0.0
    best = np.max([_over_alpha(rival, config, places) for rival in rivals], axis=0)
    tokens = expected_tokens_from_rates(job_of(config, choice).acceptance[Source.CACHE].hazards)
    lengths = np.array([expected_tokens(rate, choice.lookahead) for rate in _RATES])
    now = int(np.abs(lengths - tokens).argmin())
    return _crossing(np.log(_over_alpha(choice, config, places) / best), now)


def _break_even_p_hit(
    ssd: Choice, rivals: Sequence[Choice], config: RunConfig, place: Placement
) -> float | None:
    """Returns the hit rate, for every k, above which `ssd` beats its rivals; 0.0: always, None:
    never."""
    if not rivals:
        return 0.0
    grid = _repeated(ssd, config, place)
    p_hit = np.broadcast_to(_RATES[:, None, None, None], grid.p_hit.shape)
    rates = expect(replace(grid, p_hit=p_hit)).tok_per_s
    return _crossing(np.log(rates / rivals[0].tok_per_s), 0)


def _crossing(advantage: Floats, now: int) -> float | None:
    """Returns where the advantage turns positive: last before `now` if winning there, or first
    after."""
    wins = advantage > 0
    turns = np.flatnonzero(~wins[:now]) if wins[now] else np.flatnonzero(wins[now:]) + now - 1
    if not len(turns):
        return 0.0 if wins[now] else None
    at = int(turns[-1] if wins[now] else turns[0])  # loses at this rate, and wins at the next
    loss, gain = -advantage[at], advantage[at + 1]
    return float(_RATES[at] + loss / (loss + gain) * (_RATES[at + 1] - _RATES[at]))


@dataclass(frozen=True)
class Copies:
    """As many copies of one choice as fit on N GPUs, each with a batch of its own."""

    choice: Choice
    copies: int

    @classmethod
    def most(cls, choices: Iterable[Choice], gpus: int) -> Copies:
        """Returns the choice with the most tok/s on N GPUs; ties: the earliest tokens."""
        fitting = (cls(c, gpus // c.gpus) for c in choices)
        return min(fitting, key=lambda one: (-one.tok_per_s, one.token_s, one.gpus))

    @property
    def gpus(self) -> int:
        """The GPUs that all copies occupy; the rest of the N idles."""
        return self.copies * self.choice.gpus

    @property
    def tok_per_s(self) -> float:
        """The tok/s of all copies."""
        return self.copies * self.choice.tok_per_s

    @property
    def token_s(self) -> float:
        """Mean seconds between two tokens of a sequence."""
        return self.choice.batch_size / self.choice.tok_per_s

    def __str__(self) -> str:
        """Returns the name in tables: SSD T=1 D=1 × 2."""
        name = str(Family.of(self.choice))
        return f"{name} × {self.copies}" if self.copies > 1 else name

    def to_dict(self) -> dict[str, Any]:
        """Returns the copies as JSON, over the choice of each."""
        return {
            **asdict(self.choice),
            "copies": self.copies,
            "gpus": self.gpus,
            "tok_per_s": self.tok_per_s,
            "token_ms": self.token_s * 1e3,
        }
