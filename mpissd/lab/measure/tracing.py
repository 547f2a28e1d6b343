"""Writes --trace=FILE: every rank's host activity in the measured rounds, as a Chrome trace.

Rounds do no extra work: the ledgers' timestamps are read after the pass. The clocks are compared
before and after the pass, so that times line up even if the hosts' clocks drift apart.
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

MOST_ROUNDS = 1000  # rounds in one trace: 3 MB of JSON with three ranks


@dataclass(frozen=True)
class Span:
    """The range of the measured rounds, and the seconds of the lead's forward in each of them."""

    first_round: int
    last_round: int
    t_target_s: NDArray[np.float64]


class Tracing:
    """Collects a trace: every rank creates one before the measured pass and writes it after."""

    def __init__(self, session: Session) -> None:
        """Compares the clocks of all ranks; collective over the world."""
        self._session = session
        self._before = self._compare()

    def _compare(self) -> list[ClockReading] | None:
        self._session.barrier()  # all ranks arrive first, because a question waits for its answer
        return compare_clocks(self._session.topology.world, self._session.waiter)

    def write(
        self,
        rank: Rank,
        drafter: Drafter | None,
        span: Span | None,
        path: str,
    ) -> None:
        """Writes the trace on rank 0, after Rank.run_pass; collective over the world.

        span: set only on rank 0. drafter: set on ranks that run a draft. Raises ConfigError if the
        file cannot be written.
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
        """Returns the trace's metadata: the run's config_digest and which rounds are shown."""
        config = self._session.job.config
        return {
            "mode": config.mode,
            "config_digest": config.digest,
            "num_rounds": min(MOST_ROUNDS, span.last_round - span.first_round),
            "rounds_left_out": max(0, span.last_round - span.first_round - MOST_ROUNDS),
        }

    def _rank_trace(self, rank: int, clock: Clock, tracks: list[Track]) -> RankTrace:
        topology = self._session.topology
        role = "draft" if rank >= topology.first_draft else "target" if rank else "lead"
        device = self._session.infos[rank].name
        return RankTrace(rank, role, topology.hosts[rank], device, clock, tracks)


def _tracks(rank: Rank, drafter: Drafter | None, span: Span) -> list[Track]:
    """Returns this rank's thread rows: its host; on the lead also device and inline draft."""
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
    """Returns the lead's forwards as a thread row, each as long as the device measured.

    Device events give durations but no time on the host's clock. A forward is therefore drawn to
    end when the host noticed its end, which is the latest time possible.
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
    """Returns the arrows of messages: from the phase that packs one to the one that uses it."""
    topology = session.topology
    arrows = [
        Arrow("plan", (0, 0, LeadPhase.BROADCAST), (rank, 0, FollowPhase.COMMIT))
        for rank in range(1, topology.first_draft)
    ]
    for rank in range(topology.first_draft, topology.world.size):
        outcome = Arrow("outcome", (0, 0, LeadPhase.SEND), (rank, 0, DraftPhase.COMMIT))
        answer = Arrow("speculation", (rank, 0, DraftPhase.SEND), (0, 0, LeadPhase.BROADCAST))
        arrows += [outcome, answer]
    return arrows
