"""Measures inline SD of whole models: the device's idle time, and tokens against the parts' floors.

    python -m mpi4py -m mpissd.lab.limits.whole_rounds OUT RECORDING [ROUNDS [K]]

8B/1B with random weights at a context of 512; a recording of a real pair decides the outcomes. The
rounds are decided on the device (chained), and, for comparison, by the host. Rows go to
OUT/T1.jsonl.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from mpissd.common.config import RunConfig, parse_flags
from mpissd.common.records import is_stable
from mpissd.engine.decode.draft import Drafter
from mpissd.engine.decode.sequences import Sequences
from mpissd.engine.decode.target import TargetLoop
from mpissd.engine.model.transformer.shard import TransformerShard
from mpissd.engine.session.rank import Rank
from mpissd.engine.session.session import opened
from mpissd.lab.limits.bar import RUNS
from mpissd.lab.limits.bars import add
from mpissd.lab.limits.table import line_of

_T_DRAFT = Drafter.COLUMNS.index("t_draft_s")
_READ_BYTES, _WARM_UP, _CONTEXT, _STABLE = 4 * 10**9, 40, 512, 0.02


def config_of(recording: str, lookahead: int) -> RunConfig:
    """Returns the configuration of the rounds."""
    told: dict[str, object] = {
        "mode": "sd", "num_drafts": 0, "pair": "8b/1b", "forward": "transformer",
        "workload": "replay", "recording": recording, "context": _CONTEXT,
        "lookahead": lookahead, "backend": "cupy", "progress": "off",
    }  # fmt: skip
    return parse_flags({name: str(value) for name, value in told.items()})


class Rounds:
    """Drives one pass, and keeps what its rounds took."""

    def __init__(self, rank: Rank, count: int) -> None:
        self._rank, self._count = rank, count
        self.seconds: list[float] = []
        self.target_s: list[float] = []
        self.tokens = self.kv_tokens = 0

    def drive(self, loop: TargetLoop) -> None:
        """Runs the warm-up and the rounds, over the recording's sequences in turn."""
        sequences = self._begun(loop)
        for number in range(_WARM_UP + self._count):
            if not sequences.are_live:
                sequences = self._begun(loop)
            start = perf_counter()
            result = loop.step()
            sequences.take(result, loop)
            if number >= _WARM_UP:
                self.seconds.append(perf_counter() - start)
                self.target_s.append(result.t_target_s)
                self.tokens += int(result.outcome.num_accepted.sum()) + len(result.outcome.rows)
                self.kv_tokens += _CONTEXT + int(loop.batch.lengths.sum())

    def _begun(self, loop: TargetLoop) -> Sequences:
        sequences = Sequences(self._rank.session.workload)
        loop.admit(sequences.first())
        return sequences


def measured(
    rank: Rank, rounds: Rounds, read_rate: float, draft_s: float, *, chained: bool
) -> dict[str, Any]:
    """Returns the values of a row; draft_s: device time of a round's draft forwards."""
    job, count = rank.session.job, len(rounds.seconds)
    total_s, context = sum(rounds.seconds), rounds.kv_tokens / count
    floor_s = floor(job.target_shard, job.options, context, read_rate)
    floor_s += job.lookahead * floor(job.draft_shard, job.draft_options, context, read_rate)
    target_s, round_s = float(np.median(rounds.target_s)), float(np.median(rounds.seconds))
    assert rank.chained_target is not None
    idle = np.array(rank.chained_target.idle_s)
    if not chained:  # the draft's forwards take what they took in the passes before
        idle = np.array(rounds.seconds) - rounds.target_s - draft_s
    return {
        "model": job.target.name, "draft": job.draft and job.draft.name, "chained": chained,
        "lookahead": job.lookahead, "num_rounds": count, "tok_per_s": rounds.tokens / total_s,
        "acceptance_length": rounds.tokens / count, "round_p50_s": round_s,
        "t_target_s": target_s, "t_draft_s": draft_s, "num_idle": len(idle),
        "idle_p50_s": float(np.median(idle)), "idle_p99_s": float(np.percentile(idle, 99)),
        "floors_s": floor_s, "of_floors": floor_s * count / total_s,
        "stable": is_stable(rounds.target_s, _STABLE), "kernel": rank.kernel,
    }  # fmt: skip


def floor(shard: Any, options: Any, context: float, read_rate: float) -> float:
    """Returns the seconds in which a forward's weights, LM head and keys and values are read."""
    assert isinstance(shard, TransformerShard)
    return (2 * shard.num_params(options) + shard.kv_bytes(int(context), 1)) / read_rate


def run(out: Path, recording: str, count: int, lookahead: int) -> None:
    """Measures RUNS passes of chained rounds, and one whose rounds the host decides."""
    with opened(config_of(recording, lookahead)) as session:
        rank = Rank(session)
        rate = float(session.backend.read_bandwidth(_READ_BYTES) or 0)
        for chained in (*(True,) * RUNS, False):
            forwards, rank.chained = rank.chained, rank.chained if chained else None
            assert rank.draft is not None
            rounds, drafter = Rounds(rank, count), rank.drafter(rank.draft)
            rank.run_pass(rank.target, drafter, rounds.drive)
            if chained:  # the host alone knows of a round that it decides
                taken = drafter.table(_WARM_UP, _WARM_UP + count)[:, _T_DRAFT]
                draft_s = float(np.nanmedian(taken))
            values = measured(rank, rounds, rate, draft_s, chained=chained)
            rank.chained = forwards
            row = {"what": "inline", "tp": 1, "device": session.backend.info.name, **values}
            add(out, [row])
            print(line_of(row), flush=True)
        rank.close()


def main(arguments: Sequence[str]) -> int:
    """Measures and returns the exit code."""
    out, recording, *rest = arguments
    count, lookahead = (*rest, *("400", "4")[len(rest) :])[:2]
    Path(out).mkdir(parents=True, exist_ok=True)
    run(Path(out), recording, int(count), int(lookahead))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
