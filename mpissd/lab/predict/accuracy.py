"""Computes three errors of predictions over result rows; each is measured / predicted - 1.

    (a) replay  the row's own draws, from what its own job measured of itself (`prediction_error`)
    (b) mean    the laws' mean, from the same (`expected_tok_per_s`)
    (c) other   the laws' mean from a profile of another job: what `predict` and `plan` give a user

(b) and (c) include the luck of the row's draws: the replay over the mean of its own job
(`sampling_error`). Its standard deviation `sampling_sd` shows how much of them luck explains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from mpissd.common.errors import ConfigError
from mpissd.common.row import Row
from mpissd.engine.backend.profile import device_kind, known_profiles, load_profile
from mpissd.lab.predict import jobfile
from mpissd.lab.predict.costs import HostCosts
from mpissd.lab.predict.from_row import Forecast, forecast_from_run, forecast_row

BAR = 0.04, 0.10  # largest allowed median and p95 of the size of error (c), of products
WHOLE_BAR = 0.05, 0.12  # and of whole transformers
MEAN_BAR = 0.03  # largest allowed mean of error (c), by mode and T
ENOUGH_SEEDS = 5  # with fewer seeds luck does not cancel in the mean
_QUANTILES = [NormalDist().inv_cdf(0.5 + (n + 0.5) / 400) for n in range(200)]  # |normal|
_COLUMNS = (
    *("machine", "forwards", "T", "mode", "rows", "seeds", "(a)", "(b)", "luck alone"),
    *("(c)", "(c) mean", "(c) without luck", "mean"),
)


@dataclass(frozen=True)
class Errors:
    """The three prediction errors of one row, and its luck.

    forwards: "products" or "whole", followed by ", derived" if the profile did not measure all of
    them or the host costs. luck is the row's sampling_error; luck_sd is the standard deviation of
    that error.
    """

    machine: str
    forwards: str
    tp: int
    mode: str
    seed: int
    replay: float
    mean: float
    other: float
    luck: float
    luck_sd: float

    @property
    def other_without_luck(self) -> float:
        """Error (c) after removing the luck of the row's draws."""
        return (1 + self.other) / (1 + self.luck) - 1


def profile_of_another_job(name: str | None, host: str | None) -> Callable[[Row], Forecast]:
    """Returns a function that predicts a row from another job's profile, for error (c).

    name: a device's or run's profile, by name or file; several, separated by commas, are each used
    for the rows of their own device. None stands for the built-in profile of each row's device.
    host: a run's profile whose host costs to use (None: the profile's own). Raises ConfigError if
    there is no such profile.
    """
    run = None if name is None or "," in name else jobfile.load(name)
    if run is not None and name is not None:
        return lambda row: forecast_from_run(row, name, run)
    named = [] if name is None else [*map(load_profile, name.split(","))]
    costs = None if host is None else host_of(host)
    known = {p.kind: p for p in (*map(load_profile, known_profiles()), *named)}
    said = {p.kind: p for p in named}

    def forecast(row: Row) -> Forecast:
        if host is not None and Path(host).stem == row.run_id:
            return Forecast(reason="the host costs are of their own job")
        kind = device_kind(row.device_name)
        target = said.get(kind, named[0]) if named else known.get(kind)
        if target is None:
            return Forecast(reason=f"no profile of {kind}")
        return forecast_row(row, target, costs, known.get(device_kind(row.draft_device)))

    return forecast


def host_of(name: str) -> HostCosts:
    """Returns the host costs of a run's profile. Raises ConfigError for any other file."""
    file = jobfile.load(name)
    if file is None:
        raise ConfigError(f"host {name!r}: allowed: a run's OUT/profiles/RUN_ID.json")
    return file.host


def judge(rows: Iterable[Row], forecast: Callable[[Row], Forecast]) -> tuple[str, dict[str, Any]]:
    """Returns the errors of all rows by machine, T and mode, as Markdown and as JSON."""
    errors, left = errors_of(rows, forecast)
    judged = list(groups(errors))
    return table(judged, left), {"groups": judged, "left_out": dict(left)}


def errors_of(
    rows: Iterable[Row], forecast: Callable[[Row], Forecast]
) -> tuple[list[Errors], Counter[str]]:
    """Returns the errors of the rows that have all three, and a count of the others by reason."""
    of_rows, left = [], Counter[str]()
    for row in rows:
        other = forecast(row)
        if other.reason is not None:
            left[other.reason] += 1
        elif (errors := _errors(row, other)) is None:
            left["its own job predicted nothing"] += 1
        else:
            of_rows.append(errors)
    return of_rows, left


def _errors(row: Row, other: Forecast) -> Errors | None:
    """Returns the three errors of a row; None if its own job predicted nothing."""
    error, inline = other.error(row), " inline" if row.inline_draft else ""
    assert error is not None, "a forecast without a rate"
    replay, expected = row.prediction_error, row.expected_tok_per_s
    if replay is None or not expected or row.sampling_error is None or row.sampling_sd is None:
        return None
    return Errors(
        machine="emulated" if row.backend == "emulated" else row.device_name,
        forwards=("whole" if row.forward == "transformer" else "products")
        + ", derived" * other.derived,
        tp=row.tp,
        mode=row.mode.upper() + inline,
        seed=row.seed,
        replay=replay,
        mean=row.tok_per_s / expected - 1,
        other=error,
        luck=row.sampling_error,
        luck_sd=row.sampling_sd,
    )


def groups(errors: Sequence[Errors]) -> Iterator[dict[str, Any]]:
    """Yields median and p95 of the errors' sizes by machine, forwards, T and mode.

    After the modes of a T comes the group of all of them, and after a machine's T, with tp of None,
    that of all T.
    """
    for machine, forwards in sorted({(e.machine, e.forwards) for e in errors}):
        same = [e for e in errors if (e.machine, e.forwards) == (machine, forwards)]
        about = {"machine": machine, "forwards": forwards}
        for tp in sorted({e.tp for e in same}):
            here = [e for e in same if e.tp == tp]
            modes = sorted({e.mode for e in here})
            for mode in [*modes, "all"] if len(modes) > 1 else modes:
                chosen = [e for e in here if mode in (e.mode, "all")]
                yield {**about, "tp": tp, "mode": mode, **_group(chosen)}
        yield {**about, "tp": None, "mode": "all", **_group(same)}


def _group(chosen: Sequence[Errors]) -> dict[str, Any]:
    cleared = [e.other_without_luck for e in chosen]
    lucks = np.outer([e.luck_sd for e in chosen], _QUANTILES)
    return {
        "rows": len(chosen),
        "seeds": len({e.seed for e in chosen}),
        "replay": _sizes([e.replay for e in chosen]),
        "mean": _sizes([e.mean for e in chosen]),
        "luck": _sizes(lucks),
        "other": _sizes([e.other for e in chosen]),
        "other_signed": float(np.mean([e.other for e in chosen])),
        "without_luck": _sizes(cleared),
        "without_luck_signed": float(np.mean(cleared)),
    }


def _sizes(errors: Any) -> tuple[float, float]:
    """Returns (median, p95) of |errors|."""
    median, p95 = np.quantile(np.abs(errors), [0.5, 0.95])
    return float(median), float(p95)


def table(judged: Sequence[dict[str, Any]], left: Counter[str]) -> str:
    """Renders the groups as Markdown, with verdicts and the rows that are in no group."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|", *map(_line, judged), ""]
    lines += [_verdict(group, judged) for group in judged if group["tp"] is None]
    for reason, count in sorted(left.items()):
        lines.append(f"Without (c): {count} row{'s' * (count > 1)}, {reason}.")
    return "\n".join(lines)


def _line(group: dict[str, Any]) -> str:
    def both(key: str) -> str:
        return "{:.1%}, {:.1%}".format(*group[key])

    cells = [group["machine"], group["forwards"], group["tp"] or "all", group["mode"]]
    cells += [group["rows"], group["seeds"]]
    cells += [both("replay"), both("mean"), both("luck"), both("other")]
    cells += [f"{group['other_signed']:+.1%}", both("without_luck")]
    return "| " + " | ".join(map(str, [*cells, f"{group['without_luck_signed']:+.1%}"])) + " |"


def bar_of(forwards: str) -> tuple[float, float]:
    """Returns the largest allowed median and p95 of error (c) for this kind of forwards."""
    return WHOLE_BAR if forwards.startswith("whole") else BAR


def meets(group: dict[str, Any], key: str = "other") -> bool:
    """Returns whether a group's errors are within their bar; key: "without_luck" leaves it out."""
    bar = bar_of(group["forwards"])
    return all(size <= most for size, most in zip(group[key], bar, strict=True))


def _verdict(every: dict[str, Any], judged: Sequence[dict[str, Any]]) -> str:
    """Returns a line on whether (c) meets its bar over all T, and where its mean is off."""
    same = ("machine", "forwards")
    here = [g for g in judged if all(g[name] == every[name] for name in same)]
    own, luckless = ("meets" if meets(every, k) else "misses" for k in ("other", "without_luck"))
    bar = "median at most {:.0%}, p95 at most {:.0%}".format(*bar_of(every["forwards"]))
    biased = [f"{g['mode']} at T = {g['tp']}" for g in here if g["tp"] and is_biased(g)]
    means = f"beyond {MEAN_BAR:.0%} for {', '.join(biased)}" if biased else "within it"
    return (
        f"{every['machine']}, {every['forwards']}: (c) {own} its bar ({bar}); without luck it "
        f"{luckless} it. Its mean by mode and T, at most {MEAN_BAR:.0%}, is {means} (without luck "
        f"where the rows have fewer than {ENOUGH_SEEDS} seeds)."
    )


def is_biased(group: dict[str, Any]) -> bool:
    """Returns whether the mean of error (c) exceeds its bar.

    The mean is taken without luck, and also with luck if the rows have enough seeds for it to
    cancel.
    """
    signed = [group["without_luck_signed"]]
    signed += [group["other_signed"]] * (group["seeds"] >= ENOUGH_SEEDS)
    return any(abs(mean) > MEAN_BAR for mean in signed)

