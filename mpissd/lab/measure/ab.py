"""Measures the cost of the ledger: one run alternates blocks of rounds with and without it.

The order of the blocks is on, off, off, on, repeated: a machine that slows down steadily then slows
both kinds equally.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mpissd.common.trace import DraftPhase, LeadPhase, Ledger, NullLedger
from mpissd.engine.decode.draft import Drafter
from mpissd.engine.decode.target import TargetLoop

if TYPE_CHECKING:
    from mpissd.engine.session.rank import Rank  # importing it starts MPI

RunRounds = Callable[[int, bool], Sequence[float]]
_ORDER = (True, False, False, True)
_RESAMPLES = 1000
_SETTLE = 2  # first rounds of a block, dropped: the previous block still affects them


@dataclass(frozen=True)
class Overhead:
    """The relative cost of the ledger in the median round, with its 95% interval.

    overhead is the median round with the ledger over the median round without it, minus 1.
    """

    overhead: float
    low: float
    high: float
    on_us: float
    off_us: float
    num_rounds: int  # rounds with the ledger; as many were run without it

    def __str__(self) -> str:
        return (
            f"ledger {self.overhead:+.2%} (95% interval {self.low:+.2%} to {self.high:+.2%}): "
            f"median round {self.on_us:.2f} µs with, {self.off_us:.2f} µs without, "
            f"{self.num_rounds} rounds each"
        )


def is_on(round_: int, per_block: int) -> bool:
    """Returns whether the ledger is on in this round; blocks follow each other on, off, off, on."""
    return _ORDER[round_ // per_block % 4]


def ledger_overhead(run_rounds: RunRounds, *, quads: int = 10, per_block: int = 50) -> Overhead:
    """Returns the ledger's overhead, measured over `quads` groups of four blocks.

    A block has per_block rounds, and one more group runs first as a warm-up. run_rounds(n,
    ledger_on) runs n rounds and returns their durations in seconds, the same number for every
    block. The interval is a bootstrap over the groups, because neighbouring rounds are correlated.
    Its random seed is fixed.
    """
    blocks = [(on, run_rounds(per_block, on)) for _ in range(quads + 1) for on in _ORDER][4:]
    on = _by_quad([seconds for was_on, seconds in blocks if was_on])
    off = _by_quad([seconds for was_on, seconds in blocks if not was_on])
    return _overhead(on, off)


def _by_quad(blocks: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Returns the durations of one kind as [quads, rounds]; two blocks of that kind make a quad."""
    return np.array(blocks, np.float64).reshape(len(blocks) // 2, -1)


def _overhead(on: NDArray[np.float64], off: NDArray[np.float64]) -> Overhead:
    quads = len(on)
    picks = np.random.default_rng(0).integers(quads, size=(_RESAMPLES, quads))
    sizes = _RESAMPLES, quads * on.shape[1]
    medians = [np.median(kind[picks].reshape(sizes), axis=1) for kind in (on, off)]
    low, high = np.percentile(medians[0] / medians[1] - 1, [2.5, 97.5])
    middle_on, middle_off = float(np.median(on)), float(np.median(off))
    return Overhead(
        overhead=middle_on / middle_off - 1,
        low=float(low),
        high=float(high),
        on_us=middle_on * 1e6,
        off_us=middle_off * 1e6,
        num_rounds=on.size,
    )


class _Relay(Ledger):
    """A draft's ledger that calls next_round(n + 1) when it closes round n."""

    def __init__(self, next_round: Callable[[int], None]) -> None:
        super().__init__(DraftPhase)
        self._next_round = next_round

    def close_round(self, round_: int, phase: int) -> None:
        super().close_round(round_, phase)
        self._next_round(round_ + 1)


class _RelayOff(_Relay, NullLedger):
    """A draft's ledger that records nothing, but still calls next_round when a round closes."""


def alternate(drafter: Drafter, per_block: int) -> None:
    """Makes the draft's ledger alternate between on and off in blocks, starting at round 0.

    No message marks the beginning of the lead's blocks, so the draft counts the rounds itself.
    """

    def next_round(round_: int) -> None:
        wanted = on if is_on(round_, per_block) else off
        if drafter.ledger is not wanted:
            drafter.ledger = wanted
            wanted.restart()

    on, off = _Relay(next_round), _RelayOff(next_round)
    drafter.ledger = on


def ledger_pass(rank: Rank, *, quads: int = 10, per_block: int = 50) -> Overhead | None:
    """Runs a pass of the job's decoding loops that alternates the ledgers of lead and draft.

    Collective over the world; returns the overhead on the lead and None elsewhere. The pass admits
    sequences of its own, so run it before or after the measured pass, with workers that can be
    reused (as calibration's can).
    """
    drafter = None
    if rank.draft is not None:
        drafter = rank.drafter(rank.draft)
        alternate(drafter, per_block)
    count = rank.session.job.config.batch_size

    def drive(loop: TargetLoop) -> Overhead:
        loop.admit(rank.session.requests(0, count))
        return ledger_overhead(blocks_of(loop), quads=quads, per_block=per_block)

    return rank.run_pass(rank.target, drafter, drive)


def blocks_of(loop: TargetLoop) -> RunRounds:
    """Returns the run_rounds function that ledger_overhead needs, made from a target loop.

    The function steps this loop with the lead's ledger on or off and returns seconds per round.
    """
    ledgers = {True: Ledger(LeadPhase), False: NullLedger(LeadPhase)}

    def run_rounds(count: int, ledger_on: bool) -> list[float]:
        loop.ledger = ledgers[ledger_on]
        loop.ledger.restart()
        seconds = []
        last = perf_counter()
        for _ in range(count):
            loop.step()
            loop.ledger.close_round(loop.round - 1, LeadPhase.RECORD)
            now = perf_counter()
            seconds.append(now - last)
            last = now
        return seconds[_SETTLE:]

    return run_rounds
