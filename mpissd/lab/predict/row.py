"""Predicts a job's means under the keys of a row, and a row's rate from the profile of another job.

`forecast_row` gives the mean under the imposed models, as `plan` gives it to a user: it uses
neither the row's draws nor the costs of its own job. `judge` computes three errors of predictions
over rows; each is measured / predicted - 1.

    (a) replay  the row's own draws, from its own job's profile (`prediction_error`)
    (b) mean    the mean under the imposed models, from the same (`expected_tok_per_s`)
    (c) other   that mean from another job's profile, as `plan` gives a user

(b) and (c) include the luck of the row's draws: the replay over the mean of its own job
(`sampling_error`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.row import Row
from mpissd.engine.backend.profile import Profile, device_kind, load_profile
from mpissd.engine.job import Job, resolve
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.derive import (
    check_device,
    derived_from,
    host_of,
    shipped_profiles,
    with_derived,
)
from mpissd.lab.predict.grid import Grid
from mpissd.lab.predict.simulation import expected

_GIVEN = ("mode", "num_drafts", "target", "draft", "batch_size", "fuse", "lm_head", "context")
# Largest allowed median and p95 of the size of error (c).
BARS = {"products": (0.04, 0.10), "whole": (0.05, 0.12)}
_COLUMNS = "machine", "forwards", "T", "rows", "(a)", "(c)", "(c) without luck"
_DRAFTED = (
    *("lookahead", "acceptance", "acceptance_fast"),
    *("backup", "backup_lookahead", "hit_law"),
)


def is_predictable(job: Job) -> bool:
    """Returns whether the imposed models give this job a mean.

    The job must have imposed tokens, and a draft that takes K steps over fan-out lists that are the
    same in every round.
    """
    has_steps = job.draft is None or job.draft.num_tokens == 1
    return job.workload.is_imposed and has_steps


def is_followable(job: Job) -> bool:
    """Returns whether the simulation can time this job's rounds from their own outcomes.

    Of text and of replays: acceptance and hits are a pair's own.
    """
    has_steps = job.draft is None or (job.draft.head is None and job.draft.num_tokens == 1)
    return is_predictable(job) or (job.workload.reports_outcomes and has_steps)


def predict_row(job: Job, device: DeviceCosts, host: HostCosts) -> dict[str, Any]:
    """Predicts the long-run means of this job's runs, from costs and its imposed models.

    Keys that a result row has mean the same here. The others are round_us.mean, exposed_us (the
    lead's mean wait for its speculation) and T_p. Raises ConfigError for a job without a mean.
    """
    if not is_predictable(job):
        raise ConfigError(
            "no prediction for what is sampled (markov), recorded (replay), or drafts several "
            "tokens a forward: allowed: gemm"
        )
    means, grid = expected(job, device, host), Grid.of([job], device, host)
    rate, target = float(means.tok_per_s[0]), float(grid.verify_s[0, -1, -1])
    known = math.isfinite(rate)  # not if rounds take no time
    draft = job.lookahead * float(grid.lanes_s[0, -1]) if job.lookahead else None
    growth = None
    if grid.grows[0]:
        growth = float(grid.keys_s[0, -1, -1] + job.lookahead * grid.step_s[0, -1, -1])
    return {
        "mode": job.config.mode,
        "expected_tok_per_s": rate if known else None,
        "tok_per_s_per_gpu": rate / job.world_size if known else None,
        "round_us": {"mean": float(means.round_s[0]) * 1e6},
        "acceptance_length": float(means.tokens[0]) / job.config.batch_size,
        "hit_rate": None if growth is None else float(means.hit_rate[0]),
        "t_target_s": target,
        "t_draft_s": draft,
        "t_growth_s": growth,
        "T_SD": draft / target if draft is not None and target else None,
        "T_p": growth / target if growth is not None and target else None,
        "exposed_us": float(means.wait_s[0]) * 1e6,
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


def forecast_row(row: Row, profile: Profile, draft_profile: Profile | None = None) -> Forecast:
    """Predicts the long-run mean rate of a row's configuration on a device.

    row: written by `run`, possibly an earlier version. profile: of the row's device. draft_profile:
    of the draft ranks' device, if it is of another kind. Raises nothing: if there is no prediction,
    the forecast has a reason.
    """
    drafts = draft_profile or profile
    try:
        job = job_of_row(row)
        for role, name, known in (
            ("target", row.device_name, profile),
            ("draft", row.draft_device or row.device_name, drafts),
        ):
            if device_kind(name) != known.kind and (role == "target" or row.num_drafts):
                of = f"the profile is of {known.device_name}"
                raise ConfigError(f"their {role} ran on {name}, {of}")
        profile = with_derived(profile, job.target_shard, job.config.batch_size, job.options)
        _check_kernels(row, profile, job)
        check_device(profile, job, drafts)
        device = DeviceCosts.from_profile(profile, job, drafts)
        rate = float(expected(job, device, host_of(profile, job)).tok_per_s[0])
        if not math.isfinite(rate):
            raise ConfigError("a null device without host costs takes no time")
    except ConfigError as error:
        return Forecast(reason=str(error))
    return Forecast(rate, derived=derived_from(profile, drafts, job) is not None)


def job_of_row(row: Row) -> Job:
    """Returns the job that repeats a row of imposed tokens.

    Flags that the run chose by itself (fan-out lists, models) have the values that the row reports.
    Raises ConfigError if the imposed models give no mean for the row's rounds.
    """
    decided = {
        "replay": "a recording decides their tokens",
        "text": "the models' own text decides their tokens",
    }
    reasons = {
        decided.get(row.workload, "their tokens are sampled (markov)"): row.workload != "gemm",
        "they adapt": row.learned,
        "their draft was lost": row.draft_lost_round is not None,
        "several target groups share their drafts": (row.groups or 1) > 1,
        f"{row.schedule} keeps candidates behind the last served token alone": row.schedule
        in ("pearl", "amusd"),
        "they serve late hits as they are, which is retired": row.on_late == "serve",
    }
    if reason := next((why for why, applies in reasons.items() if applies), None):
        raise ConfigError(f"no law's mean: {reason}")
    flags = {name: row.get(name) for name in _GIVEN}
    if row.mode == "ar":
        flags["draft"] = None
    else:
        flags |= {name: row.get(name) for name in _DRAFTED} | {"tree": row.tree_nodes}
    lists = [counts for name in ("fan_out", "fan_out_miss") if (counts := row.get(name))]
    if row.tree_nodes:  # by node; their sum is spread over the nodes again
        lists = [[sum(counts), *[0] * int(row.lookahead)] for counts in lists]
    if lists:
        flags["fan_out"] = "/".join("list:" + ",".join(map(str, counts)) for counts in lists)
    if row.forward == "transformer":  # the run's length decides its mean context
        flags |= {"forward": row.forward, "num_tokens": row.token_limit, "lm_head": None}
    given = {name: value for name, value in flags.items() if value is not None}
    config = RunConfig(backend="emulated", rounds=int(row.num_rounds), seed=row.seed, **given)
    job = resolve(config, int(row.tp), backend="emulated", memory_bytes=None)
    if not is_predictable(job):
        raise ConfigError("no law's mean: they draft several tokens a forward")
    return job


def _check_kernels(row: Row, profile: Profile, job: Job) -> None:
    """Raises ConfigError if the row's commit ran other kernels than the probe.

    Rows of whole transformers name their kernel; older rows do not.
    """
    provenance = row.provenance or {}
    commit = str(provenance.get("commit")).removesuffix("+")
    own, known = str(provenance.get("kernel") or "cuda"), list[str]()
    if row.backend == "cupy" and row.forward == "transformer":
        key = job.target_shard.key(job.config.batch_size, job.options)
        measured = profile.kernels(key, job.target_shard.num_params(job.options))
        known = [each.kernel for each in measured]
    if job.draft_options.top_k > 1 and commit in profile.other_lists:
        raise ConfigError("their commit read lists of candidates in every draft forward")
    if commit in profile.other_kernels or (known and own not in known):
        raise ConfigError(f"their commit ran other kernels than profile {profile.name!r} is of")


def profile_of_another_job(name: str | None) -> Callable[[Row], Forecast]:
    """Returns a function that predicts a row from another job's profile, for error (c).

    name: a device's profile, by name or file; several, separated by commas, are each used for the
    rows of their own device. None means the built-in profile of each row's device. Raises
    ConfigError if there is no such profile.
    """
    named = [] if name is None else [*map(load_profile, name.split(","))]
    own = {p.kind: p for p in named}
    known = shipped_profiles() | own

    def forecast(row: Row) -> Forecast:
        kind = device_kind(row.device_name)
        target = own.get(kind, named[0]) if named else known.get(kind)
        if target is None:
            return Forecast(reason=f"no profile of {kind}")
        return forecast_row(row, target, known.get(device_kind(row.draft_device)))

    return forecast


def judge(rows: Iterable[Row], forecast: Callable[[Row], Forecast]) -> tuple[str, dict[str, Any]]:
    """Returns the errors of all rows by machine and T, as Markdown and as JSON."""
    rows = list(rows)
    forecasts = [forecast(row) for row in rows]
    errors, left = errors_of(rows, forecasts)
    judged = groups(errors)
    return "\n".join(table(judged, left)).rstrip(), {"groups": judged, "left_out": dict(left)}


def errors_of(
    rows: Iterable[Row], forecasts: Iterable[Forecast]
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Returns the errors of the rows that have all three, and a count of the others by reason.

    forwards: "products" or "whole", followed by ", derived" if the profile did not measure all of
    them or the host costs. without_luck: (c) after removing the luck of the row's draws.
    """
    errors, left = [], Counter[str]()
    for row, other in zip(rows, forecasts, strict=True):
        replay, expected, luck = row.prediction_error, row.expected_tok_per_s, row.sampling_error
        if other.tok_per_s is None:
            left[str(other.reason)] += 1
        elif replay is None or not expected or luck is None:
            left["its own job predicted nothing"] += 1
        else:
            error = row.tok_per_s / other.tok_per_s - 1
            kind = "whole" if row.forward == "transformer" else "products"
            errors.append(
                {
                    "machine": "emulated" if row.backend == "emulated" else row.device_name,
                    "forwards": kind + ", derived" * other.derived,
                    "tp": row.tp,
                    "replay": replay,
                    "mean": row.tok_per_s / expected - 1,
                    "other": error,
                    "without_luck": (1 + error) / (1 + luck) - 1,
                }
            )
    return errors, left


def groups(errors: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns (median, p95) of the errors' sizes by machine, forwards and T.

    After a machine's T comes the group of all T, with tp of None.
    """
    every: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for error in errors:
        for tp in (error["tp"], None):  # the keys sort as the groups are returned
            every[error["machine"], error["forwards"], tp is None, tp or 0].append(error)
    judged = []
    for (machine, forwards, _, tp), chosen in sorted(every.items()):
        group: dict[str, Any] = {"machine": machine, "forwards": forwards, "tp": tp or None}
        group["rows"] = len(chosen)
        for name in ("replay", "mean", "other", "without_luck"):
            sizes = np.abs([error[name] for error in chosen])
            group[name] = tuple(np.quantile(sizes, [0.5, 0.95]).tolist())
        judged.append(group)
    return judged


def meets(group: dict[str, Any]) -> bool:
    """Returns whether a group's errors (c) are within their bar."""
    return all(size <= most for size, most in zip(group["other"], _bar(group), strict=True))


def _bar(group: dict[str, Any]) -> tuple[float, float]:
    return BARS[group["forwards"].partition(",")[0]]


def table(judged: Sequence[dict[str, Any]], left: Counter[str]) -> list[str]:
    """Returns the lines of the groups as Markdown, a line for each group whose (c) over all T
    misses its bar, and the rows that have no (c)."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    for group in judged:
        cells = [group["machine"], group["forwards"], group["tp"] or "all", group["rows"]]
        keys = ("replay", "other", "without_luck")
        cells += ["{:.1%}, {:.1%}".format(*group[key]) for key in keys]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines.append("")
    for group in (g for g in judged if g["tp"] is None and not meets(g)):
        median, p95 = _bar(group)
        kind = f"{group['machine']}, {group['forwards']}"
        lines.append(f"{kind}: (c) misses its bar ({median:.0%}, {p95:.0%}).")
    for reason, count in sorted(left.items()):
        lines.append(f"Without (c): {count} row{'s' * (count > 1)}, {reason}.")
    return lines
