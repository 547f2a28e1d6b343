"""The laws' mean for a row that some run wrote, from a profile of another job.

This is what a user gets from `predict` and `plan`: neither the row's draws nor what its own job
measured of itself. `forecast_row` takes a device's profile, `forecast_from_run` what another run
measured of itself; `Forecast.error` is how far the row lies from what they forecast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.row import Row
from mpissd.engine.backend.profile import Profile
from mpissd.engine.job import Job, resolve
from mpissd.engine.model.shard import Shard
from mpissd.lab.predict.closed import expected
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.coverage import check_device, check_job
from mpissd.lab.predict.derive import with_derived
from mpissd.lab.predict.hosts import host_of
from mpissd.lab.predict.jobfile import JobFile
from mpissd.lab.predict.label import all_derived_from, derived_from
from mpissd.lab.predict.row import is_predictable

_SAID = ("mode", "num_drafts", "target", "draft", "batch_size", "fuse", "lm_head", "context")
_DRAFTED = (
    "lookahead",
    "acceptance",
    "acceptance_fast",
    "backup",
    "backup_lookahead",
    "on_late",
    "hit_law",
)


@dataclass(frozen=True)
class Forecast:
    """tok_per_s: the laws' mean of all sequences; None where `reason` says why there is none.

    derived: the profile derived a forward or host costs that this needs, from a stated rule, and
    measured none.
    """

    tok_per_s: float | None = None
    reason: str | None = None
    derived: bool = False

    def error(self, row: Row) -> float | None:
        """Measured / forecast - 1."""
        return None if self.tok_per_s is None else float(row.tok_per_s) / self.tok_per_s - 1


def forecast_row(
    row: Row,
    profile: Profile,
    host: HostCosts | None = None,
    draft_profile: Profile | None = None,
) -> Forecast:
    """The laws' mean of a row's configuration on a device, in the long run.

    row: as `run` wrote it, also by an earlier version. profile: of the row's device. host: what
    the host's work and the link take there (None: what the profile says). draft_profile: of the
    draft ranks' device, where it is of another kind. Raises nothing: what cannot be predicted has a
    reason.
    """
    drafts = draft_profile or profile
    try:
        job = job_of_row(row)
        _check_devices(row, profile, drafts)
        _check_kernels(row, profile)
        profile = with_derived(
            profile, Shard(job.target, job.tp), job.config.batch_size, job.options
        )
        check_device(profile, job, drafts)
        device = DeviceCosts.from_profile(profile, job, drafts)
        rate = _mean(job, device, host or host_of(profile, job))
    except ConfigError as error:
        return Forecast(reason=str(error))
    label = all_derived_from if host is None else derived_from
    return Forecast(rate, derived=label(profile, drafts, job) is not None)


def forecast_from_run(row: Row, name: str, run: JobFile) -> Forecast:
    """The same from the profile that another run wrote of itself, with its host costs.

    name: of its file, for the reasons; it has to be of a run on the row's device, which the file
    does not say.
    """
    if Path(name).stem == row.run_id:
        return Forecast(reason="the profile is of their own job")
    try:
        job = job_of_row(row)
        if run.backend != row.backend or not _covers(name, run, job):
            raise ConfigError("the profile does not cover their configuration")
        return Forecast(_mean(job, run.device, run.host))
    except ConfigError as error:
        return Forecast(reason=str(error))


def _covers(name: str, run: JobFile, job: Job) -> bool:
    config = RunConfig(**{**run.config, "dry_run": True, "world_size": None})
    measured = resolve(config, run.tp, backend=run.backend, memory_bytes=None)
    try:
        check_job(name, job, measured, run.device)
    except ConfigError:
        return False
    return True


def _mean(job: Job, device: DeviceCosts, host: HostCosts) -> float:
    """The laws' mean, tok/s of all sequences; ConfigError where rounds take no time at all."""
    rate = float(expected(job, device, host).tok_per_s[0])
    if not math.isfinite(rate):
        raise ConfigError("a null device without host costs takes no time")
    return rate


def job_of_row(row: Row) -> Job:
    """The configuration of a row, resolved; ConfigError where no law's mean holds it."""
    if reason := _unpredictable(row):
        raise ConfigError(f"no law's mean: {reason}")
    job = resolve(config_of_row(row), int(row.tp), backend="emulated", memory_bytes=None)
    if not is_predictable(job):
        raise ConfigError("no law's mean: they draft several tokens a forward")
    return job


def config_of_row(row: Row) -> RunConfig:
    """The flags of a gemm row with fixed choices; lists and laws as they were resolved."""
    flags = {name: row.get(name) for name in _SAID}
    if row.mode == "ar":
        flags["draft"] = None
    else:
        flags |= {name: row.get(name) for name in _DRAFTED}
    for name in ("fan_out", "fan_out_miss"):
        if row.get(name):
            flags[name] = "list:" + ",".join(map(str, row[name]))
    said = {name: value for name, value in flags.items() if value is not None}
    return RunConfig(backend="emulated", rounds=int(row.num_rounds), seed=row.seed, **said)


def _unpredictable(row: Row) -> str | None:
    """Why rounds of this row have no mean that laws alone would give; None where they have."""
    if row.workload != "gemm":
        return "their tokens are sampled (markov)"
    if row.learned:
        return "they adapt"
    if row.draft_lost_round is not None:
        return "their draft was lost"
    if row.schedule in ("pearl", "amusd"):
        return f"{row.schedule} keeps candidates behind the last served token alone"
    return None


def _check_devices(row: Row, profile: Profile, drafts: Profile) -> None:
    """ConfigError for a row of other devices than the profiles'."""
    pairs = [("target", row.device_name, profile)]
    if row.num_drafts:
        pairs.append(("draft", row.draft_device or row.device_name, drafts))
    for role, name, known in pairs:
        if device_of(name) != known.device_name:
            raise ConfigError(f"their {role} ran on {name}, the profile is of {known.device_name}")


def _check_kernels(row: Row, profile: Profile) -> None:
    """ConfigError for a row of a commit that ran other kernels than those that were probed."""
    commit = str((row.provenance or {}).get("commit")).removesuffix("+")
    if commit in profile.other_kernels:
        raise ConfigError(f"their commit ran other kernels than profile {profile.name!r} is of")


def device_of(name: str | None) -> str:
    """A device's name as its profile has it."""
    return (name or "").removesuffix(" (emulated)")
