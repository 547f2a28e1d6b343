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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from mpissd.common import choice
from mpissd.common.compare import Comparison, compare_rows
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.presets import LOOKUP
from mpissd.common.rivals import LOOKUPS, Family
from mpissd.common.row import Row

_SETTING = (
    "workload backend device_name target tp dtype num_layers forward batch_size fuse graph lm_head "
    "context all_reduce temperature vocab order prompt_tokens stop_token recording token_limit "
    "prompts draft acceptance divergence"
).split()
DRAFTED = ("draft", "acceptance", "divergence")  # keys that AR rows leave empty
_ASKED = ("prompt", "prompts", "prompt_ids", "chat_template", "stop", "top_p")  # flags of text
_MODES = ("ar", "sd", "ssd")
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


@dataclass(frozen=True)
class Use:
    """The rows of one method at one K in one setting: its repeats and seeds."""

    rows: tuple[Row, ...]

    @property
    def lookahead(self) -> int:
        return int(self.rows[0].lookahead)

    @property
    def mode(self) -> str:
        """The mode of its family (mode_of)."""
        return mode_of(self.rows[0])

    @property
    def tp(self) -> int:
        return int(self.rows[0].tp)

    @property
    def num_drafts(self) -> int:
        return int(self.rows[0].world_size) - self.tp

    @property
    def family(self) -> Family:
        return Family.of(self)

    @property
    def method(self) -> str:
        return method_of(self.rows[0])

    @property
    def seeds(self) -> set[object]:
        return {row.seed for row in self.rows}

    @property
    def rates(self) -> list[float]:
        """The tok/s of each row."""
        return [float(row.tok_per_s) for row in self.rows]

    @property
    def tok_per_s(self) -> float:
        """The median tok/s."""
        return median(self.rates)

    @property
    def per_gpu(self) -> float:
        return self.tok_per_s / self.family.gpus

    @property
    def spread(self) -> float:
        """The range of tok/s (largest minus smallest) as a share of the median; 0 for one row."""
        return (max(self.rates) - min(self.rates)) / self.tok_per_s

    @property
    def predicted(self) -> float | None:
        """The mean of the rows' predicted tok/s, from their own jobs' profiles; None if a row has
        no prediction."""
        known = [float(row.expected_tok_per_s) for row in self.rows if row.expected_tok_per_s]
        return fmean(known) if len(known) == len(self.rows) else None

    def over(self, base: Use) -> Comparison | None:
        """Returns the gain over another use; None if the rows lack the data to compare them."""
        try:
            return compare_rows(base.rows, self.rows)
        except ConfigError:
            return None

    def __str__(self) -> str:
        """Returns the use as text: its mode, T, D and K."""
        return str(self.family) + f" K={self.lookahead}" * bool(self.lookahead)


def missed(uses: Iterable[Use]) -> float:
    """Returns the median error of the replays of the uses' rows, as a share; 0 if unknown."""
    return choice.missed(row.prediction_error for use in uses for row in use.rows)


def best_use(uses: Sequence[Use]) -> Use:
    """Returns the use with the largest predicted tok/s, or the largest median if predictions are
    missing or far from the measurements.

    No measured round enters a prediction, so the draws that are compared do not choose K.
    """
    errors = [row.prediction_error for use in uses for row in use.rows]
    if choice.are_predicted([use.predicted for use in uses], errors):
        return max(uses, key=lambda use: use.predicted or 0.0)
    return max(uses, key=lambda use: use.tok_per_s)


@dataclass(frozen=True)
class Method:
    """One method in one setting, with a use for each K, by increasing K."""

    name: str
    uses: tuple[Use, ...]

    @property
    def best(self) -> Use:
        """The use at this method's best K (best_use)."""
        return best_use(self.uses)

    def at(self, lookahead: int) -> Use | None:
        """Returns the use at this K or None; AR has one for every K."""
        return next((use for use in self.uses if use.lookahead in (lookahead, 0)), None)


@dataclass(frozen=True)
class Comparisons:
    """All methods that were measured in one setting, AR first."""

    setting: dict[str, Any]
    methods: tuple[Method, ...]

    @property
    def lookaheads(self) -> list[int]:
        return sorted({u.lookahead for m in self.methods for u in m.uses if u.lookahead})

    @property
    def baseline(self) -> Use | None:
        """AR; None if it was not measured."""
        return next((m.best for m in self.methods if m.name.startswith("AR")), None)


def compare_methods(rows: Iterable[Row]) -> list[Comparisons]:
    """Groups rows by setting and method, in order of appearance; skips entries that are no rows."""
    kept = [row for row in rows if is_row(row)]
    settings: list[dict[str, Any]] = []
    # A row that binds fewer keys names a setting only if no row that binds more covers it.
    for row in sorted(kept, key=lambda row: (row.mode == "ar", len(free_keys(row)))):
        if not (row.mode == "ar" and settings) and not any(is_in(row, one) for one in settings):
            settings.append(setting_of(row))
    found = []
    for setting in settings:
        here = [row for row in kept if is_in(row, setting)]
        at: dict[tuple[str, int], list[Row]] = {}
        for row in here:
            at.setdefault((method_of(row), row.lookahead), []).append(row)
        uses: dict[str, list[Use]] = {}
        for (name, _), of in sorted(at.items(), key=lambda item: item[0]):
            uses.setdefault(name, []).append(Use(tuple(of)))
        methods = [Method(name, tuple(of)) for name, of in uses.items()]
        methods.sort(key=lambda m: (_MODES.index(m.name.split()[0].lower()), m.name))
        found.append(Comparisons(setting, tuple(methods)))
    return found


def setting_of(row: Row) -> dict[str, Any]:
    """Returns the values that two comparable rows share: machine, kind of forward, token models."""
    return {name: value_of(row, name) for name in _SETTING}


def is_in(row: Row, setting: Mapping[str, Any], free: Sequence[str] = ()) -> bool:
    """Returns whether a row belongs to a setting; free: further keys that do not bind it."""
    names = set(setting).difference(free_keys(row), free)
    return all(value_of(row, name) == setting[name] for name in names)


def free_keys(row: Row) -> tuple[str, ...]:
    """Returns the keys of a setting that do not bind a row: a draft's, for AR and lookups."""
    return DRAFTED if row.mode == "ar" or is_lookup(row) else ()


def is_lookup(row: Row) -> bool:
    """Returns whether nothing but a lookup drafts."""
    return row.draft == LOOKUP.name


def mode_of(row: Row) -> str:
    """Returns the mode of a row's family: ar, sd, ssd, or the kind of lookup that drafts.

    Under imposed acceptance all kinds of lookup are one use.
    """
    if not is_lookup(row):
        return str(row.mode)
    kind = "prompt" if row.acceptance is not None else row.lookup or "prompt"
    return LOOKUPS[0] if kind == "prompt" else kind


def is_row(row: Row) -> bool:
    """Returns whether an entry is a measured row: it has a rate, a mode and its counts."""
    rate, counts = row.tok_per_s, [row.get(name) for name in ("lookahead", "world_size")]
    measured = isinstance(rate, (int, float)) and rate > 0
    return measured and row.mode in _MODES and all(type(n) is int for n in counts)


def value_of(row: Row, name: str) -> Any:
    """Returns the value of one name of a setting; "prompts" covers all flags about them."""
    if name == "forward":
        return row.get(name) or "gemm"  # older rows, from before transformers
    if name != "prompts":
        return row.get(name)
    if row.workload != "text":
        return None
    flags = flags_of(row)
    return " ".join(f"{flag}={flags[flag]}" for flag in _ASKED if flag in flags)


def method_of(row: Row) -> str:
    """Returns the name of a row's method, which contains all of its options except K."""
    words = [str(row.mode).upper()]
    words += [str(row.schedule)] * bool(row.schedule)
    words += ["inline"] * bool(row.mode == "sd" and row.inline_draft)
    words += [f"D={row.num_drafts}"] * ((row.num_drafts or 0) > 1)
    if (device := row.other_draft_device) is not None:
        words.append(f"draft on {device}")
    if row.backup not in (None, "jit"):
        words.append(f"backup={row.backup}")
        if row.acceptance_fast not in (None, RunConfig.acceptance_fast):
            words.append(f"acceptance_fast={row.acceptance_fast}")
        if is_lookup(row) and row.lookup not in (None, "prompt"):
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
    if row.sweep:
        return dict(row.sweep["flags"])
    words = (word[2:] for word in row.command if word.startswith("--") and "=" in word)
    return dict(word.split("=", 1) for word in words)


def render(comparisons: Iterable[Comparisons], lines: Mapping[int, Sequence[object]] = {}) -> str:
    """Renders a table for each setting: tok/s by method and K, each method's best K, and its gain.

    lines: by a table's number, lines to print below it (claims.py).
    """
    tables = (_table(one, lines.get(n, ())) for n, one in enumerate(comparisons))
    return "\n\n".join([*tables, _LEGEND])


def _table(comparison: Comparisons, below: Sequence[object]) -> str:
    known = comparison.setting
    drafts = f"/{known['draft']}" if known.get("draft") else ""
    about = ", ".join(f"{name} {known[name]}" for name in _SHOWN if known.get(name))
    width = max(len(method.name) for method in comparison.methods)
    columns = "".join(f"{f'K={k}':>9}" for k in comparison.lookaheads)
    gains = f"{'x AR':>{_WIDE}}{'a GPU':>{_WIDE}}"
    lines = [
        f"{known['target']}{drafts}, T={known['tp']}, {known['device_name']}: {about}",
        f"{'tok/s':{width}}{columns}     best   at  spread   n{gains}",
        *(f"{method.name:{width}}{_line(method, comparison)}" for method in comparison.methods),
    ]
    errors = {method.name: missed(method.uses) for method in comparison.methods}
    far = [f"{name} {error:.0%}" for name, error in errors.items() if error > choice.MOST_MISSED]
    lines += [_WARNING.format(", ".join(far))] * bool(far)
    return "\n".join([*lines, *map(str, below)])


def _line(method: Method, comparison: Comparisons) -> str:
    best, base = method.best, comparison.baseline
    uses = [None if best.lookahead == 0 else method.at(k) for k in comparison.lookaheads]
    line = "".join(f"{'' if use is None else _number(use.tok_per_s):>9}" for use in uses)
    at = f"K={best.lookahead}" if best.lookahead else ""
    line += f"{_number(best.tok_per_s):>9}{at:>5}{best.spread:>8.1%}{len(best.rows):>4}"
    for gain in _gains(best, base):
        line += f"{'–' if gain is None else gain.brief:>{_WIDE}}"
    return line.rstrip()


def _gains(best: Use, base: Use | None) -> tuple[Comparison | None, Comparison | None]:
    """Returns a use's gain over AR, in total and per GPU; None for AR itself, and if unknown."""
    gain = None if base is None or best is base else best.over(base)
    if gain is None or base is None:
        return None, None
    return gain, gain.scaled(base.family.gpus / best.family.gpus)


def _number(rate: float) -> str:
    return f"{rate:.1f}" if rate < 1e5 else f"{rate:.0f}"


def to_dict(comparison: Comparisons) -> dict[str, Any]:
    """Returns a comparison as JSON: the setting, and the uses and best K of each method."""
    methods = []
    for method in comparison.methods:
        best, base = method.best, comparison.baseline
        gain, per_gpu = _gains(best, base)
        real = [g.speedup if g is not None and g.is_real else None for g in (gain, per_gpu)]
        methods.append(
            {
                "method": method.name,
                "best_lookahead": best.lookahead,
                "tok_per_s": best.tok_per_s,
                "tok_per_s_per_gpu": best.per_gpu,
                "spread": best.spread,
                "speedup": 1.0 if best is base else real[0],
                "speedup_per_gpu": 1.0 if best is base else real[1],
                "over_ar": None if gain is None else gain.to_dict(),
                "over_ar_per_gpu": None if per_gpu is None else per_gpu.to_dict(),
                "by_lookahead": {
                    str(use.lookahead): {"tok_per_s": use.tok_per_s, "repeats": use.rates}
                    for use in method.uses
                },
            }
        )
    return {"setting": comparison.setting, "methods": methods}
