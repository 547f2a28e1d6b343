"""Writes --trace=FILE: every rank's host activity in the measured rounds, as a Chrome trace.

Open it with ui.perfetto.dev or chrome://tracing. Each rank is a process with a thread row of its
host's phases, and on the lead one of its device's forwards. Arrows are the messages between lead
and drafts.

Rounds do no extra work: the ledgers' timestamps are read after the pass. The ranks' clocks are
compared by ping-pong before it: rank 0 notes when it sends a question and when the answer arrives;
the other rank reads its clock in between. offset = t_remote − (t_send + t_received)/2 is wrong by
at most half the round trip, whatever the network does.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.output import whole_file
from mpissd.common.trace import DraftPhase, FollowPhase, LeadPhase
from mpissd.common.wait import Waiter
from mpissd.engine.decode.draft import Drafter
from mpissd.engine.session.rank import Rank

MOST_ROUNDS = 1000  # rounds in one trace: 3 MB of JSON with three ranks
EXCHANGES = 64  # comparisons of two clocks; about 0.2 ms
_TAG = 77
_DEVICE = "device (duration by its events, end as the host saw it)"
Clocks = list[tuple[int, int]]  # by rank: (ns ahead of rank 0's clock, its possible error in ns)


class Track(NamedTuple):
    """One thread row of a rank.

    slices: int64 [n, 4] = round, index into labels, start_ns, end_ns on the rank's own clock, in
    the order of time.
    """

    name: str
    labels: Sequence[str]
    slices: NDArray[np.int64]


class RankTrace(NamedTuple):
    """One process: a rank, whose clock is offset_ns ahead of rank 0's, give or take error_ns."""

    name: str
    tracks: Sequence[Track]
    offset_ns: int = 0
    error_ns: int = 0


# Drawn in every round: its name, and (rank, label of its host's track) of both ends.
Arrow = tuple[str, tuple[int, int], tuple[int, int]]


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
    rank: Rank,
    drafter: Drafter | None,
    rounds: tuple[int, int],
    t_target_s: NDArray[np.float64] | None,
    clocks: Clocks | None,
) -> None:
    """Writes the trace on rank 0, after Rank.run_pass; collective over the world.

    drafter: set on ranks that run a draft. rounds: the first measured round and the one after the
    last. t_target_s: seconds of the lead's forward in each of them, on rank 0 as `clocks`. Raises
    ConfigError if the file cannot be written.
    """
    session, (first, last) = rank.session, rounds
    topology, config = session.topology, session.job.config
    end = min(last, first + MOST_ROUNDS)
    assert rank.ledger is not None, "a trace before the pass"
    tracks = [Track("host", rank.ledger.names, rank.ledger.slices(first, end))]
    if topology.is_lead and t_target_s is not None:
        # Device events give durations but no time on the host's clock. A forward is therefore drawn
        # to end when the host noticed its end, which is the latest time possible.
        waits = tracks[0].slices[tracks[0].slices[:, 1] == LeadPhase.DEVICE_WAIT]
        seconds = t_target_s[: len(waits)]
        known = np.isfinite(seconds)
        waits, lasted = waits[known], np.rint(seconds[known] * 1e9).astype(np.int64)
        ends = waits[:, 3]
        starts = np.maximum(ends - lasted, np.concatenate([ends[:1] - lasted[:1], ends[:-1]]))
        slices = np.column_stack([waits[:, 0], np.zeros_like(ends), starts, ends])
        tracks.append(Track(_DEVICE, ["verify"], slices))
        if drafter is not None:
            own = drafter.ledger
            tracks.append(Track("draft's host (inline)", own.names, own.slices(first, end)))
    every = topology.world.gather(tracks)
    if every is None or clocks is None:
        return
    ranks, arrows = [], list[Arrow]()
    plan = 0, int(LeadPhase.BROADCAST)
    for n, of in enumerate(every):
        is_draft = n >= topology.first_draft
        role = "draft" if is_draft else "target" if n else "lead"
        name = f"rank {n} {role} · {topology.hosts[n]} · {session.infos[n].name}"
        ranks.append(RankTrace(name, of, *clocks[n]))
        # From the phase that packs a message to the one that uses it.
        if is_draft:
            arrows.append(("outcome", (0, LeadPhase.SEND), (n, DraftPhase.COMMIT)))
            arrows.append(("speculation", (n, DraftPhase.SEND), plan))
        elif n:
            arrows.append(("plan", plan, (n, FollowPhase.COMMIT)))
    about = {
        "mode": config.mode,
        "config_digest": config.digest,
        "num_rounds": end - first,
        "rounds_left_out": last - end,
    }
    path = Path(str(config.trace))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, document(ranks, arrows, about))
    except OSError as error:
        raise ConfigError(f"trace={str(path)!r}: cannot be written: {error.strerror}") from error


def document(
    ranks: Sequence[RankTrace], arrows: Sequence[Arrow], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the trace as one JSON object, with times in µs since the earliest slice.

    about: more entries for "otherData", which has the possible error of each rank's times, too.
    """
    events: list[dict[str, Any]] = []
    shifted = [[t.slices[:, 2:] - rank.offset_ns for t in rank.tracks] for rank in ranks]
    starts = [int(times[:, 0].min()) for of in shifted for times in of if len(times)]
    origin = min(starts, default=0)
    for pid, rank in enumerate(ranks):
        names = [
            ("process_name", 0, "name", rank.name),
            ("process_sort_index", 0, "sort_index", pid),
        ]
        for tid, track in enumerate(rank.tracks):
            names.append(("thread_name", tid, "name", track.name))
            names.append(("thread_sort_index", tid, "sort_index", tid))
        for what, tid, key, value in names:
            events.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {key: value}})
        for tid, (track, times) in enumerate(zip(rank.tracks, shifted[pid], strict=True)):
            for (round_, label, *_), (start, end) in zip(
                track.slices.tolist(), times.tolist(), strict=True
            ):
                took = {"ts": (start - origin) / 1e3, "dur": (end - start) / 1e3}
                place = {"pid": pid, "tid": tid, "args": {"round": round_}}
                events.append({"ph": "X", "name": track.labels[label], **took, **place})
    for name, *ends in arrows:
        at: list[dict[int, int]] = []  # start of the slice that has the label, by round
        for pid, label in ends:
            slices, times = ranks[pid].tracks[0].slices, shifted[pid][0]
            chosen = slices[:, 1] == label
            at.append(dict(zip(slices[chosen, 0].tolist(), times[chosen, 0].tolist(), strict=True)))
        first_id = len(events)
        for n, round_ in enumerate(sorted(at[0].keys() & at[1].keys())):
            for ph, (pid, _), began in zip("sf", ends, at, strict=True):
                event = {"ph": ph, "name": name, "cat": "message", "id": first_id + n, "pid": pid}
                event |= {"tid": 0, "ts": (began[round_] - origin) / 1e3}
                events.append(event | ({"bp": "e"} if ph == "f" else {}))
    clocks = {
        "unit": "times are rank 0's perf_counter; offset_ns: how far a rank's clock is ahead of it",
        "method": "ping-pong, the exchange with the least round trip; error_ns: half of that",
        "ranks": [
            {"rank": pid, "offset_ns": rank.offset_ns, "error_ns": rank.error_ns}
            for pid, rank in enumerate(ranks)
        ],
    }
    other = {**about, "clock": clocks}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def write(path: Path, trace: Mapping[str, Any]) -> None:
    """Writes the trace to `path`, with one event a line so that grep finds an event.

    A name that ends in .gz is gzipped. The file appears complete or not at all. Raises OSError.
    """
    lines = ",\n".join(json.dumps(event, allow_nan=False) for event in trace["traceEvents"])
    rest = {key: value for key, value in trace.items() if key != "traceEvents"}
    text = f'{{"traceEvents": [\n{lines}\n],\n{json.dumps(rest, allow_nan=False)[1:]}\n'.encode()
    path.unlink(missing_ok=True)  # an earlier trace of that name
    with whole_file(path) as file:
        file.write(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
