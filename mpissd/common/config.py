"""The configuration of a run: its flags in groups, and the refusals that concern several of them.

A group is a dataclass whose fields are the flags: default, parser with bounds, and help. The
command line, its help, the axes of a grid and the digest derive from these fields, so a flag is
added in one place. A flag's group decides how a sweep treats it: MachineFlags and OutputFlags hold
for a whole job. mpissd.common.workloads names the flags that only some workloads read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from mpissd.common.default_flags import with_measured, with_text
from mpissd.common.errors import ConfigError
from mpissd.common.flags import (
    DRAFTING,
    GROWING,
    Checked,
    choice,
    flag,
    flags_of,
    integer,
    number,
    parse_into,
    switch,
    words,
)
from mpissd.common.schedules import SCHEDULES
from mpissd.common.workloads import parse_name, refused_flags

MOST_GROUPS = 64
FORWARDS = ("gemm", "transformer")
DEFAULT_VOCAB = 64
_ANSWER_TOKENS = 256


@dataclass(frozen=True)
class MethodFlags(Checked):
    """Flags of the method: how tokens are drafted and served."""

    mode: str = flag("ssd", choice("ar", "sd", "ssd"), "decoding mode: ar, sd or ssd")
    schedule: str | None = flag(
        None,
        choice(*SCHEDULES),
        f"named combination of flags to set: {', '.join(SCHEDULES)}",
        in_digest=False,  # the flags that it sets are in the digest
    )
    num_drafts: int | None = flag(
        None,
        integer(0, 1),
        "number D of draft ranks, 0 or 1; T = world size - D (default 0 for ar, else 1)",
        modes=DRAFTING,
    )
    lookahead: int = flag(
        4, integer(0, 256), "number K of tokens drafted in a round", modes=DRAFTING
    )
    fan_out: str = flag(
        "uniform:3",
        words,
        "branches kept: uniform:F, geometric:B, or list:F0,…,FK (ssd)",
        modes=GROWING,
    )
    fan_out_miss: str | None = flag(
        None,
        words,
        "as fan_out, after a miss, which a backup drafted (default: fan_out)",
        modes=GROWING,
    )
    backup: str = flag(
        "jit",
        choice("jit", "fast"),
        "what drafts after a cache miss: jit (draft model) or fast (prompt lookup)",
        modes=DRAFTING,
    )
    backup_lookahead: int | None = flag(
        None, integer(1), "number K_b of tokens that a backup drafts (default: K)", modes=DRAFTING
    )

    @property
    def drafts(self) -> int:
        """Number of draft ranks D; by default 0 for ar, 1 for sd and ssd."""
        if self.num_drafts is not None:
            return self.num_drafts
        return 0 if self.mode == "ar" else 1

    @property
    def is_lookup(self) -> bool:
        """Whether only prompt lookup drafts, without a draft model (sd with backup=fast)."""
        return self.mode == "sd" and self.backup == "fast"

    def check(self) -> None:
        """Refuses methods that the flags contradict; raises ConfigError."""
        super().check()
        if self.mode != "ar" and self.lookahead < 1:
            raise ConfigError(f"lookahead=0 with mode={self.mode}: allowed: a whole number >= 1")
        if self.mode == "ssd" and self.num_drafts == 0:
            raise ConfigError("num_drafts=0 with mode=ssd: allowed: 1 (or mode=sd, inline)")
        if self.mode == "ar" and self.num_drafts:
            raise ConfigError(f"num_drafts={self.num_drafts} with mode=ar: allowed: 0")
        if self.backup_lookahead is not None and self.backup_lookahead > self.lookahead:
            raise ConfigError(
                f"backup_lookahead={self.backup_lookahead}: allowed: 1..{self.lookahead}"
            )


@dataclass(frozen=True)
class ModelFlags(Checked):
    """Flags of the target and draft models, and of their forwards."""

    pair: str | None = flag(
        None, words, "models: toy, 8b/1b, 70b/1b or TARGET/DRAFT (default: the largest that fits)"
    )
    target: str | None = flag(
        None, words, "target model: preset, config.json or gen:layers=…,hidden=…,ffn=…"
    )
    draft: str | None = flag(None, words, "draft model, named as the target is")
    forward: str | None = flag(
        None,
        choice(*FORWARDS),
        "what a forward computes: gemm (products alone) or transformer (default gemm; text: "
        "transformer)",
        in_digest="said",
    )
    fuse: bool = flag(False, switch, "compute q, k, v as one product, and gate, up as another")
    lm_head: bool = flag(
        False, switch, "add the LM head, the product over the vocabulary, with top-k"
    )
    context: int = flag(
        0, integer(0), "tokens of KV cache that each forward reads, as attention would"
    )
    num_layers: int | None = flag(
        None, integer(1), "layers of the target that run; the row labels it as depth-scaled"
    )

    def check(self) -> None:
        """Refuses --pair together with --target or --draft."""
        super().check()
        if self.pair is not None and (self.target or self.draft):
            raise ConfigError("pair and target/draft say the same thing: give one")


@dataclass(frozen=True)
class WorkloadFlags(Checked):
    """Flags of the workload: the number of sequences, and imposed or real token models."""

    workload: str = flag(
        "gemm",
        parse_name,
        "what decides tokens: imposed laws (gemm), sampled models, or a recording",
    )
    batch_size: int = flag(1, integer(1, 4096), "number b of sequences that decode together")
    alpha: float | None = flag(
        None,
        number(0, 1),
        "probability with which each draft token is accepted",
        modes=DRAFTING,
    )
    acceptance: str | None = flag(
        None,
        words,
        "acceptance law: alpha:A, rates:a1,…,aK, marginal:… or histogram:FILE",
        modes=DRAFTING,
    )
    acceptance_fast: str = flag(
        "alpha:0.3", words, "acceptance law of the tokens that --backup=fast drafts", modes=DRAFTING
    )
    p_hit: float | None = flag(
        None,
        number(0, 1),
        "cache-hit rate to impose on each sequence (ssd)",
        modes=GROWING,
    )
    hit_a: float | None = flag(
        None,
        number(0),
        "parameter A of the hit law miss(F) = A·F^-r (ssd)",
        modes=GROWING,
    )
    hit_r: float | None = flag(None, number(0), "parameter r of the hit law (ssd)", modes=GROWING)
    hit_law: str | None = flag(
        None,
        words,
        "hit law: power:A=.75,r=1, power:A=.6/.2,r=.4/.5 (k<K/k=K), p_hit:.9 or smollm2-chat",
        modes=GROWING,
        in_digest="said",
    )
    laws: str | None = flag(
        None,
        words,
        "file of `mpissd pair`: a real pair's acceptance and hits (text, replay: of its fan-outs)",
        modes=DRAFTING,
        in_digest="said",
    )
    lookup: str = flag(
        "prompt",
        choice("prompt", "suffix"),
        "how --backup=fast finds what to copy: prompt lookup, or a suffix automaton",
        modes=DRAFTING,
        in_digest="said",
    )
    temperature: float = flag(
        0.0, number(0), "sampling temperature of both models (markov, text); 0 is greedy"
    )
    vocab: int | None = flag(
        None, integer(2, 50000), "vocabulary size of both models (markov; default 64)"
    )
    order: int | None = flag(
        None, integer(1, 3), "number of tokens that the next one depends on (markov; default 2)"
    )
    divergence: float | None = flag(
        None,
        number(0, 1),
        "distance of the draft from the target: 0 equal, 1 independent (markov; default 0.2)",
        modes=DRAFTING,
    )
    saguaro_c: float | None = flag(
        None,
        number(0, 1),
        "factor C of Saguaro sampling (markov, ssd; default 1: plain sampling)",
        modes=GROWING,
    )
    prompt_tokens: int | None = flag(
        None, integer(1, 1 << 20), "tokens of each prompt (markov; default 1)"
    )
    stop_token: int | None = flag(
        None,
        integer(0),
        "token that ends a sequence (markov; text: in addition to the model's own)",
    )
    prompt: str | None = flag(
        None, words, "user message that the model answers (text)", in_digest="said"
    )
    prompts: str | None = flag(
        None,
        words,
        'file of prompts, lines of {"prompt": "…"} or {"messages": […]} (text)',
        in_digest="said",
    )
    prompt_ids: str | None = flag(
        None,
        words,
        "prompts as token ids: 1,2,3;4,5 are two prompts (text)",
        in_digest="said",
    )
    chat_template: bool = flag(
        True, switch, "put a prompt into the model's chat template (text)", in_digest="said"
    )
    top_p: float = flag(
        1.0,
        number(0, 1),
        "sample only from the likeliest tokens whose probabilities reach this sum (text)",
        in_digest="said",
    )
    stop: str | None = flag(
        None,
        words,
        'text that ends an answer: a string, or a JSON list of strings, ["\\n\\n","###"] (text)',
        in_digest="said",
    )

    recording: str | None = flag(
        None, words, "file of `mpissd pair` that decides the tokens (replay)", in_digest="said"
    )

    @property
    def acceptance_text(self) -> str:
        """The acceptance model as text, with its default."""
        if self.acceptance is not None:
            return self.acceptance
        if self.laws is not None and self.alpha is None:
            return f"laws:{self.laws}"
        return f"alpha:{0.8 if self.alpha is None else self.alpha}"

    @property
    def acceptance_fast_text(self) -> str:
        """The acceptance model of a fast backup's tokens as text: from its flag, or from --laws."""
        if self.laws is None or self.acceptance_fast != type(self).acceptance_fast:
            return self.acceptance_fast
        return f"{self.lookup}:{self.laws}"

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings: none, one, or a JSON list; raises ConfigError."""
        if self.stop is None or not self.stop.startswith("["):
            return () if self.stop is None else (self.stop,)
        try:
            found = json.loads(self.stop)
        except (ValueError, RecursionError):
            return (self.stop,)  # a string that begins with a bracket
        if not found or not all(isinstance(each, str) and each for each in found):
            raise ConfigError(f"stop={self.stop}: allowed: a list of strings that are not empty")
        return tuple(found)

    def check(self) -> None:
        """Refuses two sources of one thing, text that is no UTF-8, and values out of range."""
        super().check()
        if self.alpha is not None and self.acceptance is not None:
            raise ConfigError("alpha and acceptance say the same thing: give one")
        names = [n for n in ("prompt", "prompts", "prompt_ids") if getattr(self, n) is not None]
        if len(names) > 1:
            raise ConfigError(f"{' and '.join(names)} say the same thing: give one")
        for name, text in (("prompt", self.prompt or ""), ("stop", "".join(self.stop_strings))):
            if any("\ud800" <= c <= "\udfff" for c in text):  # Python's form of undecodable bytes
                raise ConfigError(f"{name}: is no UTF-8 text")
        if self.top_p == 0:
            raise ConfigError("top_p=0: allowed: a number above 0, at most 1")
        if self.top_p < 1 and self.temperature == 0:
            raise ConfigError(
                f"top_p={self.top_p:g} with temperature=0: allowed: a temperature above 0"
            )
        vocab = self.vocab or DEFAULT_VOCAB  # text compares with the tokenizer's
        if self.workload != "text" and self.stop_token is not None and self.stop_token >= vocab:
            raise ConfigError(f"stop_token={self.stop_token}: allowed: 0..{vocab - 1}")


@dataclass(frozen=True)
class MachineFlags(Checked):
    """Flags of devices and communication; they are the same for a whole job."""

    backend: str = flag(
        "auto", choice("auto", "numpy", "cupy", "emulated"), "backend that computes the forwards"
    )
    device: str = flag("h100", words, "device to emulate: a profile's name or file")
    draft_device: str | None = flag(
        None,
        words,
        "device to emulate on draft ranks (default: as --device)",
        modes=DRAFTING,
        in_digest="said",
    )
    groups: int = flag(
        1,
        integer(1, MOST_GROUPS),
        "number G of target groups that share the draft; T = (world size - D) / G",
        modes=DRAFTING,
        in_digest="said",
    )
    all_reduce: str = flag(
        "auto",
        choice("auto", "oneshot", "nccl", "mpi", "staged"),
        "how the target ranks sum their partial results",
    )
    cuda_aware_mpi: bool = flag(False, switch, "let MPI read GPU memory (tried in a child first)")
    graph: bool = flag(True, switch, "replay forwards as CUDA graphs (cupy)")
    deadline_s: float = flag(120.0, number(0.1), "longest wait for a peer, in seconds")
    on_draft_loss: str = flag(
        "abort",
        choice("abort", "ar"),
        "what to do if the draft rank dies: abort, or go on as ar",
        in_digest=False,
    )


@dataclass(frozen=True)
class MeasurementFlags(Checked):
    """Flags of the length of the measurement, and its seed."""

    rounds: int | None = flag(
        None, integer(1), "number of measured rounds (default 200 without num_tokens)"
    )
    num_tokens: int | None = flag(
        None, integer(1), "tokens to decode in each sequence; with rounds, the earlier limit counts"
    )
    seed: int = flag(0, integer(0, 2**64 - 1), "seed of all random draws")
    warmup_rounds: int = flag(10, integer(1), "warm-up rounds, on sequences that are thrown away")

    @property
    def max_rounds(self) -> int | None:
        """Limit of measured rounds; None: rounds continue until num_tokens are emitted."""
        if self.rounds is None and self.num_tokens is None:
            return 200
        return self.rounds


@dataclass(frozen=True)
class LearnerFlags(Checked):
    """Flags of learner ranks: their number, sources and methods."""

    learners: int = flag(
        0,
        integer(0, 1),
        "number L of learner ranks, the last ones, which train the draft while it drafts (text)",
        modes=DRAFTING,
        in_digest="said",
    )
    learn_from: str = flag(
        "all",
        choice("rejected", "all"),
        "positions that a learner learns from: where a draft was rejected, or all verified ones",
        modes=DRAFTING,
        in_digest="said",
    )
    learn_rate: float = flag(
        3e-5, number(0, 1), "learning rate of a learner", modes=DRAFTING, in_digest="said"
    )
    learn_batch: int = flag(
        4, integer(1), "sequences of a learner's step", modes=DRAFTING, in_digest="said"
    )
    learn_steps: float = flag(
        1.0,
        number(0.01),
        "steps for each finished sequence, which is seen learn_batch · learn_steps times",
        modes=DRAFTING,
        in_digest="said",
    )
    publish_s: float = flag(
        10.0,
        number(0),
        "shortest time between two versions of the draft, in seconds",
        modes=DRAFTING,
        in_digest="said",
    )
    learn_device: str = flag(
        "auto",
        choice("auto", "cuda", "cpu"),
        "where a learner computes; cuda: the GPU of its place on the host, or the last one",
        modes=DRAFTING,
        in_digest="said",
    )


@dataclass(frozen=True)
class OutputFlags(Checked):
    """Flags of files and display; they change no measured round."""

    out: str = flag("out", words, "folder for runs.jsonl and rounds/", in_digest=False)
    trace: str | None = flag(
        None, words, "write a Chrome trace of all ranks to this file", in_digest=False
    )
    progress: str = flag(
        "auto",
        choice("auto", "on", "off"),
        "whether to show a progress bar on stderr",
        in_digest=False,
    )
    show: bool = flag(
        False, switch, "print the answer, each token by what drafted it (text)", in_digest=False
    )
    dry_run: bool = flag(False, switch, "check the flags and stop, without MPI", in_digest=False)
    world_size: int | None = flag(
        None, integer(1), "number of ranks to check for, with dry_run", in_digest=False
    )

    def check(self) -> None:
        """Refuses --world_size without --dry_run: the launcher gives the number of ranks."""
        super().check()
        if self.world_size is not None and not self.dry_run:
            raise ConfigError("world_size: only with dry_run; mpirun -np says it otherwise")


@dataclass(frozen=True)
class RunConfig(  # a dataclass lists the fields of its last base first
    OutputFlags,
    LearnerFlags,
    MeasurementFlags,
    MachineFlags,
    WorkloadFlags,
    ModelFlags,
    MethodFlags,
):
    """All flags of a run; None means not given, and is resolved when the machine is known."""

    @classmethod
    def completed(cls, flags: Mapping[str, str]) -> dict[str, str]:
        """Adds the flags implied by a prompt or a pair with weights, and a shipped pair's own K and
        fan-out."""
        return with_measured(with_text(super().completed(flags)))

    @property
    def is_text(self) -> bool:
        """Whether the models' own logits decide."""
        return self.workload == "text"

    @property
    def is_transformer(self) -> bool:
        """Whether forwards run a whole transformer, with attention over a KV cache."""
        return self.is_text or self.forward == "transformer"

    @property
    def fast_lookup(self) -> str | None:
        """The kind of lookup of a fast backup; None without one."""
        return self.lookup if self.mode != "ar" and self.backup == "fast" else None

    @property
    def token_limit(self) -> int | None:
        """Most tokens of a sequence; an answer that nothing limits has 256."""
        unlimited = self.is_text and self.num_tokens is None and self.rounds is None
        return _ANSWER_TOKENS if unlimited else self.num_tokens

    @property
    def max_rounds(self) -> int | None:
        """Most measured rounds; None: rounds continue until every sequence has ended."""
        return self.rounds if self.is_text else super().max_rounds

    def check(self) -> None:
        """Refuses combinations of flags of different groups; raises ConfigError."""
        super().check()
        self._check_models()
        for name, readers in refused_flags(self.workload):  # they would change nothing
            value = getattr(self, name)
            if value != flags_of(RunConfig)[name].default:
                raise ConfigError(
                    f"{name}={value} with workload={self.workload}: allowed: "
                    f"workload={' or '.join(readers)}"
                )
        damped = self.saguaro_c is not None and self.saguaro_c < 1
        if damped and (self.mode != "ssd" or self.temperature == 0):
            at = f"mode={self.mode}, temperature={self.temperature:g}"
            raise ConfigError(
                f"saguaro_c={self.saguaro_c} with {at}: allowed: 1, or mode=ssd and a "
                "temperature above 0"
            )
        self._check_ranks()

    def _check_models(self) -> None:
        """Refuses text from matrix products, and one model of a pair if both are needed."""
        if self.is_text and self.forward == "gemm":
            raise ConfigError("forward=gemm with workload=text: allowed: transformer")
        needs_draft = self.mode != "ar" and not (self.is_lookup and self.draft is None)
        if (self.target is None) != (self.draft is None) and needs_draft:
            missing, there = ("draft", "target") if self.draft is None else ("target", "draft")
            raise ConfigError(f"{missing}: needed beside {there} with mode={self.mode}")
        if self.draft is not None and self.target is None:
            raise ConfigError("target: needed beside draft")

    def _check_ranks(self) -> None:
        """Refuses groups, learners and the loss of a draft if another flag rules them out."""
        if self.groups > 1:
            if not self.drafts:
                at = f"mode={self.mode}, num_drafts={self.drafts}"
                raise ConfigError(f"groups={self.groups} with {at}: allowed: 1, or a draft rank")
            if self.on_draft_loss == "ar":
                raise ConfigError(f"groups={self.groups} with on_draft_loss=ar: allowed: abort")
            for name in ("trace", "show"):
                if getattr(self, name):
                    raise ConfigError(f"{name} with groups={self.groups}: allowed: groups=1")
        if self.learners:
            needed = (
                ("workload", self.workload, "text"),
                ("num_drafts", self.drafts, 1),
                ("on_draft_loss", self.on_draft_loss, "abort"),
                ("groups", self.groups, 1),
            )
            for name, value, wanted in needed:
                if value != wanted:
                    raise ConfigError(f"learners=1 with {name}={value}: allowed: {name}={wanted}")
            if self.is_lookup:
                raise ConfigError("learners=1 with backup=fast in sd: allowed: a draft model")
        if self.on_draft_loss == "ar":
            if self.drafts != 1:
                raise ConfigError(f"on_draft_loss=ar with num_drafts={self.drafts}: allowed: 1")
            if self.temperature > 0:  # verifying samples needs the lost draft's distributions
                at = f"temperature={self.temperature:g}"
                raise ConfigError(f"on_draft_loss=ar with {at}: allowed: temperature=0")
            if self.trace:
                raise ConfigError("trace with on_draft_loss=ar: allowed: on_draft_loss=abort")

    @property
    def digest(self) -> str:
        """Hash that names the configuration: equal flags in any order have equal digests."""
        named = {
            name: getattr(self, name)
            for name, field in flags_of(RunConfig).items()
            if _is_in_digest(field.metadata["in_digest"], getattr(self, name) != field.default)
        }
        text = json.dumps(named | _RETIRED, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


# Retired flags at their only value, so that a configuration keeps the digest of its older rows.
_RETIRED = {"on_late": "finish"}


def _is_in_digest(in_digest: bool | str, is_said: bool) -> bool:
    return is_said if in_digest == "said" else bool(in_digest)


def parse_flags(flags: Mapping[str, str]) -> RunConfig:
    """Parses flags into a RunConfig; raises ConfigError, with a suggestion for unknown names."""
    return parse_into(RunConfig, flags)
