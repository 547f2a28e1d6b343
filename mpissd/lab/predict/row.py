"""Predicts a run's row, under the same keys, only from costs and draws.

An imposed p_hit hits as often with one candidate a row as with ten, so such a run grows fewer
branches than a measured hit model would need: imposed_hits is the price.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.common.real_pairs import DEFAULT, least_uniform
from mpissd.common.records import outcome_digest, percentiles_us
from mpissd.common.rounds import Source
from mpissd.engine.backend.profile import Profile
from mpissd.engine.job import Job
from mpissd.engine.spec.acceptance import named_hit_law
from mpissd.engine.spec.fanout import MAX_BRANCHES
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
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


def under_default_law(job: Job) -> Job | None:
    """Returns the job under the default hit model, with the least uniform fan-out hitting as often.

    Returns None if the job imposes no hits, or no fan-out reaches their rate.
    """
    if not job.fan_out or not job.hit_law.p_hit:
        return None
    law, hazards = named_hit_law("smollm2"), job.acceptance[Source.CACHE].hazards
    most = MAX_BRANCHES // len(job.fan_out)
    least = least_uniform(job.hit_law.p_hit, hazards, DEFAULT, most)
    if least is None:
        return None
    config = replace(job.config, p_hit=None, hit_law=None, fan_out=f"uniform:{least}")
    lists = (least,) * len(job.fan_out)
    return replace(job, config=config, hit_law=law, fan_out=lists, fan_out_miss=lists)


def imposed_hits(job: Job, device: DeviceCosts, host: HostCosts) -> dict[str, Any] | None:
    """Returns {hit_law, branch_budget, expected_tok_per_s} of that job; None without imposed hits.

    The last two are None if no fan-out hits as often. Forwards with more rows than were measured
    are extrapolated.
    """
    if not job.fan_out or not job.hit_law.p_hit:
        return None
    label, honest = named_hit_law("smollm2").label, under_default_law(job)
    if honest is None:
        return {"hit_law": label, "branch_budget": None, "expected_tok_per_s": None}
    rate = float(expected(honest, device, host).tok_per_s[0])
    budget = sum(honest.fan_out)
    return {"hit_law": label, "branch_budget": budget, "expected_tok_per_s": rate}


def price_of(price: Mapping[str, Any] | None, imposed_tok_per_s: float) -> str:
    """Formats the result of imposed_hits next to the measured rate; "" without imposed hits."""
    if price is None:
        return ""
    if price["branch_budget"] is None:
        return f"imposed: no fan-out of {price['hit_law']} hits as often"
    return (
        f"imposed: with the {price['branch_budget']} branches that {price['hit_law']} needs, "
        f"{price['expected_tok_per_s']:.1f} tok/s predicted, {imposed_tok_per_s:.1f} as run"
    )


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
