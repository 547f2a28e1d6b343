"""Makes the tables of the command `compare`: tokens/s by method and K, and each method's best K. A
table covers one setting (model pair, machine, batch size and so on). A line is one method, a mode
with all options except K. A cell is the median tokens/s of the rows with one method and K. Speedups
over AR compare rows of equal seeds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mpissd.common.row import Row
from mpissd.lab.tables.uses import (
    MOST_MISSED,
    Use,
    fastest,
    is_in,
    is_lookup,
    missed_by,
    setting_of,
    unit,
    uses_of,
)

_LONG = 24  # If a hit model's name has more characters, only the table's title shows the name.
_NOTES = 3  # largest number of lines below a table that explain cells marked "!"
_SHOWN = ("acceptance", "divergence", "batch_size", "lm_head", "context", "temperature")
_WIDE = 28  # width in characters of a column for a speedup with its interval
_LEGEND = """\
best, at: the largest measured median, and its K; predicted: its mean by the job's own profile
spread: largest minus smallest of the n runs, over the median
x AR, a {unit}: the gain over AR and that a {unit}, each with its 95% interval
+: paired over 5 seeds or more of 400 rounds; what has none is of few seeds and claims no speedup"""
_CHOICE = (
    "lines of SSD: at the K of its largest predicted mean, so that a lucky run cannot choose it\n"
)


@dataclass(frozen=True)
class Comparisons:
    """The content of one table: the result rows of one setting (models, machine, batch size and so
    on) by method. setting: {key: value} that all these rows share. methods: {name of a mode with
    its options: the groups of rows of equal K, by increasing K}; AR comes first."""

    setting: dict[str, Any]
    methods: dict[str, list[Use]]

    @property
    def baseline(self) -> Use | None:
        """The rows of AR at its fastest, to compare with; None if AR was not measured."""
        return next((fastest(u) for name, u in self.methods.items() if name[:2] == "AR"), None)

    @property
    def unit(self) -> str:
        """What a rank of these rows ran on: "GPU", or "core" (of a CPU)."""
        return unit(next(iter(self.methods.values()))[0].rows[0])


def compare_methods(rows: Iterable[Row]) -> list[Comparisons]:
    """Groups result rows by setting (models, machine, batch size and so on) and by method (mode
    with its options); returns the content of one table for each setting. Each row must have the
    keys that row.NEEDED lists, without which tables.load drops rows."""
    rows = list(rows)
    settings: list[dict[str, Any]] = []
    # Rows of AR and lookups belong to several settings, so they come last and rarely add a setting.
    for row in sorted(rows, key=lambda row: (row.mode == "ar", row.mode == "ar" or is_lookup(row))):
        if not (row.mode == "ar" and settings) and not any(is_in(row, s) for s in settings):
            settings.append(setting_of(row))
    return [Comparisons(setting, _methods(rows, setting)) for setting in settings]


def _methods(rows: Sequence[Row], setting: dict[str, Any]) -> dict[str, list[Use]]:
    methods: dict[str, list[Use]] = {}
    uses = uses_of(row for row in rows if is_in(row, setting))
    for use in sorted(uses, key=lambda use: (use.method, use.lookahead)):  # AR, SD, SSD
        methods.setdefault(use.method, []).append(use)
    return methods


def render(
    comparisons: Sequence[Comparisons], below: Sequence[Sequence[object]] | None = None
) -> str:
    """Returns text tables, one for each setting: tokens/s by method and K, each method's best K,
    and its speedup over AR. below: for each table, lines below it, such as claims about SSD."""
    pairs = zip(comparisons, below or [()] * len(comparisons), strict=True)
    tables = ["\n".join([*_table(comparison), *map(str, lines)]) for comparison, lines in pairs]
    units = " or ".join(dict.fromkeys(comparison.unit for comparison in comparisons))
    choice = _CHOICE if any(below or ()) else ""
    return "\n\n".join([*tables, choice + _LEGEND.format(unit=units)])


def _table(comparison: Comparisons) -> list[str]:
    setting = comparison.setting
    methods = comparison.methods
    drafts = f"/{setting['draft']}" if setting.get("draft") else ""
    about = ", ".join(f"{name} {setting[name]}" for name in _SHOWN if setting.get(name))
    laws = {str(uses[0].rows[0].hit_law) for uses in methods.values()}
    long = [law for law in laws if len(law) > _LONG]
    law = long[0] if len(long) == 1 else ""
    names = {name: name.replace(f" {law}", "") if law else name for name in methods}
    about += f", hits {law}" * bool(law)
    width = max(map(len, names.values()))
    lookaheads = sorted({u.lookahead for uses in methods.values() for u in uses} - {0})
    columns = "".join(f"{f'K={k}':>9}" for k in lookaheads)
    lines = [
        f"{setting['target']}{drafts}, T={setting['tp']}, {setting['device_name']}: {about}",
        f"{'tok/s':{width}}{columns}     best   at  predicted  spread   n"
        f"{'x AR':>{_WIDE}}{f'a {comparison.unit}':>{_WIDE}}",
    ]
    far = []
    notes = []
    for name, uses in methods.items():
        best = fastest(uses)
        cells = {use.lookahead: _cell(use) for use in uses}
        line = "".join(f"{cells.get(k, ''):>9}" for k in lookaheads)
        predicted = "–" if best.predicted is None else _number(best.predicted)
        spread = "–" if len(best.rows) == 1 else f"{best.spread:.1%}"
        line += f"{_cell(best):>9}{best.at:>5}{predicted:>11}{spread:>8}{len(best.rows):>4}"
        line += _gains(best, comparison.baseline)
        lines.append(f"{names[name]:{width}}{line}".rstrip())
        missed = missed_by(row.prediction_error for use in uses for row in use.rows)
        far += [f"{names[name]} {missed:.0%}"] * (missed > MOST_MISSED)
        notes += [_missed(f"{names[name]} {use.at}".rstrip(), use) for use in uses if use.missed]
    lines += notes[:_NOTES]
    lines += [f"! and {len(notes) - _NOTES} more uses"] * (len(notes) > _NOTES)
    if far:
        lines.append(
            f"warning: predictions miss these rows by (median) {', '.join(far)}: measure on a "
            "machine that does nothing else"
        )
    return lines


def _missed(name: str, use: Use) -> str:
    """Returns a line that says how many runs of one method and K differ by over a third from their
    own predictions, with the rates of the worst run. name: what the table calls these runs."""
    row = use.missed[0]
    predicted = float(row.tok_per_s) / (1 + float(row.prediction_error or 0.0))
    return (
        f"! {name}: {len(use.missed)} of {len(use.rows)} runs are off their own predictions by "
        f"over a third; one made {_number(row.tok_per_s)}, predicted {_number(predicted)}"
    )


def _gains(best: Use, base: Use | None) -> str:
    """Returns two table cells: the speedup of the runs `best` over AR (`base`), in tokens/s and in
    tokens/s per GPU. The cells are dashes for AR itself, or if the speedup is unknown."""
    gain = None if base is None or best is base else best.over(base)
    if gain is None or base is None:
        return f"{'–':>{_WIDE}}" * 2
    per_gpu = gain.scaled(base.family.gpus / best.family.gpus)
    return f"{gain.brief:>{_WIDE}}{per_gpu.brief:>{_WIDE}}"


def _cell(use: Use) -> str:
    """Returns the median tokens/s as text, after a "!" if a run is far off its own prediction."""
    return "!" * bool(use.missed) + _number(use.tok_per_s)


def _number(rate: float) -> str:
    return f"{rate:.1f}" if rate < 1e5 else f"{rate:.0f}"
