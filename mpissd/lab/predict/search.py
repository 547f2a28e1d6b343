"""The configurations that `plan` weighs: every mode, K, fan-out and backup on T target ranks.

A Space lists the K, fan-outs and K_b to try. FULL is the exhaustive grid; the advisor starts from
COARSE, or from ROUGH for large batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.theory import expected_tokens, expected_tokens_from_rates
from mpissd.engine.spec.acceptance import HitLaw, hit_law_of, load_laws, resolve_acceptance
from mpissd.engine.spec.fanout import MAX_BRANCHES, resolve_fan_out
from mpissd.lab.predict.costs import DeviceCosts, Floats, HostCosts
from mpissd.lab.predict.grid import Config, Grid
from mpissd.lab.predict.simulation import expect

MOST_LOOKAHEAD = 16
LOOKUP = "lookup"  # SD whose drafts are looked up in the sequence itself, without a model
_RATES = np.linspace(0.0, 1.0, 101)  # tried for a break-even


@dataclass(frozen=True)
class Laws:
    """Acceptance rates ("hazards") and the hit model at every K, and the most candidates.

    hazards, hazards_fast, hits: by K, from 1. most_candidates limits what a row may keep (an LM
    head returns only its top 64).
    """

    hazards: tuple[tuple[float, ...], ...]
    hazards_fast: tuple[tuple[float, ...], ...]
    hits: tuple[HitLaw, ...]
    most_candidates: int = MAX_BRANCHES

    @classmethod
    def of(cls, config: RunConfig) -> Laws:
        """Returns the models of a configuration; a list of rates, or a --laws file, limits K to its
        length."""
        texts = config.acceptance_text, config.acceptance_fast_text
        each = range(1, min(_length(text) for text in texts) + 1)
        hazards, fast = (
            tuple(resolve_acceptance(cut_law(text, most), most).hazards for most in each)
            for text in texts
        )
        hits = tuple(hit_law_of(config, most) for most in each)
        has_head = config.lm_head or config.is_transformer
        return cls(hazards, fast, hits, 63 if has_head else MAX_BRANCHES)

    @property
    def longest(self) -> int:
        """The longest K that the models cover."""
        return len(self.hits)


def _length(text: str) -> int:
    """Returns the longest K that an acceptance model covers, up to MOST_LOOKAHEAD."""
    kind, _, values = text.strip().partition(":")
    if kind in ("laws", "prompt", "suffix"):
        return min(load_laws(values).longest_fitted, MOST_LOOKAHEAD)
    listed = values.count(",") + 1 if kind in ("rates", "marginal") else MOST_LOOKAHEAD
    return min(listed, MOST_LOOKAHEAD)


def cut_law(text: str, most: int) -> str:
    """Shortens a list of rates to `most` values; returns any other text unchanged."""
    kind, _, values = text.strip().partition(":")
    if kind not in ("rates", "marginal"):
        return text
    return f"{kind}:{','.join(values.split(',')[:most])}"


@dataclass(frozen=True)
class Choice:
    """One configuration with its expected rates; `derived` is its placement's label for it."""

    mode: str
    tp: int
    num_drafts: int
    batch_size: int
    lookahead: int = 0
    fan_out: str | None = None
    backup: str = "jit"  # the drafter after a miss
    backup_lookahead: int = 0
    tok_per_s: float = 0.0
    round_us: float = 0.0
    hit_rate: float | None = None
    derived: str | None = None

    @property
    def gpus(self) -> int:
        """The number of GPUs, T + D."""
        return self.tp + self.num_drafts

    @property
    def tok_per_s_per_gpu(self) -> float:
        """Throughput divided by the number of GPUs."""
        return self.tok_per_s / self.gpus

    @property
    def method(self) -> tuple[str, int]:
        """(mode, D), which distinguishes SD inline from SD on a rank of its own."""
        return self.mode, self.num_drafts

    def flags(self) -> dict[str, str]:
        """Returns the flags of `mpissd run` for this choice, except pair and token models."""
        flags = {"mode": self.mode, "num_drafts": str(self.num_drafts)}
        if self.mode == LOOKUP:
            flags |= {"mode": "sd", "backup": "fast"}
        if self.mode != "ar":
            flags["lookahead"] = str(self.lookahead)
        if self.fan_out is not None:
            flags |= {"fan_out": self.fan_out, "backup": self.backup}
            flags["backup_lookahead"] = str(self.backup_lookahead)
        return flags


@dataclass(frozen=True)
class Placement:
    """T target ranks with their forwards.

    label: returns the origin of a derived choice, None if its parts were measured. hosts: the
    host's costs by (mode, D of 0 or 1); None: not known; a missing key: the search's own costs.
    most_rows: of the largest forward whose time is known well enough to advise it (None: any). A
    lookup has the host's costs of SD inline.
    """

    tp: int
    device: DeviceCosts
    num_drafts: tuple[int, ...] = (0, 1)  # The numbers of drafts for which this machine has memory.
    label: Callable[[Choice], str | None] = lambda _: None
    hosts: Mapping[tuple[str, int], HostCosts | None] = field(default_factory=dict)
    most_rows: int | None = None

    def host(self, method: tuple[str, int], otherwise: HostCosts) -> HostCosts:
        """Returns the host's costs of a method (mode, D), which must be known."""
        costs = self.hosts.get(_way(method), otherwise)
        assert costs is not None, method
        return costs

    def judges(self, method: tuple[str, int]) -> bool:
        """Returns whether the host's costs of a method (mode, D) are known."""
        return self.hosts.get(_way(method), HostCosts()) is not None


def _way(method: tuple[str, int]) -> tuple[str, int]:
    """Returns the (mode, D) whose host costs a method has."""
    mode, drafts = method
    return ("sd", 0) if mode == LOOKUP else (mode, min(drafts, 1))


@dataclass(frozen=True)
class Space:
    """The values that are tried of each parameter of SSD.

    K_b: shares of K, rounded up (None: every value in 1..K). fast: whether backup=fast.
    """

    lookaheads: tuple[int, ...]
    fan_outs: tuple[str, ...]
    backup_shares: tuple[float, ...] | None = None
    fast: tuple[bool, ...] = (False, True)

    def backups(self, lookahead: int) -> Sequence[int]:
        """Returns the K_b to try at a K."""
        if self.backup_shares is None:
            return range(1, lookahead + 1)
        return sorted({max(1, math.ceil(s * lookahead - 1e-9)) for s in self.backup_shares})


def fan_outs(uniform: Iterable[int], budgets: Iterable[int]) -> tuple[str, ...]:
    """Returns uniform:F and geometric:B as --fan_out takes them."""
    return (*(f"uniform:{f}" for f in uniform), *(f"geometric:{b}" for b in budgets))


_BUDGETS = (4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)
FULL = Space(tuple(range(1, 1 + MOST_LOOKAHEAD)), fan_outs(range(1, 11), _BUDGETS))
COARSE = Space(
    (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16),
    fan_outs((1, 2, 3, 5, 9), (8, 16, 32, 64)),
    (0.0, 0.25, 0.5, 1.0),
)
ROUGH = Space(  # For large batches, because a configuration's time grows with its sequences.
    (1, 2, 3, 4, 6, 8, 12, 16),
    fan_outs((1, 3, 9), (8, 24, 64)),
    (0.25, 1.0),
)


def candidates(
    place: Placement, laws: Laws, batch: int, gpus: int, space: Space
) -> Iterator[Choice]:
    """Yields the choices of every mode on a placement: AR, SD and lookups at every K, and SSD.

    There are no lookups if their acceptance is 0: each round would be one of AR with more rows.
    """
    if place.tp > gpus:
        return
    if place.judges(("ar", 0)):
        yield Choice("ar", place.tp, 0, batch)
    for k in range(1, laws.longest + 1):
        for drafts in place.num_drafts:
            if place.tp + drafts <= gpus and place.judges(("sd", drafts)):
                yield Choice("sd", place.tp, drafts, batch, k, backup_lookahead=k)
        if place.judges((LOOKUP, 0)) and laws.hazards_fast[k - 1][0]:
            yield Choice(LOOKUP, place.tp, 0, batch, k, backup="fast", backup_lookahead=k)
    yield from ssd_choices(place, laws, batch, gpus, space)


def ssd_choices(
    place: Placement, laws: Laws, batch: int, gpus: int, space: Space
) -> Iterator[Choice]:
    """Yields the choices of SSD on T + 1 GPUs; imposed hits need only one candidate."""
    if 1 not in place.num_drafts or place.tp + 1 > gpus or not place.judges(("ssd", 1)):
        return
    texts = space.fan_outs if laws.hits[0].p_hit is None else ("uniform:1",)
    for k in space.lookaheads:
        if k <= laws.longest:
            for text in texts:
                for served in space.backups(k):
                    for backup in ("fast" if is_fast else "jit" for is_fast in space.fast):
                        yield Choice("ssd", place.tp, 1, batch, k, text, backup, served)


def config_of(choice: Choice, laws: Laws) -> Config | None:
    """Returns a choice as the simulation reads it; None if its fan-out is impossible."""
    k, batch, fast = choice.lookahead, choice.batch_size, choice.backup == "fast"
    if not k:
        return Config(0, batch, False, (), (), (), (), laws.hits[0], 0, False, (batch, batch), ())
    hazards, hazards_fast, law = laws.hazards[k - 1], laws.hazards_fast[k - 1], laws.hits[k - 1]
    lists: tuple[tuple[int, ...], ...] = (), ()
    if choice.fan_out is not None:
        served = choice.backup_lookahead
        drafted = (hazards_fast if fast else hazards)[:served]
        cut = (*drafted, *(0.0,) * (k - served))
        after_hit = _fan_out(choice.fan_out, hazards, k, law)
        after_miss = _fan_out(choice.fan_out, cut, served, law)
        if after_hit is None or after_miss is None:
            return None
        lists = after_hit, after_miss
        if max(map(max, lists)) > laws.most_candidates:
            return None
    rows = batch, batch * (k + 1)
    return Config(
        lookahead=k,
        batch_size=batch,
        inline=choice.num_drafts == 0,
        hazards=hazards,
        hazards_fast=hazards_fast,
        fan_out=lists[0],
        fan_out_miss=lists[1],
        hit_law=law,
        backup_lookahead=choice.backup_lookahead,
        fast=fast,
        target_rows=rows,
        draft_rows=(*rows, batch * max(1, *map(sum, lists))),
    )


def _fan_out(
    text: str, hazards: tuple[float, ...], served: int, hit: HitLaw
) -> tuple[int, ...] | None:
    """Returns F_0..F_K as `run` resolves them after `served` tokens; None if it is impossible."""
    reached = len(hazards)
    if text.startswith("geometric") and not hit.p_hit:
        # Positions after a rate of 0 keep nothing, so they are cut off and the cached result is
        # shared.
        while reached and not hazards[reached - 1]:
            reached -= 1
    resolved = _resolved(text, hazards[:reached], min(served, reached + 1), hit)
    return None if resolved is None else (*resolved, *(0,) * (len(hazards) - reached))


@lru_cache(maxsize=4096)
def _resolved(
    text: str, hazards: tuple[float, ...], served: int, hit: HitLaw
) -> tuple[int, ...] | None:
    try:
        minimum = 1 if hit.p_hit else 0
        powers = hit.powers(len(hazards), served)
        return resolve_fan_out(text, len(hazards), hazards, *powers, minimum=minimum)
    except ConfigError:  # The budget is too small, or no candidate hits.
        return None


@dataclass(frozen=True)
class Scales:
    """Weighs choices: their rates by the simulation, on placements, under imposed models."""

    laws: Laws
    host: HostCosts
    places: Sequence[Placement]

    def place(self, tp: int) -> Placement:
        """Returns the placement on T ranks."""
        return next(place for place in self.places if place.tp == tp)

    def weigh(self, choices: Iterable[Choice], *, quick: bool = False) -> list[Choice]:
        """Returns the possible ones of these choices with their rates.

        quick: of fewer rounds, to rank many. Without it the rates are those of the choice's job.
        """
        alike: dict[tuple[int, tuple[str, int]], list[tuple[Choice, Config]]] = {}
        for choice in choices:
            config, most = config_of(choice, self.laws), self.place(choice.tp).most_rows
            if config is not None and (most is None or config.most_rows <= most):
                alike.setdefault((choice.tp, choice.method), []).append((choice, config))
        if not alike:
            return []
        grids = [self._grid([c for _, c in members], *way) for way, members in alike.items()]
        found = expect(Grid.joined(grids), quick=quick)
        columns = found.tok_per_s.tolist(), found.round_s.tolist(), found.hit_rate.tolist()
        weighed = [choice for members in alike.values() for choice, _ in members]
        return [
            replace(
                choice,
                tok_per_s=rate,
                round_us=round_s * 1e6,
                hit_rate=hits if choice.fan_out is not None else None,
            )
            for choice, rate, round_s, hits in zip(weighed, *columns, strict=True)
        ]

    def _grid(self, configs: Sequence[Config], tp: int, method: tuple[str, int]) -> Grid:
        place = self.place(tp)
        return Grid.of(configs, place.device, place.host(method, self.host))

    def _repeated(self, choice: Choice) -> Grid:
        """Returns a choice once for each of the rates that are tried."""
        config = config_of(choice, self.laws)
        assert config is not None, choice
        return self._grid([config] * len(_RATES), choice.tp, choice.method)

    def over_alpha(self, choice: Choice) -> Floats:
        """Returns the tok/s of a choice at each tried alpha, one rate for every drafted token."""
        if choice.mode in ("ar", LOOKUP):
            return np.full(len(_RATES), choice.tok_per_s)
        if choice.mode == "sd":
            tokens = np.array([expected_tokens(rate, choice.lookahead) for rate in _RATES])
            return np.asarray(choice.batch_size * tokens / (choice.round_us * 1e-6))
        grid = self._repeated(choice)
        hazards = np.tile(_RATES[:, None], (1, choice.lookahead))
        return expect(replace(grid, hazards=hazards)).tok_per_s

    def break_even_alpha(self, choice: Choice, rivals: Sequence[Choice]) -> float | None:
        """Returns the alpha, one for every drafted token, above which `choice` beats its rivals.

        If it wins under the given models, that is the rate below which it stops winning (0.0: it
        always wins); if it loses, the rate above which it wins (None: it never does). The choice
        and rivals of SSD keep their parameters; SD has its best K at each rate.
        """
        if choice.mode != "sd":
            tuned = (
                sd
                for place in self.places
                for sd in candidates(place, self.laws, choice.batch_size, choice.gpus, FULL)
                if sd.mode == "sd"
            )
            rivals = [*(rival for rival in rivals if rival.mode != "sd"), *self.weigh(tuned)]
        if not rivals:
            return 0.0
        best = np.max([self.over_alpha(rival) for rival in rivals], axis=0)
        tokens = expected_tokens_from_rates(self.laws.hazards[choice.lookahead - 1])
        lengths = np.array([expected_tokens(rate, choice.lookahead) for rate in _RATES])
        now = int(np.abs(lengths - tokens).argmin())
        return _crossing(np.log(self.over_alpha(choice) / best), now)

    def break_even_p_hit(self, ssd: Choice, rival: Choice | None) -> float | None:
        """Returns the hit rate, for every k, above which `ssd` beats `rival`; 0.0: always, None:
        never."""
        if rival is None:
            return 0.0
        grid = self._repeated(ssd)
        p_hit = np.broadcast_to(_RATES[:, None, None, None], grid.p_hit.shape)
        rates = expect(replace(grid, p_hit=p_hit)).tok_per_s
        return _crossing(np.log(rates / rival.tok_per_s), 0)


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
    """Interpolates the tie between rate `index`, which loses, and the next one, which wins."""
    loss, gain = -advantage[index], advantage[index + 1]
    return float(_RATES[index] + loss / (loss + gain) * (_RATES[index + 1] - _RATES[index]))
