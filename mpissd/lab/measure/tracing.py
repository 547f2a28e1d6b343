"""Writes --trace=FILE: every rank's host activity in the measured rounds, as a Chrome trace.

Rounds do no extra work: the ledgers' timestamps are read after the pass. The ranks' clocks are
compared by ping-pong before it: rank 0 notes when it sends a question and when the answer arrives;
the other rank reads its clock in between. offset = t_remote − (t_send + t_received)/2 is wrong by
at most half the round trip, whatever the network does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.trace import DraftPhase, FollowPhase, LeadPhase, Ledger
from mpissd.common.wait import Waiter
from mpissd.engine.decode.draft import Drafter
from mpissd.engine.session.rank import Rank
from mpissd.engine.session.session import Session
from mpissd.lab.measure import chrome
from mpissd.lab.measure.chrome import Arrow, Int64s, Place, RankTrace, Track

MOST_ROUNDS = 1000  # rounds in one trace: 3 MB of JSON with three ranks
EXCHANGES = 64  # of two clocks; about 0.2 ms
_TAG = 77
Clocks = list[tuple[int, int]]  # by rank: (ns ahead of rank 0's clock, its possible error in ns)


@dataclass(frozen=True)
class Span:
    """The range of the measured rounds, and the seconds of the lead's forward in each of them."""

    first_round: int
    last_round: int
    t_target_s: NDArray[np.float64]

    @property
    def last_shown(self) -> int:
        """The round after the last one that a trace shows."""
        return min(self.last_round, self.first_round + MOST_ROUNDS)


def compare_clocks(comm: MPI.Comm, waiter: Waiter, exchanges: int = EXCHANGES) -> Clocks | None:
    """Returns every rank's clock relative to rank 0's on rank 0, and None on the other ranks.

    The exchange with the shortest round trip counts. Collective over `comm`. Raises FaultError if a
    rank does not answer within the waiter's deadline.
    """
    word = np.zeros(1, np.int64)

    def send(rank: int) -> None:
        waiter.until(comm.Isend(word, rank, _TAG).Test, f"rank {rank}: clock")

    def receive(rank: int) -> None:
        waiter.until(comm.Irecv(word, rank, _TAG).Test, f"rank {rank}: clock")

    if comm.rank:
        for _ in range(exchanges):
            receive(0)
            word[0] = perf_counter_ns()
            send(0)
        return None
    clocks = [(0, 0)]
    for rank in range(1, comm.size):
        readings = []
        for _ in range(exchanges):
            sent = perf_counter_ns()
            send(rank)
            receive(rank)
            received = perf_counter_ns()
            error = (received - sent + 1) // 2
            readings.append((int(word[0]) - (sent + received) // 2, error))
        clocks.append(min(readings, key=lambda reading: reading[1]))
    return clocks


def write_trace(
    rank: Rank, drafter: Drafter | None, span: Span | None, clocks: Clocks | None, path: str
) -> None:
    """Writes the trace on rank 0, after Rank.run_pass; collective over the world.

    span, clocks: set only on rank 0. drafter: set on ranks that run a draft. Raises ConfigError if
    the file cannot be written.
    """
    session = rank.session
    topology, config = session.topology, session.job.config
    span = topology.world.bcast(span)
    assert span is not None, "rank 0 knows which rounds were measured"
    every = topology.world.gather(_tracks(rank, drafter, span))
    if every is None or clocks is None:
        return
    ranks = []
    for n, tracks in enumerate(every):
        role = "draft" if n >= topology.first_draft else "target" if n else "lead"
        name = f"rank {n} {role} · {topology.hosts[n]} · {session.infos[n].name}"
        ranks.append(RankTrace(n, name, tracks, *clocks[n]))
    about = {
        "mode": config.mode,
        "config_digest": config.digest,
        "num_rounds": span.last_shown - span.first_round,
        "rounds_left_out": span.last_round - span.last_shown,
    }
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        chrome.write(Path(path), chrome.document(ranks, _arrows(session), about))
    except OSError as error:
        raise ConfigError(f"trace={path!r}: cannot be written: {error.strerror}") from error


def _tracks(rank: Rank, drafter: Drafter | None, span: Span) -> list[Track]:
    """Returns this rank's thread rows: its host; on the lead also device and inline draft."""

    def track(name: str, ledger: Ledger) -> Track:
        return Track(name, ledger.names, ledger.slices(span.first_round, span.last_shown))

    assert rank.ledger is not None, "a trace before the pass"
    tracks = [track("host", rank.ledger)]
    if rank.session.topology.is_lead:
        tracks.append(_device_track(tracks[0], span))
        if drafter is not None:
            tracks.append(track("draft's host (inline)", drafter.ledger))
    return tracks


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
    plan = Place(0, 0, LeadPhase.BROADCAST)
    followers, drafts = (
        range(1, topology.first_draft),
        range(topology.first_draft, topology.world.size),
    )
    arrows = [Arrow("plan", plan, Place(rank, 0, FollowPhase.COMMIT)) for rank in followers]
    for rank in drafts:
        asked = Place(0, 0, LeadPhase.SEND), Place(rank, 0, DraftPhase.COMMIT)
        answered = Place(rank, 0, DraftPhase.SEND), plan
        arrows += [Arrow("outcome", *asked), Arrow("speculation", *answered)]
    return arrows
