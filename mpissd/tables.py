"""The milestone report's two tables from our own rows, its figures beside them.

One definition for every row: speedup(AR → SD) = E / (r(K+1) + T_draft), where
E = (1 − a^{K+1})/(1 − a), r(M) = t_target(M)/t_target(1) and T_draft = t_draft/t_target(1) =
r(K+1)·T_SD. docs/milestone-tables.md says why the report's own figures don't fit each other.

    rows = load_rows(["results"])
    print(render(rows, load_profiles(["results"], rows)))
"""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpissd import theory
from mpissd.errors import ConfigError
from mpissd.presets import PAIRS
from mpissd.records import SCHEMA

Row = Mapping[str, Any]
Profiles = Mapping[str, Mapping[str, Any]]  # by run_id, as JobProfile.to_dict() makes them
Paths = Iterable[str | Path]

ALPHA = 0.9


@dataclass(frozen=True)
class ReportRow:
    """One K of the report's tables 1 and 2, as printed; None: it prints none for this pair."""

    lookahead: int
    t_sd: float
    theory: float | None = None
    achieved: float | None = None

    @property
    def recomputed(self) -> float:
        """E / (1 + T_SD): the report's formula on its own table 1."""
        return theory.speedup_sd(theory.expected_tokens(ALPHA, self.lookahead), 1.0, self.t_sd)

    @property
    def ratio(self) -> float | None:
        """Recomputed over printed: an r of the report, if table 2 is E / (r·(1 + T_SD))."""
        return None if self.theory is None else self.recomputed / self.theory


REPORT = {
    "8b/1b": (
        ReportRow(2, 0.36, 2.12, 2.19),
        ReportRow(4, 0.69, 2.57, 2.64),
        ReportRow(6, 1.02, 2.73, 2.81),
        ReportRow(8, 1.35, 2.75, 2.87),
        ReportRow(10, 1.67, 2.69, 2.75),
        ReportRow(12, 2.01, 2.60, 2.70),
    ),
    "70b/1b": tuple(
        ReportRow(2 * n, t_sd) for n, t_sd in enumerate((0.04, 0.08, 0.12, 0.15, 0.19, 0.23), 1)
    ),
}


@dataclass(frozen=True)
class Ratio:
    """t_target(M) / t_target(1); not measured: a straight line between measured neighbours."""

    value: float
    measured: bool = True


@dataclass(frozen=True)
class Achieved:
    """tok/s of SD over tok/s of AR, ± 1.96 standard errors of the drawn acceptance lengths."""

    speedup: float
    half_width: float

    @property
    def differs(self) -> bool:
        """Whether 1 is outside the interval."""
        return abs(self.speedup - 1) > self.half_width


@dataclass(frozen=True)
class TableRow:
    """One K of ours (times in units of t_target(K+1) for t_sd, of t_target(1) for t_draft).

    None: no row says it. num_rows: SD rows at ALPHA. unstable: a median round of theirs drifted.
    """

    report: ReportRow
    t_sd: float | None = None
    t_draft: float | None = None
    r_k: Ratio | None = None
    r_k1: Ratio | None = None
    theory: float | None = None
    achieved: Achieved | None = None
    num_rows: int = 0
    unstable: bool = False


@dataclass(frozen=True, order=True)
class Setting:
    """What is equal for all rows of one table; AR is compared where all but the draft is."""

    device_name: str
    backend: str
    dtype: str
    tp: int
    all_reduce: str
    graph: bool
    fuse: bool
    lm_head: bool
    context: int
    num_drafts: int = 0
    draft_device: str = ""  # where it is not the lead's

    @classmethod
    def of(cls, row: Row) -> Setting:
        """The setting of an AR or SD row."""
        names = list(cls.__dataclass_fields__)[:9]
        return cls(*(row[n] for n in names), row["num_drafts"], _draft_device(row))

    @property
    def without_draft(self) -> Setting:
        """The setting that AR, and r, share."""
        return replace(self, num_drafts=0, draft_device="")


@dataclass(frozen=True)
class Table:
    """A pair in a setting; without one, there was no row to read."""

    pair: str
    rows: tuple[TableRow, ...]
    setting: Setting | None = None
    has_ar: bool = False
    device_flag: str = ""  # DEVICE=… of an emulated device


def load_rows(paths: Paths) -> list[dict[str, Any]]:
    """The rows of runs*.jsonl files and of those under folders, in order; a row counts once.

    Raises ConfigError naming file and line: unreadable, cut off, another schema, one id for two.
    """
    rows: dict[str, dict[str, Any]] = {}
    for path in _run_files(paths):
        for number, line in enumerate(_read(path).split("\n"), 1):
            if not line.strip():
                continue
            row = _parse(f"{path}:{number}", line)
            if rows.setdefault(str(row.get("run_id", line)), row) != row:
                raise ConfigError(f"{path}:{number}: run_id {row['run_id']!r} names another row, too")
    return list(rows.values())


def load_profiles(paths: Paths, rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """{run_id: profile} from profiles/RUN_ID.json beside each runs*.jsonl, where there is one.

    Raises ConfigError naming the file: unreadable, cut off, another schema.
    """
    ids = [str(row.get("run_id")) for row in rows]
    found: dict[str, dict[str, Any]] = {}
    for folder in dict.fromkeys(path.parent / "profiles" for path in _run_files(paths)):
        for run_id in ids:
            path = folder / f"{run_id}.json"
            if run_id not in found and path.is_file():
                found[run_id] = _parse(str(path), _read(path))
                _forward_times(str(path), found[run_id])
    return found


def _run_files(paths: Paths) -> Iterator[Path]:
    for path in map(Path, paths):
        yield from sorted(path.rglob("runs*.jsonl")) if path.is_dir() else [path]


def _read(path: Path) -> str:
    data = b""
    try:
        data = path.read_bytes()
        return data.decode()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text") from error


def _parse(where: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: cut off or no JSON: {error}") from error
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        schema = value.get("schema") if isinstance(value, dict) else None
        raise ConfigError(f"{where}: schema {schema!r}: allowed: {SCHEMA}")
    return value


def _forward_times(where: str, profile: Mapping[str, Any]) -> dict[int, float]:
    """{rows: seconds} of the target's forwards in a job's profile."""
    try:
        points = {int(rows): float(s) for rows, s in profile["device"]["verify"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: no device.verify {{rows: seconds}}: a job's profile?") from error
    if bad := [s for s in points.values() if not 0 <= s < math.inf]:
        raise ConfigError(f"{where}: device.verify {bad[0]}: allowed: seconds, at least 0")
    return points


def make_tables(rows: Sequence[Row], profiles: Profiles) -> list[Table]:
    """A table for each pair and setting with an SD row; one without a setting where none has."""
    tables: list[Table] = []
    for pair, report in REPORT.items():
        used = [row for row in rows if _fits(pair, row)]
        settings = sorted({Setting.of(row) for row in used if row["mode"] == "sd"})
        tables += [_table(pair, setting, used, profiles) for setting in settings]
        if not settings:
            tables.append(Table(pair, tuple(map(TableRow, report))))
    return tables


_KEYS = (
    *list(Setting.__dataclass_fields__)[:10],
    *("run_id", "target", "draft", "lookahead", "batch_size", "acceptance", "tok_per_s", "stable"),
    *("accept_histogram", "t_target_s", "T_SD", "provenance"),
)


def _fits(pair: str, row: Row) -> bool:
    """AR or SD of the pair at full depth (a scaled target has another name), one sequence."""
    if row.get("mode") not in ("ar", "sd"):
        return False
    if missing := [key for key in _KEYS if key not in row]:
        raise ConfigError(f"row {row.get('run_id')!r}: no {missing[0]!r}: a row that `run` wrote?")
    target, draft = PAIRS[pair]
    is_pair = row["target"] == target and row["draft"] in (None, draft) and row["batch_size"] == 1
    lookaheads = [0, *(report.lookahead for report in REPORT[pair])]
    return is_pair and row["lookahead"] in lookaheads


def _table(pair: str, setting: Setting, used: Sequence[Row], profiles: Profiles) -> Table:
    alike = [row for row in used if Setting.of(row).without_draft == setting.without_draft]
    ars = [row for row in alike if row["mode"] == "ar"]
    sds = [row for row in alike if row["mode"] == "sd" and Setting.of(row) == setting]
    ratios = _ratios(alike, _median(ars, "t_target_s"), profiles)
    rows = tuple(
        _table_row(report, [row for row in sds if row["lookahead"] == report.lookahead], ars, ratios)
        for report in REPORT[pair]
    )
    return Table(pair, rows, setting, bool(ars), _device_flag(sds[0]))


def _table_row(
    report: ReportRow, sds: Sequence[Row], ars: Sequence[Row], ratios: Mapping[int, float]
) -> TableRow:
    """T_SD doesn't depend on alpha: rows at ALPHA where there are any, else those of other laws."""
    wanted = [row for row in sds if _alpha(row) == ALPHA]
    width = report.lookahead + 1
    t_sd, r_k1 = _median(wanted or sds, "T_SD"), _ratio(ratios, width)
    t_draft = speedup = None
    if t_sd is not None and r_k1 is not None:
        t_draft = r_k1.value * t_sd
        tokens = theory.expected_tokens(ALPHA, report.lookahead)
        speedup = theory.speedup_sd(tokens, r_k1.value, t_draft)
    sd_rate, ar_rate, achieved = _median(wanted, "tok_per_s"), _median(ars, "tok_per_s"), None
    if sd_rate and ar_rate:
        faster = sd_rate / ar_rate
        achieved = Achieved(faster, faster * max(1.96 * _relative_error(row) for row in wanted))
    return TableRow(
        report=report,
        t_sd=t_sd,
        t_draft=t_draft,
        r_k=_ratio(ratios, report.lookahead),
        r_k1=r_k1,
        theory=speedup,
        achieved=achieved,
        num_rows=len(wanted),
        unstable=any(row["stable"] is False for row in (*(wanted or sds), *ars)),
    )


def _ratios(
    rows: Sequence[Row], ar_t_target_s: float | None, profiles: Profiles
) -> dict[int, float]:
    """{M: t_target(M)/t_target(1)}: medians over jobs of what each job's forward table says; for a
    width that no table has, the SD row's t_target_s over the AR row's."""
    tabled: dict[int, list[float]] = {}
    timed: dict[int, list[float]] = {}
    for row in rows:
        profile = profiles.get(row["run_id"])
        times = {} if profile is None else _forward_times(f"profile {row['run_id']}", profile)
        for width, seconds in times.items() if times.get(1) else ():
            tabled.setdefault(width, []).append(seconds / times[1])
        if ar_t_target_s and row["t_target_s"]:
            timed.setdefault(row["lookahead"] + 1, []).append(row["t_target_s"] / ar_t_target_s)
    return {width: statistics.median(found) for width, found in (timed | tabled).items()}


def _ratio(ratios: Mapping[int, float], width: int) -> Ratio | None:
    """r(width); None outside the measured widths."""
    if width in ratios:
        return Ratio(ratios[width])
    known = sorted(ratios)
    if not known or not known[0] < width < known[-1]:
        return None
    return Ratio(float(np.interp(width, known, [ratios[n] for n in known])), measured=False)


def _relative_error(row: Row) -> float:
    """Of the mean acceptance length of n rounds: standard deviation / (mean·√n)."""
    counts = np.asarray(row["accept_histogram"], np.float64)
    lengths = np.arange(len(counts)) + 1.0
    mean = np.average(lengths, weights=counts)
    variance = np.average((lengths - mean) ** 2, weights=counts)
    return float(np.sqrt(variance / counts.sum()) / mean)


def _median(rows: Iterable[Row], key: str) -> float | None:
    values = [row[key] for row in rows if row[key] is not None]
    return statistics.median(values) if values else None


def _alpha(row: Row) -> float | None:
    """a of the law alpha:a; None for another law."""
    name, _, value = str(row["acceptance"]).partition(":")
    try:
        return float(value) if name == "alpha" else None
    except ValueError:
        return None
