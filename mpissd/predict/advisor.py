"""Which mode, T, D, K, fan-out and backup to run on given GPUs, and what an extra GPU brings.

`plan` searches the closed model coarsely, then finely around the best few; `best_of` with FULL is
the exhaustive search that it is held against. Everything comes from costs and laws alone:

    profile = load_profile("h100")
    places = places.placements(config, profile, gpus=4)
    advice = plan(config, HostCosts(), places, gpus=4)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from mpissd.config import RunConfig
from mpissd.errors import ConfigError
from mpissd.predict.breakeven import break_even_alpha, break_even_p_hit
from mpissd.predict.costs import HostCosts
from mpissd.predict.search import (
    COARSE,
    FULL,
    MOST_LOOKAHEAD,
    ROUGH,
    Choice,
    Group,
    Laws,
    Placement,
    Space,
    ar_choice,
    sd_groups,
    ssd_groups,
)

_FEW = 16  # sequences, whose configurations are cheap to evaluate
_REFINED = 3  # coarse SSD choices that are searched finely around


@dataclass(frozen=True)
class ExtraGpu:
    """What the GPU that SSD's draft takes would bring elsewhere.

    ssd: on N = T + D GPUs. without: the best of the other modes on at most N − 1. otherwise: the
    best of them on at most N (a larger T, or SD's draft). replicas_tok_per_s: of as many copies of
    one of them as N GPUs hold, each with a batch of its own.
    """

    ssd: Choice
    without: Choice | None
    otherwise: Choice | None
    replicas_tok_per_s: float | None

    @property
    def gain(self) -> float | None:
        """ssd / without: raw, one GPU more."""
        return None if self.without is None else self.ssd.tok_per_s / self.without.tok_per_s

    @property
    def gain_per_gpu(self) -> float | None:
        """The same in tokens a second and GPU."""
        if self.without is None:
            return None
        return self.ssd.tok_per_s_per_gpu / self.without.tok_per_s_per_gpu

    @property
    def gain_at_equal_gpus(self) -> float | None:
        """ssd / otherwise: one batch, as fast as possible, on as many GPUs."""
        return None if self.otherwise is None else self.ssd.tok_per_s / self.otherwise.tok_per_s

    @property
    def gain_over_replicas(self) -> float | None:
        """ssd / replicas: the same GPUs, more batches instead of a faster one."""
        rival = self.replicas_tok_per_s
        return None if rival is None else self.ssd.tok_per_s / rival


@dataclass(frozen=True)
class Advice:
    """What to run.

    best: most tokens a second on at most the GPUs given. by_method: the best of AR, SD inline, SD
    and SSD. alternatives: the next two ways to run best's mode, with another T or K. rival: the
    best of the other modes on no more GPUs than best. break_even_alpha: of the best choice that
    drafts, break_even_p_hit: of the best SSD, each against the other modes on no more GPUs (see
    breakeven).
    """

    best: Choice
    by_method: tuple[Choice, ...]
    alternatives: tuple[Choice, ...]
    rival: Choice | None
    break_even_alpha: float | None
    break_even_p_hit: float | None
    extra_gpu: ExtraGpu | None
    num_evaluated: int

    @property
    def gain(self) -> float | None:
        """best / rival in tokens a second."""
        return None if self.rival is None else self.best.tok_per_s / self.rival.tok_per_s


def plan(config: RunConfig, host: HostCosts, places: Sequence[Placement], gpus: int) -> Advice:
    """The advice for one batch of config.batch_size on at most `gpus` GPUs.

    Of `config` the laws and the batch size count; mode, K, fan-out and backup are what is sought.
    """
    if gpus < 1 or not places:
        raise ConfigError(f"plan: {len(places)} placements on {gpus} GPUs: allowed: 1 or more")
    laws = Laws.of(config)
    search = _Search(laws, config.batch_size, host, gpus)
    choices = search.run(places, COARSE if config.batch_size <= _FEW else ROUGH)
    for around in (_fan_outs, _policies):
        leaders = [c for c in _ranked(choices) if c.mode == "ssd"][:_REFINED]
        for tp, space in dict.fromkeys(step for leader in leaders for step in around(leader)):
            choices += search.ssd(next(p for p in places if p.tp == tp), space)
    return _advice(_ranked(choices), laws, host, places, search.num_evaluated)


def _advice(
    choices: Sequence[Choice],
    laws: Laws,
    host: HostCosts,
    places: Sequence[Placement],
    num_evaluated: int,
) -> Advice:
    """The advice that ranked choices amount to."""
    best = choices[0]
    same = [choice for choice in choices if choice.mode == best.mode]
    rivals = _others(choices, best.mode, best.gpus)
    drafting = next((c for c in choices if c.mode != "ar"), None)
    ssd = next((c for c in choices if c.mode == "ssd"), None)
    alpha = p_hit = None
    if drafting is not None:
        others = _others(choices, drafting.mode, drafting.gpus)
        alpha = break_even_alpha(drafting, others, laws, host, places)
    if ssd is not None:
        others = _others(choices, "ssd", ssd.gpus)
        p_hit = break_even_p_hit(ssd, others[0] if others else None, laws, host, places)
    return Advice(
        best=best,
        by_method=tuple(_firsts(choices, lambda c: c.method)),
        alternatives=tuple(_firsts(same, lambda c: (c.tp, c.lookahead))[1:3]),
        rival=rivals[0] if rivals else None,
        break_even_alpha=alpha,
        break_even_p_hit=p_hit,
        extra_gpu=None if ssd is None else _extra_gpu(ssd, choices),
        num_evaluated=num_evaluated,
    )


def best_of(
    config: RunConfig,
    host: HostCosts,
    places: Sequence[Placement],
    gpus: int,
    space: Space = FULL,
) -> Choice:
    """The best choice of a whole space: exhaustive, seconds for large batches."""
    return _ranked(_Search(Laws.of(config), config.batch_size, host, gpus).run(places, space))[0]


@dataclass
class _Search:
    laws: Laws
    batch: int
    host: HostCosts
    gpus: int
    num_evaluated: int = 0

    def run(self, places: Iterable[Placement], space: Space) -> list[Choice]:
        """The best of every group of a space on every placement; AR always has one."""
        choices = []
        for place in places:
            if place.tp > self.gpus:
                continue
            choices.append(ar_choice(place, self.batch, self.host))
            lookaheads = range(1, MOST_LOOKAHEAD + 1)
            choices += self._bests(sd_groups(place, self.laws, self.batch, lookaheads))
            choices += self.ssd(place, space)
        return choices

    def ssd(self, place: Placement, space: Space) -> list[Choice]:
        """The best SSD of every K of a space."""
        return self._bests(ssd_groups(place, self.laws, self.batch, space))

    def _bests(self, groups: Iterator[Group]) -> list[Choice]:
        choices = []
        for group in groups:
            if group.place.tp + group.method[1] <= self.gpus:
                found = group.expect(self.host)
                self.num_evaluated += len(group.cells)
                choices.append(group.choice(int(found.tok_per_s.argmax()), found))
        return choices


def _fan_outs(leader: Choice) -> list[tuple[int, Space]]:
    """Every fan-out at a leader's K and the next to it, with its policy; by T."""
    near = (leader.lookahead - 1, leader.lookahead, leader.lookahead + 1)
    share = leader.backup_lookahead / leader.lookahead
    policy = leader.backup == "fast", leader.on_late == "serve"
    own = replace(FULL, backup_shares=(share,), policies=(policy,))
    return [(leader.tp, replace(own, lookaheads=(k,))) for k in near if k in FULL.lookaheads]


def _policies(leader: Choice) -> list[tuple[int, Space]]:
    """Every backup, K_b and lateness at a leader's K and fan-out; by T."""
    assert leader.fan_out is not None, leader
    return [(leader.tp, Space((leader.lookahead,), (leader.fan_out,)))]


def _ranked(choices: Iterable[Choice]) -> list[Choice]:
    """Fastest first; of equals (to five digits) the fewer GPUs, then the shorter K."""
    return sorted(choices, key=lambda c: (-float(f"{c.tok_per_s:.5g}"), c.gpus, c.lookahead))


def _others(choices: Iterable[Choice], mode: str, gpus: int) -> list[Choice]:
    """Choices of other modes on at most so many GPUs, fastest first."""
    return _ranked(c for c in choices if c.mode != mode and c.gpus <= gpus)


def _firsts(choices: Iterable[Choice], kind: Callable[[Choice], Hashable]) -> list[Choice]:
    """The first of every kind, in order."""
    found: dict[Hashable, Choice] = {}
    for choice in choices:
        found.setdefault(kind(choice), choice)
    return list(found.values())


def _extra_gpu(ssd: Choice, choices: Sequence[Choice]) -> ExtraGpu:
    count = ssd.gpus
    without, otherwise = _others(choices, "ssd", count - 1), _others(choices, "ssd", count)
    copies = [(count // c.gpus) * c.tok_per_s for c in otherwise]
    return ExtraGpu(
        ssd=ssd,
        without=without[0] if without else None,
        otherwise=otherwise[0] if otherwise else None,
        replicas_tok_per_s=max(copies) if copies else None,
    )
