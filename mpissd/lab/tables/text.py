"""Renders the tables as text, at most 100 columns wide; equal rows give equal text."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence

from mpissd.common.compare import How
from mpissd.common.row import Row
from mpissd.lab.tables.compare import (
    AllRounds,
    Profiles,
    Ratio,
    Setting,
    Table,
    TableRow,
    is_usable,
    make_tables,
)
from mpissd.lab.tables.milestone import ALPHA, REPORT

_WIDTH = 100
_ROUNDS = 1000  # rounds of each run that fills a table: draws change tok/s by ± 1 to 2%
# T that holds the target's 16-bit weights (13.96 and 136.9 GB) on devices of 80 GB.
_DEFAULT_TP = {"8b/1b": 1, "70b/1b": 2}
_NONE = "–"

_LEGEND = f"""\
SD over AR at alpha = {ALPHA}, b = 1: our rows, and the milestone report's tables 1 and 2 beside

T_SD      t_draft / t_target(K+1): K draft steps over the verification of K+1 rows
T_draft   t_draft / t_target(1) = r(K+1)·T_SD
r(M)      t_target(M) / t_target(1), M rows against one; ~ interpolated between measured widths
theory    E / (r(K+1) + T_draft), with E = (1 − a^(K+1)) / (1 − a) tokens a round
achieved  tok/s of SD over tok/s of AR, and its 95% interval; "no difference" where that holds 1
ach/th    achieved / theory
E/(1+T)   the report's formula on its own T_SD; ratio: E/(1+T) over its printed theory
+         paired over 5 seeds or more of 400 rounds; without it: few seeds, which claim no speedup
*         rounds were not kept: the interval is of the rows' draws and percentiles alone
!         a row used is not stable: blocks of its rounds differ in their median
{_NONE}         no row says it (an interval needs 20 rounds)
Times don't depend on alpha: where no row has alpha = {ALPHA}, they come from another law's rows."""

_COLUMNS = (
    ("K", 3),
    ("T_SD", 6),
    ("T_draft", 8),
    ("r(K)", 7),
    ("r(K+1)", 7),
    ("theory", 7),
    ("achieved", 17),
    ("ach/th", 7),
)
_REPORT_COLUMNS = (("T_SD", 5), ("theory", 7), ("achieved", 9), ("E/(1+T)", 8), ("ratio", 6))


def render(
    rows: Sequence[Row], profiles: Profiles | None = None, rounds: AllRounds | None = None
) -> str:
    """Renders all tables, why the report's own figures contradict each other, and what to run next.

    rows: of `run`, in any mode. profiles: the jobs' profiles by run_id; without them r(K) is
    interpolated from the rows. rounds: the raw rounds by run_id; without them intervals come from
    the rows. Raises ConfigError for a row or profile that lacks something that `run` writes.
    """
    tables = make_tables(rows, {} if profiles is None else profiles, rounds)
    parts = [_LEGEND, *map(_table_text, tables), _why(), _use(rows), _to_run(tables)]
    return "\n\n".join(part for part in parts if part)


def _table_text(table: Table) -> str:
    ours = sum(width for _, width in _COLUMNS)
    source = "milestone report, one V100-32"
    if any(row.report.theory is None for row in table.rows):
        source = "milestone report, from one layer"
    lines = [_label(table), f"{'our rows':>{ours}}  | {source}", _heads()]
    return "\n".join([*lines, *map(_line, table.rows)])


def _heads() -> str:
    ours, theirs = (
        "".join(f"{name:>{width}}" for name, width in columns)
        for columns in (_COLUMNS, _REPORT_COLUMNS)
    )
    return f"{ours}  |{theirs}"


def _label(table: Table) -> str:
    """Returns a table's heading: the pair, the hardware, and how the forwards were issued."""
    pair, setting = table.pair.upper(), table.setting
    if setting is None:
        return f"{pair}: no SD row"
    where = "inline on the lead" if not setting.num_drafts else "on a device of its own"
    if setting.draft_device:
        where = f"on {setting.draft_device}"
    ranks = f"ranks: SD {setting.tp + setting.num_drafts}, AR {setting.tp}"
    issued = ["graph"] * setting.graph + ["fuse"] * setting.fuse + ["lm_head"] * setting.lm_head
    how = ", ".join([f"all_reduce={setting.all_reduce}", *issued, f"context={setting.context}"])
    return (
        f"{pair} on {setting.device_name}, {setting.backend} {setting.dtype}, T={setting.tp}, "
        f"draft {where}\n    {ranks}; {how}{'' if table.has_ar else '; no AR row'}"
    )


def _line(row: TableRow) -> str:
    report = row.report
    achieved = relative = _NONE
    marks = "!" * row.unstable
    if row.achieved is not None:
        gain = row.achieved
        achieved = "no difference"
        marks = "+" * gain.is_headline + "*" * (gain.how is How.ROWS) + marks
        if gain.is_real:
            achieved = f"{gain.speedup:.2f} ({gain.interval})"
            relative = _number(gain.speedup / row.theory if row.theory else None, 2)
    ours = (
        f"{report.lookahead}",
        _number(row.t_sd, 3),
        _number(row.t_draft, 3),
        _ratio(row.r_k),
        _ratio(row.r_k1),
        _number(row.theory, 2),
        achieved,
        relative,
    )
    theirs = (
        _number(report.t_sd, 2),
        _number(report.theory, 2),
        _number(report.achieved, 2),
        _number(report.recomputed, 2),
        _number(report.ratio, 3),
    )
    left = "".join(f"{text:>{width}}" for text, (_, width) in zip(ours, _COLUMNS, strict=True))
    right = zip(theirs, _REPORT_COLUMNS, strict=True)
    return f"{left}{marks:<2}|" + "".join(f"{text:>{width}}" for text, (_, width) in right)


def _number(value: float | None, digits: int) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"


def _ratio(ratio: Ratio | None) -> str:
    return _NONE if ratio is None else f"{'' if ratio.measured else '~'}{ratio.value:.3f}"


def _why() -> str:
    rows = [row for row in REPORT["8b/1b"] if row.theory is not None]
    ratios = [row.ratio for row in rows if row.ratio is not None]
    recomputed = " ".join(f"{row.recomputed:.2f}" for row in rows)
    printed = " ".join(f"{row.theory:.2f}" for row in rows)
    return _paragraph(
        f"Why the report's tables don't close: E/(1+T_SD) on its table 1 gives {recomputed}, its "
        f"table 2 prints {printed}. The ratio of the two, {min(ratios):.3f} to {max(ratios):.3f}, "
        "is beyond rounding (0.7% at most). It is r if table 2 is E/(r·(1+T_SD)), that is, if T_SD "
        "is over the time of a verification and the speedup over that of an AR step, which took "
        "longer (products of one row, M=1, slower than those of M=K). The report prints no r, so "
        "only r(M) measured on its hardware can confirm that. It also verifies M=K rows where E "
        "counts K+1 tokens: hence r(K) beside r(K+1). Its achieved speedup is above both columns "
        "at every K. Nothing here is tuned to match."
    )


def _use(rows: Sequence[Row]) -> str:
    usable = sum(map(is_usable, rows))
    return (
        f"Rows read: {len(rows)}; AR or SD of these pairs at full depth, b = 1 and a K above: "
        f"{usable}."
    )


def _to_run(tables: Sequence[Table]) -> str:
    """Returns the `make run` lines that would measure missing rows; empty if none is missing."""
    lines = [line for table in tables for line in _runs(table)]
    if not lines:
        return ""
    head = "To fill the rest (each run appends its row to out/runs.jsonl):"
    if any(table.setting is None for table in tables):
        head += (
            "\nTP here is for devices of 80 GB: 70B needs 137 GB / TP on each. Without a GPU, "
            "BACKEND=emulated\nDEVICE=h100 rehearses them, labelled so."
        )
    return "\n".join([head, *lines])


def _runs(table: Table) -> list[str]:
    setting = table.setting
    tp = _DEFAULT_TP[table.pair] if setting is None else setting.tp
    drafts = 0 if setting is None else setting.num_drafts
    words = [f"TP={tp}", f"PAIR={table.pair}", f"ROUNDS={_ROUNDS}"]
    if setting is not None:
        words.append(f"BACKEND={setting.backend}")
        words += [f"DEVICE={shlex.quote(table.device_flag)}"] if table.device_flag else []
        words += [f"ARGS={shlex.quote(flags)}"] if (flags := _flags(setting)) else []
    lines = [] if table.has_ar else _shell(["make run MODE=ar", *words], "  ")
    if missing := [str(row.report.lookahead) for row in table.rows if not row.num_rows]:
        start = f"make run MODE=sd DRAFTS={drafts} K=$k ALPHA={ALPHA}"
        lines.append(f"  for k in {' '.join(missing)}; do")
        lines += _shell([start, *words[:-1], f"{words[-1]}; done"], "      ")
    return lines


def _flags(setting: Setting) -> str:
    """Returns the flags that differ from the defaults and have no make variable."""
    chosen: Mapping[str, bool] = {
        "--fuse": setting.fuse,
        "--lm_head": setting.lm_head,
        f"--context={setting.context}": setting.context > 0,
        "--graph=false": setting.backend == "cupy" and not setting.graph,
        f"--all_reduce={setting.all_reduce}": setting.all_reduce in ("nccl", "staged"),
    }
    return " ".join(flag for flag, is_chosen in chosen.items() if is_chosen)


def _paragraph(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False))


def _shell(words: Sequence[str], indent: str) -> list[str]:
    """Breaks a command between words into lines that fit; all but the last end in a backslash."""
    lines = [indent + words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 3 > _WIDTH:
            lines[-1] += " \\"
            lines.append(f"{indent}    {word}")
        else:
            lines[-1] += f" {word}"
    return lines
