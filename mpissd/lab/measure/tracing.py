"""Writes the file of --trace=FILE: what every rank did in the measured rounds, as a Chrome trace.

Open the file with ui.perfetto.dev or chrome://tracing. Each rank is shown as a process with a row
for the phases of its host; rank 0 also has a row for its device's forwards. Arrows show messages.

The trace is made after the rounds, from timestamps that are always recorded, so that it does not
slow them. Before the rounds the ranks' clocks are compared: rank 0 sends a message and notes when
all answers have arrived; the other ranks read their clocks in between. The error of offset =
t_remote − (t_send + t_received)/2 is at most half the time between these two instants.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.output import whole_file
from mpissd.common.trace import DraftLog, DraftPhase, FollowPhase, LeadPhase
from mpissd.common.wait import Waiter
from mpissd.engine.session.rank import Rank

MOST_ROUNDS = 1000  # largest number of rounds in a trace: 3 MB of JSON with three ranks
EXCHANGES = 64  # number of times that the clocks are compared, in about 0.5 ms
Clocks = list[tuple[int, int]]  # for each rank (ns ahead of rank 0's clock, error in ns)


class Track(NamedTuple):
    """One horizontal row of the trace, with what one rank did over time. name: title of the row.
    labels: names of the activities. slices: int64 [n, 4], each activity's round number, index into
    labels, start and end, in order of time. Start and end are in ns of the rank's own clock."""

    name: str
    labels: Sequence[str]
    slices: NDArray[np.int64]


# (name of a message, (sending rank, index of its phase), (receiving rank, index of its phase))
Arrow = tuple[str, tuple[int, int], tuple[int, int]]


def compare_clocks(comm: MPI.Comm, waiter: Waiter, exchanges: int = EXCHANGES) -> Clocks | None:
    """Compares the clocks of all ranks of `comm`, which must all call this. Returns on rank 0, for
    each rank, (ns by which its clock is ahead of rank 0's, largest error in ns), from the shortest
    exchange of messages; None elsewhere. Raises FaultError if a rank does not answer in time."""
    word = np.zeros(1, np.int64)
    times = np.zeros(comm.size, np.int64)
    readings = list[Any]()
    for _ in range(exchanges):
        sent = perf_counter_ns()
        waiter.until(comm.Ibcast(word).Test, "clocks: a question")
        word[0] = perf_counter_ns()
        waiter.until(comm.Igather(word, times).Test, "clocks: the answers")
        readings.append((perf_counter_ns() - sent, sent, times.tolist()))
    if comm.rank:
        return None
    took, sent, answers = min(readings)
    return [(0, 0), *((answer - sent - took // 2, (took + 1) // 2) for answer in answers[1:])]


def write_trace(
    rank: Rank,
    draft: DraftLog | None,
    rounds: tuple[int, int],
    t_target_s: NDArray[np.float64] | None,
    clocks: Clocks | None,
) -> None:
    """Writes the trace file on rank 0, after Rank.run_pass; all ranks must call this. draft: the
    log of this rank's draft loop (None: it does not draft). rounds: the first measured round, and
    the one after the last. t_target_s: seconds of each round's target forward, on rank 0. clocks:
    the result of compare_clocks. Raises ConfigError if the file cannot be written."""
    session = rank.session
    first, last = rounds
    topology = session.topology
    config = session.job.config
    end = min(last, first + MOST_ROUNDS)
    assert rank.ledger is not None, "a trace before the pass"
    tracks = [Track("host", rank.ledger.names, rank.ledger.slices(first, end))]
    if topology.is_lead and t_target_s is not None:
        tracks.append(_device_track(tracks[0].slices, t_target_s))
        if draft is not None:
            ledger = draft.ledger
            tracks.append(Track("draft's host (inline)", ledger.names, ledger.slices(first, end)))
    all_tracks = topology.world.gather(tracks)
    if all_tracks is None or clocks is None:
        return
    names = list[str]()
    arrows = list[Arrow]()
    plan = (0, int(LeadPhase.BROADCAST))
    for n, (host, info) in enumerate(zip(topology.hosts, session.infos, strict=True)):
        is_draft = n >= topology.first_draft
        role = "draft" if is_draft else "target" if n else "lead"
        names.append(f"rank {n} {role} · {host} · {info.name}")
        # An arrow begins at the phase that packs the message, and ends at the one that uses it.
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
        "clock": "rank 0's perf_counter; offset_ns: a rank's is so far ahead, within error_ns",
        "ranks": [{"offset_ns": offset, "error_ns": error} for offset, error in clocks],
    }
    path = Path(str(config.trace))
    lines = ",\n".join(json.dumps(event) for event in events(names, all_tracks, clocks, arrows))
    text = f'{{"otherData": {json.dumps(about)}, "traceEvents": [\n{lines}\n]}}\n'.encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    except OSError as error:
        raise ConfigError(f"trace={str(path)!r}: cannot be written: {error.strerror}") from error


def _device_track(host: NDArray[np.int64], t_target_s: NDArray[np.float64]) -> Track:
    """Returns the trace row of rank 0's device. host: slices of rank 0's host, [n, 4]. t_target_s:
    seconds of each forward. A device measures how long a forward took, but not when on the host's
    clock; so it is drawn to end when the host noticed its end, the latest possible time."""
    waits = host[host[:, 1] == LeadPhase.DEVICE_WAIT]
    seconds = t_target_s[: len(waits)]
    is_timed = np.isfinite(seconds)
    waits = waits[is_timed]
    lasted = np.rint(seconds[is_timed] * 1e9).astype(np.int64)
    ends = waits[:, 3]
    starts = np.maximum(ends - lasted, np.concatenate([ends[:1] - lasted[:1], ends[:-1]]))
    slices = np.column_stack([waits[:, 0], np.zeros_like(ends), starts, ends])
    return Track("device (duration by its events, end as the host saw it)", ["verify"], slices)


def events(
    names: Sequence[str],
    tracks: Sequence[Sequence[Track]],
    clocks: Clocks,
    arrows: Sequence[Arrow] = (),
) -> Iterator[dict[str, Any]]:
    """Yields the events of a Chrome trace, with times in µs since the earliest activity. names,
    tracks, clocks: title, trace rows and clock offset of each rank. arrows: by round."""
    first = (
        t.slices[:, 2].min() - ahead
        for (ahead, _), of in zip(clocks, tracks, strict=True)
        for t in of
        if len(t.slices)
    )
    origin = int(min(first, default=0))
    began = dict[tuple[int, int, int], float]()
    for pid, (name, (ahead, _)) in enumerate(zip(names, clocks, strict=True)):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for tid, track in enumerate(tracks[pid]):
            args: dict[str, Any] = {"name": track.name}
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": args}
            for round_, label, start, end in track.slices.tolist():
                ts = (start - ahead - origin) / 1e3
                args = {"round": round_}
                place = {"pid": pid, "tid": tid, "ts": ts, "dur": (end - start) / 1e3}
                yield {"ph": "X", "name": track.labels[label], **place, "args": args}
                if not tid:
                    began[pid, label, round_] = ts
    rounds = sorted({round_ for _, _, round_ in began})
    for number, ((name, *ends), round_) in enumerate(product(arrows, rounds)):
        sent, used = (began.get((*end, round_)) for end in ends)
        unsure = sum(clocks[pid][1] for pid, _ in ends) / 1e3
        # Where rank 0 took a branch of its own cache, the draft's answer came later or not at all.
        if sent is None or used is None or used < sent - unsure:
            continue
        for ph, (pid, _), ts in zip("sf", ends, (sent, used), strict=True):
            event = {"ph": ph, "name": name, "cat": "message", "id": number, "pid": pid}
            yield {**event, "tid": 0, "ts": ts} | ({"bp": "e"} if ph == "f" else {})
