"""Predicts a replay: the outcomes of its recording, with the durations of forwards and host.

A recording's decisions do not depend on time. So the job's own loops decide the outcomes in one
process, over a device that takes no time, and the recurrence times each round.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.records import is_first_round, outcome_digest
from mpissd.engine.decode.in_process import Decoder
from mpissd.engine.job import Job
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.simulation import follow


def predict_replay(job: Job, device: DeviceCosts, host: HostCosts) -> dict[str, Any]:
    """Predicts the result row of a run of this replay."""
    config = job.config
    sequences, num_tokens = outcomes(job)
    followed = follow(job, device, host, sequences)
    wall = float(followed.round_s.sum())
    rate = num_tokens / wall if wall else None
    looked_up = sequences[~is_first_round(sequences)]
    return {
        "mode": config.mode,
        "num_rounds": followed.num_rounds,
        "num_tokens": num_tokens,
        "wall_s": wall,
        "tok_per_s": rate,
        "tok_per_s_per_gpu": None if rate is None else rate / job.world_size,
        "round_us": followed.round_us(),
        "acceptance_length": float(sequences[:, 3].mean() + 1),
        "hit_rate": float((looked_up[:, 6] > 0).mean()) if job.fan_out and len(looked_up) else None,
        **followed.times,
        "outcome_digest": outcome_digest(sequences),
    }


def outcomes(job: Job) -> tuple[NDArray[np.int64], int]:
    """Decodes a replay on a device of zero time; returns RoundRecords.sequences and the number of
    tokens that count."""
    config = replace(job.config, backend="emulated", device="null", draft_device=None)
    with Decoder(config) as decoder:
        limit, done = config.max_rounds, 0
        while not decoder.is_over and (limit is None or done < limit):
            decoder.step()
            done += 1
        tokens = decoder.records.tokens()
        limit = config.token_limit
        return decoder.records.sequences(), sum(len(found[:limit]) for found in tokens.values())
