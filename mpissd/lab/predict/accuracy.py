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
from typing import Any, NamedTuple

import numpy as np

from mpissd.common.row import Row
from mpissd.engine.backend.profile import device_kind, known_profiles, load_profile
from mpissd.lab.predict.row import Forecast, forecast_row

# Largest allowed median and p95 of the size of error (c).
BARS = {"products": (0.04, 0.10), "whole": (0.05, 0.12)}
MEAN_BAR = 0.03  # largest allowed mean of error (c), by mode and T
ENOUGH_SEEDS = 5  # with fewer seeds luck does not cancel in the mean
MARGIN = 0.02  # smallest measured difference whose sign counts
_SAME_CELL = (
    *("device_name", "workload", "target", "dtype", "batch_size", "lm_head", "context", "fuse"),
    *("forward", "num_layers"),
)
_SAME_USE = ("mode", "tp", "num_drafts", "lookahead", "backup", "backup_lookahead", "on_late")
_COLUMNS = "machine", "forwards", "T", "rows", "(a)", "(c)", "(c) without luck"


def profile_of_another_job(name: str | None) -> Callable[[Row], Forecast]:
    """Returns a function that predicts a row from another job's profile, for error (c).

    name: a device's profile, by name or file; several, separated by commas, are each used for the
    rows of their own device. None means the built-in profile of each row's device. Raises
    ConfigError if there is no such profile.
    """
    named = [] if name is None else [*map(load_profile, name.split(","))]
    known = {p.kind: p for p in (*map(load_profile, known_profiles()), *named)}
    own = {p.kind: p for p in named}

    def forecast(row: Row) -> Forecast:
        kind = device_kind(row.device_name)
        target = own.get(kind, named[0]) if named else known.get(kind)
        if target is None:
            return Forecast(reason=f"no profile of {kind}")
        return forecast_row(row, target, known.get(device_kind(row.draft_device)))

    return forecast


def judge(rows: Iterable[Row], forecast: Callable[[Row], Forecast]) -> tuple[str, dict[str, Any]]:
    """Returns the errors of all rows by machine, T and mode, as Markdown and as JSON."""
    rows = list(rows)
    forecasts = [forecast(row) for row in rows]
    errors, left = errors_of(rows, forecasts)
    judged, made = groups(errors), decisions(rows, forecasts)
    regret = max((regret for regret, _ in made), default=None)
    numbers = {"groups": judged, "left_out": dict(left), "largest_regret": regret}
    return "\n".join([*table(judged, left), *decided(made)]).rstrip(), numbers


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
                    "mode": row.mode.upper() + " inline" * bool(row.inline_draft),
                    "seed": row.seed,
                    "replay": replay,
                    "mean": row.tok_per_s / expected - 1,
                    "other": error,
                    "without_luck": (1 + error) / (1 + luck) - 1,
                }
            )
    return errors, left


def groups(errors: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns (median, p95) of the errors' sizes by machine, forwards, T and mode.

    After the modes of a T comes the group of all of them, and after a machine's T the group of all
    T, with tp of None.
    """
    every: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for error in errors:
        for tp, mode in ((error["tp"], error["mode"]), (error["tp"], "all"), (None, "all")):
            # The keys sort as the groups are returned.
            key = error["machine"], error["forwards"], tp is None, tp or 0, mode == "all", mode
            every[key].append(error)
    judged = []
    for (machine, forwards, is_total, tp, is_all, mode), chosen in sorted(every.items()):
        if is_all and not is_total and len({error["mode"] for error in chosen}) == 1:
            continue  # this T has one mode, whose group comes before
        group: dict[str, Any] = {"machine": machine, "forwards": forwards}
        group |= {"tp": None if is_total else tp, "mode": mode, "rows": len(chosen)}
        group["seeds"] = len({error["seed"] for error in chosen})
        for name in ("replay", "mean", "other", "without_luck"):
            values = [error[name] for error in chosen]
            group[name] = tuple(np.quantile(np.abs(values), [0.5, 0.95]).tolist())
            if name in ("other", "without_luck"):
                group[f"{name}_signed"] = float(np.mean(values))
        judged.append(group)
    return judged


def meets(group: dict[str, Any], key: str = "other") -> bool:
    """Returns whether a group's errors are within their bar; key: "without_luck" leaves it out."""
    return all(size <= most for size, most in zip(group[key], _bar(group), strict=True))


def _bar(group: dict[str, Any]) -> tuple[float, float]:
    return BARS[group["forwards"].partition(",")[0]]


def is_biased(group: dict[str, Any]) -> bool:
    """Returns whether the mean of error (c) exceeds its bar.

    The mean is taken without luck, and also with luck if the rows have enough seeds for it to
    cancel.
    """
    signed = [group["without_luck_signed"]]
    signed += [group["other_signed"]] * (group["seeds"] >= ENOUGH_SEEDS)
    return any(abs(mean) > MEAN_BAR for mean in signed)


def table(judged: Sequence[dict[str, Any]], left: Counter[str]) -> list[str]:
    """Returns the lines of the groups of all modes as Markdown, a line for each group whose (c)
    over all T misses its bar or whose means are off, and the rows that have no (c)."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    # The last group of each T covers all of its modes.
    for group in {(g["machine"], g["forwards"], g["tp"]): g for g in judged}.values():
        cells = [group["machine"], group["forwards"], group["tp"] or "all", group["rows"]]
        keys = ("replay", "other", "without_luck")
        cells += ["{:.1%}, {:.1%}".format(*group[key]) for key in keys]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines.append("")
    for group in (group for group in judged if group["tp"] is None):
        median, p95 = _bar(group)
        here = [g for g in judged if all(g[n] == group[n] for n in ("machine", "forwards"))]
        biased = [f"{g['mode']} at T = {g['tp']}" for g in here if g["tp"] and is_biased(g)]
        own, luckless = (
            "meets" if meets(group, k) else "misses" for k in ("other", "without_luck")
        )
        if biased or "misses" in (own, luckless):
            means = f"beyond {MEAN_BAR:.0%} for {', '.join(biased)}"
            lines.append(
                f"{group['machine']}, {group['forwards']}: (c) {own} its bar ({median:.0%}, "
                f"{p95:.0%}), without luck it {luckless} it; means by mode and T: "
                f"{means if biased else f'within {MEAN_BAR:.0%}'}."
            )
    for reason, count in sorted(left.items()):
        lines.append(f"Without (c): {count} row{'s' * (count > 1)}, {reason}.")
    return lines


def decisions(
    rows: Iterable[Row], forecasts: Iterable[Forecast]
) -> list[tuple[float, bool | None]]:
    """Returns (regret, sign) of every cell with two measured uses of at most as many GPUs.

    A cell is one machine, pair, acceptance, hit model and batch; cells of SSD include AR and SD on
    at most as many GPUs. Rates are means over a use's rows without the luck of their draws. regret:
    the fastest measured rate over the measured rate of the predicted best use, less one. sign:
    whether SSD against its strongest measured rival is predicted with the right sign; None if they
    differ by less than MARGIN, or without both.
    """
    alike: dict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    for row, forecast in zip(rows, forecasts, strict=True):
        if forecast.tok_per_s is None or row.sampling_error is None:
            continue
        base = tuple(str(row.get(name)) for name in _SAME_CELL)
        fast = row.acceptance_fast if row.backup == "fast" else None
        accepted = None if row.mode == "ar" else row.acceptance
        hits = row.hit_law if row.fan_out else None
        way = (*(row.get(name) for name in _SAME_USE), fast, str(row.fan_out))
        key = base, accepted, hits, row.mode, int(row.tp) + int(row.num_drafts or 0), way
        rates = row.tok_per_s / (1 + row.sampling_error), forecast.tok_per_s
        alike[key].append(rates)
    cells: dict[Any, list[_Use]] = defaultdict(list)
    for (base, *about, _), pairs in alike.items():
        cells[base].append(_Use(*about, *np.mean(pairs, axis=0).tolist()))
    made = []
    for uses in cells.values():
        for accepted in sorted({use.accepted for use in uses} - {None}, key=str):
            same = [use for use in uses if use.accepted in (None, accepted)]
            for hits in sorted({use.hits for use in same} - {None}, key=str) or [None]:
                for gpus in sorted({use.gpus for use in uses}):
                    fits = [u for u in same if u.gpus <= gpus and u.hits in (None, hits)]
                    if len(fits) > 1 and any(use.gpus == gpus for use in fits):
                        made.append(_decision(fits))
    return made


class _Use(NamedTuple):
    accepted: str | None  # the acceptance model; None: AR
    hits: str | None  # None: nothing grows
    mode: str
    gpus: int
    measured: float
    predicted: float


def _decision(uses: Sequence[_Use]) -> tuple[float, bool | None]:
    measured = np.array([use.measured for use in uses])
    predicted = np.array([use.predicted for use in uses])
    regret = float(measured.max() / measured[predicted.argmax()] - 1)
    ssd = np.array([use.mode == "ssd" for use in uses])
    if not ssd.any() or ssd.all():
        return regret, None
    gain, expected = (rates[ssd].max() / rates[~ssd].max() - 1 for rates in (measured, predicted))
    return regret, None if abs(gain) < MARGIN else bool((gain > 0) == (expected > 0))


def decided(made: Sequence[tuple[float, bool | None]]) -> list[str]:
    """Returns the lines on regret and on the sign of SSD against its strongest rival."""
    if not made:
        return []
    regrets, signs = [regret for regret, _ in made], [s for _, s in made if s is not None]
    median, p95 = np.quantile(regrets, [0.5, 0.95])
    lines = [
        f"Regret of the predicted choice over {len(made)} measured cells: {median:.1%} in the "
        f"median, {p95:.1%} at p95, {max(regrets):.1%} at most."
    ]
    if signs:
        lines.append(
            f"Sign of SSD against its strongest measured rival right in {sum(signs)} of "
            f"{len(signs)} cells that differ by {MARGIN:.0%} or more."
        )
    return lines
