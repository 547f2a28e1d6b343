"""Computes SD's speedup over AR from rows, in theory and achieved, beside the milestone report's.

One definition for every row: speedup(AR → SD) = E / (r(K+1) + T_draft), where
E = (1 − a^{K+1})/(1 − a), r(M) = t_target(M)/t_target(1) and T_draft = t_draft/t_target(1) =
r(K+1)·T_SD. Rows are compared within one Setting only. Values that no row gives are None.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpissd.common import theory
from mpissd.common.compare import Comparison, compare_rows
from mpissd.common.errors import ConfigError
from mpissd.common.presets import PAIRS
from mpissd.common.rates import FEWEST_ROUNDS, Rounds
from mpissd.common.row import Row
from mpissd.lab.tables.load import forward_times
from mpissd.lab.tables.milestone import ALPHA, REPORT, ReportRow

Profiles = Mapping[str, Mapping[str, Any]]  # jobs' profiles by run_id, as `run` writes them
AllRounds = Mapping[str, Rounds]  # raw rounds by run_id


@dataclass(frozen=True)
class Ratio:
    """The ratio t_target(M) / t_target(1), interpolated between neighbours if not measured."""

    value: float
    measured: bool = True


@dataclass(frozen=True)
class TableRow:
    """The results at one K.

    t_sd is in units of t_target(K+1), t_draft in units of t_target(1). theory and achieved are SD's
    speedups over AR; achieved compares tok/s. num_rows counts the SD rows at ALPHA. unstable: the
    median round drifted in one of the rows used.
    """

    report: ReportRow
    t_sd: float | None = None
    t_draft: float | None = None
    r_k: Ratio | None = None
    r_k1: Ratio | None = None
    theory: float | None = None
    achieved: Comparison | None = None
    num_rows: int = 0
    unstable: bool = False


_SHARED = "device_name backend dtype tp all_reduce graph fuse lm_head context".split()


@dataclass(frozen=True, order=True)
class Setting:
    """The settings that all rows of a table share; AR rows share all except the draft."""

    device_name: str
    backend: str
    dtype: str
    tp: int
    all_reduce: str
    graph: bool
    fuse: bool
    lm_head: bool
    context: int  # tokens
    num_drafts: int = 0
    draft_device: str = ""  # "": inline, or the same kind of device as the lead's

    @classmethod
    def of(cls, row: Row) -> Setting:
        """Returns the setting of an AR or SD row."""
        shared, other = {key: row[key] for key in _SHARED}, row.other_draft_device or ""
        return cls(**shared, num_drafts=row.num_drafts, draft_device=other)

    @property
    def of_target(self) -> Setting:
        """This setting without its draft: the setting of its AR rows, which r depends on."""
        return replace(self, num_drafts=0, draft_device="")


@dataclass(frozen=True)
class Table:
    """The results of a pair in one setting; the setting is None if there was no row."""

    pair: str
    rows: tuple[TableRow, ...]
    setting: Setting | None = None
    has_ar: bool = False
    device_flag: str | None = None  # value of --device for an emulated device


def make_tables(
    rows: Sequence[Row], profiles: Profiles, rounds: AllRounds | None = None
) -> list[Table]:
    """Makes a table for each pair and setting with SD rows; a pair without rows gets an empty one.

    Raises ConfigError for a row or profile that lacks something that `run` writes.
    """
    tables: list[Table] = []
    for pair, report in REPORT.items():
        used = [row for row in rows if _fits(pair, row)]
        settings = sorted({Setting.of(row) for row in used if row.mode == "sd"})
        tables += [_table(pair, setting, used, profiles, rounds or {}) for setting in settings]
        if not settings:
            tables.append(Table(pair, tuple(map(TableRow, report))))
    return tables


def is_usable(row: Row) -> bool:
    """Returns whether a row is of the report's pairs; AR rows need SD rows beside them, too."""
    return any(_fits(pair, row) for pair in REPORT)


def _fits(pair: str, row: Row) -> bool:
    """Returns whether a row is AR or SD of the pair at full depth with one sequence.

    The target of a depth-scaled model has another name, so its rows do not match.
    """
    if row.mode not in ("ar", "sd"):
        return False
    _check(row)
    target, draft = PAIRS[pair]
    is_pair = row.target == target and row.draft in (None, draft) and row.batch_size == 1
    if row.get("backup", "jit") not in (None, "jit"):
        return False  # prompt lookup drafted the tokens, not the draft model
    if row.backup_lookahead not in (None, row.lookahead):
        return False  # the run drafted fewer than K tokens (backup_lookahead < K)
    return is_pair and row.lookahead in (0, *(report.lookahead for report in REPORT[pair]))


_TEXTS = ("run_id", "target", "device_name", "backend", "dtype", "all_reduce")
_SWITCHES = ("graph", "fuse", "lm_head")
_COUNTS = ("tp", "context", "num_drafts", "lookahead", "batch_size", "num_rounds")
_NUMBERS = ("tok_per_s", "t_target_s", "T_SD")  # may be null
_OTHERS = ("draft", "acceptance", "stable", "accept_histogram", "round_us", "provenance")


def _check(row: Row) -> None:
    """Raises ConfigError for a value that `run` never writes."""
    for key in (*_TEXTS, *_SWITCHES, *_COUNTS, *_NUMBERS, *_OTHERS):
        if key not in row:
            raise ConfigError(f"row {row.get('run_id')!r}: no {key}: allowed: a row of `run`")
    good = {key: isinstance(row[key], str) for key in _TEXTS}
    good |= {key: isinstance(row[key], bool) for key in _SWITCHES}
    good |= {key: _is_number(row[key]) and isinstance(row[key], int) for key in _COUNTS}
    good |= {key: row[key] is None or _is_number(row[key]) for key in _NUMBERS}
    good |= {key: isinstance(row[key], Mapping) for key in ("round_us", "provenance")}
    counts = row.accept_histogram
    good["accept_histogram"] = isinstance(counts, list) and all(map(_is_number, counts))
    if bad := [key for key, is_good in good.items() if not is_good]:
        raise ConfigError(f"row {row.run_id!r}: {bad[0]}={row[bad[0]]!r}: no value of `run`")


def _is_number(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 <= value < math.inf


def _table(
    pair: str, setting: Setting, used: Sequence[Row], profiles: Profiles, rounds: AllRounds
) -> Table:
    alike = [row for row in used if Setting.of(row).of_target == setting.of_target]
    ars = [row for row in alike if row.mode == "ar"]
    sds = [row for row in alike if row.mode == "sd" and Setting.of(row) == setting]
    ratios = _ratios(alike, _median(ars, "t_target_s"), profiles)
    rows = tuple(
        _table_row(report, [r for r in sds if r.lookahead == report.lookahead], ars, ratios, rounds)
        for report in REPORT[pair]
    )
    return Table(pair, rows, setting, bool(ars), _device_flag(sds))


def _table_row(
    report: ReportRow,
    sds: Sequence[Row],
    ars: Sequence[Row],
    ratios: Mapping[int, float],
    rounds: AllRounds,
) -> TableRow:
    """Returns the results at one K.

    T_SD does not depend on alpha: it comes from rows at ALPHA if there are any, else from others.
    """
    lookahead = report.lookahead
    wanted = [row for row in sds if _alpha(row) == ALPHA]
    timed = wanted or sds
    t_sd, r_k1 = _median(timed, "T_SD"), _ratio(ratios, lookahead + 1)
    t_draft = speedup = None
    if t_sd is not None and r_k1 is not None:
        t_draft = r_k1.value * t_sd
        tokens = theory.expected_tokens(ALPHA, lookahead)
        speedup = theory.speedup_sd(tokens, r_k1.value, t_draft)
    return TableRow(
        report=report,
        t_sd=t_sd,
        t_draft=t_draft,
        r_k=_ratio(ratios, lookahead),
        r_k1=r_k1,
        theory=speedup,
        achieved=_achieved(wanted, ars, rounds),
        num_rows=len(wanted),
        unstable=bool(timed) and any(row.stable is False for row in (*timed, *ars)),
    )


def _achieved(sds: Sequence[Row], ars: Sequence[Row], rounds: AllRounds) -> Comparison | None:
    """Returns the measured comparison of SD with AR; None if a side has no row of 20 rounds."""
    sides = [
        [r for r in rows if r.tok_per_s and r.num_rounds >= FEWEST_ROUNDS] for rows in (ars, sds)
    ]
    return compare_rows(sides[0], sides[1], rounds) if all(sides) else None


def _ratios(
    rows: Sequence[Row], ar_t_target_s: float | None, profiles: Profiles
) -> dict[int, float]:
    """Returns {M: t_target(M)/t_target(1)}, the median over the jobs' forward tables.

    Each table is divided by its own value at M = 1. For an M in no table, the rows' t_target_s is
    divided by that of AR.
    """
    tabled: dict[int, list[float]] = {}
    timed: dict[int, list[float]] = {}
    for row in rows:
        profile = profiles.get(row.run_id)
        times = {} if profile is None else forward_times(f"profile {row.run_id}", profile)
        if times.get(1):
            for width, seconds in times.items():
                tabled.setdefault(width, []).append(seconds / times[1])
        if ar_t_target_s and row.t_target_s:
            timed.setdefault(row.lookahead + 1, []).append(row.t_target_s / ar_t_target_s)
    return {width: statistics.median(values) for width, values in (timed | tabled).items()}


def _ratio(ratios: Mapping[int, float], width: int) -> Ratio | None:
    """Returns r(width); None outside the measured widths."""
    if width in ratios:
        return Ratio(ratios[width])
    known = sorted(ratios)
    if not known or not known[0] < width < known[-1]:
        return None
    return Ratio(float(np.interp(width, known, [ratios[n] for n in known])), measured=False)


def _median(rows: Iterable[Row], key: str) -> float | None:
    values = [float(row[key]) for row in rows if row[key] is not None]
    return statistics.median(values) if values else None


def _alpha(row: Row) -> float | None:
    """Returns a if the row's acceptance law is alpha:a, else None."""
    name, _, value = str(row.acceptance).partition(":")
    try:
        return float(value) if name == "alpha" else None
    except ValueError:
        return None


def _device_flag(rows: Sequence[Row]) -> str | None:
    """Returns the value of --device= on the rows' command lines."""
    words = [word for row in rows for word in row.command]
    return min((w.partition("=")[2] for w in words if w.startswith("--device=")), default=None)
