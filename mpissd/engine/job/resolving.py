"""Resolve a configuration and T to a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.presets import LOOKUP, resolve_model, split_pair, target_of
from mpissd.common.rounds import Source
from mpissd.engine.backend.numpy_backend import available_memory_bytes
from mpissd.engine.backend.profile import role_profiles
from mpissd.engine.backend.registry import unopened
from mpissd.engine.job.checks import (
    check_draft,
    check_draft_device,
    check_fan_out,
    check_shards,
    check_states,
    check_tokens,
    check_transformer,
)
from mpissd.engine.job.job import Job
from mpissd.engine.job.memory import Room
from mpissd.engine.model.transformer.files import fetch_missing
from mpissd.engine.spec.acceptance import AcceptanceLaw, resolve_acceptance
from mpissd.engine.spec.fanout import FanOuts, resolve_fan_out
from mpissd.engine.spec.hits import HitLaw, hit_law_of
from mpissd.engine.workload.resolved import Serving

# Tried in this order: the largest pair whose shards fit is the default.
_DEFAULT_PAIRS = ("70b/1b", "8b/1b", "toy")
_PREFILL_ROWS = {"numpy": 32, "cupy": 128}


def resolve(
    config: RunConfig,
    tp: int,
    *,
    backend: str,
    memory_bytes: int | None,
    draft_memory_bytes: int | None = None,
    serving: Serving | None = None,
) -> Job:
    """Returns the job of a configuration on T target ranks.

    memory_bytes: free on the smallest target device (None: unknown, nothing is refused);
    draft_memory_bytes: the same on the drafts' devices (None: the same as the targets'). serving:
    of a job whose requests join and leave. Raises ConfigError if T does not divide the target,
    rates or a list do not fit K, memory does not suffice, or the draft device is not allowed.
    """
    check_draft_device(config, backend)
    draft_memory = memory_bytes if draft_memory_bytes is None else draft_memory_bytes
    room = Room(4 if backend == "numpy" else 2, memory_bytes, draft_memory)
    if config.pair is None and config.target is None:
        return _default_pair(config, tp, backend, room)
    job = room.sized(replace(_job(config, tp, *_names(config), backend), serving=serving))
    room.check(job)
    return job


def resolve_unopened(config: RunConfig, tp: int, sharing: int | None = None) -> Job:
    """Resolves a job before any device is open, as far as memory sizes are known.

    Only the memory of emulated devices and of this host's CPUs is known then. sharing: ranks that
    share this host's memory, if all of them will run on it. Raises ConfigError as `resolve` does,
    and if an emulated device's profile lacks all-reduces over T ranks.
    """
    if config.mode == "ar":
        fetch_missing(None, *filter(None, (config.pair and target_of(config.pair), config.target)))
    else:
        fetch_missing(config.pair, config.target, config.draft)
    memory = draft_memory = None
    backend = unopened(config.backend)
    if backend == "numpy" and sharing and (there := available_memory_bytes()):
        memory = there // sharing
    if backend == "emulated":
        profile, drafts = role_profiles(config.device, config.draft_device)
        profile.all_reduce_s(tp, 1)
        memory, draft_memory = profile.memory_bytes, drafts.memory_bytes
    return resolve(
        config, tp, backend=backend, memory_bytes=memory, draft_memory_bytes=draft_memory
    )


def _default_pair(config: RunConfig, tp: int, backend: str, room: Room) -> Job:
    names = ("toy",) if backend == "numpy" else _DEFAULT_PAIRS
    targets = [split_pair(name)[0] for name in names]
    if not any(_divides(config, target, tp) for target in targets):
        tried = ", ".join(names)
        raise ConfigError(f"tp={tp}: no built-in pair divides by {tp} (tried {tried}): another TP")
    reason: ConfigError | None = None
    for name in names:
        try:
            job = _job(config, tp, *split_pair(name), backend)
            room.check(job)
        except ConfigError as error:
            reason = reason or error
            continue
        return job
    assert reason is not None
    raise reason


def _divides(config: RunConfig, where: str, tp: int) -> bool:
    try:
        check_shards(config, resolve_model(where), where, tp)
    except ConfigError:
        return False
    return True


def _names(config: RunConfig) -> tuple[str, str | None]:
    """Returns the names of target and draft; AR needs no draft and drops a pair's."""
    if config.pair is not None and config.mode == "ar":
        return target_of(config.pair), None
    if config.pair is not None:
        return split_pair(config.pair)
    assert config.target is not None
    return config.target, config.draft


def _job(config: RunConfig, tp: int, where: str, draft_where: str | None, backend: str) -> Job:
    target = resolve_model(where)
    draft = None if draft_where is None else resolve_model(draft_where)
    # Prompt lookup never runs the draft model, so none is loaded.
    draft = LOOKUP if config.is_lookup else draft
    check_draft(config, target, draft)
    check_transformer(config, backend, draft)
    check_shards(config, target, where, tp)
    check_tokens(config, where, draft, draft_where)
    if draft is not None and draft.head is None and draft_where is not None:
        check_states(config, tp, draft, draft_where, where)
    lookahead = 0 if config.mode == "ar" else config.lookahead
    primary = resolve_acceptance(config.acceptance_text, lookahead)
    acceptance = {
        Source.CACHE: primary,
        Source.JIT: primary,
        Source.FAST: resolve_acceptance(config.acceptance_fast_text, lookahead),
    }
    hit_law = hit_law_of(config, lookahead)
    backup_lookahead = lookahead if config.backup_lookahead is None else config.backup_lookahead
    fan_outs = _fan_outs(config, acceptance, hit_law, backup_lookahead)
    if config.mode == "ssd":
        check_fan_out(config, fan_outs.widest, draft)
    job = Job(
        config=config,
        tp=tp,
        target=target,
        draft=None if config.mode == "ar" else draft,
        lookahead=lookahead,
        fan_out=fan_outs.after_hit,
        fan_out_miss=fan_outs.after_miss,
        acceptance=acceptance,
        hit_law=hit_law,
        backup_lookahead=backup_lookahead,
        target_where=where,
        draft_where=draft_where or "",
        prefill_rows=_PREFILL_ROWS.get(backend, _PREFILL_ROWS["cupy"]) if config.is_text else 0,
    )
    job.workload.check()
    return job


def _fan_outs(
    config: RunConfig, laws: Mapping[Source, AcceptanceLaw], hit_law: HitLaw, backup_lookahead: int
) -> FanOuts:
    """Returns the fan-out lists of an SSD job, and empty ones otherwise.

    SD grows no branches, but its fan_out flag is checked as well: raises ConfigError.
    """
    lookahead = config.lookahead
    text, _, text_after_miss = config.fan_out.partition("/")
    primary = laws[Source.CACHE].hazards
    if config.mode == "sd":
        _fan_out(text, lookahead, primary, hit_law)
    if config.mode != "ssd":
        return FanOuts()
    after_hit = _fan_out(text, lookahead, primary, hit_law)
    backup = laws[Source.FAST if config.backup == "fast" else Source.JIT].hazards
    cut = [rate * (n < backup_lookahead) for n, rate in enumerate(backup)]
    return FanOuts(after_hit, _fan_out(text_after_miss or text, backup_lookahead, cut, hit_law))


def _fan_out(text: str, served: int, hazards: Sequence[float], hit_law: HitLaw) -> tuple[int, ...]:
    """Returns the list F_0 … F_K after `served` drafted tokens.

    hazards: the K acceptance rates by place. Raises ConfigError if the list is impossible.
    """
    lookahead, minimum = len(hazards), 1 if hit_law.p_hit else 0
    powers = hit_law.powers(lookahead, served)
    fan_out = resolve_fan_out(text, lookahead, hazards, *powers, minimum=minimum)
    hit_law.check_fan_out(fan_out)
    return fan_out
