"""Predicts a row's rate from the profile of another job: the mean under the imposed models.

`plan` gives a user such predictions. They use neither the row's draws nor its own job's profile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.row import Row
from mpissd.engine.backend.profile import Profile, device_kind
from mpissd.engine.job import Job, resolve
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.derive import check_device, derived_from, host_of, with_derived
from mpissd.lab.predict.row import is_predictable
from mpissd.lab.predict.simulation import expected

_SAID = ("mode", "num_drafts", "target", "draft", "batch_size", "fuse", "lm_head", "context")
_DRAFTED = (
    "lookahead",
    "acceptance",
    "acceptance_fast",
    "backup",
    "backup_lookahead",
    "hit_law",
)
_DECIDED = {
    "replay": "a recording decides their tokens",
    "text": "the models' own text decides their tokens",
}


@dataclass(frozen=True)
class Forecast:
    """A predicted rate, or the reason why there is none.

    tok_per_s: the mean under the imposed models, of all sequences; None if `reason` is given.
    derived: the profile did not measure all forwards and host costs that were needed, but derived
    some by a stated rule.
    """

    tok_per_s: float | None = None
    reason: str | None = None
    derived: bool = False


def forecast_row(
    row: Row,
    profile: Profile,
    host: HostCosts | None = None,
    draft_profile: Profile | None = None,
) -> Forecast:
    """Predicts the long-run mean rate of a row's configuration on a device.

    row: written by `run`, possibly an earlier version. profile: of the row's device. host: costs of
    the host's work and the link there (None: the profile's). draft_profile: of the draft ranks'
    device, if it is of another kind. Raises nothing: if there is no prediction, the forecast has a
    reason.
    """
    drafts = draft_profile or profile
    try:
        job = job_of_row(row)
        _check_devices(row, profile, drafts)
        profile = with_derived(profile, job.target_shard, job.config.batch_size, job.options)
        _check_kernels(row, profile, job)
        check_device(profile, job, drafts)
        device = DeviceCosts.from_profile(profile, job, drafts)
        rate = _mean(job, device, host or host_of(profile, job))
    except ConfigError as error:
        return Forecast(reason=str(error))
    label = derived_from(profile, drafts, job, hosts=host is None)
    return Forecast(rate, derived=label is not None)


def _mean(job: Job, device: DeviceCosts, host: HostCosts) -> float:
    """Returns the mean tok/s of all sequences under the imposed models.

    Raises ConfigError if rounds take no time at all.
    """
    rate = float(expected(job, device, host).tok_per_s[0])
    if not math.isfinite(rate):
        raise ConfigError("a null device without host costs takes no time")
    return rate


def job_of_row(row: Row) -> Job:
    """Returns the job of a row. Raises ConfigError if its mean cannot be predicted."""
    if reason := _unpredictable(row):
        raise ConfigError(f"no law's mean: {reason}")
    job = resolve(config_of_row(row), int(row.tp), backend="emulated", memory_bytes=None)
    if not is_predictable(job):
        raise ConfigError("no law's mean: they draft several tokens a forward")
    return job


def config_of_row(row: Row) -> RunConfig:
    """Returns a configuration that repeats a row of imposed tokens.

    Flags that the run chose by itself (fan-out lists, models) have the values that the row reports.
    """
    flags = {name: row.get(name) for name in _SAID}
    if row.mode == "ar":
        flags["draft"] = None
    else:
        flags |= {name: row.get(name) for name in _DRAFTED}
    lists = [counts for name in ("fan_out", "fan_out_miss") if (counts := row.get(name))]
    if lists:
        flags["fan_out"] = "/".join("list:" + ",".join(map(str, counts)) for counts in lists)
    if row.forward == "transformer":  # whose mean context the run's length decides
        flags |= {"forward": row.forward, "num_tokens": row.token_limit, "lm_head": None}
    said = {name: value for name, value in flags.items() if value is not None}
    return RunConfig(backend="emulated", rounds=int(row.num_rounds), seed=row.seed, **said)


def _unpredictable(row: Row) -> str | None:
    """Returns why the imposed models give no mean for the row's rounds; None if they do."""
    if row.workload != "gemm":
        return _DECIDED.get(row.workload, "their tokens are sampled (markov)")
    if row.learned:
        return "they adapt"
    if row.draft_lost_round is not None:
        return "their draft was lost"
    if (row.groups or 1) > 1:
        return "several target groups share their drafts"
    if row.schedule in ("pearl", "amusd"):
        return f"{row.schedule} keeps candidates behind the last served token alone"
    if row.on_late == "serve":
        return "they serve late hits as they are, which is retired"
    return None


def _check_devices(row: Row, profile: Profile, drafts: Profile) -> None:
    """Raises ConfigError if the row ran on other devices than the profiles."""
    pairs = [("target", row.device_name, profile)]
    if row.num_drafts:
        pairs.append(("draft", row.draft_device or row.device_name, drafts))
    for role, name, known in pairs:
        if device_kind(name) != known.kind:
            raise ConfigError(f"their {role} ran on {name}, the profile is of {known.device_name}")


def _check_kernels(row: Row, profile: Profile, job: Job) -> None:
    """Raises ConfigError if the row's commit ran other kernels than the probe.

    Rows of whole transformers name their kernel; older rows do not.
    """
    said = row.provenance or {}
    commit = str(said.get("commit")).removesuffix("+")
    own = str(said.get("kernel") or "cuda")
    key, params = job.target_shard.key(job.config.batch_size, job.options), None
    if row.backend == "cupy" and row.forward == "transformer":
        params = job.target_shard.num_params(job.options)
    known = () if params is None else profile.tables.kernels(key, params)
    if job.draft_options.top_k > 1 and commit in profile.other_lists:
        raise ConfigError("their commit read lists of candidates in every draft forward")
    if commit in profile.other_kernels or (known and own not in [each.kernel for each in known]):
        raise ConfigError(f"their commit ran other kernels than profile {profile.name!r} is of")
