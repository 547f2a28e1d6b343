"""Finds the fastest method from measured rows, both at equal K and with each method at its best K.

Rows are compared only within a *setting*: one pair on one machine, with one acceptance law, batch
size and context. AR accepts nothing, so its rows belong to every acceptance law; a lookup drafts
without a model, so where texts or recordings decide its rows belong beside every draft. A *method*
is a mode with all of its options except K: where the draft runs, fan-out, hit law, backup. All rows
of one method, K and setting form one cell, whatever their seeds. A cell is shown by its median and
range; its gain over AR comes from mpissd.common.compare and is paired by seed if there are several
seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from mpissd.common import choice
from mpissd.common.compare import Comparison as Gain
from mpissd.common.compare import compare_rows
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.presets import LOOKUP
from mpissd.common.row import Row

_MACHINE = ("workload", "backend", "device_name", "target", "tp", "dtype", "num_layers")
_FORWARD = ("forward", "batch_size", "fuse", "graph", "lm_head", "context", "all_reduce")
_SAMPLED = (
    "temperature",
    "vocab",
    "order",
    "prompt_tokens",
    "stop_token",
    "recording",
    "token_limit",
    "prompts",
)
_ASKED = ("prompt", "prompts", "prompt_ids", "chat_template", "stop", "top_p")  # flags of text
DRAFTED = ("draft", "acceptance", "divergence")  # keys that AR rows leave empty
_MODES = ("ar", "sd", "ssd")
_COUNTS = ("lookahead", "world_size")
_FAN_OUTS = ("fan_out", "fan_out_miss")


@dataclass(frozen=True)
class Cell:
    """The rows of one method at one K in one setting: its repeats and seeds."""

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
        """The mean of the rows' predicted tok/s; None if a row has no prediction.

        A row's prediction is the mean under its laws, computed from its own job's profile.
        """
        rates = [row.expected_tok_per_s for row in self.rows]
        known = [float(rate) for rate in rates if rate]
        return fmean(known) if len(known) == len(rates) else None

    def over(self, base: Cell) -> Gain | None:
        """Returns the gain over another cell; None if the rows lack the data to compare them."""
        try:
            return compare_rows(base.rows, self.rows)
        except ConfigError:
            return None

    @property
    def median(self) -> float:
        return median(self.tok_per_s)

    @property
    def spread(self) -> float:
        """The range of tok/s (largest minus smallest) as a share of the median; 0 for one row."""
        return (max(self.tok_per_s) - min(self.tok_per_s)) / self.median

    @property
    def per_gpu(self) -> float:
        return self.median / self.ranks


def missed(cells: Iterable[Cell]) -> float:
    """Returns the median error of the replays of the cells' rows, as a share; 0 where unknown."""
    return choice.missed(row.prediction_error for cell in cells for row in cell.rows)


def are_predicted(cells: Sequence[Cell]) -> bool:
    """Returns whether the cells' predictions can choose among them: all have one that holds."""
    errors = [row.prediction_error for cell in cells for row in cell.rows]
    return choice.are_predicted([cell.predicted for cell in cells], errors)


def best_cell(cells: Sequence[Cell]) -> Cell:
    """Returns the cell with the largest predicted tok/s, or the largest median if the predictions
    are not there or miss what was measured."""
    if are_predicted(cells):
        return max(cells, key=lambda cell: cell.predicted or 0.0)
    return max(cells, key=lambda cell: cell.median)


@dataclass(frozen=True)
class Method:
    """One method in one setting, with a cell for each K."""

    name: str
    cells: tuple[Cell, ...]  # by increasing K

    @property
    def best(self) -> Cell:
        """The cell at this method's best K.

        The best K has the largest predicted mean. No measured round enters that prediction, so the
        draws that are compared did not choose K (docs/definitions.md). If a row has no prediction,
        or if they miss what was measured by far, the best K has the largest median.
        """
        return best_cell(self.cells)

    def at(self, lookahead: int) -> Cell | None:
        """Returns the cell at this K or None; AR has one cell for every K."""
        return next((c for c in self.cells if c.lookahead in (lookahead, 0)), None)


@dataclass(frozen=True)
class Comparison:
    """All methods that were measured in one setting, AR first."""

    setting: tuple[tuple[str, Any], ...]
    methods: tuple[Method, ...]

    @property
    def lookaheads(self) -> list[int]:
        return sorted({c.lookahead for m in self.methods for c in m.cells if c.lookahead})

    @property
    def baseline(self) -> Cell | None:
        """The cell of AR; None if AR was not measured."""
        return next((m.best for m in self.methods if m.name.startswith("AR")), None)


def compare_methods(rows: Iterable[Row]) -> list[Comparison]:
    """Groups rows by setting and method, in order of appearance; skips entries that are no rows."""
    kept = [row for row in rows if is_row(row)]
    settings = dict.fromkeys(setting_of(row) for row in kept if not free_keys(row))
    for row in kept:  # a lookup beside no other draft
        if row.mode != "ar" and not any(_is_in(row, dict(setting)) for setting in settings):
            settings[setting_of(row)] = None
    settings = settings or dict.fromkeys(setting_of(row) for row in kept)
    return [Comparison(setting, _methods(kept, dict(setting))) for setting in settings]


def _is_in(row: Row, setting: Mapping[str, Any]) -> bool:
    """Returns whether a row belongs to a setting, ignoring what does not bind it."""
    names = set(setting).difference(free_keys(row))
    return all(value_of(row, name) == setting[name] for name in names)


def free_keys(row: Row) -> tuple[str, ...]:
    """Returns the keys of a setting that do not bind a row.

    AR has no draft, and accepts nothing. A lookup drafts for any target without a model; under a
    law its acceptance is assumed, not the draft's, so that it stays apart.
    """
    if row.mode == "ar":
        return DRAFTED
    return ("draft",) if is_lookup(row) and row.acceptance is None else ()


def is_lookup(row: Row) -> bool:
    """Returns whether nothing but a lookup drafts."""
    return row.draft == LOOKUP.name


def is_row(row: Row) -> bool:
    """Returns whether an entry is a measured row: it has a rate, a mode and its counts."""
    rate, counts = row.tok_per_s, [row.get(name) for name in _COUNTS]
    measured = isinstance(rate, (int, float)) and rate > 0
    return measured and row.mode in _MODES and all(type(n) is int for n in counts)


def setting_of(row: Row) -> tuple[tuple[str, Any], ...]:
    """Returns what two rows must share to be compared: machine, kind of forward, laws."""
    names = (*_MACHINE, *_FORWARD, *_SAMPLED, *DRAFTED)
    return tuple((name, value_of(row, name)) for name in names)


def value_of(row: Row, name: str) -> Any:
    """Returns the value of one name of a setting; "prompts" stands for all flags about them."""
    if name == "forward":
        return row.get(name) or "gemm"  # rows of before there was another
    if name != "prompts":
        return row.get(name)
    if row.workload != "text":
        return None
    flags = flags_of(row)
    return " ".join(f"{flag}={flags[flag]}" for flag in _ASKED if flag in flags)


def _methods(rows: Iterable[Row], setting: Mapping[str, Any]) -> tuple[Method, ...]:
    cells: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        if _is_in(row, setting):
            cells.setdefault(method_of(row), {}).setdefault(row.lookahead, []).append(row)
    methods = [Method(name, _cells(of)) for name, of in cells.items()]
    return tuple(sorted(methods, key=lambda m: (_rank(m.name), m.name)))


def _rank(name: str) -> int:
    return _MODES.index(name.split()[0].lower())


def _cells(rows: Mapping[int, list[Row]]) -> tuple[Cell, ...]:
    return tuple(Cell(k, tuple(of)) for k, of in sorted(rows.items()))


def method_of(row: Row) -> str:
    """Returns the name of a row's method, which contains all of its options except K."""
    mode = str(row.mode)
    words = [mode.upper()]
    if row.schedule:
        words.append(str(row.schedule))
    if mode == "sd" and row.inline_draft:
        words.append("inline")
    if (row.num_drafts or 0) > 1:
        words.append(f"D={row.num_drafts}")
    if (device := row.other_draft_device) is not None:
        words.append(f"draft on {device}")
    if row.backup not in (None, "jit"):
        words.append(f"backup={row.backup}")
        if row.acceptance_fast not in (None, RunConfig.acceptance_fast):
            words.append(f"acceptance_fast={row.acceptance_fast}")
    if row.backup_lookahead not in (None, row.lookahead):
        words.append(f"backup_lookahead={row.backup_lookahead}")
    if row.get("draft_lookup"):  # of older rows alone
        words.append(f"draft_lookup={row['draft_lookup']}")
    if mode == "ssd":
        words += _growth(row)
    return " ".join(words)


def _growth(row: Row) -> list[str]:
    flags = flags_of(row)
    if not row.schedule:
        flags.setdefault("fan_out", fan_out_text(row.fan_out))
    words = [f"{name}={flags[name]}" for name in _FAN_OUTS if name in flags]
    words += [str(row.hit_law)] if row.hit_law else []
    if row.on_late not in (None, "finish"):
        words.append(f"on_late={row.on_late}")
    if row.saguaro_c not in (None, 1.0):
        words.append(f"C={row.saguaro_c:g}")
    return words


def fan_out_text(counts: Sequence[int] | None) -> str:
    """Returns the fan-out of a row that says none, by its F_0..F_K, so that it is alike at every K.

    Counts that differ are called geometric, by their sum; a row without counts has the default.
    """
    if not counts:
        return RunConfig.fan_out
    is_uniform = len(set(counts)) == 1
    return f"uniform:{counts[0]}" if is_uniform else f"geometric:{sum(counts)}"


def flags_of(row: Row) -> dict[str, str]:
    """Returns the flags that a row was run with, from its sweep's grid or its command line."""
    if row.sweep:
        return dict(row.sweep["flags"])
    words = (word[2:] for word in row.command if word.startswith("--") and "=" in word)
    return dict(word.split("=", 1) for word in words)
