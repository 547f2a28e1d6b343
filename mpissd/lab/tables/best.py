"""Finds the fastest method from measured rows, both at equal K and with each method at its best K.

Rows are compared only within a *setting*: one pair on one machine, with one acceptance model, batch
size and context. AR accepts nothing, so its rows belong to every acceptance model; a lookup drafts
without a model and with an acceptance of its own, so its rows belong to every draft and acceptance
model. A *method* is a mode with all of its options except K: place of the draft, fan-out, hit
model, backup. The rows of one method, K and setting are one *use*, whatever their seeds. A use is
shown by its median and range; its gain over AR comes from mpissd.common.compare and is paired by
seed if there are several seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from mpissd.common.compare import Comparison, compare_rows
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.presets import LOOKUP
from mpissd.common.rivals import LOOKUPS, TREE, Family
from mpissd.common.row import Row

MOST_MISSED = 0.2  # median error of replays beyond which predictions choose no K
_LONG = 24  # text columns of a hit law beyond which it moves into the title
_MOST = 3  # marked uses that a table explains
FAR = 1 / 3  # error of one run's own replay beyond which the run is marked
_SETTING = (
    "workload backend device_name target tp dtype num_layers forward batch_size fuse graph lm_head "
    "context all_reduce temperature vocab order prompt_tokens stop_token recording token_limit "
    "prompts draft acceptance divergence"
).split()
_DRAFTED = ("draft", "acceptance", "divergence")  # keys that rows of AR and lookups lack or ignore
_ASKED = ("prompt", "prompts", "prompt_ids", "chat_template", "stop", "top_p")  # flags of text
_MODES = ("ar", "sd", "ssd")
_SHOWN = ("acceptance", "divergence", "batch_size", "lm_head", "context", "temperature")
_WARNING = (
    "warning: predictions miss these rows by (median) {}: measure on a machine that does nothing "
    "else"
)
_MISSED = (
    "! {}: {} of {} runs are off their own predictions by over a third; one made {}, predicted {}"
)
_WIDE = 28  # text columns for a gain with its interval
_LEGEND = """\
best, at: the largest measured median, and its K; predicted: its mean by the job's own profile
spread: largest minus smallest of the n runs, over the median
x AR, a {unit}: the gain over AR and that a {unit}, each with its 95% interval
+: paired over 5 seeds or more of 400 rounds; what has none is of few seeds and claims no speedup"""
_CHOICE = (
    "lines of SSD: at the K of its largest predicted mean, so that a lucky run cannot choose it\n"
)


@dataclass(frozen=True)
class Use:
    """The rows of one method at one K in one setting: its repeats and seeds.

    tok_per_s: their median. predicted: the mean of their predicted tok/s, from their own jobs'
    profiles; None if a row has no prediction.
    """

    rows: tuple[Row, ...]
    method: str
    family: Family
    lookahead: int
    tok_per_s: float
    predicted: float | None

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Use:
        """Makes the use of one or more rows."""
        first, means = rows[0], [row.expected_tok_per_s for row in rows]
        known = [float(mean) for mean in means if mean]
        return cls(
            rows=tuple(rows),
            method=method_of(first),
            family=family_of(first),
            lookahead=int(first.lookahead),
            tok_per_s=float(median(row.tok_per_s for row in rows)),
            predicted=fmean(known) if len(known) == len(means) else None,
        )

    @property
    def per_gpu(self) -> float:
        """The median tok/s a GPU."""
        return self.tok_per_s / self.family.gpus

    @property
    def spread(self) -> float:
        """The range of tok/s (largest minus smallest) as a share of the median; 0 for one row."""
        rates = [row.tok_per_s for row in self.rows]
        return (max(rates) - min(rates)) / self.tok_per_s

    @property
    def missed(self) -> list[Row]:
        """The rows that miss their own replay by more than a third, the farthest first."""
        far = [row for row in self.rows if missed_by([row.prediction_error]) > FAR]
        return sorted(far, key=lambda row: -abs(row.prediction_error or 0.0))

    @property
    def seeds(self) -> set[object]:
        """The seeds of the rows."""
        return {row.seed for row in self.rows}

    def over(self, base: Use) -> Comparison | None:
        """Returns the gain over another use; None if the rows lack the data to compare them."""
        try:
            return compare_rows(base.rows, self.rows)
        except ConfigError:
            return None

    def __str__(self) -> str:
        """Returns the use as text: its mode, T, D and K."""
        return f"{self.family} {_at(self)}".rstrip()


def uses_of(rows: Iterable[Row]) -> list[Use]:
    """Returns the uses of one setting's rows, in order of appearance."""
    alike: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        alike.setdefault((method_of(row), int(row.lookahead)), []).append(row)
    return [Use.of(repeats) for repeats in alike.values()]


def best_use(uses: Sequence[Use]) -> Use:
    """Returns the use with the largest predicted tok/s, or the largest median if predictions are
    missing or far from the measurements.

    No measured round enters a prediction, so the draws that are compared do not choose K.
    """
    errors = [row.prediction_error for use in uses for row in use.rows]
    if are_predicted([use.predicted for use in uses], errors):
        return max(uses, key=lambda use: use.predicted or 0.0)
    return fastest(uses)


def fastest(uses: Iterable[Use]) -> Use:
    """Returns the use with the largest median tok/s."""
    return max(uses, key=lambda use: use.tok_per_s)


def missed_by(errors: Iterable[float | None]) -> float:
    """Returns the median size of the replays' errors, as a share; 0 if none is known.

    A replay knows the row's own draws, so that luck is no part of its error.
    """
    known = [abs(error) for error in errors if error is not None and not math.isnan(error)]
    return median(known) if known else 0.0


def are_predicted(means: Iterable[float | None], errors: Iterable[float | None]) -> bool:
    """Returns whether predicted means can choose: none is missing, and their replays hold."""
    are_known = all(mean and not math.isnan(mean) for mean in means)
    return are_known and missed_by(errors) <= MOST_MISSED


@dataclass(frozen=True)
class Comparisons:
    """All methods that were measured in one setting, AR first: {name: uses by increasing K}."""

    setting: dict[str, Any]
    methods: dict[str, list[Use]]

    @property
    def baseline(self) -> Use | None:
        """AR; None if it was not measured."""
        return next((fastest(u) for name, u in self.methods.items() if name[:2] == "AR"), None)


def compare_methods(rows: Iterable[Row]) -> list[Comparisons]:
    """Groups rows by setting and method, in order of appearance.

    Each row has the keys row.NEEDED, as tables.load reads them for comparisons.
    """
    kept = list(rows)
    settings: list[dict[str, Any]] = []
    # A row that binds fewer keys names a setting only if no row that binds more covers it.
    for row in sorted(kept, key=lambda row: (row.mode == "ar", row.mode == "ar" or is_lookup(row))):
        if not (row.mode == "ar" and settings) and not any(is_in(row, one) for one in settings):
            settings.append(setting_of(row))
    comparisons = []
    for setting in settings:
        methods: dict[str, list[Use]] = {}
        for use in sorted(uses_of(row for row in kept if is_in(row, setting)), key=_order):
            methods.setdefault(use.method, []).append(use)
        comparisons.append(Comparisons(setting, methods))
    return comparisons


def _order(use: Use) -> tuple[int, str, int]:
    """Returns the place of a use in a table: AR first, then by method and K."""
    return _MODES.index(use.method.split()[0].lower()), use.method, use.lookahead


def setting_of(row: Row) -> dict[str, Any]:
    """Returns the values that two comparable rows share: machine, kind of forward, token models."""
    return {name: _value_of(row, name) for name in _SETTING}


def is_in(row: Row, setting: Mapping[str, Any], free: Sequence[str] = ()) -> bool:
    """Returns whether a row belongs to a setting; free: further keys that do not bind it."""
    if row.mode == "ar" or is_lookup(row):
        free = (*free, *_DRAFTED)
    return all(_value_of(row, name) == setting[name] for name in setting if name not in free)


def _value_of(row: Row, name: str) -> Any:
    """Returns the value of one name of a setting; "prompts" covers all flags about them."""
    if name == "forward":
        return row.get(name) or "gemm"  # older rows, from before transformers
    if name != "prompts" or row.workload != "text":
        return row.get(name)
    flags = flags_of(row)
    return " ".join(f"{flag}={flags[flag]}" for flag in _ASKED if flag in flags)


def is_lookup(row: Row) -> bool:
    """Returns whether nothing but a lookup drafts."""
    return row.draft == LOOKUP.name


def mode_of(row: Row) -> str:
    """Returns the mode of a row's family: ar, sd, ssd, tree, or the kind of lookup that drafts.

    Under imposed acceptance all kinds of lookup are one use.
    """
    if not is_lookup(row):
        return TREE if row.tree_nodes and row.mode == "sd" else str(row.mode)
    kind = "prompt" if row.acceptance is not None else row.lookup or "prompt"
    return LOOKUPS[0] if kind == "prompt" else kind


def family_of(row: Row) -> Family:
    """Returns the mode, T and D of a row."""
    return Family(mode_of(row), int(row.tp), int(row.world_size - row.tp))


def method_of(row: Row) -> str:
    """Returns the name of a row's method, which contains all of its options except K."""
    words = [str(row.mode).upper(), *[str(row.schedule)] * bool(row.schedule)]
    words += ["inline"] * bool(row.mode == "sd" and row.inline_draft)
    words += [f"tree={row.tree_nodes}"] * bool(row.tree_nodes)
    words += ["dynamic"] * (row.tree_shape == "dynamic")
    words += [f"D={row.num_drafts}"] * ((row.num_drafts or 0) > 1)
    if (device := row.other_draft_device) is not None:
        words.append(f"draft on {device}")
    if row.backup not in (None, "jit"):
        words.append(f"backup={row.backup}")
        if row.acceptance_fast not in (None, RunConfig.acceptance_fast):
            words.append(f"acceptance_fast={row.acceptance_fast}")
        if row.lookup not in (None, "prompt"):
            words.append(f"lookup={row.lookup}")
    if row.backup_lookahead not in (None, row.lookahead):
        words.append(f"backup_lookahead={row.backup_lookahead}")
    if row.get("draft_lookup"):  # of older rows
        words.append(f"draft_lookup={row['draft_lookup']}")
    if row.mode == "ssd":
        flags = flags_of(row)
        if not row.schedule:
            flags.setdefault("fan_out", fan_out_text(row.fan_out))
        words += [f"{name}={flags[name]}" for name in ("fan_out", "fan_out_miss") if name in flags]
        words += [str(row.hit_law)] * bool(row.hit_law)
        words += [f"on_late={row.on_late}"] * (row.on_late not in (None, "finish"))
        words += [f"C={row.saguaro_c:g}"] if row.saguaro_c not in (None, 1.0) else []
    return " ".join(words)


def fan_out_text(counts: Sequence[int] | None) -> str:
    """Returns a fan-out for a row without one, from its F_0..F_K, so that it is alike at every K.

    Counts that differ are called geometric, by their sum; a row without counts has the default.
    """
    if not counts:
        return RunConfig.fan_out
    is_uniform = len(set(counts)) == 1
    return f"uniform:{counts[0]}" if is_uniform else f"geometric:{sum(counts)}"


def flags_of(row: Row) -> dict[str, str]:
    """Returns the flags that a row was run with, from its sweep's grid or its command line."""
    if row.sweep and "flags" in row.sweep:  # a rival that `run` measured beside itself has none
        return dict(row.sweep["flags"])
    words = (word[2:] for word in row.command if word.startswith("--") and "=" in word)
    return dict(word.split("=", 1) for word in words)


def unit(row: Row) -> str:
    """Returns what a rank of a row's job runs on: a GPU or, with NumPy, a core."""
    return "core" if row.backend == "numpy" else "GPU"


def render(
    comparisons: Sequence[Comparisons], below: Sequence[Sequence[object]] | None = None
) -> str:
    """Renders a table for each setting: tok/s by method and K, each method's best K, and its gain.

    below: lines to print below each table (claims.py).
    """
    pairs = zip(comparisons, below or [()] * len(comparisons), strict=True)
    tables = [_table(comparison, lines) for comparison, lines in pairs]
    units = " or ".join(dict.fromkeys(_unit(comparison) for comparison in comparisons))
    choice = _CHOICE if any(below or ()) else ""
    return "\n\n".join([*tables, choice + _LEGEND.format(unit=units)])


def _unit(comparison: Comparisons) -> str:
    return unit(next(iter(comparison.methods.values()))[0].rows[0])


def _table(comparison: Comparisons, below: Sequence[object]) -> str:
    known, methods = comparison.setting, comparison.methods
    drafts = f"/{known['draft']}" if known.get("draft") else ""
    about = ", ".join(f"{name} {known[name]}" for name in _SHOWN if known.get(name))
    laws = {str(uses[0].rows[0].hit_law) for uses in methods.values()}
    long = [law for law in laws if len(law) > _LONG]
    law = long[0] if len(long) == 1 else ""  # in the title, not in each line
    shown = {name: name.replace(f" {law}", "") if law else name for name in methods}
    about += f", hits {law}" * bool(law)
    width = max(map(len, shown.values()))
    lookaheads = sorted({u.lookahead for uses in methods.values() for u in uses} - {0})
    columns = "".join(f"{f'K={k}':>9}" for k in lookaheads)
    lines = [
        f"{known['target']}{drafts}, T={known['tp']}, {known['device_name']}: {about}",
        f"{'tok/s':{width}}{columns}     best   at  predicted  spread   n"
        f"{'x AR':>{_WIDE}}{f'a {_unit(comparison)}':>{_WIDE}}",
    ]
    far = []
    notes = []
    for name, uses in methods.items():
        best, cells = fastest(uses), {use.lookahead: _cell(use) for use in uses}
        line = "".join(f"{cells.get(k, ''):>9}" for k in lookaheads)
        predicted = "–" if best.predicted is None else _number(best.predicted)
        spread = "–" if len(best.rows) == 1 else f"{best.spread:.1%}"
        line += f"{_cell(best):>9}{_at(best):>5}{predicted:>11}{spread:>8}{len(best.rows):>4}"
        gains = _gains(best, comparison.baseline)
        line += "".join(f"{'–' if gain is None else gain.brief:>{_WIDE}}" for gain in gains)
        lines.append(f"{shown[name]:{width}}{line}".rstrip())
        missed = missed_by(row.prediction_error for use in uses for row in use.rows)
        far += [f"{shown[name]} {missed:.0%}"] * (missed > MOST_MISSED)
        notes += [_missed(f"{shown[name]} {_at(use)}".rstrip(), use) for use in uses if use.missed]
    lines += notes[:_MOST] + [f"! and {len(notes) - _MOST} more uses"] * (len(notes) > _MOST)
    lines += [_WARNING.format(", ".join(far))] * bool(far)
    return "\n".join([*lines, *map(str, below)])


def _missed(name: str, use: Use) -> str:
    """Returns the line on a use's runs that miss their predictions by far, and the farthest."""
    row = use.missed[0]
    predicted = float(row.tok_per_s) / (1 + float(row.prediction_error or 0.0))
    rates = _number(row.tok_per_s), _number(predicted)
    return _MISSED.format(name, len(use.missed), len(use.rows), *rates)


def _gains(best: Use, base: Use | None) -> tuple[Comparison | None, Comparison | None]:
    """Returns a use's gain over AR, in total and per GPU; None for AR itself, and if unknown."""
    gain = None if base is None or best is base else best.over(base)
    if gain is None or base is None:
        return None, None
    return gain, gain.scaled(base.family.gpus / best.family.gpus)


def _at(use: Use) -> str:
    """Returns a use's K as text, nothing for AR."""
    return f"K={use.lookahead}" if use.lookahead else ""


def _cell(use: Use) -> str:
    """Returns a use's median tok/s, marked if one of its runs misses its own prediction by far."""
    return "!" * bool(use.missed) + _number(use.tok_per_s)


def _number(rate: float) -> str:
    return f"{rate:.1f}" if rate < 1e5 else f"{rate:.0f}"
