"""Lists the places of a pair on a machine: every T that fits, and its forwards' durations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.rivals import Family, between, families, tps_of
from mpissd.engine.backend.profile import Profile
from mpissd.engine.job import Job, resolve
from mpissd.lab.predict.costs import (
    EMULATED_ITEMSIZE,
    DeviceCosts,
    HostCosts,
    RowTable,
    forwards,
)
from mpissd.lab.predict.derive import (
    DERIVED,
    METHODS,
    check_device,
    costs_at,
    derived_from,
    host_entry,
    with_derived,
    with_hosts,
)
from mpissd.lab.predict.search import LOOKUP, MOST_LOOKAHEAD, Choice, Placement, cut_law

_CANDIDATES = (1, 2, 4, 8, 16, 32, 64)  # of a row; between them time goes along straight lines
_MOST_BRANCHES = 10 * (MOST_LOOKAHEAD + 1)  # per sequence: uniform:10 at the largest K


@dataclass(frozen=True)
class Survey:
    """The placements of a pair on a machine, and the uses that could not be placed.

    unjudged: uses that would fit, with the reason why no forwards or host costs are known.
    too_large: uses (with D of 0 and 1) that do not fit in memory.
    """

    placements: tuple[Placement, ...]
    unjudged: Mapping[Family, str]
    too_large: tuple[Family, ...] = ()


def survey(config: RunConfig, profile: Profile, gpus: int) -> Survey:
    """Finds every T that the model can be divided into and that fits in the profile's memory.

    Forwards are measured, modelled or derived (derive.py; if T cannot divide products equally,
    from the T below and above), in this order; if none is possible, the use goes to `unjudged`.
    Host costs are handled the same way (hosts.with_hosts). Raises ConfigError if nothing can be
    judged: it names the profile's models, or the fault of the last T.
    """
    placements: list[Placement] = []
    reason = ConfigError(f"plan: gpus={gpus}: allowed: 1 or more")
    unjudged: dict[Family, str] = {}
    large: list[Family] = []
    profile = with_hosts(profile)
    for tp in range(1, gpus + 1):
        run = runnable(config, tp)
        every = families(tp, gpus, 1 if run == config else 0)
        fits = (family for family in every if _fits(run, family, None))
        large += [family for family in fits if not _fits(run, family, profile)]
        try:
            _resolved(run, "ar", tp, 0, profile)
        except ConfigError as error:
            reason = error
            continue
        try:
            find = _placement if run == config else _uneven
            place = find(config, profile, tp, gpus)
        except ConfigError as error:
            unjudged |= dict.fromkeys((*every, Family(LOOKUP, tp, 0)), str(error))
            continue
        placements.append(place)
        unjudged |= {
            family: f"profile {profile.name} has no host costs of {family.mode.upper()}"
            for family in families(tp, gpus, max(place.num_drafts, default=0))
            if not place.judges((family.mode, family.num_drafts))
        }
    if not any(place.judges(method) for place in placements for method in METHODS):
        raise ConfigError(next(iter(unjudged.values()), str(reason)))
    return Survey(tuple(placements), unjudged, tuple(large))


def _placement(config: RunConfig, profile: Profile, tp: int, gpus: int) -> Placement:
    """Returns the placement on T = tp target ranks. Raises ConfigError for unknown forwards."""
    device = device_costs(config, profile, tp)
    drafts = tuple(
        d for d in range(1 + min(1, gpus - tp)) if _fits(config, Family("sd", tp, d), profile)
    )
    hosts = _hosts(config, profile, tp)

    def label(choice: Choice) -> str | None:
        job = job_of(config, choice)
        known = with_derived(profile, job.shard(tp), config.batch_size, job.options)
        return derived_from(known, known, job)

    most = _most_rows(config, profile, tp) if config.is_transformer else None
    return Placement(tp, device, drafts, label, hosts, most)


def runnable(config: RunConfig, tp: int) -> RunConfig:
    """Returns the configuration under which T ranks can hold the pair.

    Products need shares of equal size; at another T only a whole transformer runs, if it can.
    """
    whole, here = replace(config, forward="transformer", fuse=False), Family("ar", tp, 0)
    return whole if not _fits(config, here, None) and _fits(whole, here, None) else config


def _uneven(config: RunConfig, profile: Profile, tp: int, gpus: int) -> Placement:
    """Returns the placement of products on T ranks that hold shares of unequal size.

    It has no draft rank. Raises ConfigError if the forwards of no T below and above are known.
    """
    tps = tps_of(_resolved(config, "ar", 1, 0, None).target.name, 8 * tp)
    evens = [t for t in tps if _fits(config, Family("ar", t, 0), None)]
    low, high = max(t for t in evens if t < tp), min((t for t in evens if t > tp), default=0)
    if not high:
        raise ConfigError(f"profile {profile.name} has no forwards of T above {tp}: probe first")
    below, above = (device_costs(config, profile, t) for t in (low, high))
    verify = _between(tp, (low, below.verify), (high, above.verify))
    source = f"{DERIVED}: a forward of T={tp} takes a + c/T, by those of T={low} and T={high}; "
    source += "its shares are of unequal size, which only --forward=transformer runs"
    device = replace(below, verify=verify)
    return Placement(tp, device, (0,), lambda _: source, _hosts(config, profile, tp))


def _between(tp: int, low: tuple[int, RowTable], high: tuple[int, RowTable]) -> RowTable:
    """Returns the forwards of T ranks by those of the same rows at (T, table) below and above."""
    (few, slow), (many, fast) = low, high
    seconds = (
        between(tp, (few, ours), (many, theirs))
        for ours, theirs in zip(slow.seconds, fast(slow.rows).tolist(), strict=True)
    )
    inner = None
    if slow.few is not None and fast.few is not None:
        inner = _between(tp, (few, slow.few), (many, fast.few))
    return replace(slow, seconds=tuple(seconds), few=inner)


def _most_rows(config: RunConfig, profile: Profile, tp: int) -> int:
    """Returns the largest row count at which both whole models were measured.

    Raises ConfigError if one of them was not: a whole forward modelled by the numbers was 20 to 42%
    too fast, so that nothing is advised on it.
    """
    job, batch = _resolved(config, "sd", tp, 1, None), config.batch_size
    target, draft = job.shard(tp), job.draft_shard
    assert draft is not None, "a pair without a draft"
    known, most = with_derived(profile, target, batch, job.options), list[int]()
    for shard, options in ((target, job.options), (draft, job.draft_options)):
        curve = known.tables.forward(shard.cost(1, batch, EMULATED_ITEMSIZE, options))
        if curve is None:
            pair = f"--target={job.target.name} --draft={draft.shape.name}"
            raise ConfigError(
                f"profile {profile.name!r} has no whole forward of {shard.shape.name} at "
                f"T={shard.tp}: probe first: mpissd probe --forward=transformer {pair}"
            )
        most.append(curve.points[-1])
    return min(most)


def job_of(config: RunConfig, choice: Choice) -> Job:
    """Returns the job of a choice, under the models and options of `config`."""
    if choice.mode == "ar":
        return _resolved(config, "ar", choice.tp, 0, None)
    looks_up = choice.mode == LOOKUP
    config = replace(
        config,
        mode="sd" if looks_up else choice.mode,
        backup="fast" if looks_up else "jit",
        num_drafts=choice.num_drafts,
        lookahead=choice.lookahead,
        alpha=None,
        acceptance=cut_law(config.acceptance_text, choice.lookahead),
        acceptance_fast=cut_law(config.acceptance_fast_text, choice.lookahead),
    )
    if choice.fan_out is not None:
        config = replace(
            config,
            fan_out=choice.fan_out,
            backup=choice.backup,
            backup_lookahead=choice.backup_lookahead,
        )
    return resolve(config, choice.tp, backend="emulated", memory_bytes=None)


def device_costs(config: RunConfig, profile: Profile, tp: int) -> DeviceCosts:
    """Returns the profile's forwards at every row count that a search may ask for.

    A lane reads its own KV, whose length depends on K. The KV of the middle K is used for all
    (wrong by less than 2% of a draft step of 8b/1b with 24 branches). Raises ConfigError if a
    probed profile does not cover the row counts, or if all-reduces over T ranks are unknown.
    """
    batch = config.batch_size
    job = replace(_resolved(config, "sd", tp, 1, None), lookahead=MOST_LOOKAHEAD // 2)
    target, draft = job.shard(tp), job.draft_shard
    assert draft is not None, "a pair without a draft"
    profile = with_derived(profile, target, batch, job.options)
    check_device(profile, job)
    widths, lanes = (_row_counts(batch, most) for most in (MOST_LOOKAHEAD + 1, _MOST_BRANCHES))
    verify = forwards(profile, target, widths, batch, job.options, any_job=True)
    has_head = job.config.lm_head or job.drafts_by_transformer
    tables = {
        k: forwards(profile, draft, lanes, batch, replace(job.draft_options, top_k=k), any_job=True)
        for k in (_CANDIDATES if has_head else (1,))
    }
    return DeviceCosts(verify, tables[1], tuple(tables.items()) if has_head else ())


def _hosts(config: RunConfig, profile: Profile, tp: int) -> dict[tuple[str, int], HostCosts | None]:
    """Returns {(mode, D): host costs} of every method, None for those that are unknown.

    The result is empty if the profile has no host costs at all.
    """
    costs: dict[tuple[str, int], HostCosts | None] = {}
    batch, context = config.batch_size, config.context if config.is_transformer else 0
    forward = "transformer" if config.is_transformer else "gemm"
    for mode, drafts in METHODS if profile.hosts else ():
        entry = host_entry(profile, mode, tp, drafts, batch, config.lookahead, forward)
        known = None if entry is None else costs_at(profile, entry, batch, context)
        costs[mode, drafts] = known
    return costs


def _row_counts(batch: int, most: int) -> list[int]:
    """Returns every multiple of b up to `most`, and the smaller powers of two."""
    multiples = {batch * n for n in range(1, most + 1)}
    return sorted(multiples | {1 << n for n in range((batch * most).bit_length())})


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
