"""Predicts a run's row, under the same keys, only from costs and draws."""

from __future__ import annotations

import math
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.common.records import outcome_digest, percentiles_us
from mpissd.engine.backend.profile import Profile
from mpissd.engine.job import Job
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.imposed import imposed_hits
from mpissd.lab.predict.pool import Pool
from mpissd.lab.predict.pool import replay as replay_pool
from mpissd.lab.predict.pool import simulate as simulate_pool
from mpissd.lab.predict.simulation import expected, replay, sampled

_CHAINS = 64
_LAW_ROUNDS = 32
_POOL_ROUNDS = 8000  # of the simulated mean, of all targets together


def is_predictable(job: Job) -> bool:
    """Returns whether the recurrence can predict this job.

    The job must have imposed tokens, and a draft that takes K steps over fan-out lists that are the
    same in every round.
    """
    return job.workload.is_imposed and _is_fixed(job)


def is_followable(job: Job) -> bool:
    """Returns whether the recurrence can time this job's rounds from their own outcomes.

    Of text and of replays: acceptance and hits are a pair's own.
    """
    has_steps = job.draft is None or job.draft.head is None  # looking up has no forwards
    return job.workload.reports_outcomes and has_steps and _is_fixed(job)


def _is_fixed(job: Job) -> bool:
    return job.draft is None or job.draft.num_tokens == 1


def predict_row(
    job: Job,
    device: DeviceCosts,
    host: HostCosts,
    num_rounds: int | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """Predicts the row of a run of this job, from costs and draws.

    num_rounds and seed default to the job's own. Keys that a result row has mean the same here and
    come from the run's own draws. The other keys are exposed_us (mean draft wait), T_p,
    expected_tok_per_s (the long-run mean under the imposed models), sampling_error (tok_per_s /
    expected_tok_per_s − 1: how lucky these draws are), sampling_sd (the standard deviation of that
    error over runs of as many rounds) and imposed_hits (predict.imposed).

    Measured / tok_per_s − 1 is the error of the replay; predict/accuracy gives the error of a
    prediction without these draws. Raises ConfigError for a job that cannot be predicted.
    """
    if not is_predictable(job):
        raise ConfigError(
            "no prediction for what is sampled (markov), recorded (replay), "
            "or drafts several tokens a forward: allowed: gemm"
        )
    replayed = replay(job, device, host, num_rounds, seed)
    mean = float(expected(job, device, host).tok_per_s[0])
    law = sampled(job, device, host, chains=_CHAINS, num_rounds=_LAW_ROUNDS)
    rate = replayed.tok_per_s if math.isfinite(mean) else None  # None if rounds take no time
    return {
        "mode": job.config.mode,
        "num_rounds": replayed.num_rounds,
        "num_tokens": int(replayed.tokens.sum()),
        "wall_s": float(replayed.round_s.sum()),
        "tok_per_s": rate,
        "tok_per_s_per_gpu": None if rate is None else rate / job.world_size,
        "round_us": replayed.round_us(),
        "acceptance_length": float(replayed.accepted[replayed.live].mean() + 1),
        "hit_rate": replayed.hit_rate,
        **replayed.times,
        "outcome_digest": outcome_digest(replayed.sequences()),
        "expected_tok_per_s": None if rate is None else mean,
        "sampling_error": None if rate is None else rate / mean - 1,
        "sampling_sd": None if rate is None else law.tok_per_s_noise(replayed.num_rounds) / mean,
        "imposed_hits": None if rate is None else imposed_hits(job, device, host),
    }


def predict_pool(job: Job, targets: int, profile: Profile, host: HostCosts) -> dict[str, Any]:
    """Predicts a run of G groups that share a draft under the keys of its row, by its own draws.

    job: of one group. expected_tok_per_s is the long-run mean under the imposed models. Raises
    ConfigError for a job whose rounds cannot be replayed: text, a limit of tokens, or no draft.
    """
    rounds = job.config.max_rounds
    if not is_predictable(job) or job.config.drafts != 1 or rounds is None:
        raise ConfigError(f"groups={targets}: allowed: imposed laws, a draft rank, and rounds")
    pool = Pool.of(job, targets, profile, host)
    replayed = replay_pool(pool, rounds)
    mean = simulate_pool(pool, max(100, _POOL_ROUNDS // targets), job.config.seed)
    waits = replayed.waits
    return {
        "groups": targets,
        "tok_per_s": replayed.tok_per_s,
        "tok_per_s_per_gpu": replayed.tok_per_s / (targets * job.tp + 1),
        "round_us": percentiles_us([s for each in replayed.rounds_s for s in each]),
        "draft_wait_us": {"mean": replayed.wait_s * 1e6, "p90": waits[int(0.9 * len(waits))] * 1e6},
        "hit_rate": replayed.hit_rate if job.fan_outs.branches else None,
        "pool": {"rows": replayed.rows, "seats": replayed.seats, "busy": replayed.busy},
        "expected_tok_per_s": mean.tok_per_s,
    }
