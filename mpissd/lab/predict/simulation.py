"""The one model of a round: an event simulation of the loops of `decode`.

Many configurations advance at once, each as several independent chains of rounds. The events of a
round, in the order in which the loops add up their durations:

    sent    the draft starts SPECULATION r                       (R)
    keys    sent + glue + keys                                   (K: the cache can answer)
    asked   sent + link + verification + lead's work + link      (a: OUTCOME r is at the draft)
    seen    the first poll >= asked; polls come between growth steps, which are never cut short (Q)

`expect` returns long-run means, which `plan` searches; all configurations read the same draws, and
equal ones have equal means. `follow` predicts a run's rounds from the outcomes that it had. Shapes:
[G, R] for G configurations and R chains, [G, R, b] for sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.engine.job import Job
from mpissd.lab.predict.costs import DeviceCosts, Floats, HostCosts
from mpissd.lab.predict.grid import Draws, Grid, Ints, LawDraws, Mask, RecordedDraws

_BURN_IN = 8  # first rounds of a chain, which do not count
_SETTLED = 4  # rounds after which rounds without growth are all equal
_PRECISE = 256, 64, 32  # sequences of all chains, but at least so many chains; rounds
_QUICK = 64, 16, 16  # the same, to rank many configurations
_AT_ONCE = 1 << 17  # sequences of all configurations that are simulated at once, to stay in caches
_SUMMED = {"tokens": "tokens", "round_s": "round_s", "hit_rate": "hit", "wait_s": "wait_s"}


class Rounds:
    """The clocks and sequences of all chains between two rounds."""

    def __init__(self, grid: Grid, draws: Draws) -> None:
        self._grid, self._draws = grid, draws
        hosts = grid.host.T[:, :, None]  # each [G, 1]
        self._ask_s, self._lead_s, self._send_s, self._link_s, self._reply_s = hosts[:5]
        self._inline_s, self._record_s = hosts[5:]
        count, batch = len(grid), grid.batch_size
        shape = count, draws.chains, batch
        self._first = np.arange(count)[:, None] * grid.verify_s[0].size
        self._lane = np.arange(count)[:, None] * (batch + 1)
        self.live: Mask = np.ones(shape, np.bool_)
        self._hit: Mask = np.zeros(shape, np.bool_)  # whether outcome r-1 is a key of the cache
        self._clock = np.zeros(shape[:2])  # the time at which the lead has outcome r-1
        # A run's warm-up has run full rounds of hits on throw-away sequences before the first.
        full = np.full(shape[:2], batch)
        self._grown = self._place(full, full)  # place of the answer whose branches grow
        self._sent = -self._lead_s - self._link_s - grid.verify_s.ravel()[self._grown]

    def _place(self, live: Ints, won: Ints) -> Ints:
        """Returns indices into the flattened tables of durations, [G, R]."""
        grid = self._grid
        offset = live * (grid.batch_size + 1) if grid.verify_s.shape[1] > 1 else 0
        return np.asarray(self._first + won + offset, np.int64)

    def advance(self, number: int) -> dict[str, NDArray[Any]]:
        """Simulates OUTCOME r-1 → SPECULATION r → verification → outcome r; returns its fields."""
        grid, draws = self._grid, self._draws
        self.live = draws.live(number, self.live)
        hit = self._hit & self.live
        won, live = hit.sum(axis=2), self.live.sum(axis=2)
        place = self._place(live, won)
        ready, inline = self._clock + self._ask_s, grid.inline[:, None]
        steps = np.zeros(ready.shape, np.int64)
        if inline.all():
            seen = ready + self._drafting_s(won, live, steps) + self._inline_s
        else:
            # The draft polls between growth steps: it sees the outcome when the running one ends.
            asked, grown = self._clock + self._send_s, self._grown
            step_s, free = grid.step_s.ravel()[grown], self._sent + grid.keys_s.ravel()[grown]
            grown_s = asked - free
            with np.errstate(divide="ignore", invalid="ignore"):
                begun = np.ceil(np.where(grown_s > 0, grown_s / step_s, 0.0))
            steps = np.minimum(begun, grid.most_steps.ravel()[grown]).astype(np.int64)
            free = free + steps * step_s + self._record_s
            noticed = np.maximum(free, asked)
            drafting_s = self._drafting_s(won, live, steps)
            self._sent, self._grown = noticed + drafting_s + self._reply_s, place
            seen = np.maximum(ready, self._sent + self._link_s)
            if inline.any():
                seen = np.where(inline, ready + drafting_s + self._inline_s, seen)
        num_draft = np.where(
            hit, grid.lookahead[:, None, None], grid.backup_lookahead[:, None, None]
        )
        over = seen + grid.verify_s.ravel()[place] + self._lead_s
        accepted = draws.accepted(hit, num_draft)
        self._hit = draws.hits(hit, accepted, accepted == num_draft)
        round_s = np.where(self.live.any(axis=2), over - self._clock, 0.0)
        self._clock = over
        tokens = np.where(self.live, accepted + 1, 0).sum(axis=2)
        return {"hit": hit, "wait_s": seen - ready, "round_s": round_s, "tokens": tokens}

    def _drafting_s(self, won: Ints, live: Ints, steps: Ints) -> Floats:
        """Returns the seconds of draft steps between an outcome and its answer, [G, R].

        Hits are finished and misses drafted in shared forwards: one carries all that are still
        short of tokens, then the group that needs more steps goes on.
        """
        grid, lanes_s = self._grid, self._grid.lanes_s.ravel()
        missed = live - won
        finish = np.where(won > 0, grid.lookahead[:, None] - steps, 0)
        backup = np.where(grid.fast, 0, grid.backup_lookahead)[:, None] * (missed > 0)
        shared, lane = np.minimum(finish, backup), self._lane
        apart = (finish - shared) * lanes_s[lane + won] + (backup - shared) * lanes_s[lane + missed]
        return np.asarray(shared * lanes_s[lane + live] + apart, np.float64)


@dataclass(frozen=True)
class Expected:
    """Long-run means of configurations, [G]; tokens and times are of all b sequences together."""

    tok_per_s: Floats
    round_s: Floats
    tokens: Floats  # In a round.
    hit_rate: Floats
    wait_s: Floats  # The lead's wait for its speculation.


def expected(job: Job, device: DeviceCosts, host: HostCosts) -> Expected:
    """Returns the means of one job, [1]; they depend neither on its seed nor on its length."""
    grid = Grid.of([job], device, host)
    key = tuple(getattr(grid, f.name).tobytes() for f in fields(grid)[1:])
    if key not in _KNOWN:
        _KNOWN[key] = expect(grid)
    return _KNOWN[key]


def expect(grid: Grid, *, quick: bool = False) -> Expected:
    """Returns the means of every configuration, which do not depend on the others in the grid.

    At b = 1 they are of 8,192 rounds that grow branches (quick: of 1,024). Without growth all
    rounds last as long, and the means are exact.
    """
    columns = {f.name: np.zeros(len(grid)) for f in fields(Expected)}
    sequences, least, num_rounds = _QUICK if quick else _PRECISE
    chains = max(least, sequences // grid.batch_size)
    at_once = max(1, _AT_ONCE // max(sequences, least * grid.batch_size))
    growing = np.flatnonzero(grid.grows)
    for chosen in (growing[n : n + at_once] for n in range(0, len(growing), at_once)):
        part = grid.take(chosen)
        rounds, count = Rounds(part, LawDraws(part, chains)), chains * num_rounds
        for number in range(_BURN_IN + num_rounds):
            of_round = rounds.advance(number)
            if number >= _BURN_IN:
                for name, key in _SUMMED.items():
                    columns[name][chosen] += of_round[key].reshape(len(part), -1).sum(axis=1)
        for name in _SUMMED:
            columns[name][chosen] /= count
        columns["hit_rate"][chosen] /= grid.batch_size
    # Where nothing grows only the tokens of a round are random.
    exact = np.flatnonzero(~grid.grows)
    if len(exact):
        part = grid.take(exact)
        rounds = Rounds(part, Draws())
        for number in range(_SETTLED):
            of_round = rounds.advance(number)
        served = np.arange(part.hazards.shape[1]) < part.backup_lookahead[:, None]
        hazards = np.where(part.fast[:, None], part.hazards_fast, part.hazards)
        tokens = 1 + np.cumprod(np.where(served, hazards, 0.0), axis=1).sum(axis=1)
        columns["tokens"][exact] = grid.batch_size * tokens
        for name in ("round_s", "wait_s"):
            columns[name][exact] = of_round[name][:, 0]
    with np.errstate(divide="ignore"):  # inf if a round takes no time
        columns["tok_per_s"] = columns["tokens"] / columns["round_s"]
    return Expected(**columns)


_KNOWN: dict[tuple[bytes, ...], Expected] = {}  # rows of many seeds have one grid


def follow(job: Job, device: DeviceCosts, host: HostCosts, sequences: NDArray[np.int64]) -> Floats:
    """Predicts the seconds of a run's rounds, [n], given their outcomes.

    sequences: as RoundRecords.sequences() has them, [rows, 8].
    """
    draws = RecordedDraws(job, sequences)
    rounds = Rounds(Grid.of([job], device, host, ends=True), draws)
    each = (rounds.advance(number)["round_s"][0, 0] for number in range(draws.num_rounds))
    return np.fromiter(each, np.float64, draws.num_rounds)
