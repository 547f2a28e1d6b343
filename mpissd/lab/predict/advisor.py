"""Finds which mode, T, D, K, fan-out and backup to run on given GPUs, and what N GPUs give in all.

`plan` searches the simulation coarsely, then finely around the best few; a test compares it with
the exhaustive search of FULL. All results come from costs and imposed models:

    places = survey(config, load_profile("h100"), gpus=4).placements
    advice = plan(config, places, gpus=4)

N GPUs hold as many copies of a use as fit, each with a batch of its own, and the rest of them
idles; so all uses are compared by the tokens a second of all copies, over the same N GPUs. A pool
of targets that share a draft trades a later token for a GPU: with a draft of its own a sequence is
faster; SD inline shares no draft. So the uses that are best in tok/s or time a token (the Pareto
frontier) are listed, and each pool among them is compared with the strongest other use whose tokens
arrive no later, and with the most tok/s of all.

Candidates of a pool are ranked under a draft on which all targets are always seated, and under one
with a third of them; the best few of both are simulated as pools with the same draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.rivals import Family
from mpissd.common.rounds import Source
from mpissd.common.theory import expected_tokens, expected_tokens_from_rates
from mpissd.engine.backend.profile import Profile
from mpissd.lab.predict.costs import Floats, HostCosts, RowTable
from mpissd.lab.predict.derive import with_derived
from mpissd.lab.predict.grid import Grid
from mpissd.lab.predict.pool import Pool, simulate
from mpissd.lab.predict.search import (
    COARSE,
    FULL,
    LOOKUP,
    ROUGH,
    Choice,
    Placement,
    Space,
    candidates,
    fan_outs,
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
MOST_TARGETS = 64  # the most targets of a pool that `plan` judges
_POOL_SPACE = Space(
    (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16),
    fan_outs((1, 2, 3, 5, 9), (4, 8, 16, 32, 64)),
    (0.5, 1.0),
)
_COPIES = (1, 2, 3, 4, 6, 8)
_SIMULATED = 3  # candidates of each number of targets and of seated ones
_RANKED, _ROUNDS = 500, 2000  # rounds to rank candidates, and of the best; of all targets together
_LEAST_ROUNDS = 50  # a target


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
) -> Advice:
    """Returns the advice for one batch of config.batch_size on at most `gpus` GPUs.

    Only the imposed models and the batch size of `config` are used; the search finds mode, K,
    fan-out and backup. unjudged: further uses that would fit (search.survey). Raises ConfigError
    without placements or GPUs, and where rounds take no time.
    """
    if gpus < 1 or not places:
        raise ConfigError(f"plan: {len(places)} placements on {gpus} GPUs: allowed: 1 or more")
    by_tp = {place.tp: place for place in places}
    space = COARSE if config.batch_size <= _FEW else ROUGH
    every = (c for place in places for c in candidates(config, place, gpus, space))
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
class Use:
    """Equal copies of one use on N GPUs. choice: of one target. targets: G of a copy, 1 unless a
    pool. gpus: GPUs of all copies together; the rest of the N idles.

    token_s: mean seconds between two tokens of a sequence. wait_s: a lead's mean wait for its
    speculation, of a pool.
    """

    choice: Choice
    targets: int
    copies: int
    tok_per_s: float
    token_s: float
    wait_s: float | None = None

    @property
    def gpus(self) -> int:
        """The GPUs that all copies occupy."""
        return self.copies * (self.targets * self.choice.tp + self.choice.num_drafts)

    @property
    def is_pool(self) -> bool:
        """Whether several targets share a draft."""
        return self.targets > 1

    def __str__(self) -> str:
        """Returns the name in tables: SSD T=1 G=4 D=1 × 2."""
        name = str(Family.of(self.choice))
        if self.is_pool:
            name = name.replace(" D=", f" G={self.targets} D=")
        return f"{name} × {self.copies}" if self.copies > 1 else name

    def to_dict(self) -> dict[str, Any]:
        """Returns the use as JSON; its choice is one target's."""
        return {
            **asdict(self.choice),
            "targets": self.targets,
            "copies": self.copies,
            "gpus": self.gpus,
            "tok_per_s": self.tok_per_s,
            "token_ms": self.token_s * 1e3,
            "wait_us": None if self.wait_s is None else self.wait_s * 1e6,
        }


def replicas(choices: Iterable[Choice], gpus: int) -> list[Use]:
    """Returns each choice in as many copies as fit on N GPUs."""
    return [
        Use(c, 1, n, n * c.tok_per_s, c.batch_size / c.tok_per_s)
        for c in choices
        if (n := gpus // c.gpus)
    ]


def sizes(tp: int, gpus: int) -> list[int]:
    """Returns the numbers of targets a draft that fill N GPUs with a few copies of a pool."""
    counts = {(gpus // copies - 1) // tp for copies in _COPIES}
    return sorted(n for n in counts if 2 <= n <= MOST_TARGETS)


def pools(config: RunConfig, profile: Profile, places: Sequence[Placement], gpus: int) -> list[Use]:
    """Returns the fastest pool of every T and G that fills N GPUs."""
    uses = []
    for place in places:
        host = place.host(("ssd", 1))
        if 1 not in place.num_drafts or host is None:
            continue
        for targets in sizes(place.tp, gpus):
            pool = _fastest(config, profile, place, host, targets)
            if pool is not None:
                copies = gpus // (targets * place.tp + 1)
                uses.append(replace(pool, copies=copies, tok_per_s=pool.tok_per_s * copies))
    return uses


def _fastest(
    config: RunConfig, profile: Profile, place: Placement, host: HostCosts, targets: int
) -> Use | None:
    """Returns the fastest pool of G targets on one placement, simulated; None if none can run."""
    device, batch = place.device, config.batch_size
    assert device.draft is not None, "a placement of pairs"

    def crowded(table: RowTable, seated: int) -> RowTable:
        """Returns seconds by one target's rows, of forwards with the rows of all seated targets."""
        few = None if table.few is None else crowded(table.few, seated)
        seconds = tuple(table(seated * np.array(table.rows)).tolist())
        return RowTable(table.rows, seconds, few, table.few_rows // seated)

    choices: dict[Choice, None] = {}  # the fastest of each number of seated targets, one a K
    for seated in sorted({targets, -(-targets // 3)}):
        lists = tuple((k, crowded(table, seated)) for k, table in device.lists)
        shared = replace(device, draft=crowded(device.draft, seated), lists=lists)
        crowd = replace(place, device=shared)
        every = weigh(
            ssd_choices(config, place, place.tp + 1, _POOL_SPACE), config, [crowd], quick=True
        )
        ranked = firsts(by_speed(every), lambda choice: choice.lookahead)[:_SIMULATED]
        choices |= {replace(c, tok_per_s=0.0, round_us=0.0, hit_rate=None): None for c in ranked}

    def simulated(choice: Choice, rounds: int) -> Use:
        job = job_of(config, choice)
        known = with_derived(profile, job.target_shard, batch, job.options)
        pool = Pool.of(job, targets, known, host)
        means = simulate(pool, max(_LEAST_ROUNDS, rounds // targets), config.seed)
        rate, round_us = means.tok_per_s / targets, means.round_s * 1e6
        one = replace(choice, tok_per_s=rate, round_us=round_us, hit_rate=means.hit_rate)
        return Use(one, targets, 1, means.tok_per_s, batch / rate, means.wait_s)

    tried = [(simulated(choice, _RANKED).tok_per_s, n) for n, choice in enumerate(choices)]
    if not tried:
        return None
    best = simulated(list(choices)[max(tried)[1]], _ROUNDS)
    return replace(best, choice=replace(best.choice, derived=place.label(best.choice)))


def frontier(uses: Sequence[Use]) -> list[Use]:
    """Returns the Pareto frontier of tok/s and time a token, most tok/s first."""
    kept: list[Use] = []
    for use in sorted(uses, key=lambda u: (-u.tok_per_s, u.token_s, u.gpus)):
        if not kept or use.token_s < kept[-1].token_s:
            kept.append(use)
    return kept


def rivals_of(pool: Use, uses: Sequence[Use]) -> dict[str, Use | None]:
    """Returns the uses that a pool is compared with, of those that share no draft; None: none.

    in_time: among the uses whose sequences get their tokens no later, the one with most tok/s.
    most: the use with the most tok/s of all. each: SSD with a draft for every target, at the same
    T.
    """
    others = sorted((u for u in uses if not u.is_pool), key=lambda u: -u.tok_per_s)
    in_time = (u for u in others if u.token_s <= pool.token_s)
    each = (u for u in others if u.choice.mode == "ssd" and u.choice.tp == pool.choice.tp)
    return {
        "in_time": next(in_time, None),
        "most": next(iter(others), None),
        "each": next(each, None),
    }


def best_pool(uses: Sequence[Use]) -> Use | None:
    """Returns the frontier's pool with the largest gain over its rival `in_time`; None without
    one."""

    def gain(pool: Use) -> float:
        rival = rivals_of(pool, uses)["in_time"]
        return 0.0 if rival is None else pool.tok_per_s / rival.tok_per_s

    return max((use for use in frontier(uses) if use.is_pool), key=gain, default=None)


def summary(uses: Sequence[Use]) -> dict[str, Any] | None:
    """Returns a plan's JSON: the uses on the frontier, and the gains of its pools; None without
    pools."""
    if not any(use.is_pool for use in uses):
        return None
    best, gains = frontier(uses), []
    for pool in best:
        if pool.is_pool:
            others = {
                name: use and {**use.to_dict(), "gain": pool.tok_per_s / use.tok_per_s}
                for name, use in rivals_of(pool, uses).items()
            }
            gains.append({"pool": pool.to_dict(), **others})
    return {"frontier": [use.to_dict() for use in best], "gains": gains}
