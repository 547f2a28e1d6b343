"""Defines the result row of a measured run (schema 2): each key with its type, unit and meaning.

    row = Row.from_dict(json.loads(line))    reads a line of runs.jsonl, also an older version's
    row.tok_per_s, row.get("tok_per_s")      a field, or the same as a mapping of the line's keys
    json.dumps(row.to_dict())                the line, its keys in the order of the fields

A line of runs.jsonl is a JSON object with the configuration and the measurements of one run. Keys
that flags set (`setting`) are in its inner object `configuration`, all others at the top level. A
`Row`, and a line of schema 1, has all keys at one level.

A field whose type excludes None is in every row that the command `run` wrote. If a line lacks such
a key, the field is None, and the consistency checks of lab/gates.py report it. `fault_of` checks
the values that a line has. docs/row_page.py makes docs/row.md from these fields.
"""
# ruff: noqa: RUF009 (`key` makes a field)

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from datetime import datetime
from functools import cache, partial
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

SCHEMA = 2
READABLE = (1, 2)  # schemas of the lines that this version reads
CONFIGURATION = "configuration"
# Keys of older rows that this version does not write any more.
RETIRED = (
    "schedule ledger_overhead draft_lookup full_num_layers t_target_full_depth_s sampling_sd"
).split()
Means = Mapping[str, float]
_MODES = ("ar", "sd", "ssd")
_LIMIT = 2**64  # numbers must be below this limit; a seed may have 64 bits
_LEAST = {  # {key: its lowest allowed value}; numbers under other keys must be at least 0
    **dict.fromkeys(("world_size", "tp", "batch_size"), 1),
    "tok_per_s": 1e-9,
    **dict.fromkeys(("prediction_error", "sampling_error"), -_LIMIT),
}
# Keys that a row needs before it is compared with other rows.
NEEDED = "run_id mode device_name target tok_per_s lookahead world_size tp".split()
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_NAMES |= {list: "a list", Mapping: "an object"}
_OTHER_KEYS = {  # types of values that are read but are no fields of Row, by key or dotted path
    CONFIGURATION: Mapping[str, Any],
    "schedule": str,
    "draft_lookup": str,
    "provenance.commit": str,
    "provenance.started_at": str,
    "provenance.command": list[str],
    "provenance.hosts": list[str],
    "provenance.ranks": list[Mapping[str, str]],
    "provenance.sweep": Mapping[str, Any],
    "provenance.sweep.task": str,
    "provenance.sweep.flags": Mapping[str, Any],
}


def key(meaning: str, unit: str = "", *, is_set: bool = False) -> Any:
    """Makes a dataclass field for a key of the row. meaning: its text in docs/row.md. unit: such as
    "µs". is_set: whether flags set the value; a line then has it in the object `configuration`."""
    return field(default=None, metadata={"meaning": meaning, "unit": unit, "is_set": is_set})


setting = partial(key, is_set=True)


def flat(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a line of runs.jsonl with the keys of its object `configuration` at the top level."""
    inner = line.get(CONFIGURATION)
    if not isinstance(inner, Mapping):  # schema 1, or a damaged line
        return dict(line)
    return {**{name: value for name, value in line.items() if name != CONFIGURATION}, **inner}


@dataclass(frozen=True, eq=False)
class Row(Mapping[str, Any]):
    """The result of one run. As a mapping it has all keys of its line in runs.jsonl, unnested."""

    schema: int = key("version of the set of keys: 2")
    run_id: str = key("id of the run, which names its files under OUT")
    mode: str = key("ar, sd or ssd")
    workload: str = key(
        "gemm (outcomes are imposed), markov (tokens are sampled), replay (of a recording) or text"
    )
    backend: str = key("cupy, numpy or emulated")
    device_name: str = key('the lead\'s device; an emulated one says "(emulated)"')
    world_size: int = key("G·T + D + L, all ranks")
    tp: int = key("T, ranks that share the target")
    num_drafts: int = key("D, ranks that draft")
    groups: int | None = setting("G, target groups that share the draft ([pools.md](pools.md))")
    target: str = key("the target's shape; `@nL`: scaled in depth")
    draft: str | None = key('the draft\'s shape; "lookup" if only a lookup drafts')
    dtype: str = setting("number format of the weights and products")
    lookahead: int = key("K, drafted tokens a round; 0 in AR")
    tree_nodes: int | None = setting("drafted tokens of a tree, a round")
    tree_shape: str | None = setting("fixed, or dynamic: each round's own (null: no tree)")
    parallel_drafting: bool | None = setting("whether one draft forward drafted all K levels")
    shard_draft: bool | None = setting("whether the target's ranks shared the draft")
    fan_out: list[int] | None = setting("F_0 … F_K after a hit; of a tree by node")
    branch_budget: int | None = setting("the sum of `fan_out`")
    fan_out_miss: list[int] | None = setting("F_0 … F_K after a miss")
    cache: str | None = setting("the rank that looks hits up: lead, or draft (null in older rows)")
    acceptance: str | None = setting("the imposed acceptance model")
    hit_law: str | None = setting("the imposed hit model, as `--hit_law` reads it")
    laws: str | None = setting("file and SHA-256 of imposed `--laws`")
    batch_size: int = key("b, sequences that decode together")
    draft_device_name: str | None = key("the draft rank's device")
    draft_backend: str | None = setting(
        "the draft rank's backend (null without one, and in older rows: as `backend`)"
    )
    inline_draft: bool = setting("whether the draft shares the lead's device")
    all_reduce: str = setting(
        "how the target ranks reduce: solo (T = 1), mpi (NumPy), nccl, oneshot or staged"
    )
    graph: bool = setting("whether forwards were captured and replayed as graphs")
    fuse: bool = setting("whether q, k, v were one product, and gate and up another")
    lm_head: bool = setting(
        "whether the vocabulary product with top-k was part of a forward (older rows of "
        "transformers may have false)"
    )
    context: int = setting(
        "value of `--context`: KV cache that attention reads in every forward", "tokens"
    )
    forward: str = setting("gemm (matrix products alone) or transformer (`--forward`)")
    weights: Mapping[str, Any] | None = key(
        "of target and draft: `name`, `sha256` of the files (null: random weights) and "
        "`sha256_of` (whole files, or parts of files above 512 MiB). Of a `text` target also "
        "`tokenizer_sha256`; of a draft `made_for_target`: whether `distill` made it for this "
        "target"
    )
    on_late: str | None = setting(
        "finish: hits that arrive before growth is complete are finished first; serve and auto in"
        " older rows"
    )
    backup: str | None = setting("what drafts after a miss; in SD every round")
    backup_lookahead: int | None = setting("drafted tokens after a miss")
    acceptance_fast: str | None = setting("the acceptance model of a fast backup's tokens")
    lookup: str | None = setting("how a fast backup finds what to copy: prompt or suffix")
    num_layers: int = setting("layers of the target that ran")
    seed: int = setting("seed of all random draws")
    temperature: float | None = setting("sampling temperature (`markov`, `text`)")
    vocab: int | None = setting("vocabulary size (`markov`, `text`)")
    order: int | None = setting("number of tokens on which the next one depends (`markov`)")
    divergence: float | None = setting("how far the draft is from its target (`markov`)")
    saguaro_c: float | None = setting("Saguaro's C (`markov`, `text`)")
    prompt_tokens: int | None = setting("length of each prompt (`markov`)", "tokens")
    top_p: float | None = setting("share of the target's distribution that is kept (`text`)")
    stop: list[str] | None = setting("the stop strings (`text`)")
    grammar: str | None = setting("the grammar of answers: its flag and CRC-32 (`text`)")
    num_prompts: int | None = setting("number of prompts (`text`)")
    prompts_sha256: str | None = setting("SHA-256 of the prompts' tokens (`text`)")
    recording: str | None = setting("file and SHA-256 of the recording (`replay`)")
    stop_token: int | None = setting("the token that ends a sequence (`markov`)")
    num_rounds: int = key("number of measured rounds")
    token_limit: int | None = setting("value of `--num_tokens`; null: no limit", "tokens")
    num_tokens: int = key("tokens of all sequences in the measured rounds", "tokens")
    wall_s: float = key("wall time of the measured rounds", "s")
    t_prefill_s: float | None = key(
        "time of the target's forwards over prompts, part of wall_s", "s"
    )
    time_to_first_token_s: float | None = key(
        "duration of the first measured round, prompt included", "s"
    )
    tok_per_s: float = key("num_tokens / wall_s", "tok/s")
    tok_per_s_per_gpu: float = key(
        "tok_per_s / world_size; a learner on another rank's GPU is not counted, nor is a draft "
        "on host cores beside a target on GPUs",
        "tok/s",
    )
    round_us: Means = key("{mean, p50, p90, p99, n} of the durations of the lead's rounds", "µs")
    phases_us: Mapping[str, Means | None] = key(
        "{lead, draft}: mean a round of each exclusive host phase (`mpissd/common/trace.py` lists"
        " them); they add up to the round",
        "µs",
    )
    device_us: Mapping[str, float | None] | None = key(
        "mean a round on the lead's device: `forward` (the target's, without its collectives), "
        "`all_reduce` (on GPUs timed separately at the start), `idle`; together the mean round",
        "µs",
    )
    per_group: list[Mapping[str, Any]] | None = key(
        "of each target group its own values; null for one group"
    )
    pool: Mapping[str, float] | None = key(
        "of the draft's forwards for several groups: their number (`forwards`), mean `rows` and "
        "groups (`seats`) of one, and the share of time in which one ran (`busy`)"
    )
    acceptance_length: float = key("mean tokens a round and sequence, bonus included", "tokens")
    accept_histogram: list[int] = key("numbers of outcomes with k = 0 … K accepted tokens")
    hit_rate: float | None = key(
        "share of sequences whose outcome was a key, without first rounds (forced misses)"
    )
    draft_lost_round: int | None = key(
        "the first measured round after the draft was lost (`--on_draft_loss=ar`); from then on K"
        " = 0, and no round counts in `hit_rate`"
    )
    learned: Mapping[str, Any] | None = key(
        "the draft's counts of committed outcomes, and ranks ([candidates kept, rank, how often];"
        " 0: none) of a bonus that replaces a rejection and of one after k' accepted tokens; null"
        " if outcomes are imposed"
    )
    learners: int | None = setting("L, ranks that train the draft meanwhile")
    learner_state: str | None = key(
        "starting, learning, refused or diverged (its last version was not published), lost (its "
        "trainer had ended), failed, or silent, with details in `learner`"
    )
    draft_versions: int | None = key(
        "versions of its weights that the draft swapped in during the measured rounds"
    )
    acceptance_by_version: list[Mapping[str, float]] | None = key(
        "of each version of the draft's weights (0: as loaded): rounds, drafted and accepted "
        "tokens, and acceptance_length"
    )
    learner: Mapping[str, Any] | None = key(
        "what the learner did: `swaps`, `refused_versions`, the lead's `cost` of sending examples, "
        "`ready_s`, `first_step_s`, its `gpu`, and `shares_gpu_of`, the rank on the same GPU"
    )
    t_target_s: float | None = key("p50 device time of a forward of b(K+1) rows", "s")
    t_draft_s: float | None = key(
        "p50 of K sequential draft steps: of the measured full misses, or timed before if there "
        "are none. With several groups it includes the draft's work for others",
        "s",
    )
    t_growth_s: float | None = key(
        "p50 of glue + K steps over all branches, if they ran to their end", "s"
    )
    T_SD: float | None = key("t_draft_s / t_target_s")
    floor_us: float | None = key(
        "the longer of floor_bytes / read_bytes_per_s and floor_flops / peak_flops_per_s",
        "µs",
    )
    floor_fraction: float | None = key("floor_us / t_target_s; noise on a CPU may lift it above 1")
    floor_bytes: float | None = key(
        "weights and KV that a verification of b(K+1) rows reads on a target rank "
        "([definitions.md](definitions.md#what---context-reads))",
        "bytes",
    )
    floor_flops: float | None = key("operations of that verification: 2·M·weights", "flop")
    read_bytes_per_s: float | None = key(
        "read-only bandwidth of the lead's device over its weights' bytes, in this job (emulated:"
        " the profile's)",
        "bytes/s",
    )
    peak_flops_per_s: float | None = key(
        "peak rate of the lead's device in this job: of a large square product, or of a forward "
        "if that was faster (emulated: the profile's)",
        "flop/s",
    )
    cache_bytes: float | None = key("size of the last-level cache of the lead's device", "bytes")
    predicted_tok_per_s: float | None = key(
        "rate predicted from this run's outcomes, its forwards timed in series, and its warm-up's "
        "host costs",
        "tok/s",
    )
    prediction_error: float | None = key(
        "tok_per_s / predicted_tok_per_s − 1: error (a) of [predictions.md](predictions.md)"
    )
    expected_tok_per_s: float | None = key(
        "long-run mean under the imposed models, from the same times; error (b) is tok_per_s / "
        "expected_tok_per_s − 1",
        "tok/s",
    )
    sampling_error: float | None = key(
        "luck of this run's draws: predicted_tok_per_s / expected_tok_per_s − 1"
    )
    outcome_digest: str = key(
        "SHA-256 of all (round, id, k, t*); runs that decided alike have equal digests"
    )
    token_digest: str = key(
        "SHA-256 of the first N tokens of every sequence, N = num_tokens or the number of rounds"
    )
    messages_per_round: float = key(
        "messages that the lead sent and received, mean of a measured round", "messages"
    )
    bytes_per_round: float = key("bytes of those messages", "bytes")
    rank_digests: list[int | None] | None = key(
        "by world rank, a digest of the outcomes that the rank received"
    )
    config_digest: str = key("digest of the configuration; equal flags have equal digests")
    provenance: Mapping[str, Any] = key(
        "versions, hosts, devices, command line, commit; `calibrated_at`: the oldest measurement "
        "that the prediction uses; `draws`: where the lead draws sampled tokens; `kernel`: which "
        "kernels read the target's weights; `chosen`: the seconds by rows by which the run chose K "
        "and the fan-out; `sweep`: its task, repeat and flags (null in a row of `run`)"
    )
    absent: frozenset[str] = frozenset()  # names of fields that the row's line lacks
    extra: Mapping[str, Any] = field(default_factory=dict)  # further keys

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> Row:
        """Makes a row from a line of runs.jsonl: missing keys are None, unknown ones in `extra`."""
        line = flat(line)
        values = {name: line[name] for name in KEYS if name in line}
        extra = {name: value for name, value in line.items() if name not in FIELDS}
        return cls(**values, absent=frozenset(KEYS).difference(values), extra=extra)

    def to_dict(self) -> dict[str, Any]:
        """Returns the row's line as a dict: keys in the order of the fields, then `extra`."""
        line: dict[str, Any] = {}
        for name, value in self.items():
            is_set = name in FIELDS and FIELDS[name].metadata["is_set"]
            (line.setdefault(CONFIGURATION, {}) if is_set else line)[name] = value
        return line

    @property
    def draft_device(self) -> str | None:
        """The device name of the first draft rank; None if there is none or it is unknown."""
        if not self.num_drafts:
            return None
        if "draft_device_name" not in self.absent:
            return self.draft_device_name
        ranks = self._origin("ranks")
        place = self.tp
        if not isinstance(ranks, list) or type(place) is not int or not 0 <= place < len(ranks):
            return None
        return ranks[place].get("device") if isinstance(ranks[place], Mapping) else None

    @property
    def other_draft_device(self) -> str | None:
        """The device name of the first draft rank if it differs from rank 0's, else None."""
        name = self.draft_device
        return None if name == self.device_name else name

    @property
    def sweep(self) -> dict[str, Any] | None:
        """The id, task, repeat and flags of the sweep that measured the row, or None."""
        sweep = self._origin("sweep")
        return sweep if isinstance(sweep, dict) else None

    @property
    def command(self) -> list[str]:
        return [str(word) for word in self._origin("command") or ()]

    def _origin(self, name: str) -> Any:
        return (self.provenance or {}).get(name)

    def __getattr__(self, name: str) -> Any:
        """Returns the value of a key that only older rows have; None in a row without it."""
        if name in RETIRED:
            return self.extra.get(name)
        raise AttributeError(f"a row has no {name!r}")

    def __getitem__(self, name: str) -> Any:
        if name in FIELDS and name not in self.absent:
            return getattr(self, name)
        return self.extra[name]

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in KEYS if name not in self.absent)
        yield from self.extra

    def __len__(self) -> int:
        return len(KEYS) - len(self.absent) + len(self.extra)

    def __or__(self, changed: Mapping[str, Any]) -> Row:
        """Returns a copy of the row in which the values of `changed` replace those of the row."""
        return Row.from_dict({**self, **changed})


def fault_of(line: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns (key, message) of the first impossible value in a flat line; None if all values are
    possible. A null value or a missing key means "unknown", which is possible."""
    for path, kind in _kinds().items():
        value: Any = line
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if (allowed := _unless_of(path, value, kind)) is not None:
            return path, f"{path}={repr(value)[:40]}: allowed: {allowed}"
    return None


@cache
def _kinds() -> dict[str, Any]:
    """Returns {key, or dotted path such as provenance.commit: the type of its value}."""
    hints = get_type_hints(Row)
    return {**{name: hints[name] for name in KEYS}, **_OTHER_KEYS}


def _unless_of(path: str, value: Any, kind: Any) -> str | None:
    """Returns a text of the allowed values if `value` is not of type `kind` or out of range, else
    None. path: the value's dotted key; some keys have ranges of their own."""
    if get_origin(kind) is UnionType:  # a type, or None
        kind = get_args(kind)[0]
    base = get_origin(kind) or kind
    if value is None or base is Any:
        return None
    is_of_type = isinstance(value, (int, float) if base is float else base)
    if not is_of_type or (isinstance(value, bool) and base is not bool):
        return _NAMES[base]
    if base in (int, float):
        least = _LEAST.get(path, 0)
        return None if least <= value < _LIMIT else f"{_NAMES[base]} from {least} to below 2**64"
    if path == "mode" and value not in _MODES:
        return ", ".join(_MODES)
    if path == "provenance.started_at":
        try:
            datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError):
            return "a date of ISO 8601"
    parts = value.values() if base is Mapping else value if base is list else ()
    if any(part is None for part in parts) and base is list and path != "rank_digests":
        return "a list without null"
    inner = (_unless_of(path, part, get_args(kind)[-1]) for part in parts)
    return next((f"{_NAMES[base]}, each {allowed}" for allowed in inner if allowed), None)


FIELDS: Mapping[str, Field[Any]] = {f.name: f for f in fields(Row) if "meaning" in f.metadata}
KEYS = tuple(FIELDS)
