"""The uses of N GPUs: equal copies of every choice, and pools of targets that share a draft.

A *replica* is one copy of a use, with a batch of its own. N GPUs hold as many copies as fit, and
the rest of them idles; so all uses are compared by the tokens a second of all copies, over the same
N GPUs. A pool trades a later token for a GPU that others use: with a draft of its own a sequence is
faster; SD inline shares no draft. So the uses that are best in tok/s or time a token (the Pareto
frontier) are listed, and each pool among them is compared with the strongest other use whose tokens
arrive no later, and with the most tok/s of all.

Candidates of a pool are ranked by `search` under a draft on which all targets are always seated,
and under one with a third of them; the best few of both are simulated as pools with the same draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mpissd.common.config import RunConfig
from mpissd.common.rivals import Family
from mpissd.engine.backend.profile import Profile
from mpissd.lab.predict.advisor import by_speed, firsts
from mpissd.lab.predict.costs import HostCosts, RowTable
from mpissd.lab.predict.derive import with_derived
from mpissd.lab.predict.places import job_of
from mpissd.lab.predict.pool import Pool, simulate
from mpissd.lab.predict.search import (
    Choice,
    Laws,
    Placement,
    Scales,
    Space,
    fan_outs,
    ssd_choices,
)

MOST_TARGETS = 64  # of a pool that `plan` judges
_SPACE = Space(
    (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16),
    fan_outs((1, 2, 3, 5, 9), (4, 8, 16, 32, 64)),
    (0.5, 1.0),
)
_COPIES = (1, 2, 3, 4, 6, 8)
_SIMULATED = 3  # candidates of each number of targets and of seated ones
_RANKED, _ROUNDS = 500, 2000  # rounds to rank candidates, and of the best; of all targets together
_LEAST_ROUNDS = 50  # a target


@dataclass(frozen=True)
class Use:
    """Equal copies of one use on N GPUs. choice: of one target. targets: G of a copy, 1 unless a
    pool. gpus: of all copies together; the rest of the N idles.

    token_s: mean seconds between two tokens of a sequence. wait_s: a lead's mean wait for its
    speculation, of a pool.
    """

    choice: Choice
    targets: int
    copies: int
    tok_per_s: float
    token_s: float
    hit_rate: float | None
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


def replicas(choices: Iterable[Choice], gpus: int) -> list[Use]:
    """Returns each choice in as many copies as fit on N GPUs."""
    return [
        Use(c, 1, n, n * c.tok_per_s, c.batch_size / c.tok_per_s, c.hit_rate)
        for c in choices
        if (n := gpus // c.gpus)
    ]


def sizes(tp: int, gpus: int) -> list[int]:
    """Returns the numbers of targets a draft that fill N GPUs with a few copies of a pool."""
    counts = {(gpus // copies - 1) // tp for copies in _COPIES}
    return sorted(n for n in counts if 2 <= n <= MOST_TARGETS)


def pools(config: RunConfig, profile: Profile, places: Sequence[Placement], gpus: int) -> list[Use]:
    """Returns the fastest pool of every T and G that fills N GPUs."""
    found = [
        (fastest(config, profile, place, targets), gpus // (targets * place.tp + 1))
        for place in places
        if 1 in place.num_drafts and place.judges(("ssd", 1))
        for targets in sizes(place.tp, gpus)
    ]
    return [
        replace(use, copies=copies, tok_per_s=use.tok_per_s * copies)
        for use, copies in found
        if use is not None
    ]


def fastest(config: RunConfig, profile: Profile, place: Placement, targets: int) -> Use | None:
    """Returns the fastest pool of G targets on one placement, simulated; None if none can run."""
    host = place.host(("ssd", 1), HostCosts())
    choices = dict.fromkeys(
        choice
        for seated in sorted({targets, -(-targets // 3)})
        for choice in _candidates(config, place, seated)
    )

    def simulated(choice: Choice, rounds: int) -> Use:
        job = job_of(config, choice)
        known = with_derived(profile, job.target_shard, job.config.batch_size, job.options)
        pool = Pool.of(job, targets, known, host)
        means = simulate(pool, max(_LEAST_ROUNDS, rounds // targets), config.seed)
        rate, round_us = means.tok_per_s / targets, means.round_s * 1e6
        one = replace(choice, tok_per_s=rate, round_us=round_us, hit_rate=means.hit_rate)
        token_s = config.batch_size / rate
        return Use(one, targets, 1, means.tok_per_s, token_s, means.hit_rate, means.wait_s)

    tried = [(simulated(choice, _RANKED).tok_per_s, n) for n, choice in enumerate(choices)]
    if not tried:
        return None
    best = simulated(list(choices)[max(tried)[1]], _ROUNDS)
    return replace(best, choice=replace(best.choice, derived=place.label(best.choice)))


def _candidates(config: RunConfig, place: Placement, seated: int) -> list[Choice]:
    """Returns the fastest choices, one a K, on a draft with so many targets in every forward."""
    device, laws, batch = place.device, Laws.of(config), config.batch_size
    assert device.draft is not None, "a placement of pairs"
    lists = tuple((k, _crowded(table, seated)) for k, table in device.lists)
    crowded = replace(device, draft=_crowded(device.draft, seated), lists=lists)
    scales = Scales(laws, HostCosts(), [replace(place, device=crowded)])
    every = scales.weigh(ssd_choices(place, laws, batch, place.tp + 1, _SPACE), quick=True)
    ranked = firsts(by_speed(every), lambda choice: choice.lookahead)[:_SIMULATED]
    return [replace(choice, tok_per_s=0.0, round_us=0.0, hit_rate=None) for choice in ranked]


def _crowded(table: RowTable, targets: int) -> RowTable:
    """Returns the seconds of forwards with the rows of G targets, by the rows of one target."""
    few = None if table.few is None else _crowded(table.few, targets)
    seconds = tuple(table(targets * np.array(table.rows)).tolist())
    return RowTable(table.rows, seconds, few, table.few_rows // targets)


@dataclass(frozen=True)
class Gain:
    """A pool compared with other uses of the same N GPUs; a field is None without such a use.

    in_time: among the uses whose sequences get their tokens no later, the one with most tok/s.
    most: the use with the most tok/s of all. each: SSD with a draft for every target, at the same
    T.
    """

    pool: Use
    in_time: Use | None
    most: Use | None
    each: Use | None

    def over(self, other: Use | None) -> float | None:
        """Returns the pool's tok/s over another use's."""
        return None if other is None else self.pool.tok_per_s / other.tok_per_s

    def to_dict(self) -> dict[str, Any]:
        """Returns the entries of a plan's JSON."""
        return {
            "pool": to_dict(self.pool),
            **{
                name: None if use is None else {**to_dict(use), "gain": self.over(use)}
                for name, use in (
                    ("in_time", self.in_time),
                    ("most", self.most),
                    ("each", self.each),
                )
            },
        }


def frontier(uses: Sequence[Use]) -> list[Use]:
    """Returns the Pareto frontier of tok/s and time a token, most tok/s first."""
    kept: list[Use] = []
    for use in sorted(uses, key=lambda u: (-u.tok_per_s, u.token_s, u.gpus)):
        if not kept or use.token_s < kept[-1].token_s:
            kept.append(use)
    return kept


def gain_of(pool: Use, uses: Sequence[Use]) -> Gain:
    """Compares a pool with the uses that share no draft."""
    others = sorted((u for u in uses if not u.is_pool), key=lambda u: -u.tok_per_s)
    in_time = (u for u in others if u.token_s <= pool.token_s)
    each = (u for u in others if u.choice.mode == "ssd" and u.choice.tp == pool.choice.tp)
    return Gain(pool, next(in_time, None), next(iter(others), None), next(each, None))


def best_pool(uses: Sequence[Use]) -> Use | None:
    """Returns the pool of the frontier with the largest gain over `in_time`; None without one."""
    gains = [gain_of(use, uses) for use in frontier(uses) if use.is_pool]
    known = [gain for gain in gains if gain.in_time is not None]
    best = max(known or gains, key=lambda gain: gain.over(gain.in_time) or 0.0, default=None)
    return None if best is None else best.pool


def most(uses: Sequence[Use]) -> Use | None:
    """Returns the use of all GPUs with the most tok/s, of equal ones the one that is soonest."""
    return next(iter(frontier(uses)), None)


def to_dict(use: Use) -> dict[str, Any]:
    """Returns a use as JSON; its choice is one target's."""
    return {
        **asdict(use.choice),
        "targets": use.targets,
        "copies": use.copies,
        "gpus": use.gpus,
        "tok_per_s": use.tok_per_s,
        "token_ms": use.token_s * 1e3,
        "hit_rate": use.hit_rate,
        "wait_us": None if use.wait_s is None else use.wait_s * 1e6,
    }


def summary(uses: Sequence[Use]) -> dict[str, Any] | None:
    """Returns a plan's JSON: the uses on the frontier, and the gains of its pools; None without
    pools."""
    if not any(use.is_pool for use in uses):
        return None
    best = frontier(uses)
    gains = [gain_of(use, uses).to_dict() for use in best if use.is_pool]
    return {"frontier": [to_dict(use) for use in best], "gains": gains}
