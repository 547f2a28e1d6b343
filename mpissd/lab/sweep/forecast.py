"""Estimates how long a sweep will take, to plan a job's time limit; it is no measurement.

The duration of a round comes from the closed form, with the device profile that the flags name. On
a CPU, which has no profile, it is the time to read the weights at a nominal rate.
"""

from __future__ import annotations

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.engine.backend.profile import role_profiles
from mpissd.engine.job import Job, resolve
from mpissd.lab.predict.costs import DeviceCosts, HostCosts, RowTable
from mpissd.lab.predict.row import is_predictable
from mpissd.lab.predict.simulation import expected
from mpissd.lab.sweep.plan import Plan

_CPU_BYTES_PER_S = 4e9
_CPU_ROUND_S = 0.5e-3  # host work of a round
_START_S = 2.0  # start of MPI and Python
_MAKE_BYTES_PER_S = 10e9  # rate of making weights on a GPU
_EACH_S = 0.1  # overhead of each measurement: messages, row, files


def predicted_s(plan: Plan, tp: int, backend: str) -> float:
    """Returns about how many seconds a plan takes on T = tp target ranks."""
    total, weights = _START_S, 0
    for point in plan.points:
        if point.config is None:
            continue
        try:
            job = resolve(point.config, tp, backend=backend, memory_bytes=None)
        except ConfigError:
            continue
        each, tokens = _round(job, backend)
        rounds = point.config.warmup_rounds + _rounds(point.config, tokens)
        total += plan.repeats * (rounds * each + _EACH_S)
        weights = max(weights, job.rank_bytes(2)[0])
    return total + (weights / _MAKE_BYTES_PER_S if backend in ("auto", "cupy") else 0.0)


def _rounds(config: RunConfig, tokens: float) -> float:
    enough = config.token_limit / tokens if config.token_limit else float("inf")
    return min(enough, config.max_rounds or float("inf"))


def _round(job: Job, backend: str) -> tuple[float, float]:
    """Returns the predicted seconds of a round, and the tokens that it adds to a sequence."""
    device = _costs(job, backend)
    if is_predictable(job):
        mean = expected(job, device, HostCosts())
        host = _CPU_ROUND_S if backend != "cupy" else 0.0
        return float(mean.round_s[0]) + host, float(mean.tokens[0]) / job.config.batch_size
    steps = job.num_forwards(job.lookahead)
    drafting = steps * float(device.draft_s([job.config.batch_size])[0]) if job.draft else 0.0
    return float(device.verify_s([job.verify_rows])[0]) + drafting + _CPU_ROUND_S, 1.0


def _costs(job: Job, backend: str) -> DeviceCosts:
    if backend != "numpy":
        profiles = role_profiles(job.config.device, job.config.draft_device)
        return DeviceCosts.from_profile(profiles[0], job, profiles[1])
    target, alone, draft = job.target_shard, job.draft_shard, None
    if alone is not None:
        draft = RowTable.of({1: 4 * alone.num_params(job.draft_options) / _CPU_BYTES_PER_S})
    size = 4 * target.num_params(job.options)
    return DeviceCosts(RowTable.of({1: size / _CPU_BYTES_PER_S}), draft)


def duration_text(seconds: float) -> str:
    """Returns a duration as text, rounded to minutes from two minutes on."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
