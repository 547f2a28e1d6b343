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
from dataclasses import dataclass, replace

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.rivals import Family
from mpissd.lab.predict.search import (
    COARSE,
    FULL,
    ROUGH,
    Choice,
    Space,
    TargetRanks,
    candidates,
    ssd_choices,
    weigh,
)

_FEW = 8  # largest batch for which a configuration is cheap to evaluate
_REFINED = 3  # number of coarse SSD choices that the fine search starts from
_FINALISTS = 4  # choices of each use that are simulated for more rounds


@dataclass(frozen=True)
class Advice:
    """The advice of `plan`; each choice records whether its times are derived.

    judged: the fastest choice of each mode, T and D, fastest first. missing: uses that would fit
    but could not be judged (plan's unjudged).
    """

    judged: tuple[Choice, ...]
    missing: tuple[Family, ...] = ()

    @property
    def best(self) -> Choice:
        """The choice with the most tok/s among those that could be judged."""
        return self.judged[0]

    def first(self, *modes: str) -> Choice | None:
        """Returns the fastest choice in one of these modes; None if there is none."""
        return next((c for c in self.judged if c.mode in modes), None)

    def other(self, mode: str, gpus: int) -> Choice | None:
        """Returns the fastest use of at most so many GPUs in another mode.

        None if there is none, or if one that would fit was not judged: it may be the fastest.
        """
        if any(family.mode != mode and family.gpus <= gpus for family in self.missing):
            return None
        return next((c for c in self.judged if c.mode != mode and c.gpus <= gpus), None)

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
    places: Sequence[TargetRanks],
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
    return Advice(tuple(judged), tuple(sorted(unjudged)))


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


def most_in_all(choices: Iterable[Choice], gpus: int) -> tuple[Choice, int]:
    """Returns the choice whose copies make the most tok/s on N GPUs, and how many copies fit.

    Each copy has a batch of its own, and GPUs that are left idle. Ties: the earliest tokens.
    """

    def order(choice: Choice) -> tuple[float, float, int]:
        copies = gpus // choice.gpus
        return (
            -copies * choice.tok_per_s,
            choice.batch_size / choice.tok_per_s,
            copies * choice.gpus,
        )

    best = min(choices, key=order)
    return best, gpus // best.gpus
