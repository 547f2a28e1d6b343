"""Predicts a job's means under the keys of a row."""

from __future__ import annotations

import math
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.engine.job import Job
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.grid import Grid
from mpissd.lab.predict.simulation import expected


def is_predictable(job: Job) -> bool:
    """Returns whether the imposed models give this job a mean.

    The job must have imposed tokens, and a draft that takes K steps over fan-out lists that are the
    same in every round.
    """
    has_steps = job.draft is None or job.draft.num_tokens == 1
    return job.workload.is_imposed and has_steps


def is_followable(job: Job) -> bool:
    """Returns whether the simulation can time this job's rounds from their own outcomes.

    Of text and of replays: acceptance and hits are a pair's own.
    """
    has_steps = job.draft is None or (job.draft.head is None and job.draft.num_tokens == 1)
    reports = job.workload.reports_outcomes and job.dynamic is None
    return is_predictable(job) or (reports and has_steps)


def predict_row(job: Job, device: DeviceCosts, host: HostCosts) -> dict[str, Any]:
    """Predicts the long-run means of this job's runs, from costs and its imposed models.

    Keys that a result row has mean the same here. The others are round_us.mean, exposed_us (the
    lead's mean wait for its speculation) and T_p. Raises ConfigError for a job without a mean.
    """
    if not is_predictable(job):
        raise ConfigError(
            "no prediction for what is sampled (markov), recorded (replay), or drafts several "
            "tokens a forward: allowed: gemm"
        )
    means, grid = expected(job, device, host), Grid.of([job], device, host)
    rate, target = float(means.tok_per_s[0]), float(grid.verify_s[0, -1, -1])
    known = math.isfinite(rate)  # not if rounds take no time
    draft = job.lookahead * float(grid.lanes_s[0, -1]) if job.lookahead else None
    growth = None
    if grid.grows[0]:
        growth = float(grid.keys_s[0, -1, -1] + job.lookahead * grid.step_s[0, -1, -1])
    return {
        "mode": job.config.mode,
        "expected_tok_per_s": rate if known else None,
        "tok_per_s_per_gpu": rate / job.world_size if known else None,
        "round_us": {"mean": float(means.round_s[0]) * 1e6},
        "acceptance_length": float(means.tokens[0]) / job.config.batch_size,
        "hit_rate": None if growth is None else float(means.hit_rate[0]),
        "t_target_s": target,
        "t_draft_s": draft,
        "t_growth_s": growth,
        "T_SD": draft / target if draft is not None and target else None,
        "T_p": growth / target if growth is not None and target else None,
        "exposed_us": float(means.wait_s[0]) * 1e6,
    }
