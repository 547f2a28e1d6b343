"""The flags of a run in groups: method, model, machine, measurement and output, and the workload's
(mpissd.common.workload_flags).

A group is a dataclass whose fields are flags, with the checks that need no other group. RunConfig
(mpissd.common.config) joins them and holds the checks that compare two groups. A flag's group
decides what a sweep makes of it: those of MachineFlags and OutputFlags are the same for a whole
job. `flag` (mpissd.common.flags) takes the modes in which a flag has an effect and whether it is a
part of the digest; mpissd.common.workloads names the flags that only some workloads read.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpissd.common.errors import ConfigError
from mpissd.common.flags import (
    DRAFTING,
    GROWING,
    Checked,
    choice,
    flag,
    integer,
    number,
    switch,
    words,
)
from mpissd.common.schedules import SCHEDULES, is_tail

MOST_GROUPS = 64
FORWARDS = ("gemm", "transformer")


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
        "branches kept: uniform:F, geometric:B, list:F0,…,FK, adaptive:B or tail:F (ssd)",
        modes=GROWING,
    )
    fan_out_miss: str | None = flag(
        None,
        words,
        "as fan_out, after a miss, which a backup drafted (default: fan_out)",
        modes=GROWING,
    )
    on_late: str = flag(
        "finish",
        choice("finish", "serve", "auto"),
        "what to do with a hit that is not fully grown: finish it, or serve it as it is (ssd)",
        modes=GROWING,
    )
    backup: str = flag(
        "jit",
        choice("jit", "fast", "auto"),
        "what drafts after a cache miss: jit (draft model), fast (prompt lookup) or auto",
        modes=DRAFTING,
    )
    backup_lookahead: int | None = flag(
        None, integer(0), "number K_b of tokens that a backup drafts (default: K)", modes=DRAFTING
    )

    @property
    def drafts(self) -> int:
        """Number of draft ranks D; by default 0 for ar, 1 for sd and ssd."""
        if self.num_drafts is not None:
            return self.num_drafts
        return 0 if self.mode == "ar" else 1

    @property
    def is_lookup(self) -> bool:
        """Whether prompt lookup alone drafts, without a draft model (sd with backup=fast)."""
        return self.mode == "sd" and self.backup == "fast"

    def check_lookahead(self) -> None:
        """Refuses lookahead=0 in sd and ssd."""
        if self.mode != "ar" and self.lookahead < 1:
            raise ConfigError(f"lookahead=0 with mode={self.mode}: allowed: a whole number >= 1")

    def check_num_drafts(self) -> None:
        """Refuses SSD without a draft rank, and AR with one."""
        if self.mode == "ssd" and self.num_drafts == 0:
            raise ConfigError("num_drafts=0 with mode=ssd: allowed: 1 (or mode=sd, inline)")
        if self.mode == "ar" and self.num_drafts:
            raise ConfigError(f"num_drafts={self.num_drafts} with mode=ar: allowed: 0")

    def check_fan_outs(self) -> None:
        """Refuses fan_out_miss if either fan-out is a tail or adaptive, and so changes by round."""
        if self.fan_out_miss is None:
            return
        for name, text in (("fan_out", self.fan_out), ("fan_out_miss", self.fan_out_miss)):
            if is_tail(text) or text.strip().startswith("adaptive"):
                raise ConfigError(
                    f"{name}={text} with both fan_out and fan_out_miss: allowed: uniform, "
                    "geometric, list"
                )

    def check_backup(self) -> None:
        """Refuses backup=auto without a cache that can miss."""
        if self.backup == "auto" and self.mode != "ssd":
            raise ConfigError(f"backup=auto with mode={self.mode}: allowed: jit, fast")

    def check_backup_lookahead(self) -> None:
        """Refuses backup_lookahead above K, and 0 unless the fan-out is a tail."""
        if self.backup_lookahead is not None and self.backup_lookahead > self.lookahead:
            raise ConfigError(
                f"backup_lookahead={self.backup_lookahead}: allowed: 1..{self.lookahead}"
            )
        if self.backup_lookahead == 0 and not (self.mode == "ssd" and is_tail(self.fan_out)):
            raise ConfigError(
                f"backup_lookahead=0 with mode={self.mode}, fan_out={self.fan_out}: allowed: "
                f"1..{self.lookahead}, and 0 with mode=ssd and fan_out=tail:F"
            )


@dataclass(frozen=True)
class ModelFlags(Checked):
    """Flags of the target and draft models, and of what their forwards compute."""

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

    def check_pair(self) -> None:
        """Refuses --pair together with --target or --draft."""
        if self.pair is not None and (self.target or self.draft):
            raise ConfigError("pair and target/draft say the same thing: give one")


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
class OutputFlags(Checked):
    """Flags of files and display; they change no measured round."""

    out: str = flag("out", words, "folder for runs.jsonl and rounds/", in_digest=False)
    trace: str | None = flag(
        None, words, "write a Chrome trace of all ranks to this file", in_digest=False
    )
    ledger_ab: bool = flag(
        False, switch, "measure the cost of the round ledger, on against off", in_digest=False
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

    def check_world_size(self) -> None:
        """Refuses --world_size without --dry_run: the launcher gives the number of ranks."""
        if self.world_size is not None and not self.dry_run:
            raise ConfigError("world_size: only with dry_run; mpirun -np says it otherwise")
