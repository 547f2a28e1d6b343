"""Checks of a job: drafts, branches and devices that cannot work.

All functions raise ConfigError. Checks of one workload are in its own class (Workload.check).
"""

from __future__ import annotations

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.presets import ModelShape, files_of
from mpissd.engine.model.shard import Shard
from mpissd.engine.model.transformer.shard import TransformerShard
from mpissd.engine.model.transformer.sources import check_vocabularies, config_of


def check_draft(config: RunConfig, target: ModelShape, draft: ModelShape | None) -> None:
    """Refuses a draft shape that the other flags do not allow."""
    if target.head is not None:
        raise ConfigError(f"target={target.name}: a draft's shape: allowed: a whole model")
    if draft is None or draft.head is None or config.mode == "ar":
        return
    if draft.head.lm_heads == 0 and not config.is_lookup:
        asked = f"draft={draft.name} with mode={config.mode}, backup={config.backup}"
        raise ConfigError(f"{asked}: allowed: mode=sd, backup=fast")
    if draft.num_tokens > 1:
        _check_parallel(config, draft)


def _check_parallel(config: RunConfig, draft: ModelShape) -> None:
    """Refuses a K, or a backup's K_b, other than the number of tokens that one forward drafts.

    Heads that draft in parallel cannot stop after fewer tokens.
    """
    if config.lookahead != draft.num_tokens:
        what = f"{draft.num_tokens}, one head a token (medusaN:MODEL has N)"
        raise ConfigError(f"lookahead={config.lookahead} with {draft.name}: allowed: {what}")
    if config.backup_lookahead not in (None, config.lookahead):
        asked = f"backup_lookahead={config.backup_lookahead} with {draft.name}"
        raise ConfigError(f"{asked}: allowed: {config.lookahead}, which one forward drafts")


def check_shards(config: RunConfig, target: ModelShape, where: str, tp: int) -> None:
    """Refuses a T over which the target's heads, FFN or (with lm_head) vocabulary cannot be split.

    Forwards of bare products need equal shares. where: the target's name.
    """
    if config.is_transformer:
        TransformerShard(config_of(where), tp)
        return
    Shard(target, tp)
    if config.lm_head and target.vocab_size % tp:
        raise ConfigError(f"{target.name}: vocab_size={target.vocab_size} % tp={tp} is not 0")


def check_transformer(config: RunConfig, backend: str, draft: ModelShape | None) -> None:
    """Refuses flags that a transformer's forward lacks, and text on the emulated backend."""
    if config.is_text and backend == "emulated":
        raise ConfigError("workload=text with backend=emulated: allowed: numpy, cupy")
    if not config.is_transformer:
        return
    if config.fuse:
        raise ConfigError("fuse with forward=transformer: allowed: forward=gemm")
    if draft is not None and draft.head is not None and not config.is_lookup:
        raise ConfigError(f"draft={draft.name} with forward=transformer: allowed: a whole model")


def check_tokens(
    config: RunConfig, where: str, draft: ModelShape | None, draft_where: str | None
) -> None:
    """Refuses a draft of text whose tokens mean other texts than the target's."""
    if config.is_text and config.mode != "ar" and draft is not None and draft.head is None:
        assert draft_where is not None
        check_vocabularies(where, draft_where)


def check_fan_out(config: RunConfig, widest: int, draft: ModelShape | None) -> None:
    """Refuses a fan-out with more candidates a row than an LM head reads out."""
    has_head = config.lm_head or config.is_transformer
    if has_head and draft and widest + 1 > min(64, draft.vocab_size):
        most = min(64, draft.vocab_size) - 1
        raise ConfigError(
            f"fan_out {config.fan_out} with lm_head: {widest} a row: allowed: at most {most}"
        )


def check_draft_device(config: RunConfig, backend: str) -> None:
    """Refuses draft_device on a backend that is not emulated, or without a draft rank."""
    if config.draft_device is None:
        return
    if backend != "emulated":
        raise ConfigError(
            f"draft_device={config.draft_device} with backend={backend}: allowed: backend=emulated"
        )
    if not config.drafts:
        raise ConfigError(
            f"draft_device={config.draft_device} without a draft rank: allowed: num_drafts=1"
        )


def check_states(
    config: RunConfig, tp: int, draft: ModelShape, draft_where: str, where: str
) -> None:
    """Refuses a draft that reads its target's hidden states if it cannot have them in time."""
    # A draft without a file reads tokens; its target may be bare products.
    kind = "" if files_of(draft_where) is None else config_of(draft_where, where).kind
    if not kind:
        return
    asked = f"draft={draft.name} ({kind})"
    if config.mode == "ssd" or config.drafts:
        told = f"mode={config.mode}, num_drafts={config.drafts}"
        why = "it reads the hidden state behind the bonus token, known only after the verification"
        raise ConfigError(f"{asked} with {told}: {why}: allowed: mode=sd, num_drafts=0")
    if not config.is_text:
        raise ConfigError(f"{asked} with workload={config.workload}: allowed: workload=text")
    if tp > 1:
        why = "it reads one rank's hidden states and LM head"
        raise ConfigError(f"{asked} with tp={tp}: {why}: allowed: tp=1")
    if kind == "medusa" and config.lookahead > draft.num_layers:
        told = f"allowed: at most its {draft.num_layers} heads"
        raise ConfigError(f"lookahead={config.lookahead} with {asked}: {told}")
