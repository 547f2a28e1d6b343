"""Groups result rows by how they used the GPUs, and lists the alternatives that SSD must beat
(docs/definitions.md, "The uses of G GPUs").

A *use* of GPUs is a mode on T target ranks and D draft ranks, at one K (number of tokens drafted a
round). If acceptance is drawn from a model, all lookups have the same acceptance rate and count as
one; on text or a recording, each kind must be measured.

Rows are compared only within a *setting*: the same models, machine, acceptance model, batch size
and context. AR and lookups are compared with rows of every draft and acceptance model. A *method*
is a mode with all options except K: where the draft runs, fan-out, hit model, what drafts after a
miss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.presets import LOOKUP, resolve_model
from mpissd.common.row import Row
from mpissd.lab.tables.compare import Comparison, gain_of

LOOKUPS = ("lookup", "suffix")
WORTH = 1.05  # A smaller speedup does not count as a gain: it is not worth another GPU.
TREE = "tree"  # name of the mode "SD with draft trees"
MOST_MISSED = 0.2  # If predictions have a larger median error, measured rates choose the best K.
FAR = 1 / 3  # Tables mark a run if its own prediction has a larger relative error.
_SETTING = (
    "workload backend device_name target tp dtype num_layers forward batch_size fuse graph lm_head "
    "context all_reduce temperature vocab order prompt_tokens stop_token recording token_limit "
    "prompts draft acceptance divergence"
).split()
_DRAFTED = ("draft", "acceptance", "divergence")  # row keys that AR and lookups do not use
_PROMPT_FLAGS = ("prompt", "prompts", "prompt_ids", "chat_template", "stop", "top_p")


@dataclass(frozen=True, order=True)
class Family:
    """A mode together with the number of target ranks T (tp) and of draft ranks D (num_drafts).
    mode: "ar", "sd", "ssd", "tree" (SD with draft trees), or "lookup" or "suffix" (SD whose drafts
    are copied from earlier text)."""

    mode: str
    tp: int
    num_drafts: int

    @property
    def gpus(self) -> int:
        return self.tp + self.num_drafts

    @property
    def name(self) -> str:
        """The mode's printed name: "AR", "SD inline" (no draft rank), "SD", "SSD", "lookup"."""
        if self.mode not in ("ar", "sd", "ssd"):
            return self.mode
        return self.mode.upper() + " inline" * (self.mode == "sd" and not self.num_drafts)

    def __str__(self) -> str:
        """Returns the name for tables and messages, such as "AR T=2" or "SD T=1 D=1"."""
        return f"{self.name} T={self.tp}" + f" D={self.num_drafts}" * bool(self.num_drafts)


def widest(
    gpus: int, tps: Collection[int], lookups: Sequence[str] = LOOKUPS[:1]
) -> tuple[Family, ...]:
    """Returns the modes, with numbers of ranks, that must be measured before one of them is called
    the best on `gpus` GPUs: AR, inline SD, lookups, SD and SSD with one draft rank. Each has the
    largest number of target ranks in `tps` for which there is room, because on fewer ranks each
    reads more bytes. lookups: the kinds of lookup that must be measured."""
    inline_tp, drafted_tp = (max((t for t in tps if t <= gpus - d), default=0) for d in (0, 1))
    possible = [Family(mode, inline_tp, 0) for mode in ("ar", "sd", *lookups)]
    possible += [Family(mode, drafted_tp, 1) for mode in ("sd", "ssd")]
    return tuple(family for family in possible if family.tp)


def tps_of(target: str, limit: int) -> tuple[int, ...]:
    """Returns every number of ranks T up to `limit` over which the model named `target` can be
    divided. A rank needs at least one KV head; heads and columns may be divided unevenly. If the
    name is unknown, all numbers up to the limit are returned."""
    try:
        heads = resolve_model(target).num_kv_heads
    except ConfigError:
        heads = limit
    return tuple(range(1, min(limit, heads) + 1))


@dataclass(frozen=True)
class Use:
    """The result rows of one method (mode with its options) at one K in one setting; they differ in
    seed and repeat. tok_per_s: median of the rows. predicted: mean of the rates that each row
    predicts from its own measured durations; None if a row has no prediction."""

    rows: tuple[Row, ...]
    method: str
    family: Family
    lookahead: int
    tok_per_s: float
    predicted: float | None

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Use:
        """Makes a Use from result rows (at least one) that share mode, options, K and setting."""
        first = rows[0]
        means = [float(row.expected_tok_per_s) for row in rows if row.expected_tok_per_s]
        return cls(
            rows=tuple(rows),
            method=method_of(first),
            family=family_of(first),
            lookahead=int(first.lookahead),
            tok_per_s=float(median(row.tok_per_s for row in rows)),
            predicted=fmean(means) if len(means) == len(rows) else None,
        )

    @property
    def per_gpu(self) -> float:
        return self.tok_per_s / self.family.gpus

    @property
    def spread(self) -> float:
        """(largest − smallest) / median of the rows' tok/s; 0 for one row."""
        rates = [row.tok_per_s for row in self.rows]
        return (max(rates) - min(rates)) / self.tok_per_s

    @property
    def missed(self) -> list[Row]:
        """The rows whose tokens/s are over a third off their own prediction, the worst first."""
        far = [row for row in self.rows if missed_by([row.prediction_error]) > FAR]
        return sorted(far, key=lambda row: -abs(row.prediction_error or 0.0))

    @property
    def seeds(self) -> set[object]:
        return {row.seed for row in self.rows}

    def over(self, base: Use) -> Comparison | None:
        """Returns the speedup of these rows over the rows in `base`; None if they share no seed."""
        return gain_of(self.rows, base.rows)

    @property
    def name(self) -> str:
        """The mode's printed name, such as "tree in one forward"."""
        return self.family.name + " in one forward" * bool(self.rows[0].parallel_drafting)

    @property
    def at(self) -> str:
        """K (the number of tokens drafted a round) as text, such as "K=4"; "" for AR."""
        return f"K={self.lookahead}" if self.lookahead else ""

    def __str__(self) -> str:
        """Returns mode, ranks and drafted tokens as text, such as "SD T=1 D=1 K=4"."""
        family = str(self.family).replace(self.family.name, self.name, 1)
        return f"{family} {self.at}".rstrip()


def uses_of(rows: Iterable[Row]) -> list[Use]:
    """Groups result rows of one setting (models, machine, batch size and so on) by method (mode
    with its options) and K. The groups are in order of their first rows."""
    cells: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        cells.setdefault((method_of(row), int(row.lookahead)), []).append(row)
    return [*map(Use.of, cells.values())]


def best_use(uses: Sequence[Use]) -> Use:
    """Returns the group of rows (one method at one K) with the highest predicted tokens/s; if
    predictions are missing or far from the measurements, the one with the highest measured median.
    Predictions use no measured round, so that luck cannot choose the reported K."""
    errors = [row.prediction_error for use in uses for row in use.rows]
    if are_predicted([use.predicted for use in uses], errors):
        return max(uses, key=lambda use: use.predicted or 0.0)
    return fastest(uses)


def fastest(uses: Iterable[Use]) -> Use:
    """Returns the group of rows (one method at one K) with the highest median tokens/s."""
    return max(uses, key=lambda use: use.tok_per_s)


def missed_by(errors: Iterable[float | None]) -> float:
    """Returns the median size of relative prediction errors; None and NaN are left out, and without
    any error the result is 0. A row's prediction uses the row's own acceptance results, so that
    luck in acceptance does not count as an error."""
    sizes = [abs(error) for error in errors if error is not None and not math.isnan(error)]
    return median(sizes) if sizes else 0.0


def are_predicted(means: Iterable[float | None], errors: Iterable[float | None]) -> bool:
    """Returns whether predicted rates may choose the best K: every predicted mean is known, and the
    median of the relative prediction errors is at most 20% (MOST_MISSED)."""
    are_complete = all(mean and not math.isnan(mean) for mean in means)
    return are_complete and missed_by(errors) <= MOST_MISSED


def setting_of(row: Row) -> dict[str, Any]:
    """Returns the values in which comparable rows must agree, as {key of the row: value}: models,
    machine, kind of forward, batch size, acceptance model and so on."""
    return {name: _value_of(row, name) for name in _SETTING}


def is_in(row: Row, setting: Mapping[str, Any], free: Sequence[str] = ()) -> bool:
    """Returns whether a row has the values of a setting, {key: value}. free: keys in which the row
    may differ, in addition to the draft and acceptance model of AR and lookups."""
    if row.mode == "ar" or is_lookup(row):
        free = (*free, *_DRAFTED)
    return all(_value_of(row, name) == setting[name] for name in setting if name not in free)


def _value_of(row: Row, name: str) -> Any:
    """Returns the row's value of one of the keys in which comparable rows agree. For the key
    "prompts" it is a text of all flags about prompts."""
    if name == "forward":
        return row.get(name) or "gemm"  # Old rows lack this key.
    if name != "prompts" or row.workload != "text":
        return row.get(name)
    flags = flags_of(row)
    return " ".join(f"{flag}={flags[flag]}" for flag in _PROMPT_FLAGS if flag in flags)


def is_lookup(row: Row) -> bool:
    """Returns whether a lookup drafted all tokens of this row, without a draft model."""
    return row.draft == LOOKUP.name


def mode_of(row: Row) -> str:
    """Returns the mode of a row: "ar", "sd", "ssd", "tree" (SD with draft trees), or the kind of
    lookup that drafted. If acceptance is drawn from a model, all lookups are called "lookup"."""
    if not is_lookup(row):
        return TREE if row.tree_nodes and row.mode == "sd" else str(row.mode)
    kind = "prompt" if row.acceptance is not None else row.lookup or "prompt"
    return LOOKUPS[0] if kind == "prompt" else kind


def family_of(row: Row) -> Family:
    """Returns a row's mode and numbers of ranks; lookups and draft trees count as modes."""
    return Family(mode_of(row), int(row.tp), int(row.world_size - row.tp))


def method_of(row: Row) -> str:
    """Returns a name for how a row was decoded: its mode and all options except K."""
    words = [str(row.mode).upper(), *[str(row.schedule)] * bool(row.schedule)]
    words += ["inline"] * bool(row.mode == "sd" and row.inline_draft)
    words += [f"tree={row.tree_nodes}"] * bool(row.tree_nodes)
    words += ["dynamic"] * (row.tree_shape == "dynamic")
    words += ["in one forward"] * bool(row.parallel_drafting)
    words += ["sharded"] * bool(row.shard_draft)
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
        words += ["cache=draft"] * (row.cache == "draft")
        words += [f"C={row.saguaro_c:g}"] if row.saguaro_c not in (None, 1.0) else []
    return " ".join(words)


def fan_out_text(counts: Sequence[int] | None) -> str:
    """Returns a value of the flag --fan_out for a row that recorded only the resulting counts F_0 …
    F_K (candidates for the next token after k = 0 … K accepted ones). Equal counts give
    "uniform:F", others "geometric:SUM"; without counts the default is returned."""
    if not counts:
        return RunConfig.fan_out
    is_uniform = len(set(counts)) == 1
    return f"uniform:{counts[0]}" if is_uniform else f"geometric:{sum(counts)}"


def flags_of(row: Row) -> dict[str, str]:
    """Returns {flag: value} of the run that made a row, by its sweep's grid or its command line."""
    if row.sweep and "flags" in row.sweep:  # Some sweeps record no flags.
        return dict(row.sweep["flags"])
    words = (word[2:] for word in row.command if word.startswith("--") and "=" in word)
    return dict(word.split("=", 1) for word in words)


def number_of(law: object, name: str) -> float | None:
    """Returns the number in the text of an acceptance or hit model, such as .8 in "alpha:.8".
    Returns None unless the text is `name`, a colon and a number."""
    match = re.fullmatch(rf"{name}:([0-9.eE+-]+)", str(law))
    return float(match[1]) if match else None


def unit(row: Row) -> str:
    """Returns "core" if the row's ranks computed with NumPy on CPU cores, else "GPU"."""
    return "core" if row.backend == "numpy" else "GPU"
