"""Finds the pools that fit on N GPUs, and ranks them with replicas of every other use.

A pool is G targets on T ranks each and one draft; a *replica* is one copy of a use, with a batch of
its own. N GPUs hold as many copies as fit, and the rest of them idles; so all uses are compared by
the tokens a second of all copies, over the same N GPUs.

Candidates are ranked by lab.predict.simulation under a draft on which all targets are always
seated, and under one with a third of them; the best few of both are simulated as pools with the
same draws, and the fastest is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpissd.common.config import RunConfig
from mpissd.common.rivals import Family
from mpissd.engine.backend.profile import Profile
from mpissd.engine.job import Job
from mpissd.lab.pools.durations import Pool
from mpissd.lab.pools.simulation import simulate
from mpissd.lab.pools.tally import Simulated
from mpissd.lab.predict.costs import HostCosts, RowTable
from mpissd.lab.predict.derive import with_derived
from mpissd.lab.predict.laws import Laws
from mpissd.lab.predict.places import job_of
from mpissd.lab.predict.search import Choice, Placement, Space, fan_outs, ssd_groups

MOST_TARGETS = 64  # of a pool that `plan` judges
_SPACE = Space(
    (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16),
    fan_outs((1, 2, 3, 5, 9), (4, 8, 16, 32, 64)),
    (0.5, 1.0),
)
_COPIES = (1, 2, 3, 4, 6, 8)
_SIMULATED = 4  # candidates of each number of targets and of seated ones
_ROUNDS = 2000  # that a simulation draws, of all targets together
_LEAST_ROUNDS = 100  # a target


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

    def times(self, copies: int) -> Use:
        """Returns as many copies of a use as there are of it in one."""
        return replace(self, copies=copies, tok_per_s=self.tok_per_s * copies / self.copies)

    def __str__(self) -> str:
        """Returns the name in tables: SSD T=1 G=4 D=1 × 2."""
        name = str(Family.of(self.choice))
        if self.is_pool:
            name = name.replace(" D=", f" G={self.targets} D=")
        return f"{name} × {self.copies}" if self.copies > 1 else name


def replicas(choices: Iterable[Choice], gpus: int) -> list[Use]:
    """Returns each choice in as many copies as fit on N GPUs."""
    return [_copied(choice, gpus) for choice in choices if choice.gpus <= gpus]


def _copied(choice: Choice, gpus: int) -> Use:
    copies, rate = gpus // choice.gpus, choice.tok_per_s
    return Use(choice, 1, copies, copies * rate, choice.batch_size / rate, choice.hit_rate)


def sizes(tp: int, gpus: int) -> list[int]:
    """Returns the numbers of targets a draft that fill N GPUs with a few copies of a pool."""
    counts = {(gpus // copies - 1) // tp for copies in _COPIES}
    return sorted(n for n in counts if 2 <= n <= MOST_TARGETS)


def pools(
    config: RunConfig, profile: Profile, places: Sequence[Placement], host: HostCosts, gpus: int
) -> list[Use]:
    """Returns the fastest pool of every T and G that fills N GPUs."""
    laws, uses = Laws.of(config), []
    for place in places:
        if 1 in place.num_drafts and place.judges(("ssd", 1)):
            for targets in sizes(place.tp, gpus):
                copies = gpus // (targets * place.tp + 1)
                best = fastest(config, profile, place, host, laws, targets)
                uses += [] if best is None else [best.times(copies)]
    return uses


def fastest(
    config: RunConfig,
    profile: Profile,
    place: Placement,
    host: HostCosts,
    laws: Laws,
    targets: int,
    rounds: int = _ROUNDS,
) -> Use | None:
    """Returns the fastest pool of G targets on one placement, simulated; None if none can run.

    rounds: that a simulation draws, of all targets together, but at least 100 a target.
    """
    costs, batch = place.host(("ssd", 1), host), config.batch_size
    choices = [
        choice
        for seated in sorted({targets, -(-targets // 3)})
        for choice in _candidates(place, laws, batch, host, seated)[:_SIMULATED]
    ]
    each = max(_LEAST_ROUNDS, rounds // targets)
    cells = {_cell(choice): choice for choice in choices}.values()
    tried = [(c, _simulated(config, profile, c, costs, targets, each)) for c in cells]
    if not tried:
        return None
    choice, best = max(tried, key=lambda one: one[1].tok_per_s)
    token_s = targets * config.batch_size / best.tok_per_s
    rate, round_us = best.tok_per_s / targets, best.round_s * 1e6
    derived = place.label(choice)
    one = replace(choice, tok_per_s=rate, round_us=round_us, derived=derived)
    return Use(one, targets, 1, best.tok_per_s, token_s, best.hit_rate, best.wait_s)


def pool_of(
    config: RunConfig, profile: Profile, choice: Choice, host: HostCosts, targets: int
) -> Pool:
    """Returns the pool of a choice; forwards of a T that was not measured are derived."""
    job = job_of(config, choice)
    return Pool.of(job, targets, _known(profile, job), host)


def _known(profile: Profile, job: Job) -> Profile:
    return with_derived(profile, job.target_shard, job.config.batch_size, job.options)


def _cell(choice: Choice) -> tuple[object, ...]:
    """Returns the key that distinguishes two choices' flags."""
    return choice.lookahead, choice.fan_out, choice.backup, choice.backup_lookahead


def _simulated(
    config: RunConfig, profile: Profile, choice: Choice, host: HostCosts, targets: int, rounds: int
) -> Simulated:
    return simulate(pool_of(config, profile, choice, host, targets), rounds, config.seed)


def _candidates(
    place: Placement, laws: Laws, batch: int, host: HostCosts, seated: int
) -> list[Choice]:
    """Returns the fastest choice of each K on a draft with so many targets in every forward."""
    device = place.device
    assert device.draft is not None, "a placement of pairs"
    lists = tuple((k, _crowded(table, seated)) for k, table in device.lists)
    crowded = replace(device, draft=_crowded(device.draft, seated), lists=lists)
    choices = []
    for group in ssd_groups(replace(place, device=crowded), laws, batch, _SPACE):
        expected = group.expect(host)
        choices.append(group.choice(int(expected.tok_per_s.argmax()), expected))
    return sorted(choices, key=lambda c: -c.tok_per_s)


def _crowded(table: RowTable, targets: int) -> RowTable:
    """Returns the seconds of forwards with the rows of G targets, by the rows of one target."""
    few = None if table.few is None else _crowded(table.few, targets)
    seconds = tuple(table(targets * np.array(table.rows)).tolist())
    return RowTable(table.rows, seconds, few, table.few_rows // targets)
