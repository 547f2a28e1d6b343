"""Computes three errors of predictions over result rows; each is measured / predicted - 1.

    (a) replay  the row's own draws, from its own job's profile (`prediction_error`)
    (b) mean    the mean under the imposed models, from the same (`expected_tok_per_s`)
    (c) other   that mean from another job's profile, as `plan` gives a user

(b) and (c) include the luck of the row's draws: the replay over the mean of its own job
(`sampling_error`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mpissd.common.row import Row
from mpissd.engine.backend.profile import device_kind, load_profile
from mpissd.lab.predict.derive import shipped_profiles
from mpissd.lab.predict.row import Forecast, forecast_row

# Largest allowed median and p95 of the size of error (c).
BARS = {"products": (0.04, 0.10), "whole": (0.05, 0.12)}
_COLUMNS = "machine", "forwards", "T", "rows", "(a)", "(c)", "(c) without luck"


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
