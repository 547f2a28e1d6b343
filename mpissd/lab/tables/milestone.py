"""The milestone report's tables 1 and 2 (one V100-32, alpha = .9), and ours.

One definition for every row: speedup(AR → SD) = E / (r(K+1) + T_draft), where
E = (1 − a^{K+1})/(1 − a), r(M) = t_target(M)/t_target(1) and T_draft = t_draft/t_target(1) =
r(K+1)·T_SD. Rows are compared within one setting only. A value that no row gives is None.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mpissd.common import theory
from mpissd.common.compare import Comparison, How, compare_rows
from mpissd.common.presets import PAIRS
from mpissd.common.rates import FEWEST_ROUNDS, Rounds
from mpissd.common.row import Row
from mpissd.lab.tables.load import forward_times

ALPHA = 0.9
Profiles = Mapping[str, Mapping[str, Any]]  # jobs' profiles by run_id, as `run` writes them
AllRounds = Mapping[str, Rounds]  # raw rounds by run_id
_NONE = "–"
# What all rows of a table share; AR rows share all except the last two, the draft's.
SETTING = (
    "device_name backend dtype tp all_reduce graph fuse lm_head context num_drafts "
    "other_draft_device"
).split()
_OF_DRAFTS = 2


@dataclass(frozen=True)
class ReportRow:
    """One K of the report's tables 1 and 2, as printed; None if it prints none for this pair."""

    lookahead: int
    t_sd: float
    theory: float | None = None
    achieved: float | None = None

    @property
    def recomputed(self) -> float:
        """The speedup E / (1 + T_SD): the report's formula, applied to its own table 1."""
        return theory.speedup_sd(theory.expected_tokens(ALPHA, self.lookahead), 1.0, self.t_sd)

    @property
    def ratio(self) -> float | None:
        """The recomputed speedup over the printed one: the report's r, if its table 2 has one."""
        return None if self.theory is None else self.recomputed / self.theory


_PRINTED = {
    "8b/1b": "2 .36 2.12 2.19, 4 .69 2.57 2.64, 6 1.02 2.73 2.81, 8 1.35 2.75 2.87, "
    "10 1.67 2.69 2.75, 12 2.01 2.60 2.70",
    "70b/1b": "2 .04, 4 .08, 6 .12, 8 .15, 10 .19, 12 .23",
}
REPORT = {
    pair: tuple(
        ReportRow(int(k), *map(float, values))
        for k, *values in (line.split() for line in text.split(","))
    )
    for pair, text in _PRINTED.items()
}


class Ratio(NamedTuple):
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


@dataclass(frozen=True)
class Table:
    """The results of a pair in one setting (the values of SETTING); None if there was no row."""

    pair: str
    rows: tuple[TableRow, ...]
    setting: tuple[Any, ...] | None = None
    has_ar: bool = False


def make_tables(
    rows: Sequence[Row], profiles: Profiles, rounds: AllRounds | None = None
) -> list[Table]:
    """Makes a table for each pair and setting with SD rows; an empty one without."""
    tables: list[Table] = []
    for pair, report in REPORT.items():
        used = [row for row in rows if _fits(pair, row)]
        settings = sorted({_setting(row) for row in used if row.mode == "sd"})
        for setting in settings:
            alike = [row for row in used if _setting(row)[:-_OF_DRAFTS] == setting[:-_OF_DRAFTS]]
            ars = [row for row in alike if row.mode == "ar"]
            sds = [row for row in alike if row.mode == "sd" and _setting(row) == setting]
            ratios = _ratios(alike, _median(ars, "t_target_s"), profiles)
            lines = (_table_row(line, sds, ars, ratios, rounds or {}) for line in report)
            tables.append(Table(pair, tuple(lines), setting, bool(ars)))
        if not settings:
            tables.append(Table(pair, tuple(map(TableRow, report))))
    return tables


def _setting(row: Row) -> tuple[Any, ...]:
    return (*(getattr(row, name) for name in SETTING[:-1]), row.other_draft_device or "")


def is_usable(row: Row) -> bool:
    """Returns whether a row is of the report's pairs; AR rows need SD rows, too."""
    return any(_fits(pair, row) for pair in REPORT)


def _fits(pair: str, row: Row) -> bool:
    """Returns whether a row is AR or SD of the pair at full depth with one sequence.

    The target of a depth-scaled model has another name, so its rows do not match.
    """
    target, draft = PAIRS[pair]
    is_pair = row.target == target and row.draft in (None, draft) and row.batch_size == 1
    drafts_k = row.backup in (None, "jit") and row.backup_lookahead in (None, row.lookahead)
    known = {0, *(line.lookahead for line in REPORT[pair])}
    return row.mode in ("ar", "sd") and is_pair and drafts_k and row.lookahead in known


def _table_row(
    report: ReportRow,
    sds: Sequence[Row],
    ars: Sequence[Row],
    ratios: Mapping[int, float],
    rounds: AllRounds,
) -> TableRow:
    """Returns the results at one K.

    T_SD does not depend on alpha: it comes from rows at ALPHA if there are any, or from others.
    """
    lookahead = report.lookahead
    here = [row for row in sds if row.lookahead == lookahead]
    wanted = [row for row in here if _alpha(row) == ALPHA]
    timed = wanted or here
    t_sd, r_k1 = _median(timed, "T_SD"), _ratio(ratios, lookahead + 1)
    t_draft = speedup = achieved = None
    if t_sd is not None and r_k1 is not None:
        t_draft = r_k1.value * t_sd
        tokens = theory.expected_tokens(ALPHA, lookahead)
        speedup = theory.speedup_sd(tokens, r_k1.value, t_draft)
    long = [
        [r for r in of if r.tok_per_s and r.num_rounds >= FEWEST_ROUNDS] for of in (ars, wanted)
    ]
    if all(long):
        achieved = compare_rows(long[0], long[1], rounds)
    return TableRow(
        report=report,
        t_sd=t_sd,
        t_draft=t_draft,
        r_k=_ratio(ratios, lookahead),
        r_k1=r_k1,
        theory=speedup,
        achieved=achieved,
        num_rows=len(wanted),
        unstable=bool(timed) and any(row.stable is False for row in (*timed, *ars)),
    )


def _ratios(
    rows: Sequence[Row], ar_t_target_s: float | None, profiles: Profiles
) -> dict[int, float]:
    """Returns {M: t_target(M)/t_target(1)}, the median over the jobs' forward tables.

    Each table is divided by its own value at M = 1. For an M in no table, the rows' t_target_s is
    divided by AR's.
    """
    tabled: dict[int, list[float]] = {}
    timed: dict[int, list[float]] = {}
    for row in rows:
        profile = profiles.get(row.run_id)
        times = {} if profile is None else forward_times(f"profile {row.run_id}", profile)
        for width, seconds in times.items() if times.get(1) else ():
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
    """Returns a if the row's acceptance model is alpha:a, or None."""
    match = re.fullmatch(r"alpha:([0-9.eE+-]+)", str(row.acceptance))
    return float(match[1]) if match else None


_LEGEND = f"""\
SD over AR at alpha = {ALPHA}, b = 1: our rows, and the milestone report's tables 1 and 2

T_SD      t_draft / t_target(K+1): K draft steps over the verification of K+1 rows
T_draft   t_draft / t_target(1) = r(K+1)·T_SD
r(M)      t_target(M) / t_target(1), M rows against one; ~ interpolated between measured widths
theory    E / (r(K+1) + T_draft), with E = (1 − a^(K+1)) / (1 − a) tokens a round
achieved  tok/s of SD over tok/s of AR, and its 95% interval; "no difference" where that holds 1
ach/th    achieved / theory
E/(1+T)   the report's formula on its own T_SD; ratio: E/(1+T) over its printed theory
+         paired over 5 seeds or more of 400 rounds; without it: few seeds, which claim no speedup
*         rounds were not kept: the interval is of the rows' draws and percentiles only
!         a row used is not stable: blocks of its rounds differ in their median
{_NONE}         not measured (an interval needs 20 rounds)
Times don't depend on alpha: where no row has alpha = {ALPHA}, they come from another law's rows."""

_COLUMNS = {
    "K": 3, "T_SD": 6, "T_draft": 8, "r(K)": 7, "r(K+1)": 7, "theory": 7, "achieved": 17,
    "ach/th": 7,
}  # fmt: skip
_REPORT_COLUMNS = {"T_SD": 5, "theory": 7, "achieved": 9, "E/(1+T)": 8, "ratio": 6}


def render(
    rows: Sequence[Row], profiles: Profiles | None = None, rounds: AllRounds | None = None
) -> str:
    """Renders all tables; docs/milestone-tables.md explains where the report contradicts itself.

    rows: of `run`, in any mode. profiles: the jobs' profiles by run_id; without them r(K) is
    interpolated from the rows. rounds: the raw rounds by run_id; without them intervals come from
    the rows.
    """
    tables = make_tables(rows, {} if profiles is None else profiles, rounds)
    usable = sum(map(is_usable, rows))
    used = f"Rows read: {len(rows)}; AR or SD of these pairs at full depth, b = 1 and a K above: "
    return "\n\n".join([_LEGEND, *map(_table_text, tables), f"{used}{usable}."])


def _table_text(table: Table) -> str:
    source = "milestone report, one V100-32"
    if any(row.report.theory is None for row in table.rows):
        source = "milestone report, from one layer"
    lines = [_label(table), f"{'our rows':>{sum(_COLUMNS.values())}}  | {source}"]
    lines.append(f"{_padded(_COLUMNS, _COLUMNS)}  |{_padded(_REPORT_COLUMNS, _REPORT_COLUMNS)}")
    return "\n".join([*lines, *map(_line, table.rows)])


def _padded(cells: Iterable[str], columns: Mapping[str, int]) -> str:
    return "".join(f"{text:>{width}}" for text, width in zip(cells, columns.values(), strict=True))


def _label(table: Table) -> str:
    """Returns a table's heading: the pair, the hardware, and how the forwards were issued."""
    if table.setting is None:
        return f"{table.pair.upper()}: no SD row"
    known = dict(zip(SETTING, table.setting, strict=True))
    where = "on a device of its own" if known["num_drafts"] else "inline on the lead"
    if device := known["other_draft_device"]:
        where = f"on {device}"
    ranks = f"ranks: SD {known['tp'] + known['num_drafts']}, AR {known['tp']}"
    issued = [name for name in ("graph", "fuse", "lm_head") if known[name]]
    how = ", ".join([f"all_reduce={known['all_reduce']}", *issued, f"context={known['context']}"])
    return (
        f"{table.pair.upper()} on {known['device_name']}, {known['backend']} {known['dtype']}, "
        f"T={known['tp']}, draft {where}\n"
        f"    {ranks}; {how}{'' if table.has_ar else '; no AR row'}"
    )


def _line(row: TableRow) -> str:
    report, gain = row.report, row.achieved
    achieved = relative = _NONE
    marks = "!" * row.unstable
    if gain is not None:
        achieved = "no difference"
        marks = "+" * gain.is_headline + "*" * (gain.how is How.ROWS) + marks
        if gain.is_real:
            achieved = f"{gain.speedup:.2f} ({gain.interval})"
            relative = _number(gain.speedup / row.theory if row.theory else None, 2)
    times = _number(row.t_sd, 3), _number(row.t_draft, 3), _of_ratio(row.r_k), _of_ratio(row.r_k1)
    ours = (f"{report.lookahead}", *times, _number(row.theory, 2), achieved, relative)
    printed = (report.t_sd, report.theory, report.achieved, report.recomputed)
    theirs = (*(_number(value, 2) for value in printed), _number(report.ratio, 3))
    return f"{_padded(ours, _COLUMNS)}{marks:<2}|{_padded(theirs, _REPORT_COLUMNS)}"


def _number(value: float | None, digits: int) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"


def _of_ratio(ratio: Ratio | None) -> str:
    return _NONE if ratio is None else f"{'' if ratio.measured else '~'}{ratio.value:.3f}"
