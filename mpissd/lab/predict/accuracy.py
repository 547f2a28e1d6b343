"""Computes three errors of predictions over result rows; each is measured / predicted - 1.

    (a) replay  the row's own draws, from its own job's profile (`prediction_error`)
    (b) mean    the mean under the imposed models, from the same (`expected_tok_per_s`)
    (c) other   that mean from another job's profile, as `plan` gives a user

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

from mpissd.common.row import Row
from mpissd.engine.backend.profile import device_kind, known_profiles, load_profile
from mpissd.lab.predict.costs import load_job
from mpissd.lab.predict.from_row import Forecast, forecast_row

BAR = 0.04, 0.10  # largest allowed median and p95 of the size of error (c), of products
WHOLE_BAR = 0.05, 0.12  # and of whole transformers
MEAN_BAR = 0.03  # largest allowed mean of error (c), by mode and T
ENOUGH_SEEDS = 5  # with fewer seeds luck does not cancel in the mean
MARGIN = 0.02  # smallest measured difference whose sign counts
_SAME_CELL = (
    *("device_name", "workload", "target", "dtype", "batch_size", "lm_head", "context", "fuse"),
    *("forward", "num_layers"),
)
_SAME_USE = ("mode", "tp", "num_drafts", "lookahead", "backup", "backup_lookahead", "on_late")
_QUANTILES = [NormalDist().inv_cdf(0.5 + (n + 0.5) / 400) for n in range(200)]  # |normal|
_COLUMNS = "machine", "forwards", "T", "rows", "(a)", "(c)", "(c) without luck"


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

    name: a device's profile, by name or file; several, separated by commas, are each used for the
    rows of their own device. None means the built-in profile of each row's device. host: a run's
    profile whose host costs to use (None: the profile's own). Raises ConfigError if there is no
    such profile.
    """
    named = [] if name is None else [*map(load_profile, name.split(","))]
    costs = None if host is None else load_job(host)[1]
    known = {p.kind: p for p in (*map(load_profile, known_profiles()), *named)}
    own = {p.kind: p for p in named}

    def forecast(row: Row) -> Forecast:
        if host is not None and Path(host).stem == row.run_id:
            return Forecast(reason="the host costs are of their own job")
        kind = device_kind(row.device_name)
        target = own.get(kind, named[0]) if named else known.get(kind)
        if target is None:
            return Forecast(reason=f"no profile of {kind}")
        return forecast_row(row, target, costs, known.get(device_kind(row.draft_device)))

    return forecast


def judge(rows: Iterable[Row], forecast: Callable[[Row], Forecast]) -> tuple[str, dict[str, Any]]:
    """Returns the errors of all rows by machine, T and mode, as Markdown and as JSON."""
    rows = list(rows)
    forecasts = [forecast(row) for row in rows]
    errors, left = errors_of(rows, forecasts)
    judged, made = list(groups(errors)), decisions(rows, forecasts)
    regret = max((one.regret for one in made), default=None)
    numbers = {"groups": judged, "left_out": dict(left), "largest_regret": regret}
    return f"{table(judged, left)}\n{decided(made)}".rstrip(), numbers


def errors_of(
    rows: Iterable[Row], forecasts: Iterable[Forecast]
) -> tuple[list[Errors], Counter[str]]:
    """Returns the errors of the rows that have all three, and a count of the others by reason."""
    of_rows, left = [], Counter[str]()
    for row, other in zip(rows, forecasts, strict=True):
        own = row.prediction_error, row.expected_tok_per_s, row.sampling_error, row.sampling_sd
        replay, expected, luck, luck_sd = own
        if other.tok_per_s is None:
            left[str(other.reason)] += 1
        elif replay is None or not expected or luck is None or luck_sd is None:
            left["its own job predicted nothing"] += 1
        else:
            errors = Errors(
                machine="emulated" if row.backend == "emulated" else row.device_name,
                forwards=("whole" if row.forward == "transformer" else "products")
                + ", derived" * other.derived,
                tp=row.tp,
                mode=row.mode.upper() + " inline" * bool(row.inline_draft),
                seed=row.seed,
                replay=replay,
                mean=row.tok_per_s / expected - 1,
                other=row.tok_per_s / other.tok_per_s - 1,
                luck=luck,
                luck_sd=luck_sd,
            )
            of_rows.append(errors)
    return of_rows, left


def groups(errors: Sequence[Errors]) -> Iterator[dict[str, Any]]:
    """Yields median and p95 of the errors' sizes by machine, forwards, T and mode.

    After the modes of a T comes the group of all of them, and after a machine's T the group of all
    T, with tp of None.
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
    def sizes(errors: Any) -> tuple[float, ...]:
        """Returns (median, p95) of |errors|."""
        return tuple(np.quantile(np.abs(errors), [0.5, 0.95]).tolist())

    other, cleared = ([getattr(e, n) for e in chosen] for n in ("other", "other_without_luck"))
    return {
        "rows": len(chosen),
        "seeds": len({e.seed for e in chosen}),
        "replay": sizes([e.replay for e in chosen]),
        "mean": sizes([e.mean for e in chosen]),
        "luck": sizes(np.outer([e.luck_sd for e in chosen], _QUANTILES)),
        "other": sizes(other),
        "other_signed": float(np.mean(other)),
        "without_luck": sizes(cleared),
        "without_luck_signed": float(np.mean(cleared)),
    }


def table(judged: Sequence[dict[str, Any]], left: Counter[str]) -> str:
    """Renders the groups of all modes as Markdown, missed bars, and the rows that have no (c)."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    # The last group of each T covers all of its modes.
    lines += map(_line, {(g["machine"], g["forwards"], g["tp"]): g for g in judged}.values())
    lines.append("")
    lines += filter(None, (_verdict(group, judged) for group in judged if group["tp"] is None))
    for reason, count in sorted(left.items()):
        lines.append(f"Without (c): {count} row{'s' * (count > 1)}, {reason}.")
    return "\n".join(lines)


def _line(group: dict[str, Any]) -> str:
    cells = [group["machine"], group["forwards"], group["tp"] or "all", group["rows"]]
    cells += ["{:.1%}, {:.1%}".format(*group[key]) for key in ("replay", "other", "without_luck")]
    return "| " + " | ".join(map(str, cells)) + " |"


def _bar(group: dict[str, Any]) -> tuple[float, float]:
    return WHOLE_BAR if group["forwards"].startswith("whole") else BAR


def meets(group: dict[str, Any], key: str = "other") -> bool:
    """Returns whether a group's errors are within their bar; key: "without_luck" leaves it out."""
    return all(size <= most for size, most in zip(group[key], _bar(group), strict=True))


def _verdict(every: dict[str, Any], judged: Sequence[dict[str, Any]]) -> str:
    """Returns a line on a (c) over all T that misses its bar, or a mean that is off; else ""."""
    bar = _bar(every)
    here = [g for g in judged if all(g[name] == every[name] for name in ("machine", "forwards"))]
    own, luckless = ("meets" if meets(every, k) else "misses" for k in ("other", "without_luck"))
    biased = [f"{g['mode']} at T = {g['tp']}" for g in here if g["tp"] and is_biased(g)]
    if own == luckless == "meets" and not biased:
        return ""
    means = f"beyond {MEAN_BAR:.0%} for {', '.join(biased)}" if biased else f"within {MEAN_BAR:.0%}"
    return (
        f"{every['machine']}, {every['forwards']}: (c) {own} its bar ({bar[0]:.0%}, {bar[1]:.0%}), "
        f"without luck it {luckless} it; means by mode and T: {means}."
    )


def is_biased(group: dict[str, Any]) -> bool:
    """Returns whether the mean of error (c) exceeds its bar.

    The mean is taken without luck, and also with luck if the rows have enough seeds for it to
    cancel.
    """
    signed = [group["without_luck_signed"]]
    signed += [group["other_signed"]] * (group["seeds"] >= ENOUGH_SEEDS)
    return any(abs(mean) > MEAN_BAR for mean in signed)


@dataclass(frozen=True)
class Decision:
    """The predictor's choice among the measured uses of a cell, and the fastest use.

    A cell is one machine, pair, acceptance, hit model and batch. regret: the fastest measured rate
    over the choice's, less one. sign: whether SSD against its strongest measured rival is predicted
    with the right sign; None if they differ by less than MARGIN, or without both.
    """

    regret: float
    sign: bool | None


@dataclass(frozen=True)
class _Use:
    acceptance: str | None  # None: AR
    hits: str | None  # None: nothing grows
    mode: str
    gpus: int
    measured: float
    predicted: float


def decisions(rows: Iterable[Row], forecasts: Iterable[Forecast]) -> list[Decision]:
    """Returns the decision of every cell with two measured uses of at most as many GPUs.

    Rates are means over a use's rows without the luck of their draws. Cells of SSD include AR and
    SD of the same machine, pair and acceptance on at most as many GPUs.
    """
    made = []
    for uses in _uses(rows, forecasts).values():
        for accepted in sorted({use.acceptance for use in uses} - {None}, key=str):
            alike = [use for use in uses if use.acceptance in (None, accepted)]
            hits = sorted({use.hits for use in alike} - {None}, key=str) or [None]
            for hit in hits:
                for gpus in sorted({use.gpus for use in uses}):
                    fits = [u for u in alike if u.gpus <= gpus and u.hits in (None, hit)]
                    if len(fits) > 1 and any(use.gpus == gpus for use in fits):
                        made.append(_decision(fits))
    return made


def _uses(rows: Iterable[Row], forecasts: Iterable[Forecast]) -> dict[Any, list[_Use]]:
    """Returns the measured uses with a forecast by their machine, pair and batch, each the mean
    over its rows."""
    alike: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for row, forecast in zip(rows, forecasts, strict=True):
        if forecast.tok_per_s is None or row.sampling_error is None:
            continue
        base = tuple(str(row.get(name)) for name in _SAME_CELL)
        fast = row.acceptance_fast if row.backup == "fast" else None
        accepted = None if row.mode == "ar" else row.acceptance
        way = (*(row.get(name) for name in _SAME_USE), fast, str(row.fan_out))
        about = accepted, row.hit_law if row.fan_out else None, row.mode
        key = base, about, int(row.tp) + int(row.num_drafts or 0), way
        rates = row.tok_per_s / (1 + row.sampling_error), forecast.tok_per_s
        alike.setdefault(key, []).append(rates)
    uses: dict[Any, list[_Use]] = {}
    for (base, (accepted, hits, mode), gpus, _), pairs in alike.items():
        measured, predicted = np.mean(pairs, axis=0).tolist()
        use = _Use(accepted, hits, mode, gpus, measured, predicted)
        uses.setdefault(base, []).append(use)
    return uses


def _decision(uses: Sequence[_Use]) -> Decision:
    chosen = max(uses, key=lambda use: use.predicted)
    regret = max(use.measured for use in uses) / chosen.measured - 1
    ssd = [use for use in uses if use.mode == "ssd"]
    rivals = [use for use in uses if use.mode != "ssd"]
    if not (ssd and rivals):
        return Decision(regret, None)
    true, predicted = (
        max(getattr(u, rate) for u in ssd) / max(getattr(u, rate) for u in rivals) - 1
        for rate in ("measured", "predicted")
    )
    return Decision(regret, None if abs(true) < MARGIN else (true > 0) == (predicted > 0))


def decided(made: Sequence[Decision]) -> str:
    """Returns the lines on regret and on the sign of SSD against its strongest rival."""
    if not made:
        return ""
    regrets = np.array([one.regret for one in made])
    signs = [one.sign for one in made if one.sign is not None]
    median, p95 = np.quantile(regrets, [0.5, 0.95])
    text = (
        f"Regret of the predicted choice over {len(made)} measured cells: {median:.1%} in the "
        f"median, {p95:.1%} at p95, {regrets.max():.1%} at most."
    )
    if signs:
        text += (
            f"\nSign of SSD against its strongest measured rival right in {sum(signs)} of "
            f"{len(signs)} cells that differ by {MARGIN:.0%} or more."
        )
    return text
