"""The pairs of features that cannot be used together, each with its error message.

What one flag requires of another is declared with the flag (`needs` in config.py). The tables here
cover conditions on more than flags: on models, rates, fan-outs and trees. A comment above each
table names the objects that its conditions and messages read.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from mpissd.common.errors import ConfigError


@dataclass(frozen=True)
class Exclusion:
    """Two features that cannot be used together. feature, other: their names. allowed: what to use
    instead. why: the reason, or "". These format strings over `refuse`'s arguments make the error.
    is_asked: a function of these arguments that says whether both features are asked for."""

    feature: str
    other: str
    allowed: str
    is_asked: Callable[[Any], object]
    why: str = ""


def refuse(exclusions: Iterable[Exclusion], **values: Any) -> None:
    """Raises ConfigError for the first exclusion whose two features are both asked for. values: the
    objects that the conditions and messages of these exclusions read, by name."""
    for row in exclusions:
        if row.is_asked(SimpleNamespace(**values)):
            other = row.other if row.other.startswith("without ") else f"with {row.other}"
            why = f": {row.why}" if row.why else ""
            message = f"{row.feature} {other}{why}: allowed: {row.allowed}"
            raise ConfigError(message.format(**values))


# Exclusions for every run; their conditions read `config`.
FLAGS = (
    Exclusion("target={config.target}", "without draft", "both, or mode=ar",
              lambda at: at.config.target and not at.config.draft
              and at.config.mode != "ar" and not at.config.is_lookup),
    Exclusion("learners=1", "backup=fast in sd", "a draft model",
              lambda at: at.config.learners and at.config.is_lookup),
)  # fmt: skip
# Exclusions by backend; their conditions read `config` and the targets' `backend`.
DEVICES = (
    Exclusion("draft_device={config.draft_device}", "backend={backend}", "backend=emulated",
              lambda at: at.config.draft_device and at.backend != "emulated"
              and not at.config.draft_backend),
    Exclusion("draft_device={config.draft_device}", "draft_backend={config.draft_backend}",
              "draft_backend=emulated", lambda at: at.config.draft_device
              and at.config.draft_backend not in (None, "emulated")),
    Exclusion("draft_device={config.draft_device}", "without a draft rank", "num_drafts=1",
              lambda at: at.config.draft_device and not at.config.drafts),
)  # fmt: skip
FORWARDS = (
    Exclusion("workload=text", "backend=emulated", "numpy, cupy",
              lambda at: at.config.is_text and at.backend == "emulated"),
    Exclusion("workload=text", "draft_backend=emulated", "numpy, cupy",
              lambda at: at.config.is_text and at.config.draft_backend == "emulated"),
    Exclusion("shard_draft", "forward=gemm", "forward=transformer",
              lambda at: at.config.shard_draft and not at.config.is_transformer),
    Exclusion("fuse", "forward=transformer", "forward=gemm",
              lambda at: at.config.fuse and at.config.is_transformer),
)  # fmt: skip
# Exclusions for head-sized drafts and lookups; their conditions read `config` and `draft`.
HEADS = (
    Exclusion("draft={draft.name}", "mode={config.mode}, backup={config.backup}",
              "mode=sd, backup=fast",
              lambda at: not at.draft.head.lm_heads and not at.config.is_lookup),
    Exclusion("draft={draft.name}", "forward=transformer", "a whole model",
              lambda at: at.draft.head.lm_heads and at.config.is_transformer),
    # Heads that draft in parallel cannot stop after fewer tokens than one forward drafts.
    Exclusion("lookahead={config.lookahead}", "{draft.name}",
              "{draft.num_tokens}, one head a token (medusaN:MODEL has N)",
              lambda at: at.draft.num_tokens not in (1, at.config.lookahead)),
    Exclusion("backup_lookahead={config.backup_lookahead}", "{draft.name}",
              "{config.lookahead}, which one forward drafts",
              lambda at: at.draft.num_tokens > 1
              and at.config.backup_lookahead not in (None, at.config.lookahead)),
)  # fmt: skip
# Exclusions for drafts on the target's hidden states; they read `config`, `tp`, `draft`, `kind`.
STATES = (
    Exclusion("draft={draft.name} ({kind})", "mode={config.mode}, num_drafts={config.drafts}",
              "mode=sd, num_drafts=0", lambda at: at.config.mode == "ssd" or at.config.drafts,
              "it reads the hidden state of the bonus token, known only after the verification"),
    Exclusion("draft={draft.name} ({kind})", "workload={config.workload}", "workload=text",
              lambda at: not at.config.is_text),
    Exclusion("draft={draft.name} ({kind})", "tp={tp}", "tp=1", lambda at: at.tp > 1,
              "it reads one rank's hidden states and LM head"),
    Exclusion("lookahead={config.lookahead}", "draft={draft.name} ({kind})",
              "at most its {draft.num_layers} heads",
              lambda at: at.kind == "medusa" and at.config.lookahead > at.draft.num_layers),
)  # fmt: skip
# Hits cannot be imposed if a fan-out is 0; the condition reads `job` and a list `fan_out`.
FAN_OUTS = (
    Exclusion("p_hit={job.hit_law.p_hit}", "fan_out {fan_out}", "every F_k from 1",
              lambda at: at.job.hit_law.p_hit and not all(at.fan_out)),
)  # fmt: skip
# Exclusions for tree drafts, then for all drafts; their conditions read `config` and `job`.
TREES = (
    Exclusion("backup_lookahead={job.backup_lookahead}", "tree_shape=dynamic", "{job.lookahead}",
              lambda at: at.job.backup_lookahead < at.job.lookahead
              and at.config.tree_shape == "dynamic"),
    Exclusion("backup_lookahead={job.backup_lookahead}", "tree={config.tree} and mode=ssd",
              "{job.lookahead}",
              lambda at: at.job.backup_lookahead < at.job.lookahead and at.job.fan_out,
              "keys are by node of the whole tree"),
    Exclusion("p_hit={job.hit_law.p_hit}", "tree={config.tree} and mode=ssd", "hit_law=power:…",
              lambda at: at.job.hit_law.p_hit is not None and at.job.fan_out,
              "keys share the ranks of nodes"),
)  # fmt: skip
# Exclusions for --parallel_drafting; they read `config`, `draft`, and its number `masks` of masks.
PARALLEL = (
    Exclusion("parallel_drafting", "draft={draft.name}", "a draft model of its own",
              lambda at: at.draft.head or at.draft.num_tokens > 1),
    Exclusion("parallel_drafting", "workload={config.workload}", "gemm, replay, text",
              lambda at: at.config.workload == "markov"),
    Exclusion("parallel_drafting", "draft={draft.name}", "a draft of distill --parallel=J",
              lambda at: at.masks == 0, "it has no mask tokens"),
    Exclusion("lookahead={config.lookahead}", "parallel_drafting and draft={draft.name}",
              "at most {masks} + 1, its mask tokens and one",
              lambda at: at.masks is not None and at.config.lookahead > at.masks + 1),
    Exclusion("backup_lookahead={config.backup_lookahead}", "parallel_drafting",
              "{config.lookahead}, which one forward drafts",
              lambda at: at.config.backup_lookahead not in (None, at.config.lookahead)),
)  # fmt: skip
DRAFTS = (
    Exclusion("tree={config.tree}", "draft={job.draft_where}", "a draft model of its own",
              lambda at: at.config.tree and at.job.draft
              and (at.job.draft.head or at.job.reads_states)),
    Exclusion("draft={job.draft.name}", "workload={config.workload}", "gemm",
              lambda at: at.job.draft and at.job.draft.num_tokens > 1
              and not at.job.workload.drafts_in_parallel),
)  # fmt: skip
