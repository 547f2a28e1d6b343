"""The recurrence's expectation without sampling, for many configurations at once.

The rounds form a renewal process whose state is the row count of the verification: n of b sequences
verified m cached tokens each, the others K_b tokens of the backup. That sets how long the draft may
grow, hence the steps j taken when the outcome is seen, hence the next answer:

    P(n | m)   = Binomial(b, h_m), h_m the mean hit probability of the rounds that led to m
    j(n, m)    = steps grown during the verification of n(m+1) + (b−n)(K_b+1) rows
    tok/s      = E[tokens] / E[round]                    (renewal reward)

m is what is served: j with on_late=serve, K with finish (m then only labels rounds). The result is
exact for b = 1. For b > 1 the one approximation is that hits given m are binomial: sequences that
hit in the last round and sequences that missed have different chances, of which h_m is the mean.
How late an outcome is seen enters as a mean where something depends on it (whether the lead naps).
With T_p ≤ r and no host cost it is THEORY's closed form.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Source
from mpissd.engine.job import Job, buckets
from mpissd.lab.predict.costs import DeviceCosts, Floats, HostCosts
from mpissd.lab.predict.stationary import State, hit_counts, onto, stationary
from mpissd.lab.predict.timing import Ints, answer_s, found_after_s, in_buckets, steps_seen


@dataclass(frozen=True)
class Cells:
    """G configurations with one draft model and equal K ≥ 1, b and place of the draft.

    branches: ΣF, 0 in SD. p_hits: P(hit | k accepted) if not all, or all, served tokens were
    accepted. hazards: of cached and JIT tokens. *_miss: after a trunk that a backup drafted.
    """

    lookahead: int
    batch_size: int
    inline: bool
    hazards: Floats  # [G, K]
    hazards_fast: Floats  # [G, K]
    p_hits: Floats  # [G, 2, K+1]
    p_hits_miss: Floats  # [G, 2, K+1]
    branches: Ints  # [G]
    branches_miss: Ints  # [G]
    candidates: Ints  # [G], ids that a glue reads out of each row
    backup_lookahead: Ints  # [G]
    fast: NDArray[np.bool_]  # [G]
    serve: NDArray[np.bool_]  # [G]

    def __len__(self) -> int:
        return len(self.branches)

    @property
    def draft_rows(self) -> Ints:
        """Rows of the largest draft forward, [G]: the glue's, or those of all branches."""
        lanes = np.maximum(self.branches, self.branches_miss)
        return np.asarray(self.batch_size * np.maximum(self.lookahead + 1, lanes), np.int64)

    @classmethod
    def of(cls, job: Job) -> Cells:
        """Makes the one configuration of a job that drafts."""
        nothing = (0,) * (job.lookahead + 1)
        chance = job.hit_law.hit_probabilities(job.fan_outs.widest)
        fan_out, fan_out_miss = job.fan_out or nothing, job.fan_out_miss or nothing
        return cls(
            lookahead=job.lookahead,
            batch_size=job.config.batch_size,
            inline=job.inline,
            hazards=np.array([job.acceptance[Source.CACHE].hazards]),
            hazards_fast=np.array([job.acceptance[Source.FAST].hazards]),
            p_hits=chance[None, :, fan_out],
            p_hits_miss=chance[None, :, fan_out_miss],
            branches=np.array([sum(fan_out)]),
            branches_miss=np.array([sum(fan_out_miss)]),
            candidates=np.array([job.widest + 1]),
            backup_lookahead=np.array([job.backup_lookahead]),
            fast=np.array([job.config.backup == "fast"]),
            serve=np.array([job.config.on_late == "serve"]),
        )

    def take(self, chosen: Ints) -> Cells:
        """Returns the configurations with indices `chosen`, in that order."""
        kept = {"lookahead", "batch_size", "inline"}
        arrays = {f.name: getattr(self, f.name)[chosen] for f in fields(self) if f.name not in kept}
        return Cells(self.lookahead, self.batch_size, self.inline, **arrays)


@dataclass(frozen=True)
class Expected:
    """Stationary means, [G]; tokens and times are of all b sequences together."""

    tok_per_s: Floats
    round_s: Floats
    tokens: Floats  # In a round.
    hit_rate: Floats
    wait_s: Floats  # The lead's wait for its speculation.


def expected(job: Job, device: DeviceCosts, host: HostCosts, late_s: float = 0.0) -> Expected:
    """Computes the expectation of one job, AR included ([1]); late_s: as in `expect`."""
    if job.lookahead == 0:
        return expect_ar(job.config.batch_size, device, host)
    return expect(Cells.of(job), device, host, late_s)


def expect_ar(batch: int, device: DeviceCosts, host: HostCosts) -> Expected:
    """Computes AR's round of b rows, [1]; nothing in it is random."""
    round_s = host.ask_s + host.lead_s + device.verify.in_job(batch)([batch])
    tokens, none = np.full(1, float(batch)), np.zeros(1)
    return Expected(_rate(tokens, round_s), round_s, tokens, none, none)


def expect(cells: Cells, device: DeviceCosts, host: HostCosts, late_s: float = 0.0) -> Expected:
    """Computes the expectation of every cell, with the kernels that its own row counts select.

    late_s: seconds by which drafts saw the outcome before the first round too late. Where it
    matters there are two stationary rounds: a lead that naps once for a late speculation asks so
    much later that the draft has begun a further step, is late again, and the lead naps in every
    round. Chance at the start decides between them; 0 gives the shorter round.
    """
    widths = cells.batch_size * (cells.lookahead + 1)
    if device.draft is None or device.draft.few is None:
        return _expect(cells, replace(device, verify=device.verify.in_job(widths)), host, late_s)
    is_few = cells.draft_rows <= device.draft.few_rows
    columns = {f.name: np.zeros(len(cells)) for f in fields(Expected)}
    for chosen in (np.flatnonzero(is_few), np.flatnonzero(~is_few)):
        if len(chosen):
            part = cells.take(chosen)
            known = device.in_job(widths, int(part.draft_rows.max()))
            for name, values in vars(_expect(part, known, host, late_s)).items():
                columns[name][chosen] = values
    return Expected(**columns)


def _expect(cells: Cells, device: DeviceCosts, host: HostCosts, late_s: float) -> Expected:
    """Computes the expectation of cells whose forwards use one kernel."""
    model = _Model(cells, device, host, late_s)
    batch, hits = cells.batch_size, model.hits
    chance = hits * model.p_hit[:, :, None] + (batch - hits) * model.p_hit_miss[:, None, None]
    return _means(model, stationary(int(hits[-1]), chance / batch, model.next))


class _Model:
    """Tables of a round by (served m, hits n): [G, D, N], with D distinct step counts j.

    In each cell j is between `first` and `first` + D − 1; index d stands for j = first + d.
    """

    def __init__(self, cells: Cells, device: DeviceCosts, host: HostCosts, late_s: float) -> None:
        self.cells, self.host, self._start_s = cells, host, late_s
        lookahead, batch = cells.lookahead, cells.batch_size
        full, can_hit = batch * (lookahead + 1), bool(cells.branches_miss.any())
        self.hits = hit_counts(batch if can_hit else 0)
        held = buckets(batch, full)
        rows = in_buckets(held, np.arange(full + 1))
        self.verify_s = device.verify_s(rows)
        self.lanes_s = device.draft_s(in_buckets(held, np.arange(batch + 1))) + host.step
        self._device, glue_s = device, device.glue_s(full, cells.candidates)
        self._keys_s = np.broadcast_to(glue_s, cells.candidates.shape) + host.glue + host.keys
        self.p_hit_cached, self.tokens_cached = _laws(cells.hazards, cells.p_hits)
        backup = np.where(cells.fast[:, None], cells.hazards_fast, cells.hazards)
        p_hit, tokens = _laws(backup, cells.p_hits_miss)
        self.p_hit_miss = _at(p_hit, cells.backup_lookahead)
        self.tokens_miss = _at(tokens, cells.backup_lookahead)
        self._span()
        self._follow()

    def _span(self) -> None:
        """Finds the step counts that can occur, so that only those are computed.

        More rows never take less time, so m between two bounds leads to a j between their steps.
        The rows are most or fewest if all sequences hit or none does.
        """
        lookahead, serve = self.cells.lookahead, self.cells.serve
        ends, hits = np.array([[0, lookahead]]), np.array([0, self.cells.batch_size])
        bounds = np.where(serve[:, None], ends, lookahead)  # [G, 2], bounds of the tokens served
        longest = self.host.nap + self.host.ask_s
        for _ in range(3):
            least = self._steps(bounds, hits, np.zeros(1))[1].min(axis=(1, 2))
            most = self._steps(bounds, hits, np.full(1, longest))[1].max(axis=(1, 2))
            bounds = np.where(serve[:, None], np.stack([least, most], axis=1), lookahead)
        self.first = least
        self.depth = int((most - least).max()) + 1
        self.grown = np.minimum(least[:, None] + np.arange(self.depth), lookahead)
        self.served = np.where(serve[:, None], self.grown, lookahead)  # [G, D]
        self.p_hit = np.take_along_axis(self.p_hit_cached, self.served, axis=1)  # [G, D]
        self.tokens = np.take_along_axis(self.tokens_cached, self.served, axis=1)

    def _follow(self) -> None:
        """Computes what follows from each (m, n): verification, steps at the outcome, its lateness.

        The lead's delay in finding a speculation depends on how late the previous outcome was seen;
        the mean over the (m, n) that lead there is used for it.
        """
        cells, hits = self.cells, self.hits
        left = np.where(cells.serve[:, None], 0, cells.lookahead - self.grown)[:, :, None]
        backup = np.where(cells.fast, 0, cells.backup_lookahead)[:, None, None]
        self.drafting = answer_s(self.lanes_s, hits, left, cells.batch_size - hits, backup)
        late, slack = np.full(self.served.shape, self._start_s), np.full(1, np.nan)
        for _ in range(2):
            arrived, answered = self.answered(late)
            before, slack = slack, answered - arrived
            if np.array_equal(before, slack):
                break
            self.verified_s, steps, self.late_s = self._steps(self.served, hits, slack)
            self.next = np.clip(steps - self.first[:, None, None], 0, self.depth - 1)
            ways = np.maximum(onto(self.next, np.ones(self.next.shape)), 1)
            late = onto(self.next, self.late_s) / ways

    def answered(self, late: Floats) -> tuple[Floats, Floats]:
        """Returns when a speculation arrives and when the lead has it, seconds from outcome r−1,
        [G, D, n].

        late: how late the outcome was seen, [G, D].
        """
        host = self.host
        if self.cells.inline:
            there = host.ask_s + self.drafting + host.draft_s + host.draft_record
            return there, there
        travel = host.lead_send + 2 * host.link + host.reply_s
        arrived = travel + late[:, :, None] + self.drafting
        answered_at = arrived + found_after_s(arrived - host.ask_s, host)
        return arrived, np.maximum(host.ask_s, answered_at)

    def _steps(self, served: Ints, hits: Ints, slack: Floats) -> tuple[Floats, Ints, Floats]:
        """Returns (verification, steps when its outcome is seen, how late it is seen), [G, D, n].

        slack: seconds from the speculation's arrival until the lead has it.
        """
        cells, host = self.cells, self.host
        misses = cells.batch_size - hits
        drafted = cells.backup_lookahead[:, None, None]
        rows = hits * (served[:, :, None] + 1) + misses * (drafted + 1)
        verified = self.verify_s[rows]
        asked = 2 * host.link + slack + host.lead_s + host.lead_send + verified
        lanes = hits * cells.branches[:, None] + misses * cells.branches_miss[:, None]
        lanes = lanes[:, None, :]  # [G, 1, n]
        grows = lanes > 0
        step_s = self._device.draft_s(np.maximum(lanes, 1)) + host.step
        keys = np.where(grows, self._keys_s[:, None, None] + host.keys_lane * lanes, 0.0)
        steps = np.where(grows, steps_seen(asked - keys, step_s, cells.lookahead), 0)
        free = keys + np.where(grows, steps * step_s, 0.0) + host.draft_record
        late = np.maximum(free - asked, found_after_s(asked - free, host))
        return verified, steps, late


def _means(model: _Model, state: State) -> Expected:
    """Averages tokens and the parts of a round over P(m, n), as renewal reward requires."""
    host, batch, hits = model.host, model.cells.batch_size, model.hits
    verified = (state.joint * model.verified_s).sum(axis=(1, 2))
    # Mean lateness of the outcome after j steps, [G, D].
    late = onto(model.next, state.joint * model.late_s)
    late = late / np.where(state.weight > 0, state.weight, 1.0)
    _, answered = model.answered(late)
    wait = (state.joint * answered).sum(axis=(1, 2))
    tokens = hits * model.tokens[:, :, None] + (batch - hits) * model.tokens_miss[:, None, None]
    emitted = (state.joint * tokens).sum(axis=(1, 2))
    hit_rate = (state.joint * hits).sum(axis=(1, 2)) / batch
    round_s = wait + host.lead_s + verified
    rate = _rate(emitted, round_s)
    return Expected(rate, round_s, emitted, hit_rate, wait - host.ask_s)


def _rate(tokens: Floats, round_s: Floats) -> Floats:
    """Returns tok/s; inf where a round takes no time."""
    with np.errstate(divide="ignore"):
        return np.asarray(tokens / round_s, np.float64)


def _laws(hazards: Floats, p_hits: Floats) -> tuple[Floats, Floats]:
    """Returns (P(next outcome hits), mean tokens) of a round that verifies m = 0..K tokens, [G,
    K+1].

    p_hits: [G, 2, K+1].
    """
    (rejected, end), width = p_hits.swapaxes(0, 1), p_hits.shape[2]
    reached = np.cumprod(np.column_stack([np.ones(len(hazards)), hazards]), axis=1)  # P(k >= i)
    ended = reached[:, :-1] * (1 - hazards) * rejected[:, :-1]  # P(k = i < m, and a hit)
    before = np.column_stack([np.zeros(len(hazards)), np.cumsum(ended, axis=1)])
    # The case k = m: the bonus token after m accepted tokens.
    hit = before[:, :width] + reached * end
    return hit, np.cumsum(reached, axis=1)


def _at(table: Floats, column: Ints) -> Floats:
    """Returns table[g, column[g]] for every row g."""
    return np.asarray(np.take_along_axis(table, column[:, None], axis=1)[:, 0])
