"""The milestone report's tables 1 and 2 (one V100-32, alpha = .9), and ours.

One definition for every row: speedup(AR → SD) = E / (r(K+1) + T_draft), where
E = (1 − a^{K+1})/(1 − a), r(M) = t_target(M)/t_target(1) and T_draft = t_draft/t_target(1) =
r(K+1)·T_SD. Rows are compared within one setting only. A value that no row gives is a dash.
docs/milestone-tables.md explains where the report contradicts itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mpissd.common import theory
from mpissd.common.compare import FEWEST_ROUNDS, How, Rounds, compare_rows
from mpissd.common.presets import PAIRS
from mpissd.common.row import Row
from mpissd.lab.tables.claims import alpha_of
from mpissd.lab.tables.load import forward_times

ALPHA = 0.9
Profiles = Mapping[str, Mapping[str, Any]]  # jobs' profiles by run_id, as `run` writes them
Setting = tuple[Any, ...]  # values of _SETTING, and the drafts' device if it is another
# What all rows of a table share; AR rows share all except the draft's two, the last ones.
_SETTING = "device_name backend dtype tp all_reduce graph fuse lm_head context num_drafts".split()
# The report's K, T_SD and, of its table 2, SD's speedups over AR in theory and achieved.
_PRINTED = {
    "8b/1b": "2 .36 2.12 2.19, 4 .69 2.57 2.64, 6 1.02 2.73 2.81, 8 1.35 2.75 2.87, "
    "10 1.67 2.69 2.75, 12 2.01 2.60 2.70",
    "70b/1b": "2 .04, 4 .08, 6 .12, 8 .15, 10 .19, 12 .23",
}
REPORT = {
    pair: {int(line.split()[0]): [*map(float, line.split()[1:])] for line in text.split(",")}
    for pair, text in _PRINTED.items()
}
_NONE = "–"
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
_COLUMNS = {"K": 3, "T_SD": 6, "T_draft": 8, "r(K)": 7, "r(K+1)": 7, "theory": 7}
_COLUMNS |= {"achieved": 17, "ach/th": 7}
_REPORT_COLUMNS = {"T_SD": 5, "theory": 7, "achieved": 9, "E/(1+T)": 8, "ratio": 6}


def fits(pair: str, row: Row) -> bool:
    """Returns whether a row is AR or SD of the pair at full depth with one sequence.

    The target of a depth-scaled model has another name, so its rows do not match.
    """
    target, draft = PAIRS[pair]
    is_pair = row.target == target and row.draft in (None, draft) and row.batch_size == 1
    drafts_k = row.backup in (None, "jit") and row.backup_lookahead in (None, row.lookahead)
    return row.mode in ("ar", "sd") and is_pair and drafts_k and row.lookahead in {0, *REPORT[pair]}


def render(
    rows: Sequence[Row], profiles: Profiles, rounds: Mapping[str, Rounds] | None = None
) -> str:
    """Renders a table for each pair and setting with SD rows; a heading for a pair without.

    rows: of `run`, in any mode. profiles: the jobs' profiles by run_id (without one, r(K) is
    interpolated from the rows). rounds: the raw rounds by run_id; without them intervals come from
    the rows.
    """
    tables, num_used = [_LEGEND], 0
    for pair, report in REPORT.items():
        used = [row for row in rows if fits(pair, row)]
        num_used += len(used)
        measured = sorted({_setting(row) for row in used if row.mode == "sd"})
        settings: list[Setting | None] = [*measured] or [None]
        for setting in settings:
            alike = [r for r in used if setting and _setting(r)[:-2] == setting[:-2]]
            ars = [row for row in alike if row.mode == "ar"]
            sds = [row for row in alike if row.mode == "sd" and _setting(row) == setting]
            ratios = _ratios(alike, _median(ars, "t_target_s"), profiles)
            has_theory = all(len(printed) > 1 for printed in report.values())
            source = "milestone report, " + ("one V100-32" if has_theory else "from one layer")
            lines = [
                _label(pair, setting, bool(ars)),
                f"{'our rows':>{sum(_COLUMNS.values())}}  | {source}",
                f"{_padded(_COLUMNS, _COLUMNS)}  |{_padded(_REPORT_COLUMNS, _REPORT_COLUMNS)}",
            ]
            for lookahead, printed in report.items():
                here = [row for row in sds if row.lookahead == lookahead]
                ours, marks = _ours(lookahead, here, ars, ratios, rounds or {})
                lines.append(f"{ours}{marks:<2}|{_theirs(lookahead, *printed)}")
            tables.append("\n".join(lines))
    read = f"Rows read: {len(rows)}; AR or SD of these pairs at full depth, b = 1 and a K above: "
    return "\n\n".join([*tables, f"{read}{num_used}."])


def _setting(row: Row) -> Setting:
    return (*(row.get(name) for name in _SETTING), row.other_draft_device or "")


def _label(pair: str, setting: Setting | None, has_ar: bool) -> str:
    """Returns a table's heading: the pair, the hardware, and how the forwards were issued."""
    if setting is None:
        return f"{pair.upper()}: no SD row"
    known = dict(zip(_SETTING, setting[:-1], strict=True))
    where = "on a rank of its own" if known["num_drafts"] else "inline on the lead"
    where = f"on {setting[-1]}" if setting[-1] else where
    ranks = f"ranks: SD {known['tp'] + known['num_drafts']}, AR {known['tp']}"
    issued = [name for name in ("graph", "fuse", "lm_head") if known[name]]
    how = ", ".join([f"all_reduce={known['all_reduce']}", *issued, f"context={known['context']}"])
    return (
        f"{pair.upper()} on {known['device_name']}, {known['backend']} {known['dtype']}, "
        f"T={known['tp']}, draft {where}\n"
        f"    {ranks}; {how}{'' if has_ar else '; no AR row'}"
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


def _ours(
    lookahead: int,
    sds: Sequence[Row],
    ars: Sequence[Row],
    ratios: Mapping[int, float],
    rounds: Mapping[str, Rounds],
) -> tuple[str, str]:
    """Returns our cells at one K, and their marks.

    T_SD does not depend on alpha: it comes from rows at ALPHA if there are any, or from others.
    """
    wanted = [row for row in sds if alpha_of(row.acceptance) == ALPHA]
    timed = wanted or sds
    (_, shown_k), (r_k1, shown_k1) = (_ratio(ratios, lookahead + n) for n in (0, 1))
    t_sd, t_draft, speedup = _median(timed, "T_SD"), None, None
    if t_sd is not None and r_k1 is not None:
        t_draft = r_k1 * t_sd
        tokens = theory.expected_tokens(ALPHA, lookahead)
        speedup = theory.speedup_sd(tokens, r_k1, t_draft)
    achieved = relative = _NONE
    marks = "!" * (bool(timed) and any(row.stable is False for row in (*timed, *ars)))
    long = [
        [r for r in of if r.tok_per_s and r.num_rounds >= FEWEST_ROUNDS] for of in (ars, wanted)
    ]
    if all(long):
        gain = compare_rows(long[0], long[1], rounds)
        achieved = f"{gain.speedup:.2f} ({gain.interval})" if gain.is_real else "no difference"
        if gain.is_real:
            relative = _number(gain.speedup / speedup if speedup else None, 2)
        marks = "+" * gain.is_headline + "*" * (gain.how is How.ROWS) + marks
    cells = [f"{lookahead}", _number(t_sd, 3), _number(t_draft, 3), shown_k, shown_k1]
    return _padded([*cells, _number(speedup, 2), achieved, relative], _COLUMNS), marks


def _theirs(
    lookahead: int, t_sd: float, theory_: float | None = None, achieved: float | None = None
) -> str:
    """Returns the report's cells, and its formula applied to its own table 1: E / (1 + T_SD)."""
    again = theory.speedup_sd(theory.expected_tokens(ALPHA, lookahead), 1.0, t_sd)
    cells = [_number(value, 2) for value in (t_sd, theory_, achieved, again)]
    ratio = None if theory_ is None else again / theory_
    return _padded([*cells, _number(ratio, 3)], _REPORT_COLUMNS)


def _ratio(ratios: Mapping[int, float], width: int) -> tuple[float | None, str]:
    """Returns r(width) and its cell; interpolated between measured widths, None outside."""
    known = sorted(ratios)
    if width in ratios:
        return ratios[width], f"{ratios[width]:.3f}"
    if not known or not known[0] < width < known[-1]:
        return None, _NONE
    value = float(np.interp(width, known, [ratios[n] for n in known]))
    return value, f"~{value:.3f}"


def _median(rows: Iterable[Row], key: str) -> float | None:
    values = [float(row[key]) for row in rows if row[key] is not None]
    return statistics.median(values) if values else None


def _padded(cells: Iterable[str], columns: Mapping[str, int]) -> str:
    return "".join(f"{text:>{width}}" for text, width in zip(cells, columns.values(), strict=True))


def _number(value: float | None, digits: int) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"
