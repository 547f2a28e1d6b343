"""The configuration of a run: its flags in groups, each flag declared once.

A group is a dataclass whose fields are flags: default, parser with bounds, help. Parsing, help,
sweeps, the configuration's digest and error messages are derived from these fields. The flags of
MachineFlags and OutputFlags have one value in a whole job; a sweep varies others.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.common.exclusions import FLAGS, refuse
from mpissd.common.flags import (
    DRAFTING,
    GROWING,
    Checked,
    choice,
    flag,
    flags_of,
    integer,
    mapped,
    number,
    parse_into,
    ranks_or_switch,
    switch,
    words,
)
from mpissd.common.gguf import is_gguf
from mpissd.common.presets import files_of, is_missing, resolve_model, target_of
from mpissd.common.workloads import LOOKUPS, is_text, parse_name, readers

# Functions that declare a flag which only some modes or workloads use.
drafting = partial(flag, modes=DRAFTING)
growing = partial(flag, modes=GROWING)
imposed = partial(drafting, workloads="gemm")
imposed_hits = partial(growing, workloads="gemm")
of_markov = partial(flag, workloads="markov")
of_text = partial(flag, workloads="text")
MOST_GROUPS = 64
FORWARDS = ("gemm", "transformer")
DEFAULT_VOCAB = 64
_ANSWER_TOKENS = 256
PROMPTS = ("prompt", "prompts", "prompt_ids")
DEFAULT_PAIR = "smollm2"
_ON_CPUS = {"lookahead": "2", "fan_out": "uniform:2"}  # defaults for pair=smollm2 on CPUs


def with_text(flags: Mapping[str, str]) -> dict[str, str]:
    """Adds the flags that a text workload implies: workload=text if a prompt or a target with
    weights is given, but neither --workload nor --forward; pair=smollm2 for text prompts without a
    model. Raises ConfigError if the target's weights are in a package that is not installed."""
    given = dict(flags)
    if not {"workload", "forward"} & given.keys() and _wants_text(given):
        given["workload"] = "text"
    needs_models = is_text(given.get("workload", "")) and "prompt_ids" not in given
    if needs_models and not {"pair", "target"} & given.keys():
        given["pair"] = DEFAULT_PAIR
    return given


def with_measured(flags: Mapping[str, str]) -> dict[str, str]:
    """Adds K, and in ssd the fan-out, for pair=smollm2 if a CPU will decode text with it: the
    values at which it was not slower than AR on any measured CPU. Given flags stay the same."""
    is_shipped = flags.get("workload") == "text" and flags.get("pair", "").lower() == DEFAULT_PAIR
    backend = flags.get("backend", "auto")
    on_cpu = backend == "numpy" or (backend == "auto" and find_spec("cupy") is None)
    if not (is_shipped and on_cpu) or "tree" in flags:
        return dict(flags)
    names = {"ssd": [*_ON_CPUS], "sd": ["lookahead"]}.get(flags.get("mode", "ssd"), [])
    return {**{name: _ON_CPUS[name] for name in names}, **flags}


def _wants_text(flags: Mapping[str, str]) -> bool:
    """Returns whether the flags give a prompt, or a target whose name is that of files with
    weights, even if these files are not on this machine."""
    if any(name in flags for name in PROMPTS):
        return True
    try:
        target = target_of(flags["pair"]) if "pair" in flags else flags.get("target")
    except ConfigError:
        return False  # the check of the run's flags refuses an unknown name later
    if target is None or is_missing(target):
        return target is not None
    try:
        path = files_of(target)
    except ConfigError:
        try:
            resolve_model(target)
        except ConfigError:
            return False
        raise
    return path is not None and (is_gguf(path) or any(path.glob("*.safetensors")))


@dataclass(frozen=True)
class MethodFlags(Checked):
    """Flags of the decoding method, of the target and draft models, and of their forwards."""

    mode: str = flag(
        "ssd",
        choice("ar", "sd", "ssd"),
        "decoding mode: ar, sd or ssd",
        needs={"ar": "num_drafts=0", "sd": "lookahead>0", "ssd": "lookahead>0 num_drafts=1"},
    )
    num_drafts: int | None = drafting(
        None,
        integer(0, 1),
        "number D of draft ranks, 0 or 1; T = world size - D (default 0 for ar, else 1)",
    )
    lookahead: int = drafting(4, integer(0, 256), "number K of tokens drafted in a round")
    tree: int | None = drafting(
        None,
        integer(1, 256),
        "tokens drafted in a round, as the best tree of K levels (default: a chain)",
        needs="backup=jit learners=0",
    )
    tree_shape: str = drafting(
        "fixed",
        choice("fixed", "dynamic"),
        "fixed, or dynamic: each round's own by the draft's probabilities (inline sd)",
        workloads="text replay",
        needs="tree>0 mode=sd num_drafts=0 temperature=0.0 grammar=None",
    )
    parallel_drafting: bool = drafting(
        False,
        switch,
        "draft all K tokens in one forward, by a draft with mask tokens",
        needs="mode=sd|ssd backup=jit learners=0",
    )
    shard_draft: bool = drafting(
        False,
        switch,
        "share the draft among the target's ranks, as they share the target (greedy inline sd)",
        workloads="gemm text replay",
        needs="mode=sd num_drafts=0 backup=jit tree=None temperature=0.0 grammar=None "
        "forward=None|transformer beside=auto|off show=False",
    )
    fan_out: str = growing(
        "uniform:3",
        words,
        "branches kept: uniform:F, geometric:B or list:F0,…,FK; A/B: B after a miss (ssd)",
    )
    cache: str = growing(
        "lead",
        choice("lead", "draft"),
        "the rank that looks hits up: the target's rank 0 (lead), to which the draft sends whole "
        "branches, or the draft (ssd)",
    )
    backup: str = drafting(
        "jit",
        choice("jit", "fast"),
        "what drafts after a cache miss: jit (draft model) or fast (prompt lookup)",
    )
    backup_lookahead: int | None = drafting(
        None, integer(1), "number K_b of tokens that a backup drafts (default: K)"
    )

    pair: str | None = flag(
        None,
        words,
        "models: toy, 8b/1b, 70b/1b or TARGET/DRAFT (default: the largest that fits)",
        needs="target=None draft=None",
    )
    target: str | None = flag(
        None, words, "target model: preset, folder, .gguf, or a shape (config.json, gen:layers=…)"
    )
    draft: str | None = flag(None, words, "draft model, named as the target is", needs="target")
    forward: str | None = flag(
        None,
        choice(*FORWARDS),
        "what a forward computes: gemm (products alone) or transformer (default gemm; text: "
        "transformer)",
    )
    fuse: bool = flag(False, switch, "compute q, k, v as one product, and gate, up as another")
    lm_head: bool = flag(
        False, switch, "add the LM head, the product over the vocabulary, with top-k"
    )
    context: int = flag(
        0, integer(0), "tokens of KV cache that each forward reads, as attention would"
    )

    @property
    def drafts(self) -> int:
        """The number D of draft ranks; by default 0 for ar, and 1 for sd and ssd."""
        return int(self.mode != "ar") if self.num_drafts is None else self.num_drafts

    @property
    def is_lookup(self) -> bool:
        """Whether all draft tokens are copied from earlier text, without a draft model."""
        return self.mode == "sd" and self.backup == "fast"

    def effective(self, name: str) -> Any:
        return self.drafts if name == "num_drafts" else super().effective(name)

    def check(self) -> None:
        """Raises ConfigError if more tokens are to be drafted after a cache miss than K."""
        super().check()
        tokens = self.backup_lookahead
        if tokens is not None and tokens > self.lookahead:
            raise ConfigError(f"backup_lookahead={tokens}: allowed: 1..{self.lookahead}")


@dataclass(frozen=True)
class WorkloadFlags(Checked):
    """Flags of the workload: sequences, imposed acceptance and hit rates, prompts, sampling."""

    workload: str = flag(
        "gemm",
        parse_name,
        "what decides tokens: imposed laws (gemm), sampled models, or a recording",
        needs={"text": "forward=None|transformer"},
    )
    batch_size: int = flag(1, integer(1, 4096), "number b of sequences that decode together")
    alpha: float | None = imposed(
        None,
        number(0, 1),
        "probability with which each draft token is accepted",
        needs="acceptance=None",
    )
    acceptance: str | None = imposed(
        None, words, "acceptance law: alpha:A, rates:a1,…,aK or marginal:…"
    )
    acceptance_fast: str = imposed(
        "alpha:0.3", words, "acceptance law of the tokens that --backup=fast drafts"
    )
    p_hit: float | None = imposed_hits(
        None, number(0, 1), "cache-hit rate to impose on each sequence (ssd)", needs="hit_law=None"
    )
    hit_law: str | None = imposed_hits(
        None,
        words,
        "hit law: power:A=.75,r=1, power:A=.6/.2,r=.4/.5 (k<K/k=K), p_hit:.9 or smollm2",
    )
    laws: str | None = drafting(
        None,
        words,
        "file of `mpissd pair`: a real pair's acceptance and hits (text, replay: of its fan-outs)",
        workloads="gemm text replay",
    )
    lookup: str = drafting(
        "prompt",
        choice(*LOOKUPS),
        f"how --backup=fast finds what to copy: {', '.join(LOOKUPS)}",
        workloads="gemm text replay",
    )
    temperature: float = flag(
        0.0,
        number(0),
        "sampling temperature of both models (markov, text); 0 is greedy",
        workloads="markov text",
    )
    vocab: int | None = of_markov(
        None, integer(2, 50000), "vocabulary size of both models (markov; default 64)"
    )
    order: int | None = of_markov(
        None, integer(1, 3), "number of tokens that the next one depends on (markov; default 2)"
    )
    divergence: float | None = drafting(
        None,
        number(0, 1),
        "distance of the draft from the target: 0 equal, 1 independent (markov; default 0.2)",
        workloads="markov",
    )
    saguaro_c: float | None = growing(
        None,
        number(0, 1),
        "factor C of Saguaro sampling (ssd; default 1: plain sampling)",
        workloads="markov text",
        needs="mode=ssd temperature>0",
        neutral=1.0,
    )
    prompt_tokens: int | None = of_markov(
        None, integer(1, 1 << 20), "tokens of each prompt (markov; default 1)"
    )
    stop_token: int | None = flag(
        None,
        integer(0),
        "token that ends a sequence (markov; text: in addition to the model's own)",
        workloads="markov text",
    )
    prompt: str | None = of_text(
        None,
        words,
        "user message that the model answers (text)",
        needs="prompts=None prompt_ids=None",
    )
    prompts: str | None = of_text(
        None,
        words,
        'file of prompts, lines of {"prompt": "…"} or {"messages": […]} (text)',
        needs="prompt_ids=None",
    )
    prompt_ids: str | None = of_text(
        None, words, "prompts as token ids: 1,2,3;4,5 are two prompts (text)"
    )
    chat_template: bool = of_text(
        True, switch, "put a prompt into the model's chat template (text)"
    )
    top_p: float = of_text(
        1.0,
        number(0, 1),
        "sample only from the likeliest tokens whose probabilities reach this sum (text)",
        needs="temperature>0",
    )
    stop: str | None = of_text(
        None,
        words,
        'text that ends an answer: a string, or a JSON list of strings, ["\\n\\n","###"] (text)',
    )
    grammar: str | None = of_text(
        None,
        words,
        "what answers are: json, regex:…, choice:A|B, or a file with a JSON schema (text)",
    )
    recording: str | None = flag(
        None, words, "file of `mpissd pair` that decides the tokens (replay)", workloads="replay"
    )

    @property
    def acceptance_text(self) -> str:
        """The acceptance model as text, from --acceptance, --laws or --alpha (default .8)."""
        if self.acceptance is not None:
            return self.acceptance
        if self.laws is not None and self.alpha is None:
            return f"laws:{self.laws}"
        return f"alpha:{0.8 if self.alpha is None else self.alpha}"

    @property
    def acceptance_fast_text(self) -> str:
        """The acceptance model of a lookup's tokens, as text, from --acceptance_fast or --laws."""
        if self.laws is None or self.acceptance_fast != type(self).acceptance_fast:
            return self.acceptance_fast
        return f"{self.lookup}:{self.laws}"

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end an answer, from --stop, whose value is one string or a JSON list of
        strings. Raises ConfigError for another value."""
        if self.stop is None or not self.stop.startswith("["):
            return () if self.stop is None else (self.stop,)
        try:
            stops = json.loads(self.stop)
        except (ValueError, RecursionError):
            return (self.stop,)  # the text is one stop string that begins with "["
        if not stops or not all(isinstance(text, str) and text for text in stops):
            raise ConfigError(f"stop={self.stop}: allowed: a list of strings that are not empty")
        return tuple(stops)

    def check(self) -> None:
        """Raises ConfigError for text that is not UTF-8, and for values out of range."""
        super().check()
        for name, text in (("prompt", self.prompt or ""), ("stop", "".join(self.stop_strings))):
            if any("\ud800" <= c <= "\udfff" for c in text):  # read from invalid UTF-8
                raise ConfigError(f"{name}: is no UTF-8 text")
        if self.top_p == 0:
            raise ConfigError("top_p=0: allowed: a number above 0, at most 1")
        vocab = self.vocab or DEFAULT_VOCAB  # unused for text: its tokenizer has the size
        if not is_text(self.workload) and self.stop_token is not None and self.stop_token >= vocab:
            raise ConfigError(f"stop_token={self.stop_token}: allowed: 0..{vocab - 1}")


@dataclass(frozen=True)
class MachineFlags(Checked):
    """Flags of devices and communication. Each has one value in all runs of a job or sweep."""

    backend: str = flag(
        "auto", choice("auto", "numpy", "cupy", "emulated"), "backend that computes the forwards"
    )
    draft_backend: str | None = drafting(
        None,
        choice("numpy", "cupy", "emulated"),
        "backend of the draft rank (default: as --backend); numpy drafts on a host core",
        needs="num_drafts=1 learners=0",
    )
    device: str = flag("h100", words, "device to emulate: a profile's name or file")
    draft_device: str | None = drafting(
        None, words, "device to emulate on draft ranks (default: as --device)"
    )
    groups: int = drafting(
        1,
        integer(1, MOST_GROUPS),
        "number G of target groups that share the draft; T = (world size - D) / G",
        needs="num_drafts=1 on_draft_loss=abort trace=None show=False",
    )
    share_gpu: bool = flag(
        False, switch, "let ranks share a GPU: they take turns", needs="backend=auto|cupy"
    )
    all_reduce: str = flag(
        "auto",
        choice("auto", "oneshot", "nccl", "staged"),
        "how the target ranks sum their partial results on GPUs",
    )
    graph: bool = flag(True, switch, "replay forwards as CUDA graphs (cupy)")
    deadline_s: float = flag(120.0, number(0.1), "longest wait for a peer, in seconds")
    on_draft_loss: str = flag(
        "abort",
        choice("abort", "ar"),
        "what to do if the draft rank dies or hangs: abort, or go on as ar",
        # Sampled tokens cannot be verified without the distributions that a lost draft rank had.
        needs="num_drafts=1 temperature=0.0 trace=None",
    )


@dataclass(frozen=True)
class Learning(Checked):
    """How a learner (a rank that trains the draft model while others decode) works: the values of
    --learn. A finished sequence causes `steps` training steps of `batch` sequences each, so that it
    is trained on batch · steps times on average. With device=cuda, the learner with index i on its
    host uses GPU i, or the last GPU of a host with fewer GPUs."""

    rate: float = flag(3e-5, number(0, 1), "learning rate")
    batch: int = flag(4, integer(1), "sequences of a step")
    steps: float = flag(1.0, number(0.01), "steps for each finished sequence")
    publish_s: float = flag(10.0, number(0), "shortest time between two versions, in seconds")
    device: str = flag("auto", choice("auto", "cuda", "cpu"), "where it computes")


@dataclass(frozen=True)
class OutputFlags(Checked):
    """Flags of output files and of what is shown. They do not change the measured rounds."""

    out: str = flag("out", words, "folder for runs.jsonl and rounds/")
    trace: str | None = flag(None, words, "write a Chrome trace of all ranks to this file")
    progress: str = flag(
        "auto", choice("auto", "on", "off"), "whether to show a progress bar on stderr"
    )
    show: bool = of_text(False, switch, "print the answer, each token by what drafted it (text)")
    beside: str = flag(
        "auto",
        choice("auto", "all", "ar", "off"),
        "compare with AR and SD inline on the target's ranks and on all, in turns (auto: all, "
        "after --show of one answer in a terminal)",
        needs=dict.fromkeys(("all", "ar"), "groups=1 learners=0 on_draft_loss=abort"),
    )
    beside_s: float = flag(20.0, number(0), "seconds of --beside's turns; twice as many to decide")
    json: bool = flag(False, switch, "print the row also in a terminal, as in a pipe")
    dry_run: bool | int = flag(
        False, ranks_or_switch, "check the flags and stop, without MPI; =N: for N ranks"
    )

    @property
    def world_size(self) -> int | None:
        """The number of ranks for which --dry_run=N checks the flags; None if it is not given."""
        return None if isinstance(self.dry_run, bool) else self.dry_run


@dataclass(frozen=True)
class RunConfig(  # dataclass fields come from the last base class first
    OutputFlags, MachineFlags, WorkloadFlags, MethodFlags
):
    """All flags of a run. None: a flag is not given, and is resolved when the machine is known."""

    rounds: int | None = flag(
        None, integer(1), "number of measured rounds (default 200 without num_tokens)"
    )
    num_tokens: int | None = flag(
        None, integer(1), "tokens to decode in each sequence; with rounds, the earlier limit counts"
    )
    seed: int = flag(0, integer(0, 2**64 - 1), "seed of all random draws")
    warmup_rounds: int = flag(10, integer(1), "warm-up rounds, on sequences that are thrown away")
    learners: int = drafting(
        0,
        integer(0, 1),
        "number L of learner ranks, the last ones, which train the draft while it drafts (text)",
        needs="workload=text num_drafts=1 on_draft_loss=abort groups=1",
    )
    learn: str | None = drafting(
        None,
        words,
        "how a learner trains: rate=3e-5,batch=4,steps=1,publish_s=10,device=auto|cuda|cpu",
    )

    @classmethod
    def completed(cls, flags: Mapping[str, str]) -> dict[str, str]:
        """Adds flags that a prompt or pair implies; on CPUs the shipped pair's K, fan-out."""
        return with_measured(with_text(super().completed(flags)))

    @property
    def is_text(self) -> bool:
        """Whether the logits of real models decide the tokens (workload=text)."""
        return is_text(self.workload)

    @property
    def is_transformer(self) -> bool:
        """Whether forwards run a whole transformer, with attention over a KV cache."""
        return self.is_text or self.forward == "transformer"

    @property
    def fast_lookup(self) -> str | None:
        """The kind of lookup that drafts after cache misses; None if the draft model does."""
        return self.lookup if self.mode != "ar" and self.backup == "fast" else None

    @property
    def token_limit(self) -> int | None:
        """The most tokens to decode in a sequence: the value of --num_tokens or, for text whose
        tokens and rounds are both unlimited, 256; None: no limit."""
        unlimited = self.is_text and self.num_tokens is None and self.rounds is None
        return _ANSWER_TOKENS if unlimited else self.num_tokens

    @property
    def max_rounds(self) -> int | None:
        """The most measured rounds: the value of --rounds; without it 200 or, if a number of tokens
        or the text ends the sequences, None (as many rounds as they need)."""
        is_limited = self.is_text or self.num_tokens is not None
        return 200 if self.rounds is None and not is_limited else self.rounds

    @property
    def learning(self) -> Learning:
        return mapped(Learning, self.learn, "learn")

    def check(self) -> None:
        """Raises ConfigError for flags that the workload does not use, for a wrong --learn, and for
        features that exclude each other (exclusions.FLAGS)."""
        super().check()
        for name, field in flags_of(RunConfig).items():
            value = getattr(self, name)
            allowed = readers(name, field.metadata["workloads"])
            if value != field.default and self.workload not in allowed:  # it has no effect
                given = f"{name}={value} with workload={self.workload}"
                raise ConfigError(f"{given}: allowed: workload={' or '.join(allowed)}")
        self.learning  # noqa: B018  (raises a wrong --learn)
        refuse(FLAGS, config=self)

    @property
    def digest(self) -> str:
        """16 hex digits of a hash over the flags' values, whatever the order of the flags."""
        named = {
            name: getattr(self, name)
            for name, field in flags_of(RunConfig).items()
            if name not in _NOT_IN_DIGEST
            and (name in _ALWAYS_IN_DIGEST or getattr(self, name) != field.default)
        }
        hit, _, miss = self.fan_out.partition("/")
        lists = {"fan_out": hit, "fan_out_miss": miss or None} if miss else {}
        text = json.dumps(_RETIRED | named | lists, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


# Flags that are hashed into the digest even at their defaults; others only at another value.
_ALWAYS_IN_DIGEST = frozenset(
    "mode num_drafts lookahead fan_out backup backup_lookahead pair target draft fuse lm_head "
    "context workload batch_size alpha acceptance acceptance_fast p_hit temperature vocab order "
    "divergence saguaro_c prompt_tokens stop_token backend device all_reduce graph deadline_s "
    "rounds num_tokens seed warmup_rounds".split()
)
_NOT_IN_DIGEST = {*flags_of(OutputFlags), "on_draft_loss"}  # they change no measured round
# Removed flags; their old values are hashed too, so that digests of older rows stay valid.
_RETIRED: dict[str, Any] = {
    "on_late": "finish",
    **dict.fromkeys(("fan_out_miss", "hit_a", "hit_r", "num_layers")),
    "cuda_aware_mpi": False,
}


def parse_flags(flags: Mapping[str, str]) -> RunConfig:
    return parse_into(RunConfig, flags)
