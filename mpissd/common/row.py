"""The result row, schema 2: every key once, with its type, its unit and its meaning.

    row = Row.from_dict(json.loads(line))    reads a line of runs.jsonl, also an older version's
    row.tok_per_s, row.get("tok_per_s")      a field, or the same as a mapping of the line's keys
    json.dumps(row.to_dict())                the line, its keys in the order of the fields

A line is a configuration and its measurements: what the flags set (`setting`) is in the object
`configuration`, all other keys are at the top. In memory a row is flat, and so was a line of schema
1, which is read as it is.

Fields whose type has no None are in every row that `run` wrote. Nothing is checked here: if a line
lacks such a key, the field is None, and the gates report it. docs/row.md is made from these fields
by docs/row_page.py.
"""
# ruff: noqa: RUF009 (`key` makes a field)

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

SCHEMA = 2
READABLE = (1, 2)  # schemas of the lines that this version reads
CONFIGURATION = "configuration"
# Keys of older rows alone.
RETIRED = "schedule ledger_overhead draft_lookup full_num_layers t_target_full_depth_s".split()
Means = Mapping[str, float]


def key(meaning: str, unit: str = "") -> Any:
    """Makes a field of the row from its meaning, as docs/row.md prints it, and its unit."""
    return field(default=None, metadata={"meaning": meaning, "unit": unit, "is_set": False})


def setting(meaning: str, unit: str = "") -> Any:
    """Makes a field that the flags set; in a line it is in the object `configuration`."""
    return field(default=None, metadata={"meaning": meaning, "unit": unit, "is_set": True})


def flat(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a line with the keys of its `configuration` among the others."""
    inner = line.get(CONFIGURATION)
    if not isinstance(inner, Mapping):  # schema 1, or a damaged line
        return dict(line)
    return {**{name: value for name, value in line.items() if name != CONFIGURATION}, **inner}


@dataclass(frozen=True, eq=False)
class Row(Mapping[str, Any]):
    """One measured run; also a mapping, equal to the flat form of its line in runs.jsonl."""

    schema: int = key("version of the set of keys: 2; in rows of 1 no key is in `configuration`")
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
    groups: int | None = setting(
        "G, target groups that share the draft ([pools.md](pools.md)). Rounds, tokens, phases and "
        "hits are of all of them, `wall_s` is the longest one's; null in rows from before this key"
    )
    target: str = key("the target's shape; `@nL` marks a depth-scaled target")
    draft: str | None = key(
        'the draft\'s shape; "lookup" where nothing but prompt lookup drafts; null in AR'
    )
    dtype: str = setting("number format of the weights and products")
    lookahead: int = key("K, drafted tokens a round; 0 in AR")
    fan_out: list[int] | None = setting("the list F_0 … F_K used after a hit null unless SSD")
    branch_budget: int | None = setting("the sum of `fan_out`")
    fan_out_miss: list[int] | None = setting(
        "the list F_0 … F_K used after a miss, which a backup drafted. A small `markov` vocabulary "
        "may have fewer candidates"
    )
    acceptance: str | None = setting(
        "the acceptance law that was imposed; null in AR and in a `markov` job"
    )
    hit_law: str | None = setting(
        "the hit law that was imposed (`--hit_law` takes this text again); null unless SSD"
    )
    laws: str | None = setting(
        "file and SHA-256 of the laws of a real pair that were imposed (`--laws`); else null"
    )
    batch_size: int = key("b, sequences that decode together")
    draft_device_name: str | None = key(
        "the first draft rank's device, which may be of another kind than the lead's "
        "(`--draft_device` on the emulated backend); null without a draft rank"
    )
    inline_draft: bool = setting("whether the draft shares the lead's device")
    all_reduce: str = setting(
        "how the target ranks reduce: solo (T = 1), mpi, nccl, oneshot, device or staged"
    )
    graph: bool = setting("whether forwards were captured and replayed as graphs")
    fuse: bool = setting("whether q, k, v were one product, and gate and up another")
    lm_head: bool = setting(
        "whether the vocabulary product with top-k was part of a forward; true of every "
        "transformer, though older rows of one say false"
    )
    context: int = setting(
        "value of `--context`: KV cache that attention reads in every forward", "tokens"
    )
    forward: str = setting("gemm (matrix products alone) or transformer (`--forward`)")
    weights: Mapping[str, Any] | None = key(
        "of target and draft, the `name` of the weights, the `sha256` of their files (null: random "
        "weights) and `sha256_of`, what of them it covers: whole files, or of each one above 512 "
        "MiB its size, its first 16 MiB and 64 blocks of 64 KiB up to its end. Of the target of a "
        "`text` job also `tokenizer_sha256`, of tokenizer, chat template and stop tokens where "
        "they are files of their own (null: inside the weights' file, or ids alone). Of a draft "
        "also `made_for_target`, whether `distill` made it for this target, by the digest of the "
        "norms' weights, which is the same in all file formats of a model (null: its files do not "
        "say; missing: an older row). Null for `forward` gemm"
    )
    on_late: str | None = setting(
        "finish: hits that arrive before growth is complete are finished first; serve and auto in "
        "older rows. Null unless SSD"
    )
    backup: str | None = setting(
        "what drafts after a miss; in SD it drafts every round; null in AR"
    )
    backup_lookahead: int | None = setting("drafted tokens after a miss; null in AR")
    acceptance_fast: str | None = setting(
        "the acceptance law of a fast backup's tokens; null if no fast backup may draft"
    )
    lookup: str | None = setting(
        "how a fast backup finds what to copy: prompt or suffix; null if none may draft, or where "
        "`acceptance_fast` decides"
    )
    num_layers: int = setting("layers of the target that ran")
    seed: int = setting("seed of all random draws")
    temperature: float | None = setting(
        "sampling temperature of a `markov` or `text` job; else null"
    )
    vocab: int | None = setting("vocabulary size of a `markov` or `text` job; else null")
    order: int | None = setting(
        "number of tokens on which the next one depends in a `markov` job; else null"
    )
    divergence: float | None = setting(
        "how far a `markov` job's draft is from its target; else null"
    )
    saguaro_c: float | None = setting("Saguaro's C in a `markov` or `text` job; else null")
    prompt_tokens: int | None = setting(
        "length of each prompt of a `markov` job; else null", "tokens"
    )
    top_p: float | None = setting(
        "share of the target's distribution that is kept where a `text` job samples; else null"
    )
    stop: list[str] | None = setting("the stop strings of a `text` job; else null")
    num_prompts: int | None = setting(
        "prompts of a `text` job; fewer than batch_size fill no batch. Else null"
    )
    prompts_sha256: str | None = setting(
        "SHA-256 of the tokens of a `text` job's prompts, chat template applied: a line each, "
        "ids in decimal with a space between; else null"
    )
    recording: str | None = setting(
        "file and SHA-256 of the recording that a `replay` job follows; else null"
    )
    stop_token: int | None = setting("the token that ends a sequence of a `markov` job; else null")
    num_rounds: int = key("number of measured rounds")
    token_limit: int | None = setting("value of `--num_tokens`; null: no limit", "tokens")
    num_tokens: int = key("tokens of all sequences in the measured rounds", "tokens")
    wall_s: float = key("wall time of the measured rounds", "s")
    t_prefill_s: float | None = key(
        "what the target's forwards over prompts took, of wall_s; null without prompts", "s"
    )
    time_to_first_token_s: float | None = key(
        "duration of the first measured round, prompt included; null without prompts", "s"
    )
    tok_per_s: float = key("num_tokens / wall_s", "tok/s")
    tok_per_s_per_gpu: float = key(
        "tok_per_s / world_size; a learner on another rank's GPU (`shares_gpu_of`) is not counted",
        "tok/s",
    )
    round_us: Means = key("{mean, p50, p90, p99, n} of the durations of the lead's rounds", "µs")
    phases_us: Mapping[str, Means | None] = key(
        "{lead, draft}: mean a round of each exclusive host phase (docs/architecture.md lists "
        "them); they add up to the round. Rows without `upload` count it in `launch`",
        "µs",
    )
    device_us: Mapping[str, float | None] | None = key(
        "mean a round on the lead's device, beside the host's phases: `forward` (the target's, "
        "without its collectives), `all_reduce` (those, waiting for peers included), `idle` (no "
        "target forward); together the mean round. `all_reduce` is 0 at T = 1; on GPUs as many "
        "all-reduces as a verification has, of b(K+1) rows, timed alone by events at the start of "
        "the job, captured where the forward is (inside its graph they cannot be timed); on "
        "CPUs timed where they run; emulated: the profile's. Null where that is not known",
        "µs",
    )
    draft_wait_us: Means | None = key(
        "{mean, p50, p90, p99, n} over rounds of what the lead waited for speculations of draft "
        "ranks; null without one",
        "µs",
    )
    per_group: list[Mapping[str, Any]] | None = key(
        "of each target group its tok_per_s, num_tokens, num_rounds, wall_s, acceptance_length, "
        "hit_rate, round_us, draft_wait_us and outcome_digest; null for one group"
    )
    pool: Mapping[str, float] | None = key(
        "of the first draft's forwards in the measured rounds, which several target groups share: "
        "their number (`forwards`), mean `rows` and groups (`seats`) of one, and the share of time "
        "in which one ran (`busy`); null for one group"
    )
    ledger_closure: float = key(
        "first percentile, over rounds, of the sum of phases divided by the round's wall time, "
        "which another clock measured"
    )
    acceptance_length: float = key("mean tokens a round and sequence, bonus included", "tokens")
    accept_histogram: list[int] = key("numbers of outcomes with k = 0 … K accepted tokens")
    hit_rate: float | None = key(
        "share of sequences whose outcome was a key, first rounds (forced misses) left out; null "
        "unless SSD"
    )
    draft_lost_round: int | None = key(
        "with `--on_draft_loss=ar`, the first measured round after the draft was lost. From then "
        "on K = 0 and no round counts in `hit_rate`; predictions and the draft's phases are null. "
        "Null: the draft was present to the end"
    )
    learned: Mapping[str, Any] | None = key(
        "what the draft counted of committed outcomes: their number, and ranks ([candidates kept, "
        "rank, how often]; rank 0: none of them), for a bonus that replaces a rejection and for "
        "one after k' accepted tokens; null where outcomes are imposed. Rows of before 2026-11-24 "
        "also have hazards, lists and fitted (A, r)"
    )
    learners: int | None = setting("L, ranks that train the draft meanwhile; null: none")
    learner_state: str | None = key(
        "of a learner at the end: learning; refused or diverged (its last version was not "
        "published); lost (its trainer had ended); failed (`fault` in `learner`); silent (its "
        "rank did not answer, or its trainer did not end within 3 s: `last_state`, which it "
        "reported `unheard_s` before, in `learner`); starting. Null without one"
    )
    draft_versions: int | None = key(
        "versions of its weights that the draft swapped in during the measured rounds; null "
        "without a learner"
    )
    acceptance_by_version: list[Mapping[str, float]] | None = key(
        "of each version of the draft's weights (0: as loaded): rounds, drafted and accepted "
        "tokens of all sequences, and acceptance_length; null without a learner"
    )
    learner: Mapping[str, Any] | None = key(
        "what a learner has seen and done, `swaps` (version, bytes, the longest time that one unit "
        "of taking it over held up the draft), `refused_versions`, the `cost` of teaching on "
        "the lead (rows, bytes and µs a round, rounds that were dropped), seconds from its start "
        "to `ready_s` and `first_step_s`, its `gpu`, and `shares_gpu_of`, the rank that has the "
        "same one; null without one"
    )
    t_target_s: float | None = key("p50 device time of a forward of b(K+1) rows", "s")
    t_draft_s: float | None = key(
        "p50 of K sequential draft steps: of the measured full misses, else of the calibration "
        "(until 2026-11-24 also in rounds that the device chains); null for prompt lookup and in "
        "AR. With several groups it includes what the draft did for others meanwhile, as "
        "`t_growth_s` does",
        "s",
    )
    t_growth_s: float | None = key(
        "p50 of glue + K steps over all branches, where they ran to their end; null unless SSD", "s"
    )
    T_SD: float | None = key("t_draft_s / t_target_s")
    floor_us: float | None = key(
        "the longer of floor_bytes / read_bytes_per_s and floor_flops / peak_flops_per_s, null "
        "where either rate is unknown (rows without `floor_flops`: of the bytes alone)",
        "µs",
    )
    floor_fraction: float | None = key("floor_us / t_target_s; noise on a CPU may lift it above 1")
    floor_bytes: float | None = key(
        "what a verification of b(K+1) rows reads on a target rank: weights and KV "
        "([definitions.md](definitions.md#what---context-reads))",
        "bytes",
    )
    floor_flops: float | None = key(
        "what a verification of b(K+1) rows computes on a target rank: 2·M·weights", "flop"
    )
    read_bytes_per_s: float | None = key(
        "read-only bandwidth of the lead's device over its weights' bytes, in this job "
        "(emulated: the profile's)",
        "bytes/s",
    )
    peak_flops_per_s: float | None = key(
        "peak rate of the lead's device in this job: that of the fastest launch of a large square "
        "product, or of a calibrated forward if that was faster (emulated: the profile's)",
        "flop/s",
    )
    cache_bytes: float | None = key(
        "size of the last-level cache of the lead's device; null: unknown, or emulated", "bytes"
    )
    predicted_tok_per_s: float | None = key(
        "rate that the replay predicts from this run's draws, its forwards timed in series, and "
        "the ledger of its warm-up rounds; of text, from its own acceptance, hits and "
        "`t_prefill_s` where a model drafts (else null)",
        "tok/s",
    )
    predicted_round_us: Means | None = key("`round_us` as the replay predicts it", "µs")
    prediction_error: float | None = key(
        "tok_per_s / predicted_tok_per_s − 1: error (a) of docs/predictions.md. It is not what a "
        "prediction without the run would err by: that is (c), which `plan --rows` prints"
    )
    expected_tok_per_s: float | None = key(
        "long-run mean under the laws, from the same times; error (b) is tok_per_s / "
        "expected_tok_per_s − 1",
        "tok/s",
    )
    sampling_error: float | None = key(
        "luck of this run's draws: predicted_tok_per_s / expected_tok_per_s − 1"
    )
    sampling_sd: float | None = key(
        "standard deviation of `sampling_error` over runs of as many rounds"
    )
    imposed_hits: Mapping[str, Any] | None = key(
        "of an imposed p_hit above 0, its price: the default `hit_law`, the `branch_budget` of the "
        "least uniform fan-out that hits as often under it, and `expected_tok_per_s` of that run "
        "by the closed model (forwards of more rows than were measured are extrapolated; compare "
        "with the row's own `expected_tok_per_s`); the last two null where no fan-out reaches "
        "p_hit. Null: hits follow a law; rows from before this key lack it"
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
    proposal_bytes_per_round: float = key(
        "of bytes_per_round, the draft's distributions of tokens that were sampled", "bytes"
    )
    proposal_wait_us: float = key(
        "mean time a round that the lead waited for those distributions, exposed", "µs"
    )
    rank_digests: list[int | None] | None = key(
        "by world rank, a digest of the outcomes that the rank received; null: unknown"
    )
    stable: bool | None = key(
        "whether the p50 round varies ≤ 1% (GPU; 10% CPU) over five interleaved blocks (rounds "
        "dealt in turn: a drift is in all of them and widens the interval of `compare` instead); "
        "null with under 50 rounds"
    )
    config_digest: str = key("digest of the configuration; equal flags have equal digests")
    provenance: Mapping[str, Any] = key(
        "versions as loaded, hosts, devices, command line, commit; `calibrated_at`: the time of "
        "the oldest measurement behind the prediction; `draws`: where the lead draws sampled "
        "tokens, device or host; `kernel`: which kernels read the target's "
        "weights on the lead (of a transformer on a GPU: whole, one kernel where a forward has few "
        "rows, or cuda: docs/transformer.md); `sweep`: which sweep, task, repeat and flags "
        "(docs/sweep.md), null in a row of `run`"
    )
    absent: frozenset[str] = frozenset()  # keys that the line, of an older version, lacks
    extra: Mapping[str, Any] = field(default_factory=dict)  # keys of the line that are no fields

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> Row:
        """Makes a row from a line, nested or flat: missing keys are None, unknown ones go to
        `extra`."""
        line = flat(line)
        known = {name: line[name] for name in KEYS if name in line}
        extra = {name: value for name, value in line.items() if name not in FIELDS}
        return cls(**known, absent=frozenset(KEYS).difference(known), extra=extra)

    def to_dict(self) -> dict[str, Any]:
        """Returns the line as a dict: keys in the order of the fields, then `extra`."""
        line: dict[str, Any] = {}
        for name, value in self.items():
            is_set = name in FIELDS and FIELDS[name].metadata["is_set"]
            (line.setdefault(CONFIGURATION, {}) if is_set else line)[name] = value
        return line

    @property
    def draft_device(self) -> str | None:
        """Device name of the first draft rank; None if there is none or it is unknown."""
        if not self.num_drafts:
            return None
        if "draft_device_name" not in self.absent:
            return self.draft_device_name
        ranks, place = self._origin("ranks"), self.tp
        if not isinstance(ranks, list) or type(place) is not int or not 0 <= place < len(ranks):
            return None
        return ranks[place].get("device") if isinstance(ranks[place], Mapping) else None

    @property
    def other_draft_device(self) -> str | None:
        """Device name of the first draft rank if it differs from the lead's, or None."""
        name = self.draft_device
        return None if name == self.device_name else name

    @property
    def sweep(self) -> dict[str, Any] | None:
        """The row's sweep: its id, task, repeat and flags; None in a row of `run`."""
        sweep = self._origin("sweep")
        return sweep if isinstance(sweep, dict) else None

    @property
    def command(self) -> list[str]:
        """The words of the command line that wrote the row."""
        return [str(word) for word in self._origin("command") or ()]

    def _origin(self, name: str) -> Any:
        return (self.provenance or {}).get(name)

    def __getattr__(self, name: str) -> Any:
        """Returns a key that only older rows have; None in a row without it."""
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
        """Returns a row with these values changed, as `|` does for dicts."""
        return Row.from_dict({**self, **changed})


FIELDS: Mapping[str, Field[Any]] = {f.name: f for f in fields(Row) if "meaning" in f.metadata}
KEYS = tuple(FIELDS)
