"""The configuration of a run: one frozen dataclass, one row a flag, validated before MPI starts.

The flags of the command line, their help and their defaults are read off these fields, so there is
one place to add one. Values arrive as text and are typed by their fields (mpissd.common.flags).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from mpissd.common.errors import ConfigError
from mpissd.common.flags import Checked, choice, flag, integer, number, parse_into, switch, words
from mpissd.common.schedules import SCHEDULES, is_tail
from mpissd.common.workloads import parse_name, refused_flags

MOST_DRAFTS = 4
DEFAULT_VOCAB = 64
DEFAULT_ACCEPTANCE_FAST = "alpha:0.3"


# What changes no measured round; a schedule is in the flags that it stands for.
_NOT_MEASURED = frozenset(
    "out progress trace ledger_ab dry_run world_size schedule on_draft_loss".split()
)


@dataclass(frozen=True)
class RunConfig(Checked):
    """What the user asked for; None is "not said" and resolved when the machine is known."""

    mode: str = flag("ssd", choice("ar", "sd", "ssd"), "ar, sd or ssd")
    schedule: str | None = flag(
        None, choice(*SCHEDULES), f"sets what its name stands for: {', '.join(SCHEDULES)}"
    )
    num_drafts: int | None = flag(
        None,
        integer(0, MOST_DRAFTS),
        "draft ranks D; T = world size - D (default 0 for ar, else 1)",
    )
    pair: str | None = flag(
        None, words, "toy, 8b/1b, 70b/1b, TARGET/DRAFT (default: what the machine can hold)"
    )
    target: str | None = flag(None, words, "preset, config.json, or gen:layers=…,hidden=…,ffn=…")
    draft: str | None = flag(None, words, "likewise")
    backend: str = flag("auto", choice("auto", "numpy", "cupy", "emulated"), "what computes")
    device: str = flag("h100", words, "emulated device: a profile's name or file")
    draft_device: str | None = flag(
        None, words, "emulated device of the draft ranks (default: as the targets')"
    )
    workload: str = flag(
        "gemm", parse_name, "imposed laws, or a language-model pair that is sampled"
    )
    lookahead: int = flag(4, integer(0, 256), "K, draft tokens a round")
    fan_out: str = flag(
        "uniform:3", words, "uniform:F, geometric:B, list:F0,…,FK, adaptive:B or tail:F (ssd)"
    )
    fan_out_miss: str | None = flag(
        None, words, "likewise, behind a trunk that a backup drafted (default: as fan_out)"
    )
    alpha: float | None = flag(None, number(0, 1), "acceptance rate of every draft token")
    acceptance: str | None = flag(
        None, words, "alpha:A, rates:a1,…,aK, marginal:… or histogram:FILE (default alpha:0.8)"
    )
    acceptance_fast: str = flag(DEFAULT_ACCEPTANCE_FAST, words, "of --backup=fast tokens")
    p_hit: float | None = flag(None, number(0, 1), "imposed cache-hit rate a sequence (ssd)")
    hit_a: float | None = flag(None, number(0), "A of the hit law miss(F) = A·F^-r (ssd)")
    hit_r: float | None = flag(None, number(0), "r of the hit law")
    hit_law: str | None = flag(
        None, words, "power:A=.75,r=1, power:A=.6/.2,r=.4/.5 (k<K/k=K), p_hit:.9 or smollm2-chat"
    )
    batch_size: int = flag(1, integer(1, 4096), "sequences b")
    rounds: int | None = flag(None, integer(1), "measured rounds (default 200 without num_tokens)")
    num_tokens: int | None = flag(
        None, integer(1), "tokens a sequence; with rounds, whichever is reached first"
    )
    seed: int = flag(0, integer(0, 2**64 - 1), "of every draw")
    out: str = flag("out", words, "folder of runs.jsonl and rounds/")
    temperature: float = flag(0.0, number(0), "of both models (markov); 0 is greedy")
    vocab: int | None = flag(None, integer(2, 50000), "V of both models (markov; default 64)")
    order: int | None = flag(None, integer(1, 3), "tokens a row depends on (markov; default 2)")
    divergence: float | None = flag(
        None, number(0, 1), "of draft from target, 0 none, 1 all (markov; default 0.2)"
    )
    saguaro_c: float | None = flag(
        None, number(0, 1), "C of Saguaro sampling (markov, ssd; default 1: plain)"
    )
    prompt_tokens: int | None = flag(None, integer(1, 1 << 20), "prompt length (markov; default 1)")
    stop_token: int | None = flag(None, integer(0), "ends a sequence (markov; default none)")
    all_reduce: str = flag(
        "auto", choice("auto", "oneshot", "nccl", "mpi", "staged"), "how target ranks add up"
    )
    cuda_aware_mpi: bool = flag(False, switch, "let MPI read GPU memory (tried in a child first)")
    fuse: bool = flag(False, switch, "issue q,k,v as one product, and gate,up as one")
    lm_head: bool = flag(False, switch, "add the vocabulary product with top-k")
    context: int = flag(0, integer(0), "tokens of KV cache that attention would read")
    num_layers: int | None = flag(None, integer(1), "depth-scaled target (labelled)")
    graph: bool = flag(True, switch, "replay forwards as CUDA graphs (cupy)")
    on_late: str = flag(
        "finish", choice("finish", "serve", "auto"), "a hit not fully grown yet (ssd)"
    )
    backup: str = flag("jit", choice("jit", "fast", "auto"), "what drafts a miss")
    backup_lookahead: int | None = flag(None, integer(0), "K_b, tokens that a backup drafts")
    warmup_rounds: int = flag(10, integer(1), "rounds on throw-away sequences")
    deadline_s: float = flag(120.0, number(0.1), "longest wait for a peer, in seconds")
    on_draft_loss: str = flag(
        "abort", choice("abort", "ar"), "when the draft rank is gone: end, or go on with K=0"
    )
    trace: str | None = flag(None, words, "Chrome trace of all ranks to this file")
    ledger_ab: bool = flag(False, switch, "measure what the round ledger costs, on against off")
    progress: str = flag("auto", choice("auto", "on", "off"), "progress bar on stderr")
    dry_run: bool = flag(False, switch, "validate and stop, without MPI")
    world_size: int | None = flag(None, integer(1), "ranks to validate for, with dry_run")

    def check_acceptance(self) -> None:
        """Refuses two acceptance laws."""
        if self.alpha is not None and self.acceptance is not None:
            raise ConfigError("alpha and acceptance say the same thing: give one")

    def check_lookahead(self) -> None:
        """Refuses to draft no token."""
        if self.mode != "ar" and self.lookahead < 1:
            raise ConfigError(f"lookahead=0 with mode={self.mode}: allowed: a whole number >= 1")

    def check_num_drafts(self) -> None:
        """Refuses SSD without a draft rank, and AR with one."""
        if self.mode == "ssd" and self.num_drafts == 0:
            raise ConfigError("num_drafts=0 with mode=ssd: allowed: 1 (or mode=sd, inline)")
        if self.mode == "ar" and self.num_drafts:
            raise ConfigError(f"num_drafts={self.num_drafts} with mode=ar: allowed: 0")

    def check_pair(self) -> None:
        """Refuses models that are said twice."""
        if self.pair is not None and (self.target or self.draft):
            raise ConfigError("pair and target/draft say the same thing: give one")

    def check_models(self) -> None:
        """Refuses one model of a pair without the other, where both are needed."""
        needs_draft = self.mode != "ar" and not (self.is_lookup and self.draft is None)
        if (self.target is None) != (self.draft is None) and needs_draft:
            missing = "draft" if self.draft is None else "target"
            raise ConfigError(f"{missing}: needed beside the other with mode={self.mode}")
        if self.draft is not None and self.target is None:
            raise ConfigError("target: needed beside draft")

    def check_fan_outs(self) -> None:
        """Refuses fan_out_miss where either fan-out follows what was served or committed."""
        if self.fan_out_miss is None:
            return
        for name, text in (("fan_out", self.fan_out), ("fan_out_miss", self.fan_out_miss)):
            if is_tail(text) or text.strip().startswith("adaptive"):
                raise ConfigError(
                    f"{name}={text} with both fan_out and fan_out_miss: allowed: uniform, "
                    "geometric, list"
                )

    def check_backup(self) -> None:
        """Refuses backup=auto without a cache that can miss, and with several drafts."""
        if self.backup == "auto" and self.mode != "ssd":
            raise ConfigError(f"backup=auto with mode={self.mode}: allowed: jit, fast")
        if self.backup == "auto" and self.drafts > 1:  # each would time the others' misses, too
            raise ConfigError(f"backup=auto with num_drafts={self.drafts}: allowed: num_drafts=1")

    def check_workload(self) -> None:
        """Refuses flags that only other workloads read: they would change nothing."""
        for name, readers in refused_flags(self.workload):
            value = getattr(self, name)
            if value != RunConfig.__dataclass_fields__[name].default:
                raise ConfigError(
                    f"{name}={value} with workload={self.workload}: allowed: "
                    f"workload={' or '.join(readers)}"
                )

    def check_saguaro(self) -> None:
        """Refuses Saguaro sampling where no cache is filled, or where tokens are not sampled."""
        damped = self.saguaro_c is not None and self.saguaro_c < 1
        if damped and (self.mode != "ssd" or self.temperature == 0):
            at = f"mode={self.mode}, temperature={self.temperature:g}"
            raise ConfigError(
                f"saguaro_c={self.saguaro_c} with {at}: allowed: 1, or mode=ssd and a "
                "temperature above 0"
            )

    def check_stop_token(self) -> None:
        """Refuses a stop token outside the vocabulary."""
        if self.stop_token is not None and self.stop_token >= (self.vocab or DEFAULT_VOCAB):
            raise ConfigError(
                f"stop_token={self.stop_token}: allowed: 0..{(self.vocab or DEFAULT_VOCAB) - 1}"
            )

    def check_backup_lookahead(self) -> None:
        """Refuses a backup longer than K, and one of no token where the fan-out needs a trunk."""
        if self.backup_lookahead is not None and self.backup_lookahead > self.lookahead:
            raise ConfigError(
                f"backup_lookahead={self.backup_lookahead}: allowed: 1..{self.lookahead}"
            )
        if self.backup_lookahead == 0 and not (self.mode == "ssd" and is_tail(self.fan_out)):
            raise ConfigError(
                f"backup_lookahead=0 with mode={self.mode}, fan_out={self.fan_out}: allowed: "
                f"1..{self.lookahead}, and 0 with mode=ssd and fan_out=tail:F"
            )

    def check_draft_loss(self) -> None:
        """Refuses on_draft_loss=ar where the run cannot go on without its draft."""
        if self.on_draft_loss != "ar":
            return
        if self.drafts != 1:
            raise ConfigError(f"on_draft_loss=ar with num_drafts={self.drafts}: allowed: 1")
        if self.temperature > 0:  # a draft that dies after its tokens takes their rows with it
            raise ConfigError(
                f"on_draft_loss=ar with temperature={self.temperature:g}: allowed: temperature=0"
            )
        for name in ("trace", "ledger_ab"):
            if getattr(self, name):
                raise ConfigError(f"{name} with on_draft_loss=ar: allowed: on_draft_loss=abort")

    def check_world_size(self) -> None:
        """Refuses a number of ranks where ranks are started: their launcher says it."""
        if self.world_size is not None and not self.dry_run:
            raise ConfigError("world_size: only with dry_run; mpirun -np says it otherwise")

    @property
    def drafts(self) -> int:
        """D, with its default: 0 for ar, 1 for sd and ssd."""
        if self.num_drafts is not None:
            return self.num_drafts
        return 0 if self.mode == "ar" else 1

    @property
    def is_lookup(self) -> bool:
        """Whether nothing but the backup that costs no draft step drafts: prompt lookup."""
        return self.mode == "sd" and self.backup == "fast"

    @property
    def acceptance_text(self) -> str:
        """The acceptance law as text, with its default."""
        if self.acceptance is not None:
            return self.acceptance
        return f"alpha:{0.8 if self.alpha is None else self.alpha}"

    @property
    def max_rounds(self) -> int | None:
        """Measured rounds at most; None: until num_tokens are there."""
        if self.rounds is None and self.num_tokens is None:
            return 200
        return self.rounds

    @property
    def digest(self) -> str:
        """Names the configuration: equal for equal flags, whatever their order."""
        told = {k: v for k, v in dataclasses.asdict(self).items() if k not in _NOT_MEASURED}
        for name in ("draft_device", "hit_law"):  # rows from before these flags keep their digests
            if told[name] is None:
                del told[name]
        text = json.dumps(told, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def parse_flags(flags: Mapping[str, str]) -> RunConfig:
    """Flags as text → a validated RunConfig; ConfigError with a did-you-mean for unknown names."""
    return parse_into(RunConfig, flags)
