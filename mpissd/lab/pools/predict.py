"""Predicts the row of a run of several target groups, from durations and the run's own draws."""

from __future__ import annotations

from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.common.records import percentiles_us
from mpissd.engine.job import Job
from mpissd.lab.pools.durations import Pool
from mpissd.lab.pools.simulation import replay, simulate
from mpissd.lab.pools.theory import by_queueing
from mpissd.lab.predict.row import is_predictable

_ROUNDS = 8000  # for the simulated mean, of all targets together


def check_pool(job: Job) -> int:
    """Returns the rounds of a job of one group that can be replayed in a pool.

    Raises ConfigError for a job without a recurrence: real text, a limit of tokens, and several
    drafts.
    """
    rounds = job.config.max_rounds
    if not is_predictable(job) or job.config.drafts != 1 or rounds is None:
        raise ConfigError("predict with groups: allowed: imposed laws, one draft, and rounds")
    return rounds


def predict_pool(pool: Pool) -> dict[str, Any]:
    """Predicts a run of this pool under the keys of its row.

    Keys that a row has mean the same, by the run's own draws. expected_tok_per_s is the long-run
    mean under the imposed models, simulated; theory_tok_per_s the same by queueing theory. Raises
    ConfigError as check_pool does.
    """
    found, rounds = replay(pool, check_pool(pool.job))
    gpus = pool.targets * pool.job.tp + 1
    law = simulate(pool, max(100, _ROUNDS // pool.targets), pool.job.config.seed)
    return {
        "groups": pool.targets,
        "tok_per_s": found.tok_per_s,
        "tok_per_s_per_gpu": found.tok_per_s / gpus,
        "round_us": percentiles_us([s for each in rounds for s in each]),
        "draft_wait_us": {"mean": found.wait_s * 1e6, "p90": found.wait_p90_s * 1e6},
        "hit_rate": found.hit_rate if pool.job.fan_outs.branches else None,
        "pool": {"rows": found.rows, "seats": found.seats, "busy": found.busy},
        "expected_tok_per_s": law.tok_per_s,
        "theory_tok_per_s": by_queueing(pool).tok_per_s,
    }
