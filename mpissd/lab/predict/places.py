"""Where a pair can run on a machine: every T that fits, and what forwards take there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.flag_groups import MOST_DRAFTS
from mpissd.engine.backend.profile import Profile
from mpissd.engine.job import Job, resolve
from mpissd.engine.model.shard import Shard
from mpissd.lab.predict.costs import EMULATED_ITEMSIZE, DeviceCosts, HostCosts, forwards_of_any_job
from mpissd.lab.predict.coverage import check_device
from mpissd.lab.predict.derive import DERIVED, with_derived
from mpissd.lab.predict.hosts import METHODS, costs_at, host_entry
from mpissd.lab.predict.laws import MOST_LOOKAHEAD
from mpissd.lab.predict.search import Placement

_MOST_BRANCHES = 10 * (MOST_LOOKAHEAD + 1)  # of a sequence: uniform:10 at the longest K


@dataclass(frozen=True)
class Survey:
    """Where a pair can run. unjudged: why no forward is known, by each T that would fit, too."""

    placements: tuple[Placement, ...]
    unjudged: Mapping[int, str]


def placements(config: RunConfig, profile: Profile, gpus: int) -> list[Placement]:
    """Those of the survey."""
    return list(survey(config, profile, gpus).placements)


def survey(config: RunConfig, profile: Profile, gpus: int) -> Survey:
    """Every T that divides and fits the profile's memory: as measured or modelled, else derived
    (derive.py), else among the unjudged.

    ConfigError where nothing can be judged: what the profile covers, or what is wrong with the
    last T.
    """
    found: list[Placement] = []
    reason = ConfigError(f"plan: gpus={gpus}: allowed: 1 or more")
    unjudged: dict[int, ConfigError] = {}
    for tp in range(1, gpus + 1):
        try:
            _resolved(config, "ar", tp, 0, profile)
        except ConfigError as error:
            reason = error
            continue
        try:
            device, derived = device_costs(config, profile, tp)
        except ConfigError as error:
            unjudged[tp] = error
            continue
        most = min(MOST_DRAFTS, gpus - tp, config.batch_size)  # more would have no sequence
        drafts = tuple(d for d in range(1 + most) if _fits(config, tp, d, profile))
        found.append(Placement(tp, device, drafts, derived, _hosts(config, profile, tp)))
    if not found:
        raise next(iter(unjudged.values()), reason)
    return Survey(tuple(found), {tp: str(error) for tp, error in unjudged.items()})


def device_costs(config: RunConfig, profile: Profile, tp: int) -> tuple[DeviceCosts, str | None]:
    """Returns the profile's forwards at every row count that a search may ask for.

    With them comes what the target's forwards were derived from (None: they were not). Raises
    ConfigError: a probed profile does not cover them, or all-reduces over T ranks are not known.

    A lane reads its own KV, which K decides: here as of the middle K for all of them (off by less
    than 2% of a draft step of 8b/1b with 24 branches).
    """
    batch = config.batch_size
    job = _resolved(config, "sd", tp, 1, replace(profile, memory_bytes=None))
    job = replace(job, lookahead=MOST_LOOKAHEAD // 2)
    assert job.draft is not None, "a pair without a draft"
    target, draft = Shard(job.target, tp), Shard(job.draft)
    profile = with_derived(profile, target, batch, job.options)
    check_device(profile, job)
    widths, lanes = (_row_counts(batch, most) for most in (MOST_LOOKAHEAD + 1, _MOST_BRANCHES))
    verify = forwards_of_any_job(profile, target, widths, batch, job.options)
    drafts = forwards_of_any_job(profile, draft, lanes, batch, job.draft_options)
    known = profile.tables.forward(target.cost(1, batch, EMULATED_ITEMSIZE, job.options))
    source = "" if known is None else known.source
    return DeviceCosts(verify, drafts), source if source.startswith(DERIVED) else None


def _hosts(config: RunConfig, profile: Profile, tp: int) -> dict[tuple[str, int], HostCosts]:
    """The host's costs of every method, where the profile has them."""
    if not profile.hosts:
        return {}
    batch = config.batch_size
    entries = {
        (mode, drafts): host_entry(profile, mode, tp, drafts, batch, config.lookahead)
        for mode, drafts in METHODS
    }
    return {way: costs_at(profile, entry, batch) for way, entry in entries.items()}


def _row_counts(batch: int, most: int) -> list[int]:
    """Every multiple of b up to `most`, and the powers of two below."""
    multiples = {batch * n for n in range(1, most + 1)}
    return sorted(multiples | {1 << n for n in range((batch * most).bit_length())})


def _resolved(config: RunConfig, mode: str, tp: int, drafts: int, profile: Profile) -> Job:
    """The pair of `config` under another mode; its laws don't matter here."""
    if config.pair is None and (config.target is None or config.draft is None):
        raise ConfigError("plan: needs a pair, or a target and a draft")
    wanted = replace(config, mode=mode, num_drafts=drafts, lookahead=1, backup_lookahead=None)
    wanted = replace(wanted, alpha=0.5, acceptance=None, acceptance_fast="alpha:0.3")
    return resolve(wanted, tp, backend="emulated", memory_bytes=profile.memory_bytes)


def _fits(config: RunConfig, tp: int, drafts: int, profile: Profile) -> bool:
    try:
        _resolved(config, "sd", tp, drafts, profile)
    except ConfigError:
        return False
    return True
