"""Simulates one round after another, exactly as the loops of `decode` run [THEORY, "one round"].

`simulate` advances many independent chains of a job at once. One chain with ReplayDraws predicts a
run's own outcomes; many with LawDraws give the mean and how far a run may stray from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Source
from mpissd.engine.job import Job
from mpissd.lab.predict.costs import DeviceCosts, Floats, HostCosts
from mpissd.lab.predict.draws import Draws, LawDraws, RecordedDraws, ReplayDraws
from mpissd.lab.predict.prediction import Prediction, Trail
from mpissd.lab.predict.timing import Ints, Timing, answer_s, found_after_s, steps_seen

Mask = NDArray[np.bool_]


def replay(
    job: Job,
    device: DeviceCosts,
    host: HostCosts,
    num_rounds: int | None = None,
    seed: int | None = None,
) -> Prediction:
    """Predicts the run itself: the same seed gives the same k, t* and hits."""
    limit = num_rounds or job.config.max_rounds or job.config.num_tokens
    assert limit is not None, "neither rounds nor tokens end this run"
    draws = ReplayDraws(job, limit, seed)
    return simulate(job, device, host, draws, limit, num_tokens=job.config.num_tokens)


def follow(
    job: Job,
    device: DeviceCosts,
    host: HostCosts,
    sequences: NDArray[np.int64],
    *,
    apart: bool = False,
) -> Prediction:
    """Predicts how long a run's rounds took, given their outcomes (RoundRecords.sequences).

    apart: as RecordedDraws takes it.
    """
    draws = RecordedDraws(job, sequences, apart=apart)
    return simulate(job, device, host, draws, draws.num_rounds)


def expect_by_law(
    job: Job,
    device: DeviceCosts,
    host: HostCosts,
    *,
    chains: int = 256,
    num_rounds: int = 64,
    seed: int = 0,
) -> Prediction:
    """Estimates the stationary mean and its standard error, with num_rounds fresh rounds a
    chain."""
    draws = LawDraws(job, chains, seed)
    return simulate(job, device, host, draws, num_rounds, burn_in=8)


def simulate(
    job: Job,
    device: DeviceCosts,
    host: HostCosts,
    draws: Draws,
    num_rounds: int,
    *,
    burn_in: int = 0,
    num_tokens: int | None = None,
) -> Prediction:
    """Runs the recurrence for every chain of `draws`.

    burn_in: first rounds that are not reported. num_tokens: tokens after which a sequence ends.
    """
    timing = Timing.of(job, device, host)
    state = _State(job, timing, draws, num_tokens)
    trail = Trail()
    for number in range(burn_in + num_rounds):
        if number == burn_in:
            trail = Trail()
        state.live = draws.live(number, state.live)
        state.round(trail)
        if not state.live.any():
            break
    return Prediction.of(job, timing, trail)


@dataclass
class _Answer:
    """The answer to an outcome, SPECULATION r, as the lead gets it."""

    seen: Floats  # [chains], the time at which the lead has the answer
    num_draft: Ints  # [chains, b]
    steps: Ints  # [chains], growth steps taken when the outcome was seen


class _State:
    """Clocks, lengths and outcomes of all chains between two rounds."""

    def __init__(self, job: Job, timing: Timing, draws: Draws, num_tokens: int | None) -> None:
        self._job, self._timing, self._draws = job, timing, draws
        self._num_tokens = num_tokens
        host = timing.host
        shape = draws.chains, job.config.batch_size
        self.live: Mask = np.ones(shape, np.bool_)
        self._fresh = True  # True before the first outcome: the first round is a forced miss.
        self._hit: Mask = np.zeros(shape, np.bool_)  # Whether outcome r-1 is a key of the cache.
        self._length = np.ones(shape, np.int64)
        self._emitted = np.zeros(shape, np.int64)
        self._clock = np.zeros(shape[0])  # The time at which the lead has outcome r-1, by chain.
        # The run's warm-up has run full rounds on throw-away sequences before the first round.
        self._sent = np.full(shape[0], -host.lead_s - host.link - timing.verify_s[-1])
        self._growing = np.full(shape[0], shape[1])  # Sequences that grow since `_sent`.
        nothing = (0,) * (job.lookahead + 1)
        fan_outs = job.fan_out_miss or nothing, job.fan_out or nothing
        self._lists = np.array(fan_outs)  # the fan-out lists after a miss, and after a hit
        # The lanes that those sequences grow.
        self._lanes = np.full(shape[0], shape[1] * sum(fan_outs[1]))
        backup = Source[job.config.backup.upper()]
        self._backup_steps = job.backup_lookahead if backup == Source.JIT else 0
        self._hazards = np.array(
            [job.acceptance[backup].hazards, job.acceptance[Source.CACHE].hazards]
        )

    def round(self, trail: Trail) -> None:
        """Simulates OUTCOME r-1 → SPECULATION r → verification → outcome r."""
        hit = self._hit & self.live
        answer = self._answer(hit)
        rows = np.where(self.live, answer.num_draft + 1, 0).sum(axis=1)
        over = answer.seen + self._timing.verify_s[rows] + self._timing.host.lead_s
        accepted = self._accepted(hit, answer.num_draft)
        bonus = self._draws.bonus(self._length, accepted)
        trail.add(
            live=self.live,
            counted=self.live & (not self._fresh),
            hit=hit,
            num_draft=answer.num_draft,
            accepted=accepted,
            bonus=bonus,
            steps=answer.steps,
            wait_s=answer.seen - self._clock - self._timing.host.ask_s,
            round_s=np.where(self.live.any(axis=1), over - self._clock, 0.0),
            tokens=self._commit(accepted, accepted == answer.num_draft),
        )
        self._clock = over

    def _answer(self, hit: Mask) -> _Answer:
        """Returns the draft's answer and its time, for a draft on any rank."""
        job, ready = self._job, self._clock + self._timing.host.ask_s
        steps = np.zeros(len(ready), np.int64)
        if job.lookahead == 0:
            return _Answer(ready, np.zeros_like(self._length), steps)
        if job.inline:
            seen = ready + self._drafting_s(hit, steps) + self._timing.host.draft_record
            return _Answer(seen, self._num_draft(steps), steps)
        asked = self._clock + self._timing.host.lead_send + self._timing.host.link
        noticed, steps = self._poll(asked)
        self._sent = noticed + self._drafting_s(hit, steps)
        self._growing = self.live.sum(axis=1)
        branches = self._lists.sum(axis=1)
        won = hit.sum(axis=1)
        self._lanes = won * branches[1] + (self._growing - won) * branches[0]
        arrived = self._sent + self._timing.host.link
        arrived += found_after_s(arrived - ready, self._timing.host)
        seen = np.maximum(ready, arrived)
        return _Answer(seen, self._num_draft(steps), steps)

    def _poll(self, asked: Floats) -> tuple[Floats, Ints]:
        """Returns (when the draft sees the outcome, growth steps taken by then), each [chains]."""
        timing, steps = self._timing, np.zeros(len(asked), np.int64)
        free = self._sent
        if self._job.fan_outs.branches:
            free = free + timing.glue_s[self._growing] + timing.keys_s[self._lanes]
            step_s = timing.growth_s[self._lanes]
            steps = steps_seen(asked - free, step_s, timing.lookahead)
            free = free + steps * step_s
        free = free + timing.host.draft_record
        return np.maximum(free, asked + found_after_s(asked - free, timing.host)), steps

    def _drafting_s(self, hit: Mask, steps: Ints) -> Floats:
        """Returns seconds from the outcome seen to SPECULATION sent (inline: handed over),
        [chains]."""
        serve = self._job.config.on_late == "serve"
        left = np.zeros_like(steps) if serve else self._job.lookahead - steps
        hits = hit.sum(axis=1)
        misses = self.live.sum(axis=1) - hits
        backup = np.full_like(steps, self._backup_steps)
        drafting = answer_s(self._timing.lanes_s, hits, left, misses, backup)
        host = self._timing.host
        return drafting + (host.draft_s if self._job.inline else host.reply_s)

    def _num_draft(self, steps: Ints) -> Ints:
        """Returns k' of every sequence: K for hits (the tokens grown if served late), K_b for
        misses."""
        job = self._job
        served = steps if job.config.on_late == "serve" else np.full_like(steps, job.lookahead)
        return np.where(self._hit, served[:, None], job.backup_lookahead)

    def _accepted(self, hit: Mask, num_draft: Ints) -> Ints:
        """Returns k: the leading i ≤ k' with U(accept) < a_i, by the law of what drafted them."""
        if self._job.lookahead == 0:
            return np.zeros_like(self._length)
        good = self._draws.coins(self._length) < self._hazards[hit.astype(np.int64)]
        good &= np.arange(self._job.lookahead) < num_draft[..., None]
        return np.asarray(np.logical_and.accumulate(good, axis=2).sum(axis=2), np.int64)

    def _commit(self, accepted: Ints, end: Mask) -> Ints:
        """Advances the sequences; returns the tokens [chains] that this round adds to a result.

        end: where all served tokens were accepted.
        """
        limit = self._lists[self._hit.astype(np.int64), accepted]
        self._hit = self._draws.hits(self._length, accepted, limit, end)
        self._fresh = False
        count = np.where(self.live, accepted + 1, 0)
        self._length = self._length + count
        if self._num_tokens is not None:
            count = np.minimum(count, self._num_tokens - self._emitted)
            self._emitted += count
            self.live = self._emitted < self._num_tokens
        return np.asarray(count.sum(axis=1), np.int64)
