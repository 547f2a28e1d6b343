"""The uses of N GPUs: equal copies of every choice, and pools of targets that share a draft.

N GPUs hold as many copies of a use as fit, each with a batch of its own, and the rest of them
idles; so all uses are compared by the tokens a second of all copies, over the same N GPUs. A pool
trades a later token for a GPU that others use: with a draft of its own a sequence is faster; SD
inline shares no draft. So the uses that are best in tok/s or time a token (the Pareto frontier) are
listed, and each pool among them is compared with the strongest other use whose tokens arrive no
later, and with the most tok/s of all.

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
from mpissd.lab.predict.pool import Pool, simulate
from mpissd.lab.predict.search import (
    Choice,
    Laws,
    Placement,
    Space,
    fan_outs,
    job_of,
    ssd_choices,
    weigh,
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

    def to_dict(self) -> dict[str, Any]:
        """Returns the use as JSON; its choice is one target's."""
        return {
            **asdict(self.choice),
            "targets": self.targets,
            "copies": self.copies,
            "gpus": self.gpus,
            "tok_per_s": self.tok_per_s,
            "token_ms": self.token_s * 1e3,
            "hit_rate": self.hit_rate,
            "wait_us": None if self.wait_s is None else self.wait_s * 1e6,
        }


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
    device, laws, batch = place.device, Laws.of(config), config.batch_size
    assert device.draft is not None, "a placement of pairs"

    def crowded(table: RowTable, seated: int) -> RowTable:
        """Returns the seconds of forwards with the rows of all seated targets, by one's rows."""
        few = None if table.few is None else crowded(table.few, seated)
        seconds = tuple(table(seated * np.array(table.rows)).tolist())
        return RowTable(table.rows, seconds, few, table.few_rows // seated)

    choices: dict[Choice, None] = {}  # the fastest of each number of seated targets, one a K
    for seated in sorted({targets, -(-targets // 3)}):
        lists = tuple((k, crowded(table, seated)) for k, table in device.lists)
        shared = replace(device, draft=crowded(device.draft, seated), lists=lists)
        crowd = replace(place, device=shared)
        every = weigh(
            ssd_choices(place, laws, batch, place.tp + 1, _SPACE), laws, [crowd], quick=True
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
        return Use(one, targets, 1, means.tok_per_s, batch / rate, means.hit_rate, means.wait_s)

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
    """Returns the pool of the frontier with the largest gain over `in_time`; None without one."""

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
