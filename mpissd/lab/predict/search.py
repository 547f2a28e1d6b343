"""The configurations that `plan` weighs: every mode, K, fan-out and backup, at every T that fits.

`survey` places a pair on a machine: it finds every T that fits, and its forwards' durations. A
Space lists the K, fan-outs and K_b to try. FULL is the exhaustive grid; the advisor starts from
COARSE, or from ROUGH for large batches. `weigh` simulates choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.rivals import TREE, Family, between, tps_of
from mpissd.common.rounds import Source
from mpissd.engine.backend.profile import Profile
from mpissd.engine.job import Job, resolve
from mpissd.engine.law.acceptance import LAW_FILES, HitLaw, hit_law_of, load_laws
from mpissd.engine.law.fanout import resolve_fan_out
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stacks import AnyShard
from mpissd.lab.predict.costs import EMULATED_ITEMSIZE, DeviceCosts, HostCosts, RowTable, forwards
from mpissd.lab.predict.derive import (
    DERIVED,
    METHODS,
    check_device,
    derived_from,
    entry_of,
    host_of,
    with_derived,
    with_hosts,
)
from mpissd.lab.predict.grid import Grid
from mpissd.lab.predict.simulation import expect

MOST_LOOKAHEAD = 16
LOOKUP = "lookup"  # SD whose drafts are looked up in the sequence itself, without a model
_CANDIDATES = (1, 2, 4, 8, 16, 32, 64)  # of a row; between them time goes along straight lines
_MOST_READ = 63  # candidates of a row that an LM head returns besides the token itself
_MOST_BRANCHES = 10 * (MOST_LOOKAHEAD + 1)  # per sequence: uniform:10 at the largest K


def longest_lookahead(config: RunConfig) -> int:
    """Returns the largest K to try; a list of rates, or a --laws file, limits it to its length."""
    longest = MOST_LOOKAHEAD
    for text in (config.acceptance_text, config.acceptance_fast_text):
        kind, _, values = text.strip().partition(":")
        if kind in LAW_FILES:
            longest = min(longest, load_laws(values).longest_fitted)
        elif kind in ("rates", "marginal"):
            longest = min(longest, values.count(",") + 1)
    return longest


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
    tree: int | None = None

    @property
    def gpus(self) -> int:
        """The number of GPUs, T + D."""
        return self.tp + self.num_drafts

    @property
    def method(self) -> tuple[str, int]:
        """(mode, D), which distinguishes SD inline from SD on a rank of its own."""
        return self.mode, self.num_drafts

    def flags(self) -> dict[str, str]:
        """Returns the flags of `mpissd run` for this choice, except pair and token models."""
        flags = {"mode": self.mode, "num_drafts": str(self.num_drafts)}
        if self.mode == LOOKUP:
            flags |= {"mode": "sd", "backup": "fast"}
        if self.tree is not None:
            flags |= {"tree": str(self.tree)} | ({"mode": "sd"} if self.mode == TREE else {})
        if self.mode != "ar":
            flags["lookahead"] = str(self.lookahead)
        if self.fan_out is not None:
            flags |= {"fan_out": self.fan_out, "backup": self.backup}
            flags["backup_lookahead"] = str(self.backup_lookahead)
        return flags


@dataclass(frozen=True)
class TargetRanks:
    """T target ranks with their forwards.

    label: returns the origin of a derived choice, None if its parts were measured. hosts: the
    host's costs by (mode, D of 0 or 1); None: not known; a missing key: no costs. most_rows: of the
    largest forward whose time is known well enough to advise it (None: any).
    """

    tp: int
    device: DeviceCosts
    num_drafts: tuple[int, ...] = (0, 1)  # The numbers of drafts for which this machine has memory.
    label: Callable[[Choice], str | None] = lambda _: None
    hosts: Mapping[tuple[str, int], HostCosts | None] = field(default_factory=dict)
    most_rows: int | None = None

    def host(self, method: tuple[str, int]) -> HostCosts | None:
        """Returns the host's costs of a method (mode, D); None if they are not known.

        A lookup has the costs of SD inline, and a tree those of SD.
        """
        mode, drafts = method
        way = ("sd" if mode in (LOOKUP, TREE) else mode), min(drafts, 1)
        return self.hosts.get(way, HostCosts())


@dataclass(frozen=True)
class Survey:
    """The placements of a pair on a machine, and the uses that could not be placed.

    unjudged: uses that would fit, with the reason why no forwards or host costs are known.
    too_large: uses (with D of 0 and 1) that do not fit in memory.
    """

    placements: tuple[TargetRanks, ...]
    unjudged: Mapping[Family, str]
    too_large: tuple[Family, ...] = ()


def survey(config: RunConfig, profile: Profile, gpus: int) -> Survey:
    """Finds every T that the model can be divided into and that fits in the profile's memory.

    Forwards are measured, modelled or derived (derive.py; if T cannot divide products equally,
    from the T below and above), in this order; if none is possible, the use goes to `unjudged`.
    Host costs are handled the same way. Raises ConfigError if nothing can be judged: it names the
    profile's models, or the fault of the last T.
    """
    placements: list[TargetRanks] = []
    reason = ConfigError(f"plan: gpus={gpus}: allowed: 1 or more")
    unjudged: dict[Family, str] = {}
    large: list[Family] = []
    profile = with_hosts(profile)
    for tp in range(1, gpus + 1):
        run = runnable(config, tp)
        without_rank = [Family("ar", tp, 0), Family("sd", tp, 0)]
        with_rank = [Family("sd", tp, 1), Family("ssd", tp, 1)] if tp < gpus else []
        every = [*without_rank, *(with_rank if run == config else ())]
        fits = (family for family in every if _fits(run, family, None))
        large += [family for family in fits if not _fits(run, family, profile)]
        try:
            _resolved(run, "ar", tp, 0, profile)
        except ConfigError as error:
            reason = error
            continue
        try:
            place = (placed if run == config else _uneven)(config, profile, tp, gpus)
        except ConfigError as error:
            unjudged |= dict.fromkeys((*every, Family(LOOKUP, tp, 0)), str(error))
            continue
        placements.append(place)
        unjudged |= {
            family: f"profile {profile.name} has no host costs of {family.mode.upper()}"
            for family in (*without_rank, *(with_rank if 1 in place.num_drafts else ()))
            if place.host((family.mode, family.num_drafts)) is None
        }
    if all(place.host(method) is None for place in placements for method in METHODS):
        raise ConfigError(next(iter(unjudged.values()), str(reason)))
    return Survey(tuple(placements), unjudged, tuple(large))


def runnable(config: RunConfig, tp: int) -> RunConfig:
    """Returns the configuration under which T ranks can hold the pair.

    Products need shares of equal size; at another T only a whole transformer runs, if it can.
    """
    whole, here = replace(config, forward="transformer", fuse=False), Family("ar", tp, 0)
    return whole if not _fits(config, here, None) and _fits(whole, here, None) else config


def placed(config: RunConfig, profile: Profile, tp: int, gpus: int) -> TargetRanks:
    """Returns the placement on T = tp target ranks. Raises ConfigError for unknown forwards."""
    device, batch = _device_costs(config, profile, tp), config.batch_size
    drafts = tuple(
        d for d in range(1 + min(1, gpus - tp)) if _fits(config, Family("sd", tp, d), profile)
    )

    def label(choice: Choice) -> str | None:
        job = job_of(config, choice)
        known = _with_models(profile, job.shard(tp), job)
        return derived_from(known, known, job)

    most_rows = None
    if config.is_transformer:
        # No more rows than both whole models were measured at: a whole forward modelled by the
        # profile's numbers was 20 to 42% too fast.
        job, measured = _resolved(config, "sd", tp, 1, None), list[int]()
        known = _with_models(profile, job.shard(tp), job)
        for shard, options in ((job.shard(tp), job.options), (job.draft_shard, job.draft_options)):
            assert shard is not None, "a pair without a draft"
            curve = known.measured(shard.cost(1, batch, EMULATED_ITEMSIZE, options))
            if curve is not None:  # else a datasheet
                measured.append(curve.points[-1])
        most_rows = min(measured, default=None)
    return TargetRanks(tp, device, drafts, label, _hosts(config, profile, tp), most_rows)


def _with_models(profile: Profile, target: AnyShard, job: Job) -> Profile:
    """Returns the profile with the forwards of this share of the target, and of the job's draft."""
    batch = job.config.batch_size
    profile = with_derived(profile, target, batch, job.options)
    if job.draft_shard is None:
        return profile
    return with_derived(profile, job.draft_shard, batch, job.draft_options)


def _uneven(config: RunConfig, profile: Profile, tp: int, gpus: int) -> TargetRanks:
    """Returns the placement of products on T ranks that hold shares of unequal size.

    It has no draft rank. Raises ConfigError if the forwards of no T below and above are known.
    """
    tps = tps_of(_resolved(config, "ar", 1, 0, None).target.name, 8 * tp)
    evens = [t for t in tps if _fits(config, Family("ar", t, 0), None)]
    low, high = max(t for t in evens if t < tp), min((t for t in evens if t > tp), default=0)
    if not high:
        raise ConfigError(f"profile {profile.name} has no forwards of T above {tp}: probe first")

    def verify(slow: RowTable, fast: RowTable) -> RowTable:
        points = zip(slow.seconds, fast(slow.rows).tolist(), strict=True)
        seconds = tuple(between(tp, (low, ours), (high, theirs)) for ours, theirs in points)
        few = verify(slow.few, fast.few) if slow.few is not None and fast.few is not None else None
        return replace(slow, seconds=seconds, few=few)

    below, above = (_device_costs(config, profile, t) for t in (low, high))
    device = replace(below, verify=verify(below.verify, above.verify))
    source = f"{DERIVED}: a forward of T={tp} takes a + c/T, by those of T={low} and T={high}; "
    source += "its shares are of unequal size, which only --forward=transformer runs"
    return TargetRanks(tp, device, (0,), lambda _: source, _hosts(config, profile, tp))


def _device_costs(config: RunConfig, profile: Profile, tp: int) -> DeviceCosts:
    """Returns the profile's forwards at every row count that a search may ask for.

    A lane reads its own KV, whose length depends on K. The KV of the middle K is used for all
    (wrong by less than 2% of a draft step of 8b/1b with 24 branches). Raises ConfigError if a
    probed profile does not cover the row counts, or if all-reduces over T ranks are unknown.
    """
    batch = config.batch_size
    job = replace(_resolved(config, "sd", tp, 1, None), lookahead=MOST_LOOKAHEAD // 2)
    target, draft, options = job.shard(tp), job.draft_shard, job.draft_options
    assert draft is not None, "a pair without a draft"
    profile = _with_models(profile, target, job)
    check_device(profile, job)

    def table(shard: AnyShard, most: int, options: ForwardOptions) -> RowTable:
        # Every multiple of b up to `most`, and the smaller powers of two.
        rows = {batch * n for n in range(1, most + 1)}
        rows |= {1 << n for n in range((batch * most).bit_length())}
        return forwards(profile, shard, rows, batch, options, any_job=True)

    has_head = job.config.lm_head or job.drafts_by_transformer
    tables = {
        k: table(draft, _MOST_BRANCHES, replace(options, top_k=k))
        for k in (_CANDIDATES if has_head else (1,))
    }
    verify = table(target, MOST_LOOKAHEAD + 1, job.options)
    return DeviceCosts(verify, tables[1], tuple(tables.items()) if has_head else ())


def _hosts(config: RunConfig, profile: Profile, tp: int) -> dict[tuple[str, int], HostCosts | None]:
    """Returns {(mode, D): host costs} of every method, None for those that are unknown.

    The result is empty if the profile has no host costs at all.
    """
    costs: dict[tuple[str, int], HostCosts | None] = {}
    for mode, drafts in METHODS if profile.hosts else ():
        job = replace(_resolved(config, mode, 1, drafts, None), tp=tp, lookahead=config.lookahead)
        is_known = entry_of(profile, job) is not None
        costs[mode, drafts] = host_of(profile, job) if is_known else None
    return costs


def job_of(config: RunConfig, choice: Choice) -> Job:
    """Returns the job of a choice, under the models and options of `config`.

    Raises ConfigError if its fan-out is impossible.
    """
    method = choice.mode, choice.num_drafts, choice.backup
    fans = choice.fan_out if choice.tree is not None else None
    job = replace(_job_of(config, *method, choice.lookahead, choice.tree, fans), tp=choice.tp)
    if not choice.lookahead or choice.tree is not None:
        return job
    served = choice.backup_lookahead
    job = replace(job, backup_lookahead=served)
    if choice.fan_out is None:
        return job
    k, law = choice.lookahead, job.hit_law
    hazards = tuple(job.acceptance[Source.CACHE].hazards)
    drafted = tuple(job.acceptance[Source[choice.backup.upper()]].hazards)[:served]
    after_hit = _fan_out(choice.fan_out, hazards, k, law)
    after_miss = _fan_out(choice.fan_out, (*drafted, *(0.0,) * (k - served)), served, law)
    has_head = config.lm_head or config.is_transformer
    if has_head and max(*after_hit, *after_miss) > _MOST_READ:
        raise ConfigError(f"fan_out={choice.fan_out}: allowed: at most {_MOST_READ} a row")
    return replace(job, fan_out=after_hit, fan_out_miss=after_miss)


@lru_cache(maxsize=512)
def _job_of(
    config: RunConfig,
    mode: str,
    drafts: int,
    backup: str,
    lookahead: int,
    tree: int | None = None,
    fans: str | None = None,
) -> Job:
    """Returns what all jobs of a method and a K share, at T = 1. fans: the fan-out of trees."""
    if mode == "ar":
        return _resolved(config, "ar", 1, 0, None)
    config = replace(
        config,
        mode="sd" if mode in (LOOKUP, TREE) else mode,
        tree=tree,
        backup=backup,
        backup_lookahead=None,
        num_drafts=drafts,
        lookahead=lookahead,
        fan_out=fans or "uniform:1",
        alpha=None,
        acceptance=cut_law(config.acceptance_text, lookahead),
        acceptance_fast=cut_law(config.acceptance_fast_text, lookahead),
    )
    return resolve(config, 1, backend="emulated", memory_bytes=None)


def _resolved(config: RunConfig, mode: str, tp: int, drafts: int, profile: Profile | None) -> Job:
    """Returns the job of `config`'s pair under another mode; its imposed models do not matter here.

    profile: its memory must hold the job (None: no limit).
    """
    if config.pair is None and (config.target is None or config.draft is None):
        raise ConfigError("plan: needs a pair, or a target and a draft")
    wanted = replace(config, mode=mode, num_drafts=drafts, lookahead=1, backup_lookahead=None)
    wanted = replace(wanted, alpha=0.5, acceptance=None, acceptance_fast="alpha:0.3", laws=None)
    memory = None if profile is None else profile.memory_bytes
    return resolve(wanted, tp, backend="emulated", memory_bytes=memory)


def _fits(config: RunConfig, family: Family, profile: Profile | None) -> bool:
    try:
        _resolved(config, family.mode, family.tp, family.num_drafts, profile)
    except ConfigError:
        return False
    return True


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
    (1, 2, 3, 4, 6, 8, 12, 16), fan_outs((1, 3, 9), (8, 24, 64)), (0.25, 1.0)
)


def candidates(
    config: RunConfig, place: TargetRanks, gpus: int, space: Space, *, trees: bool = False
) -> Iterator[Choice]:
    """Yields the choices of every mode on a placement: AR, SD and lookups at every K, and SSD.

    There are no lookups if their acceptance is 0: each round would be one of AR with more rows.
    trees: whether trees are choices as well, SD's of up to MOST_LOOKAHEAD tokens, SSD's of _TREES.
    """
    batch = config.batch_size
    if place.tp > gpus:
        return
    if place.host(("ar", 0)) is not None:
        yield Choice("ar", place.tp, 0, batch)
    for k in range(1, longest_lookahead(config) + 1):
        for drafts in place.num_drafts:
            if place.tp + drafts <= gpus and place.host(("sd", drafts)) is not None:
                sd = Choice("sd", place.tp, drafts, batch, k, backup_lookahead=k)
                yield sd
                for nodes in range(k + 1, MOST_LOOKAHEAD + 1) if trees else ():
                    yield replace(sd, mode=TREE, tree=nodes)
        if place.host((LOOKUP, 0)) is not None:
            looked_up = _job_of(config, LOOKUP, 0, "fast", k).acceptance[Source.FAST]
            if looked_up.hazards[0]:
                yield Choice(LOOKUP, place.tp, 0, batch, k, backup="fast", backup_lookahead=k)
    yield from ssd_choices(config, place, gpus, space)
    for nodes, k, fans in product(*_TREES) if trees else ():  # branches in the tree's shape
        if k < nodes and k <= longest_lookahead(config) and _has_ssd(place, gpus):
            yield Choice("ssd", place.tp, 1, batch, k, f"uniform:{fans}", "jit", k, tree=nodes)


_TREES = (3, 4, 5, 6, 7, 8, 10, 12), (2, 3, 4), (1, 2, 3, 4, 6)  # nodes, K and F of SSD's trees


def _has_ssd(place: TargetRanks, gpus: int) -> bool:
    return 1 in place.num_drafts and place.tp < gpus and place.host(("ssd", 1)) is not None


def ssd_choices(config: RunConfig, place: TargetRanks, gpus: int, space: Space) -> Iterator[Choice]:
    """Yields the choices of SSD on T + 1 GPUs; imposed hits need only one candidate."""
    if not _has_ssd(place, gpus):
        return
    texts = space.fan_outs if hit_law_of(config, 1).p_hit is None else ("uniform:1",)
    longest = longest_lookahead(config)
    for k in (k for k in space.lookaheads if k <= longest):
        for text, served, is_fast in product(texts, space.backups(k), space.fast):
            backup = "fast" if is_fast else "jit"
            yield Choice("ssd", place.tp, 1, config.batch_size, k, text, backup, served)


def _fan_out(text: str, hazards: tuple[float, ...], served: int, hit: HitLaw) -> tuple[int, ...]:
    """Returns F_0..F_K as `run` resolves them after `served` tokens."""
    reached = len(hazards)
    if text.startswith("geometric") and not hit.p_hit:
        # Positions after a rate of 0 keep nothing, so they are cut off and the cached result is
        # shared.
        while reached and not hazards[reached - 1]:
            reached -= 1
    resolved = _resolved_fan_out(text, hazards[:reached], min(served, reached + 1), hit)
    return (*resolved, *(0,) * (len(hazards) - reached))


@lru_cache(maxsize=4096)
def _resolved_fan_out(
    text: str, hazards: tuple[float, ...], served: int, hit: HitLaw
) -> tuple[int, ...]:
    powers, minimum = hit.powers(len(hazards), served), 1 if hit.p_hit else 0
    return resolve_fan_out(text, len(hazards), hazards, *powers, minimum=minimum)


def weigh(
    choices: Iterable[Choice],
    config: RunConfig,
    places: Sequence[TargetRanks],
    *,
    quick: bool = False,
) -> list[Choice]:
    """Returns the choices that are possible, with their simulated rates.

    quick: of fewer rounds, to rank many. Without it the rates equal `expected` of the choice's job.
    """
    by_tp = {place.tp: place for place in places}
    alike: dict[tuple[int, tuple[str, int]], list[tuple[Choice, Job]]] = {}
    for choice in choices:
        try:
            job, most = job_of(config, choice), by_tp[choice.tp].most_rows
        except ConfigError:
            if choice.fan_out is None:
                raise
            continue  # its budget is too small, or no candidate hits
        if most is None or job.draft_buckets()[-1] <= most:
            alike.setdefault((choice.tp, choice.method), []).append((choice, job))
    weighed = []
    for (tp, method), members in alike.items():
        place = by_tp[tp]
        host = place.host(method)
        assert host is not None, method
        means = expect(Grid.of([job for _, job in members], place.device, host), quick=quick)
        columns = means.tok_per_s.tolist(), means.round_s.tolist(), means.hit_rate.tolist()
        for (choice, _), rate, round_s, hits in zip(members, *columns, strict=True):
            rates = {"tok_per_s": rate, "round_us": round_s * 1e6}
            hit_rate = hits if choice.fan_out is not None else None
            weighed.append(replace(choice, **rates, hit_rate=hit_rate))
    return weighed
