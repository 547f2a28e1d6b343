"""A pool's means by queueing theory (queueing.py), from its durations and imposed models."""

from __future__ import annotations

from dataclasses import dataclass

from mpissd.lab.pools.durations import Pool
from mpissd.lab.pools.queueing import Shared, SharedDraft, shared_draft
from mpissd.lab.predict.simulation import Expected, expected


@dataclass(frozen=True)
class Sized:
    """Means of a pool; rates are of all G targets together. shared: means of one target."""

    tok_per_s: float
    round_s: float
    hit_rate: float
    wait_s: float
    shared: Shared


def by_queueing(pool: Pool) -> Sized:
    """Returns a pool's means: one target's tokens and forwards, and the wait of a closed network.

    The hit rate and the tokens of a round equal those with a draft each, since waiting changes
    neither; they come from lab.predict.simulation.
    """
    alone = expected(pool.job, pool.device, pool.host)
    host, batch = pool.host, pool.batch
    hit_rate = float(alone.hit_rate[0])
    won = hit_rate * batch
    rows = won * (pool.job.lookahead + 1) + (batch - won) * (pool.job.backup_lookahead + 1)
    verify_s = float(pool.verify_s[round(rows)])
    window_s = 2 * host.link + host.lead_s + host.lead_send + verify_s
    shared = shared_draft(_shared(pool, alone, window_s))
    # The lead's own work between outcome and answer hides a shorter wait.
    wait_s = max(0.0, shared.wait_s + host.reply_s + 2 * host.link + host.lead_send - host.ask_s)
    round_s = host.ask_s + wait_s + host.lead_s + verify_s
    rate = pool.targets * float(alone.tokens[0]) / round_s
    return Sized(rate, round_s, hit_rate, wait_s, shared)


def _shared(pool: Pool, alone: Expected, window_s: float) -> SharedDraft:
    job, hit_rate = pool.job, float(alone.hit_rate[0])
    return SharedDraft(
        window_s=window_s,
        lookahead=job.lookahead,
        all_hit=hit_rate**pool.batch,
        none_hit=(1 - hit_rate) ** pool.batch,
        backup=job.backup_lookahead if job.config.backup == "jit" else 0,
        grows=job.fan_outs.branches > 0,
        targets=pool.targets,
        frames=lambda ahead, answer: _frames(pool, hit_rate, ahead, answer),
    )


def _frames(pool: Pool, hit_rate: float, ahead: float, answer: float) -> tuple[float, ...]:
    """Returns f(1) … f(G): a forward of the mean rows of n turns, and the host work of each.

    ahead, answer: turns of a round's glue and growth, and of its answer.
    """
    job, host, batch = pool.job, pool.host, pool.batch
    miss, hit = sum(job.fan_out_miss or ()), sum(job.fan_out or ())
    lanes = batch * (hit_rate * hit + (1 - hit_rate) * miss)
    glue, turns = min(1.0, ahead), max(ahead + answer, 1e-9)
    rows = glue * job.verify_rows + (ahead - glue) * lanes + answer * batch * (1 - hit_rate / 2)
    work_s = host.reply_s + host.draft_record + glue * pool.keys_s(round(lanes))
    seated = range(1, pool.targets + 1)
    return tuple(
        _forward_s(pool, max(1, round(n * rows / turns)), 1 - (1 - glue / turns) ** n)
        + host.step
        + n * work_s / turns
        for n in seated
    )


def _forward_s(pool: Pool, rows: int, glues: float) -> float:
    """Returns the seconds of a forward; glues: P(it has some group's glue in it)."""
    return glues * pool.glue_s(rows) + (1 - glues) * pool.step_s(rows)
