"""What a use of GPUs is: its family, method, setting and rows; and which uses SSD must beat.

A *use* is a mode on T target ranks and D draft ranks with its tok/s at its own best K. On G GPUs
SSD (T + D = G) must beat, for the same sequences:

    AR T, SD inline T, lookup T, suffix T    no draft GPU
    SD T D                                   a draft GPU of its own

T is every number of ranks that a target can be divided into, evenly or not (tps_of). A lookup and a
suffix automaton draft without a model. If acceptance is imposed, both have the acceptance that
SSD's own lookup backup may assume (acceptance_fast, .3 by default), so they are one use; for text
or a recording, both must be measured.

If the throughput of a use that would fit is unknown, the comparison gives no verdict: that use is
named, and no use is called the best.

Rows are compared only within a *setting*: one pair on one machine, with one acceptance model, batch
size and context. AR accepts nothing, so its rows belong to every acceptance model; a lookup drafts
without a model and with an acceptance of its own, so its rows belong to every draft and acceptance
model. A *method* is a mode with all of its options except K: place of the draft, fan-out, hit
model, backup. The rows of one method, K and setting are those of one use, whatever their seeds.
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
WORTH = 1.05  # the least gain that counts as one: a smaller one is not worth a rank
TREE = "tree"  # SD whose drafts are trees: a use if it is measured, or if `plan` weighs it
MOST_MISSED = 0.2  # median error of replays beyond which predictions choose no K
FAR = 1 / 3  # error of one run's own replay beyond which the run is marked
_SETTING = (
    "workload backend device_name target tp dtype num_layers forward batch_size fuse graph lm_head "
    "context all_reduce temperature vocab order prompt_tokens stop_token recording token_limit "
    "prompts draft acceptance divergence"
).split()
_DRAFTED = ("draft", "acceptance", "divergence")  # keys that rows of AR and lookups lack or ignore
_PROMPT_FLAGS = ("prompt", "prompts", "prompt_ids", "chat_template", "stop", "top_p")


@dataclass(frozen=True, order=True)
class Family:
    """Key of the uses that share mode, T and D and differ in K.

    mode: ar, sd, ssd, or a kind of lookup (SD whose drafts are looked up), such as LOOKUPS.
    """

    mode: str
    tp: int
    num_drafts: int

    @property
    def gpus(self) -> int:
        """The number of GPUs, T + D."""
        return self.tp + self.num_drafts

    @property
    def name(self) -> str:
        """The name without T and D: AR, SD inline, lookup, SD."""
        if self.mode not in ("ar", "sd", "ssd"):
            return self.mode
        return self.mode.upper() + " inline" * (self.mode == "sd" and not self.num_drafts)

    def __str__(self) -> str:
        """Returns the name in tables and messages: AR T=2, SD inline T=2, SD T=1 D=1."""
        return f"{self.name} T={self.tp}" + f" D={self.num_drafts}" * bool(self.num_drafts)


def widest(
    gpus: int, tps: Collection[int], lookups: Sequence[str] = LOOKUPS[:1]
) -> tuple[Family, ...]:
    """Returns the families that rows must hold before one use is called the best.

    These are AR, SD inline, lookups, SD and SSD, each on the largest T that fits. lookups: lookups
    that count as uses, one if acceptance is imposed and two for text. A smaller T reads more bytes
    a rank; such rows count if they exist, but are not required.
    """
    inline_tp, drafted_tp = (max((t for t in tps if t <= gpus - d), default=0) for d in (0, 1))
    possible = [Family(mode, inline_tp, 0) for mode in ("ar", "sd", *lookups)]
    possible += [Family(mode, drafted_tp, 1) for mode in ("sd", "ssd")]
    return tuple(family for family in possible if family.tp)


def tps_of(target: str, limit: int) -> tuple[int, ...]:
    """Returns every T up to the limit into which a target can be divided, judged by its name.

    Whole transformers divide their heads and columns unevenly where they must (70B on three GPUs);
    each rank needs a KV head. For an unknown name every T is returned.
    """
    try:
        heads = resolve_model(target).num_kv_heads
    except ConfigError:
        heads = limit
    return tuple(range(1, min(limit, heads) + 1))


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
        return gain_of(self.rows, base.rows)

    @property
    def at(self) -> str:
        """K as text; nothing for AR."""
        return f"K={self.lookahead}" if self.lookahead else ""

    def __str__(self) -> str:
        """Returns the use as text: its mode, T, D and K."""
        return f"{self.family} {self.at}".rstrip()


def uses_of(rows: Iterable[Row]) -> list[Use]:
    """Groups rows of one setting by method and K, in order of appearance."""
    cells: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        cells.setdefault((method_of(row), int(row.lookahead)), []).append(row)
    return [*map(Use.of, cells.values())]


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
    """Returns the median size of the replays' errors, as a share; 0 without errors.

    A replay repeats the row's own draws, so that luck is no part of its error.
    """
    sizes = [abs(error) for error in errors if error is not None and not math.isnan(error)]
    return median(sizes) if sizes else 0.0


def are_predicted(means: Iterable[float | None], errors: Iterable[float | None]) -> bool:
    """Returns whether predicted means can choose: none is missing, and their replays hold."""
    are_complete = all(mean and not math.isnan(mean) for mean in means)
    return are_complete and missed_by(errors) <= MOST_MISSED


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
    return " ".join(f"{flag}={flags[flag]}" for flag in _PROMPT_FLAGS if flag in flags)


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
    """Returns the family of a row; lookups and trees have families of their own."""
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


def number_of(law: object, name: str) -> float | None:
    """Returns the number of a model `name:number`, such as alpha:.8; None for another model."""
    match = re.fullmatch(rf"{name}:([0-9.eE+-]+)", str(law))
    return float(match[1]) if match else None


def unit(row: Row) -> str:
    """Returns what a rank of a row's job runs on: a GPU or, with NumPy, a core."""
    return "core" if row.backend == "numpy" else "GPU"
