"""Presents the comparison of methods as tables for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mpissd.common.choice import MOST_MISSED
from mpissd.common.compare import Comparison as Gain
from mpissd.lab.sweep.best import Cell, Comparison, Method, missed

_SHOWN = ("acceptance", "divergence", "batch_size", "lm_head", "context", "temperature")
_WARNING = (
    "warning: predictions miss these rows by (median) {}: best K by what was measured; measure on "
    "a machine that does nothing else"
)
_WIDE = 28  # text columns for a gain with its interval
_LEGEND = """\
best, at: K of the largest predicted mean (expected_tok_per_s), which no measured round enters;
  of the largest median tok/s where there is none, or where the predictions miss by more than 20%
x AR, a GPU: the gain over AR and that a GPU, each with its 95% interval
+: paired over 5 seeds or more of 400 rounds; what has none is of few seeds and claims no speedup"""


def render(comparisons: Iterable[Comparison], beside: Sequence[Sequence[object]] = ()) -> str:
    """Renders a table for each setting: tok/s by method and K, each method's best K, and its gain.

    beside: lines to print below each table, one sequence per table (sweep/uses.py).
    """
    shown = list(comparisons)
    lines_of = [*beside, *[[]] * (len(shown) - len(beside))]
    tables = (_table(one, lines) for one, lines in zip(shown, lines_of, strict=True))
    return "\n\n".join([*tables, _LEGEND])


def _table(comparison: Comparison, beside: Sequence[object]) -> str:
    said = dict(comparison.setting)
    settings = [f"{name} {said[name]}" for name in _SHOWN if said.get(name)]
    drafts = f"/{said['draft']}" if said.get("draft") else ""
    lines = [
        f"{said['target']}{drafts}, T={said['tp']}, {said['device_name']}: {', '.join(settings)}"
    ]
    width = max(len(method.name) for method in comparison.methods)
    columns = "".join(f"{f'K={k}':>9}" for k in comparison.lookaheads)
    gains = f"{'x AR':>{_WIDE}}{'a GPU':>{_WIDE}}"
    lines.append(f"{'tok/s':{width}}{columns}     best   at  spread   n{gains}")
    lines += [f"{method.name:{width}}{_line(method, comparison)}" for method in comparison.methods]
    return "\n".join([*lines, *_warnings(comparison), *map(str, beside)])


def _warnings(comparison: Comparison) -> list[str]:
    """Returns a line that names the methods whose predictions miss what was measured by far."""
    errors = {method.name: missed(method.cells) for method in comparison.methods}
    told = [f"{name} {error:.0%}" for name, error in errors.items() if error > MOST_MISSED]
    return [_WARNING.format(", ".join(told))] if told else []


def _line(method: Method, comparison: Comparison) -> str:
    best, base = method.best, comparison.baseline
    cells = [None if best.lookahead == 0 else method.at(k) for k in comparison.lookaheads]
    line = "".join(f"{'' if c is None else _number(c.median):>9}" for c in cells)
    at = f"K={best.lookahead}" if best.lookahead else ""
    line += f"{_number(best.median):>9}{at:>5}{best.spread:>8.1%}{len(best.tok_per_s):>4}"
    for gain in _gains(best, base):
        line += f"{'–' if gain is None else gain.brief:>{_WIDE}}"
    return line.rstrip()


def _gains(best: Cell, base: Cell | None) -> tuple[Gain | None, Gain | None]:
    """Returns a cell's gain over AR, in total and per GPU.

    Both are None for AR itself, and if the rows lack the data to compare them.
    """
    gain = None if base is None or best is base else best.over(base)
    if gain is None or base is None:
        return None, None
    return gain, gain.scaled(base.ranks / best.ranks)


def _number(rate: float) -> str:
    return f"{rate:.1f}" if rate < 1e5 else f"{rate:.0f}"


def to_dict(comparison: Comparison) -> dict[str, Any]:
    """Returns a comparison as JSON: the setting, and the cells and best K of each method."""
    return {
        "setting": dict(comparison.setting),
        "methods": [_method_dict(method, comparison.baseline) for method in comparison.methods],
    }


def _number_of(gain: Gain | None, is_base: bool) -> float | None:
    """Returns the speedup for JSON: 1 for the base, None if unknown or if its interval holds 1."""
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
