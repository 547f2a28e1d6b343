"""--trace=FILE: what every rank's host did in the measured rounds, as one Chrome trace.

Nothing is added to a round: the ledgers' stamps are read when the pass is over. The clocks are
compared before and after it, so that clocks of two hosts that drift apart still line up.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.trace import DraftPhase, FollowPhase, LeadPhase, Ledger
from mpissd.engine.decode.draft import Drafter
from mpissd.engine.session.rank import Rank
from mpissd.engine.session.session import Session
from mpissd.lab.measure import chrome
from mpissd.lab.measure.chrome import Arrow, Clock, ClockReading, Int64s, RankTrace, Track
from mpissd.lab.measure.clock import compare_clocks

MOST_ROUNDS = 1000  # of a trace: 3 MB of JSON with three ranks


@dataclass(frozen=True)
class Span:
    """The measured rounds, as the lead counts them, and the lead's forwards in them (seconds)."""

    first_round: int
    last_round: int
    t_target_s: NDArray[np.float64]


class Tracing:
    """Opened by all ranks before the pass that counts, written by all ranks after it."""

    def __init__(self, session: Session) -> None:
        """Collective over the world: compares the clocks."""
        self._session = session
        self._before = self._compare()

    def _compare(self) -> list[ClockReading] | None:
        self._session.barrier()  # nobody is late: a question waits for its answer
        return compare_clocks(self._session.topology.world, self._session.waiter)

    def write(
        self,
        rank: Rank,
        drafter: Drafter | None,
        span: Span | None,
        path: str,
    ) -> None:
        """Collective over the world, after Rank.run_pass: rank 0 (which has the span) writes.

        drafter: where there is one. ConfigError where the file can't be written.
        """
        world = self._session.topology.world
        after = self._compare()
        span = world.bcast(span, root=0)
        assert span is not None, "rank 0 says which rounds were measured"
        every = world.gather(_tracks(rank, drafter, span), root=0)
        if every is None or self._before is None or after is None:
            return
        clocks = [Clock(readings) for readings in zip(self._before, after, strict=True)]
        ranks = [self._rank_trace(n, clocks[n], tracks) for n, tracks in enumerate(every)]
        trace = chrome.document(ranks, _arrows(self._session), self._about(span))
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            chrome.write(Path(path), trace)
        except OSError as error:
            raise ConfigError(f"trace={path!r}: cannot be written: {error.strerror}") from error

    def _about(self, span: Span) -> dict[str, Any]:
        """Which run it is (a row with this config_digest), and what of it is shown."""
        config = self._session.job.config
        return {
            "mode": config.mode,
            "config_digest": config.digest,
            "num_rounds": min(MOST_ROUNDS, span.last_round - span.first_round),
            "rounds_left_out": max(0, span.last_round - span.first_round - MOST_ROUNDS),
        }

    def _rank_trace(self, rank: int, clock: Clock, tracks: list[Track]) -> RankTrace:
        topology = self._session.topology
        role = "draft" if rank >= topology.tp else "target" if rank else "lead"
        device = self._session.infos[rank].name
        return RankTrace(rank, role, topology.hosts[rank], device, clock, tracks)


def _tracks(rank: Rank, drafter: Drafter | None, span: Span) -> list[Track]:
    """This rank's rows: its host; the lead's also its device and, inline, the draft's host."""
    assert rank.ledger is not None, "a trace before the pass"
    topology = rank.session.topology
    host = _host_track("host", rank.ledger, span)
    tracks = [host]
    if topology.is_lead:
        tracks.append(_device_track(host, span))
        if drafter is not None:
            tracks.append(_host_track("draft's host (inline)", drafter.ledger, span))
    return tracks


def _host_track(name: str, ledger: Ledger, span: Span) -> Track:
    first = span.first_round
    slices = ledger.slices(first, min(span.last_round, first + MOST_ROUNDS))
    return Track(name, ledger.names, slices)


def _device_track(host: Track, span: Span) -> Track:
    """The lead's forwards: as long as the device says; ended, at the latest, when the host saw it.

    Events give durations and no place on the host's clock, so the place is this bound.
    """
    waits: Int64s = host.slices[host.slices[:, 1] == LeadPhase.DEVICE_WAIT]
    seconds = span.t_target_s[: len(waits)]
    known = np.isfinite(seconds)
    waits, lasted = waits[known], np.rint(seconds[known] * 1e9).astype(np.int64)
    ends = waits[:, 3]
    starts = np.maximum(ends - lasted, np.concatenate([ends[:1] - lasted[:1], ends[:-1]]))
    slices = np.column_stack([waits[:, 0], np.zeros_like(ends), starts, ends])
    return Track("device (duration by its events, end as the host saw it)", ["verify"], slices)


def _arrows(session: Session) -> list[Arrow]:
    """Messages, from the phase that packs one to the phase that follows its arrival."""
    topology = session.topology
    arrows = [
        Arrow("plan", (0, 0, LeadPhase.BROADCAST), (rank, 0, FollowPhase.COMMIT))
        for rank in range(1, topology.tp)
    ]
    for rank in range(topology.tp, topology.tp + topology.num_drafts):
        outcome = Arrow("outcome", (0, 0, LeadPhase.SEND), (rank, 0, DraftPhase.COMMIT))
        answer = Arrow("speculation", (rank, 0, DraftPhase.SEND), (0, 0, LeadPhase.BROADCAST))
        arrows += [outcome, answer]
    return arrows
