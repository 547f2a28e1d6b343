"""Finds which mode, T, D, K, fan-out and backup to run on given GPUs, and the gain of one more GPU.

`plan` searches the simulation coarsely, then finely around the best few; a test compares it with
the exhaustive search of FULL. All results come from costs and imposed models:

    profile = load_profile("h100")
    places = places.survey(config, profile, gpus=4).placements
    advice = plan(config, HostCosts(), places, gpus=4)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.rivals import Family, Others, other_uses
from mpissd.lab.predict.costs import HostCosts
from mpissd.lab.predict.search import (
    COARSE,
    FULL,
    ROUGH,
    Choice,
    Laws,
    Placement,
    Scales,
    Space,
    candidates,
    ssd_choices,
)

_FEW = 8  # largest batch for which a configuration is cheap to evaluate
_REFINED = 3  # number of coarse SSD choices that the fine search starts from
_FINALISTS = 4  # choices of each use that are simulated for more rounds


@dataclass(frozen=True)
class ExtraGpu:
    """The gains of SSD over other uses of the GPU that its draft occupies.

    ssd: the best SSD, on N = T + D GPUs. without: the best other use of N − 1 GPUs. otherwise: the
    best other use of N GPUs (a larger T, or SD's draft). A field is None if there is no such use,
    or if not all that would fit could be judged.
    """

    ssd: Choice
    without: Choice | None
    otherwise: Choice | None

    @property
    def gain(self) -> float | None:
        """SSD's tok/s over the best use's on one GPU less."""
        return None if self.without is None else self.ssd.tok_per_s / self.without.tok_per_s

    @property
    def gain_per_gpu(self) -> float | None:
        """The ratio of `gain`, with both sides in tok/s per GPU."""
        if self.without is None:
            return None
        return self.ssd.tok_per_s_per_gpu / self.without.tok_per_s_per_gpu

    @property
    def gain_at_equal_gpus(self) -> float | None:
        """SSD's tok/s over the best other use's on as many GPUs, for one batch."""
        return None if self.otherwise is None else self.ssd.tok_per_s / self.otherwise.tok_per_s


@dataclass(frozen=True)
class Advice:
    """The advice of `plan`; each choice records whether its times are derived.

    judged: the fastest choice of each mode, T and D, fastest first. missing: uses that would fit
    but could not be judged (plan's unjudged). break_even_alpha: for the best choice that drafts;
    break_even_p_hit: for the best SSD; each against the other uses of its GPUs (Scales).
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

    def others(self, mode: str, gpus: int) -> Others[Choice]:
        """Returns the uses of this many GPUs in other modes."""
        return other_uses(mode, gpus, self.judged, self.missing)

    @property
    def rival(self) -> Choice | None:
        """The best other use of best's GPUs (rivals.py); None if any use is missing."""
        return None if self.missing else self.others(self.best.mode, self.best.gpus).best

    @property
    def gain(self) -> float | None:
        """The ratio best / rival in tok/s; None without a rival."""
        return None if self.rival is None else self.best.tok_per_s / self.rival.tok_per_s

    @property
    def extra_gpu(self) -> ExtraGpu | None:
        """The gains of the best SSD; None without SSD."""
        ssd = self.first("ssd")
        if ssd is None:
            return None
        return ExtraGpu(ssd, *(self.others("ssd", ssd.gpus - less).best for less in (1, 0)))

    @property
    def to_probe(self) -> tuple[Choice, ...]:
        """Those of the two fastest uses and of best's rival whose times are derived.

        If there are any, `plan` gives no command to run.
        """
        deciding = *self.judged[:2], self.rival
        return tuple(dict.fromkeys(use for use in deciding if use and use.derived))


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
    scales, batch = Scales(Laws.of(config), host, places), config.batch_size
    space = COARSE if batch <= _FEW else ROUGH
    every = (c for p in places for c in candidates(p, scales.laws, batch, gpus, space))
    choices = scales.weigh(every, quick=True)
    for around in (_fan_outs, _policies):
        leaders = [c for c in by_speed(choices) if c.mode == "ssd"][:_REFINED]
        steps = dict.fromkeys(step for leader in leaders for step in around(leader))
        finer = (
            choice
            for tp, space in steps
            for choice in ssd_choices(scales.place(tp), scales.laws, batch, gpus, space)
        )
        choices += scales.weigh(finer, quick=True)
    ranked = by_speed(scales.weigh(_finalists(choices)))
    judged = (replace(c, derived=scales.place(c.tp).label(c)) for c in firsts(ranked, Family.of))
    return _with_break_evens(Advice(tuple(judged), tuple(sorted(unjudged))), scales)


def _finalists(choices: Iterable[Choice]) -> list[Choice]:
    """Returns the fastest choices of each use, one a K."""
    counts, finalists = Counter[Family](), list[Choice]()
    for choice in firsts(by_speed(choices), lambda c: (Family.of(c), c.lookahead)):
        counts[Family.of(choice)] += 1
        if counts[Family.of(choice)] <= _FINALISTS:
            finalists.append(choice)
    return finalists


def _with_break_evens(advice: Advice, scales: Scales) -> Advice:
    """Adds the break-even rates whose rivals are all judged."""
    drafting, ssd = advice.first("sd", "ssd"), advice.first("ssd")
    alpha = p_hit = None
    if drafting is not None:
        mode, gpus = drafting.method[0], drafting.gpus
        rivals = [c for c in advice.judged if c.mode != mode and c.gpus <= gpus]
        if not advice.others(mode, gpus).missing:
            alpha = scales.break_even_alpha(drafting, rivals)
    if ssd is not None:
        others = advice.others("ssd", ssd.gpus)
        if not others.missing:
            p_hit = scales.break_even_p_hit(ssd, others.best)
    return replace(advice, break_even_alpha=alpha, break_even_p_hit=p_hit)


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


def firsts(choices: Iterable[Choice], kind: Callable[[Choice], Hashable]) -> list[Choice]:
    """Returns the first choice of each kind, in order; kind maps a choice to its kind."""
    first: dict[Hashable, Choice] = {}
    for choice in choices:
        first.setdefault(kind(choice), choice)
    return list(first.values())
