"""Compares SSD with the best other use of as many GPUs (rivals.py), from rows of every T and D."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpissd.common.compare import Comparison as Gain
from mpissd.common.rivals import Family, Others, other_uses, tps_of, widest
from mpissd.common.row import Row
from mpissd.lab.sweep.best import (
    Cell,
    Comparison,
    are_predicted,
    best_cell,
    free_keys,
    is_lookup,
    is_row,
    method_of,
    value_of,
)

_OF_T = ("tp", "all_reduce")  # keys that may differ between the uses of one setting


@dataclass(frozen=True)
class MeasuredUse:
    """A method on T + D GPUs at one K.

    tok_per_s is the rate that uses are ranked by (see best_cell).
    """

    mode: str
    tp: int
    num_drafts: int
    tok_per_s: float
    method: str
    cell: Cell

    @property
    def where(self) -> str:
        """The use as text: its mode, T, D and K."""
        name = str(Family.of(self))
        if is_lookup(self.cell.rows[0]):
            name = name.replace("SD inline", "lookup")
        return f"{name}{f' K={self.cell.lookahead}' * bool(self.cell.lookahead)}"

    def __str__(self) -> str:
        return f"{self.where}: {self.cell.median:.1f} tok/s"


@dataclass(frozen=True)
class Verdict:
    """SSD under one hit law, the other uses of its GPUs, and its gain over the fastest of them."""

    ssd: MeasuredUse
    others: Others[MeasuredUse]
    every: tuple[MeasuredUse, ...] = ()  # the other uses, at every measured K

    @property
    def gain(self) -> Gain | None:
        """SSD's gain over the fastest other use; None without one or if the rows lack data."""
        fastest = self.others.fastest
        return None if fastest is None else self.ssd.cell.over(fastest.cell)

    def __str__(self) -> str:
        line = f"{self.ssd.method}, T={self.ssd.tp} D={self.ssd.num_drafts} K="
        line += f"{self.ssd.cell.lookahead}: {self.ssd.cell.median:.1f} tok/s"
        if self.others.fastest is None:
            return f"{line}; no other use of its GPUs was measured"
        what = "fastest measured" if self.others.missing else "best other use"
        line += f"; {what} of {self._gpus} GPUs, {self.others.fastest}"
        if self.gain is not None:
            unclaimed = f"{self.gain.interval}, no claim"
            line += f", {unclaimed if self.others.missing else self.gain.brief}"
        if is_imposed(self.ssd.cell.rows[0].hit_law):
            line += "; its hits are imposed and cost no branches"
        return f"{line}; not measured: {self.others.not_known}" if self.others.missing else line

    @property
    def _gpus(self) -> int:
        return self.ssd.tp + self.ssd.num_drafts

    def to_dict(self) -> dict[str, Any]:
        """Returns the verdict as JSON, with the uses that were not measured.

        over_best, the gain over the best other use, is null if that use is not known.
        """
        best, fastest = self.others.best, self.others.fastest
        return {
            "ssd": self.ssd.method,
            "gpus": self._gpus,
            "best_other_use": None if best is None else str(Family.of(best)),
            "fastest_measured": None if fastest is None else str(Family.of(fastest)),
            "not_measured": [str(family) for family in self.others.missing],
            "over_best": None if best is None or self.gain is None else self.gain.to_dict(),
        }


def is_imposed(hit_law: object) -> bool:
    """Returns whether a row's hit rate was imposed, so that no branches had to be grown for it."""
    return str(hit_law).startswith("p_hit:")


def verdicts(comparison: Comparison, rows: Iterable[Row]) -> list[Verdict]:
    """Returns a verdict on SSD for each number of GPUs, hit law and schedule of a setting.

    rows: all rows; those that differ from the setting in T alone are compared too. Rows whose
    drafts run on another kind of device are left out, because their GPUs are not the same.
    """
    setting = dict(comparison.setting)
    alike = _alike(setting, rows)
    ways, uses = _ways(alike), _uses(alike)
    most = max((row.world_size for row in alike), default=0)
    tps = tps_of(str(setting["target"]), most, str(setting["forward"]))
    here = [row for row in alike if row.mode == "ssd" and row.tp == setting["tp"]]
    judged = []
    for case in dict.fromkeys(map(_case, here)):
        gpus, own = case[0], [row for row in here if _case(row) == case]
        ssd = max(_uses(own), key=lambda use: use.tok_per_s)
        every = tuple(u for u in ways if u.mode != "ssd" and Family.of(u).gpus <= gpus)
        judged.append(Verdict(ssd, _others(gpus, uses, tps, setting["draft"]), every))
    return judged


def _others(
    gpus: int, uses: Sequence[MeasuredUse], tps: Sequence[int], draft: object
) -> Others[MeasuredUse]:
    """Ranks the other uses; a lookup is one of them, but stands for none of the setting's draft."""
    wanted = widest(gpus, tps)
    drafted = [u for u in uses if u.cell.rows[0].draft == draft or not is_lookup(u.cell.rows[0])]
    missing = other_uses("ssd", gpus, drafted, wanted).missing
    return replace(other_uses("ssd", gpus, uses, wanted), missing=missing)


def _case(row: Row) -> tuple[int, str | None, str | None]:
    """Returns (GPUs, hit law, schedule); SSD rows that differ in these get separate verdicts."""
    return row.world_size, row.hit_law, row.schedule


def ways_of(setting: Mapping[str, Any], rows: Iterable[Row]) -> list[MeasuredUse]:
    """Returns every method measured in a setting, on every T and D at every K, including SSD."""
    return _ways(_alike(setting, rows))


def _alike(setting: Mapping[str, Any], rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if is_row(row) and _is_alike(row, setting)]


def _is_alike(row: Row, setting: Mapping[str, Any]) -> bool:
    """Returns whether a row belongs to a setting, ignoring its T and what does not bind it."""
    free = {*_OF_T, *free_keys(row)}
    same = all(value_of(row, name) == value for name, value in setting.items() if name not in free)
    return same and row.other_draft_device is None


def _uses(rows: Sequence[Row]) -> list[MeasuredUse]:
    """Returns every method on every T and D at its own best K."""
    ways: dict[tuple[Family, str], list[MeasuredUse]] = {}
    for use in _ways(rows):
        ways.setdefault((Family.of(use), use.method), []).append(use)
    bests = [(of, best_cell([use.cell for use in of])) for of in ways.values()]
    chosen = [next(use for use in of if use.cell is best) for of, best in bests]
    if not are_predicted([use.cell for use in chosen]):
        return chosen
    return [replace(use, tok_per_s=use.cell.predicted or 0.0) for use in chosen]


def _ways(rows: Sequence[Row]) -> list[MeasuredUse]:
    """Returns every method on every T and D at every K, with the median rate of its rows."""
    cells: dict[tuple[str, int, int, str, int], list[Row]] = {}
    for row in rows:
        place = row.mode, row.tp, row.world_size - row.tp
        cells.setdefault((*place, method_of(row), row.lookahead), []).append(row)
    ways = []
    for (mode, tp, num_drafts, method, lookahead), of in cells.items():
        cell = Cell(lookahead, tuple(of))
        ways.append(MeasuredUse(mode, tp, num_drafts, cell.median, method, cell))
    return ways
