"""Computes three errors of predictions over result rows; each is measured / predicted - 1.

    python -m results.predictions FOLDER[,FOLDER …] [PROFILE]    # the table of docs/predictions.md

    (a) replay  the row's own draws, from its own job's profile (`prediction_error`)
    (b) mean    the mean under the imposed models, from the same (`expected_tok_per_s`)
    (c) other   that mean from another job's profile, as `plan` gives a user

(b) and (c) include the luck of the row's draws: the replay over the mean of its own job
(`sampling_error`). PROFILE: a device's profile, by name or file; several, separated by commas, are
each used for the rows of their own device (default: the built-in profile of each row's device).
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.row import Row
from mpissd.engine.backend.profile import Profile, device_kind, load_profile
from mpissd.engine.job import Job, resolve
from mpissd.lab.predict.costs import DeviceCosts
from mpissd.lab.predict.derive import (
    check_device,
    derived_from,
    host_of,
    shipped_profiles,
    with_derived,
)
from mpissd.lab.predict.simulation import expected, is_predictable
from mpissd.lab.tables.load import load_rows, row_files
from results import pages

# The largest allowed median and 95th percentile of |error (c)|, for predictions by `plan`.
BARS = {"products": (0.04, 0.10), "whole": (0.05, 0.12)}
_GIVEN = ("mode", "num_drafts", "target", "draft", "batch_size", "fuse", "lm_head", "context")
_DRAFTED = (
    *("lookahead", "acceptance", "acceptance_fast"),
    *("backup", "backup_lookahead", "hit_law", "parallel_drafting"),
)


@dataclass(frozen=True)
class Forecast:
    """A predicted tokens/s, or the reason why there is none. tok_per_s: the long-run mean of all
    sequences together; None if `reason` is given. derived: whether some of the needed durations
    were not measured for the profile, but derived from others."""

    tok_per_s: float | None = None
    reason: str | None = None
    derived: bool = False


def forecast_row(row: Row, profile: Profile, draft_profile: Profile | None = None) -> Forecast:
    """Predicts the long-run mean tokens/s of a result row's configuration. profile, draft_profile:
    durations on the row's device, and on the draft ranks' device if it is of another kind. Raises
    no error: if there is no prediction, the result has a reason."""
    drafts = draft_profile or profile
    draft_device = row.draft_device or row.device_name if row.num_drafts else drafts.device_name
    sides = ("target", row.device_name, profile), ("draft", draft_device, drafts)
    try:
        job = job_of_row(row)
        for role, device, of in sides:
            if device_kind(device) != of.kind:
                raise ConfigError(
                    f"their {role} ran on {device}, the profile is of {of.device_name}"
                )
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
    """Returns the job that a result row was measured with; its acceptance must be imposed by a
    model. Settings that the run chose by itself (fan-out, models) are taken from the row. Raises
    ConfigError if the long-run mean of such a job cannot be predicted."""
    decided = {
        "replay": "a recording decides their tokens",
        "text": "the models' own text decides their tokens",
    }
    reasons = {
        decided.get(row.workload, "their tokens are sampled (markov)"): row.workload != "gemm",
        "they adapt": row.learned,
        "their draft was lost": row.draft_lost_round is not None,
        "several target groups share their drafts": (row.groups or 1) > 1,
        "they use a retired schedule": row.schedule in ("pearl", "amusd") or row.on_late == "serve",
    }
    if reason := next((why for why, applies in reasons.items() if applies), None):
        raise ConfigError(f"no law's mean: {reason}")
    flags = {name: row.get(name) for name in _GIVEN}
    if row.mode == "ar":
        flags["draft"] = None
    else:
        flags |= {name: row.get(name) for name in _DRAFTED} | {"tree": row.tree_nodes}
    lists = [counts for name in ("fan_out", "fan_out_miss") if (counts := row.get(name))]
    if row.tree_nodes:  # A tree's fan-out has a count for each node, but the flag takes their sum.
        lists = [[sum(counts), *[0] * int(row.lookahead)] for counts in lists]
    if lists:
        flags["cache"] = row.cache or "draft"
        flags["fan_out"] = "/".join("list:" + ",".join(map(str, counts)) for counts in lists)
    if row.forward == "transformer":  # The mean context depends on the run's length.
        flags |= {"forward": row.forward, "num_tokens": row.token_limit, "lm_head": None}
    given = {name: value for name, value in flags.items() if value is not None}
    config = RunConfig(backend="emulated", rounds=int(row.num_rounds), seed=row.seed, **given)
    job = resolve(config, int(row.tp), backend="emulated", memory_bytes=None)
    if not is_predictable(job):
        raise ConfigError("no law's mean: they draft several tokens a forward")
    return job


def _check_kernels(row: Row, profile: Profile, job: Job) -> None:
    """Raises ConfigError if the row's forwards used other kernels than those that were timed for
    the profile. Rows of whole transformers name their kernel, except older ones."""
    provenance = row.provenance or {}
    commit = str(provenance.get("commit")).removesuffix("+")
    kernel = str(provenance.get("kernel") or "cuda")
    probed = list[str]()
    if row.backend == "cupy" and row.forward == "transformer":
        key = job.target_shard.key(job.config.batch_size, job.options)
        measured = profile.kernels(key, job.target_shard.num_params(job.options))
        probed = [forward.kernel for forward in measured]
    if job.draft_options.top_k > 1 and commit in profile.other_lists:
        raise ConfigError("their commit read lists of candidates in every draft forward")
    if commit in profile.other_kernels or (probed and kernel not in probed):
        raise ConfigError(f"their commit ran other kernels than profile {profile.name!r} is of")


def profile_of_another_job(name: str | None) -> Callable[[Row], Forecast]:
    """Returns a function that predicts a result row from a profile that another job measured.
    name: names or files of profiles, separated by commas (None: the built-in profile of each row's
    device). Raises ConfigError if there is no such profile."""
    named = [] if name is None else [*map(load_profile, name.split(","))]
    profiles = shipped_profiles() | {profile.kind: profile for profile in named}

    def forecast(row: Row) -> Forecast:
        kind = device_kind(row.device_name)
        target = profiles.get(kind)
        if named and target not in named:
            target = named[0]
        if target is None:
            return Forecast(reason=f"no profile of {kind}")
        return forecast_row(row, target, profiles.get(device_kind(row.draft_device)))

    return forecast


def errors_of(
    rows: Iterable[Row], forecasts: Iterable[Forecast]
) -> tuple[pd.DataFrame, Counter[str]]:
    """Returns a frame with the prediction errors of each row that has all three (see the module),
    and {reason: number of rows without them}. Its column `forwards` is "products" or "whole" (for
    transformers), followed by ", derived" if some durations were derived. without_luck: error (c)
    without the effect of the row's random draws."""
    errors = []
    left = Counter[str]()
    for row, other in zip(rows, forecasts, strict=True):
        replay = row.prediction_error
        luck = row.sampling_error
        if other.tok_per_s is None:
            left[str(other.reason)] += 1
        elif replay is None or not row.expected_tok_per_s or luck is None:
            left["its own job predicted nothing"] += 1
        else:
            error = row.tok_per_s / other.tok_per_s - 1
            kind = "whole" if row.forward == "transformer" else "products"
            machine = "emulated" if row.backend == "emulated" else row.device_name
            forwards = kind + ", derived" * other.derived
            without_luck = (1 + error) / (1 + luck) - 1
            errors.append((machine, forwards, row.tp, replay, error, without_luck))
    columns = ["machine", "forwards", "tp", "replay", "other", "without_luck"]
    return pd.DataFrame(errors, columns=columns), left


def groups(errors: pd.DataFrame) -> pd.DataFrame:
    """Returns the number of rows, their T, and the median and 95th percentile of |error|, for each
    machine and kind of forwards. The columns are "rows", "T", (error, .5) and (error, .95) for each
    error."""
    names = ["replay", "other", "without_luck"]
    kinds = errors.assign(**errors[names].astype(float).abs()).groupby(["machine", "forwards"])
    judged = kinds[names].quantile([0.5, 0.95]).unstack()
    judged["rows", ""] = kinds.size()
    judged["T", ""] = kinds["tp"].agg(lambda tp: ", ".join(map(str, sorted(set(tp)))))
    return judged


def meets(group: pd.Series) -> bool:
    """Returns whether a group's errors by another job's profile are within the allowed limits."""
    bar = BARS[group.name[1].partition(",")[0]]
    return bool(group["other", 0.5] <= bar[0] and group["other", 0.95] <= bar[1])


def table(judged: pd.DataFrame, left: Counter[str]) -> Iterator[str]:
    """Yields a Markdown table of the groups of rows; then a line for each group whose error by
    another job's profile exceeds its limit, and the reasons why rows have no prediction."""
    yield from pages.head("machine", "forwards", "T", "rows", "(a)", "(c)", "(c) without luck")
    for (machine, forwards), group in judged.iterrows():
        names = ("replay", "other", "without_luck")
        cells = [f"{group[name, 0.5]:.1%}, {group[name, 0.95]:.1%}" for name in names]
        yield pages.line([machine, forwards, group["T", ""], group["rows", ""], *cells])
    yield ""
    for (machine, forwards), group in judged.iterrows():
        if not meets(group):
            median, p95 = BARS[forwards.partition(",")[0]]
            yield f"{machine}, {forwards}: (c) misses its bar ({median:.0%}, {p95:.0%})."
    for reason, count in sorted(left.items()):
        yield f"Without (c): {count} row{'s' * (count > 1)}, {reason}."


def main(folders: str, profile: str | None = None) -> int:
    """Prints the prediction errors of the rows in `folders` (separated by commas); returns the exit
    code. profile: names or files of profiles, separated by commas (None: built-in ones)."""
    try:
        paths = [path for part in folders.split(",") for path in row_files(Path(part))]
        if not paths:
            raise ConfigError(f"rows {folders!r}: no runs there")
        rows = load_rows(paths)
        errors, left = errors_of(rows, map(profile_of_another_job(profile), rows))
        print("\n".join(table(groups(errors), left)).rstrip())
    except ConfigError as error:
        print(f"predictions: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
