"""Which method is fastest, at equal K and with each at its own best K: from rows, offline.

Rows are compared within a *setting*: one pair on one machine, one acceptance law, batch, context.
AR accepts nothing, so its rows belong to every acceptance law. A *method* is a mode with all that
belongs to it but K: where the draft sits, fan-out, hit law, backup. Several rows of one method, K
and setting, whatever their seed, are one cell: its median and range are shown, and its gain over AR
is mpissd.common.compare's, paired by seed where there are several.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from mpissd.common.compare import Comparison as Gain
from mpissd.common.compare import compare_rows
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.row import Row

_MACHINE = ("workload", "backend", "device_name", "target", "tp", "dtype", "num_layers")
_FORWARD = ("batch_size", "fuse", "graph", "lm_head", "context", "all_reduce")
_SAMPLED = ("temperature", "vocab", "order", "prompt_tokens", "stop_token", "token_limit")
DRAFTED = ("draft", "acceptance", "divergence")  # AR has none of it
_SHOWN = ("acceptance", "divergence", "batch_size", "lm_head", "context", "temperature")
_MODES = ("ar", "sd", "ssd")
_COUNTS = ("lookahead", "world_size")
_FAN_OUTS = ("fan_out", "fan_out_miss")
_WIDE = 28  # of a gain with its interval
_LEGEND = """\
best, at: K of the largest predicted mean (expected_tok_per_s), which no measured round enters
x AR, a GPU: the gain over AR and that a GPU, each with its 95% interval
+: paired over 5 seeds or more of 400 rounds; what has none is of few seeds and claims no speedup"""


@dataclass(frozen=True)
class Cell:
    """Rows of one method at one K: repeats and seeds."""

    lookahead: int
    rows: tuple[Row, ...]

    @property
    def tok_per_s(self) -> tuple[float, ...]:
        return tuple(float(row.tok_per_s) for row in self.rows)

    @property
    def ranks(self) -> int:
        return int(self.rows[0].world_size)

    @property
    def predicted(self) -> float | None:
        """The mean of the laws' means that the jobs' profiles say; None where a row has none."""
        found = [row.expected_tok_per_s for row in self.rows]
        told = [float(rate) for rate in found if rate]
        return fmean(told) if len(told) == len(found) else None

    def over(self, base: Cell) -> Gain | None:
        """Its gain over another cell; None where rows say too little of themselves."""
        try:
            return compare_rows(base.rows, self.rows)
        except ConfigError:
            return None

    @property
    def median(self) -> float:
        return median(self.tok_per_s)

    @property
    def spread(self) -> float:
        """Largest less smallest, of the median; 0 for one row."""
        return (max(self.tok_per_s) - min(self.tok_per_s)) / self.median

    @property
    def per_gpu(self) -> float:
        return self.median / self.ranks


def best_cell(cells: Sequence[Cell]) -> Cell:
    """The one of the largest predicted mean; where one has none, of the largest median."""
    if all(cell.predicted for cell in cells):
        return max(cells, key=lambda cell: cell.predicted or 0.0)
    return max(cells, key=lambda cell: cell.median)


@dataclass(frozen=True)
class Method:
    """One method in one setting, by K."""

    name: str
    cells: tuple[Cell, ...]  # by rising K

    @property
    def best(self) -> Cell:
        """At its own best K: that of the largest predicted mean, which no measured round enters,
        so that the draws it is then compared by did not choose it (docs/definitions.md). Where a
        row has no prediction: that of the largest median."""
        return best_cell(self.cells)

    def at(self, lookahead: int) -> Cell | None:
        """At this K; AR has but one cell, which is that of every K."""
        return next((c for c in self.cells if c.lookahead in (lookahead, 0)), None)


@dataclass(frozen=True)
class Comparison:
    """The methods of one setting, AR first."""

    setting: tuple[tuple[str, Any], ...]
    methods: tuple[Method, ...]

    @property
    def lookaheads(self) -> list[int]:
        return sorted({c.lookahead for m in self.methods for c in m.cells if c.lookahead})

    @property
    def baseline(self) -> Cell | None:
        """AR, where it was measured."""
        return next((m.best for m in self.methods if m.name.startswith("AR")), None)


def compare_methods(rows: Iterable[Row]) -> list[Comparison]:
    """Every setting of these rows, in the order in which they come; without what is no row."""
    found = [row for row in rows if is_row(row)]
    settings = dict.fromkeys(setting_of(row) for row in found if row.mode != "ar")
    if not settings:
        settings = dict.fromkeys(setting_of(row) for row in found)
    return [Comparison(setting, _methods(found, dict(setting))) for setting in settings]


def is_row(row: Row) -> bool:
    """Whether it has a rate, a mode and its counts."""
    rate, counts = row.tok_per_s, [row.get(name) for name in _COUNTS]
    measured = isinstance(rate, (int, float)) and rate > 0
    return measured and row.mode in _MODES and all(type(n) is int for n in counts)


def setting_of(row: Row) -> tuple[tuple[str, Any], ...]:
    """What rows that are compared have in common: machine, forward, laws."""
    names = (*_MACHINE, *_FORWARD, *_SAMPLED, *DRAFTED)
    return tuple((name, row.get(name)) for name in names)


def _methods(rows: Iterable[Row], setting: Mapping[str, Any]) -> tuple[Method, ...]:
    cells: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        told = [name for name in setting if row.mode != "ar" or name not in DRAFTED]
        if all(row.get(name) == setting[name] for name in told):
            cells.setdefault(method_of(row), {}).setdefault(row.lookahead, []).append(row)
    methods = [Method(name, _cells(of)) for name, of in cells.items()]
    return tuple(sorted(methods, key=lambda m: (_rank(m.name), m.name)))


def _rank(name: str) -> int:
    return _MODES.index(name.split()[0].lower())


def _cells(rows: Mapping[int, list[Row]]) -> tuple[Cell, ...]:
    return tuple(Cell(k, tuple(of)) for k, of in sorted(rows.items()))


def method_of(row: Row) -> str:
    """The name of a row's method: all that belongs to it but K."""
    mode = str(row.mode)
    told = [mode.upper()]
    if row.schedule:
        told.append(str(row.schedule))
    if mode == "sd" and row.inline_draft:
        told.append("inline")
    if (row.num_drafts or 0) > 1:
        told.append(f"D={row.num_drafts}")
    if (device := row.other_draft_device) is not None:
        told.append(f"draft on {device}")
    if row.backup not in (None, "jit"):
        told.append(f"backup={row.backup}")
        if row.acceptance_fast not in (None, RunConfig.acceptance_fast):
            told.append(f"acceptance_fast={row.acceptance_fast}")
    if row.backup_lookahead not in (None, row.lookahead):
        told.append(f"backup_lookahead={row.backup_lookahead}")
    if mode == "ssd":
        told += _growth(row)
    return " ".join(told)


def _growth(row: Row) -> list[str]:
    flags = flags_of(row)
    if not row.schedule:
        flags.setdefault("fan_out", RunConfig.fan_out)
    told = [f"{name}={flags[name]}" for name in _FAN_OUTS if name in flags]
    told += [str(row.hit_law)] if row.hit_law else []
    if row.on_late not in (None, "finish"):
        told.append(f"on_late={row.on_late}")
    if row.saguaro_c not in (None, 1.0):
        told.append(f"C={row.saguaro_c:g}")
    return told


def flags_of(row: Row) -> dict[str, str]:
    """What a row's sweep, or its command line, said."""
    if row.sweep:
        return dict(row.sweep["flags"])
    words = (word[2:] for word in row.command if word.startswith("--") and "=" in word)
    return dict(word.split("=", 1) for word in words)


def render(comparisons: Iterable[Comparison], beside: Sequence[Sequence[object]] = ()) -> str:
    """A table for each setting: tok/s by method and K, the best K of each, and what it gains.

    beside: what is said below each table, a line each (sweep/uses.py).
    """
    found = list(comparisons)
    told = [*beside, *[[]] * (len(found) - len(beside))]
    tables = (_table(one, lines) for one, lines in zip(found, told, strict=True))
    return "\n\n".join([*tables, _LEGEND])


def _table(found: Comparison, beside: Sequence[object]) -> str:
    said = dict(found.setting)
    told = [f"{name} {said[name]}" for name in _SHOWN if said.get(name)]
    drafts = f"/{said['draft']}" if said.get("draft") else ""
    lines = [f"{said['target']}{drafts}, T={said['tp']}, {said['device_name']}: {', '.join(told)}"]
    width = max(len(method.name) for method in found.methods)
    columns = "".join(f"{f'K={k}':>9}" for k in found.lookaheads)
    gains = f"{'x AR':>{_WIDE}}{'a GPU':>{_WIDE}}"
    lines.append(f"{'tok/s':{width}}{columns}     best   at  spread   n{gains}")
    lines += [f"{method.name:{width}}{_line(method, found)}" for method in found.methods]
    return "\n".join([*lines, *map(str, beside)])


def _line(method: Method, found: Comparison) -> str:
    best, base = method.best, found.baseline
    cells = [None if best.lookahead == 0 else method.at(k) for k in found.lookaheads]
    told = "".join(f"{'' if c is None else _number(c.median):>9}" for c in cells)
    at = f"K={best.lookahead}" if best.lookahead else ""
    told += f"{_number(best.median):>9}{at:>5}{best.spread:>8.1%}{len(best.tok_per_s):>4}"
    for gain in _gains(best, base):
        told += f"{'–' if gain is None else gain.brief:>{_WIDE}}"
    return told.rstrip()


def _gains(best: Cell, base: Cell | None) -> tuple[Gain | None, Gain | None]:
    """Over AR, and that a GPU; None for AR itself, and where rows say too little."""
    found = None if base is None or best is base else best.over(base)
    if found is None or base is None:
        return None, None
    return found, found.scaled(base.ranks / best.ranks)


def _number(rate: float) -> str:
    return f"{rate:.1f}" if rate < 1e5 else f"{rate:.0f}"


def to_dict(found: Comparison) -> dict[str, Any]:
    """As JSON: the setting, and of each method its cells and its best K."""
    return {
        "setting": dict(found.setting),
        "methods": [_method_dict(method, found.baseline) for method in found.methods],
    }


def _number_of(gain: Gain | None, is_base: bool) -> float | None:
    """Null where no speedup is known, and where its interval holds 1."""
    if is_base:
        return 1.0
    return gain.speedup if gain is not None and gain.is_real else None


def _method_dict(method: Method, base: Cell | None) -> dict[str, Any]:
    best = method.best
    gain, per_gpu = _gains(best, base)
    return {
        "method": method.name,
        "best_lookahead": best.lookahead,
        "tok_per_s": best.median,
        "tok_per_s_per_gpu": best.per_gpu,
        "spread": best.spread,
        "speedup": _number_of(gain, best is base),
        "speedup_per_gpu": _number_of(per_gpu, best is base),
        "over_ar": None if gain is None else gain.to_dict(),
        "over_ar_per_gpu": None if per_gpu is None else per_gpu.to_dict(),
        "by_lookahead": {
            str(cell.lookahead): {"tok_per_s": cell.median, "repeats": cell.tok_per_s}
            for cell in method.cells
        },
    }
