"""Gathers what every rank sees, then opens and closes a session as a run would.

If a stage outlasts the deadline or fails, that is a fact as well, and rank 0 reports what it has
gathered so far.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import importlib.util
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mpissd
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.engine.comm.topology import (
    Topology,
    launcher_rank,
    launcher_size,
    open_topology,
    usable_cores,
)
from mpissd.ops.doctor.child import ASK_S
from mpissd.ops.doctor.facts import (
    HostFacts,
    RankFacts,
    SessionFacts,
    build_host,
    build_rank,
)
from mpissd.ops.doctor.host import blas_threads, peek, read_cuda, read_host
from mpissd.ops.doctor.launcher import library_path, one_line, refusal

_HEAD_START_S = 3.0
Say = Callable[["Seen"], int]


@dataclasses.dataclass
class Seen:
    """The facts that were gathered so far; session.error says why there are no more."""

    ranks: list[RankFacts] = dataclasses.field(default_factory=list)
    hosts: list[HostFacts] = dataclasses.field(default_factory=list)
    session: SessionFacts | None = None

    def to_json(self) -> str:
        """Returns the facts as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Seen:
        """Returns the facts in a line of to_json; raises ValueError, TypeError or KeyError."""
        data = json.loads(text)
        session = data["session"]
        return cls(
            [build_rank(rank) for rank in data["ranks"]],
            [build_host(host) for host in data["hosts"]],
            None if session is None else SessionFacts(**session),
        )


def examine_rank(config: RunConfig, check: Callable[[RunConfig], None], say: Say) -> int:
    """Examines the machine as one of the ranks; returns the exit code. Collective.

    say: called once, on rank 0, with the facts; returns the exit code of every rank. check: raises
    ConfigError for what a rank of `run` refuses before MPI starts.
    """
    from mpissd.engine.comm import mpi_library

    seen = Seen()
    with _watched(config.deadline_s, seen, say) as stage:
        stage("MPI_Init")
        rank, size, library = mpi_library.identity()
        mine = _myself(rank, size, library)
        seen.ranks = [mine]
        try:
            topology = open_topology(config.drafts, config.groups)
            _gather(topology, mine, seen, stage, config.deadline_s)
            stage("opening a session")
            refused = list(filter(None, topology.world.allgather(refusal(config, check))))
            seen.session = SessionFacts(refused[0]) if refused else _session(config, seen)
        except ConfigError as error:  # from open_topology, on every rank
            seen.session = SessionFacts(error=str(error))
            return say(seen) if launcher_rank() == 0 else 2
        except Exception as error:  # noqa: BLE001  (what is examined may fail in any way)
            problem = f"rank {rank}: {type(error).__name__}: {error}"
            seen.session = SessionFacts(error=problem)
            if launcher_rank():  # if all fail alike, rank 0 reports first and ends the others
                time.sleep(_HEAD_START_S)
            mpi_library.abort(say(seen) or 2)
    code = say(seen) if topology.is_lead else 0
    return int(topology.world.bcast(code))


@contextmanager
def _watched(seconds: float, seen: Seen, say: Say) -> Iterator[Callable[[str], None]]:
    """Reports the facts and ends this process if the block takes longer than `seconds`.

    Rank 0 does so first, because a launcher ends all ranks when one has left. Yields the function
    that names the current stage for the report.
    """
    at = ["start"]
    patience = seconds + (_HEAD_START_S if launcher_rank() else 0.0)

    def late() -> None:
        seen.session = SessionFacts(error=f"{at[0]}: not over after {seconds:.0f} s")
        code = say(seen) if launcher_rank() == 0 else 2
        sys.stdout.flush()
        os._exit(code or 2)

    timer = threading.Timer(patience, late)
    timer.daemon = True
    timer.start()
    # A library that hangs while it holds Python's lock stops every Python thread, so C ends it.
    faulthandler.dump_traceback_later(patience + _HEAD_START_S, exit=True)
    try:
        yield lambda name: at.__setitem__(0, name)
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def _myself(rank: int, size: int, library: str) -> RankFacts:
    from mpissd.engine.comm.seats import core_numa_nodes

    cores = usable_cores()
    maps = Path("/proc/self/maps")
    return RankFacts(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        python=sys.executable,
        python_version=platform.python_version(),
        mpissd=mpissd.__version__,
        folder=str(Path(mpissd.__file__).parent),
        world_size=size,
        launcher_rank=launcher_rank(),
        launcher_size=launcher_size(),
        library=one_line(library),
        library_path=library_path(maps.read_text()) if maps.exists() else "",
        cores=sorted(cores),
        core_numa=core_numa_nodes(cores),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        blas_threads=blas_threads(),
    )


def _gather(
    topology: Topology,
    mine: RankFacts,
    seen: Seen,
    stage: Callable[[str], None],
    limit_s: float,
) -> None:
    """Fills `seen` with hosts and ranks, on every rank. Collective.

    Hosts come first, while no rank has opened a GPU. limit_s: the deadline.
    """
    from mpissd.engine.comm.seats import numa_node

    world, first = topology.world, topology.local_rank == 0
    stage("gathering what each host has")
    cores = {(host, core) for host, core in _every(world, _cores(mine))}
    here = sum(host == mine.host for host, _ in cores)
    hosts = world.allgather(json.dumps(dataclasses.asdict(read_host(here))) if first else None)
    seen.hosts = [build_host(json.loads(host)) for host in hosts if host is not None]
    stage("gathering what each rank sees")
    has_cupy = importlib.util.find_spec("cupy") is not None
    cuda = read_cuda(topology.local_rank, min(ASK_S, limit_s / 2)) if has_cupy else None
    role = "draft" if topology.is_draft else "lead" if topology.leads_group else "target"
    own = dataclasses.replace(
        mine,
        role=role,
        local_rank=topology.local_rank,
        reads_neighbour=_reads_neighbour(world, mine),
        gpu_numa=numa_node(cuda.bus_id or None) if cuda else None,
        cuda=cuda,
    )
    ranks = world.allgather(json.dumps(dataclasses.asdict(own)))
    seen.ranks = [build_rank(json.loads(rank)) for rank in ranks]


def _cores(mine: RankFacts) -> list[tuple[str, int]]:
    return [(mine.host, core) for core in mine.cores]


def _every(world: Any, mine: list[Any]) -> list[Any]:
    return [one for facts in world.allgather(mine) for one in facts]


def _reads_neighbour(world: Any, mine: RankFacts) -> bool | None:
    """Returns whether this process may read the memory of the next rank on its host. Collective.

    None where it is the only one there.
    """
    words = f"rank {mine.rank} of mpissd".encode()
    kept = ctypes.create_string_buffer(words)
    seats = world.allgather((mine.host, mine.pid, ctypes.addressof(kept), words))
    local = [seat for seat in seats if seat[0] == mine.host]
    answer = None
    if len(local) > 1:
        here = [pid for _, pid, _, _ in local].index(mine.pid)
        _, pid, address, content = local[(here + 1) % len(local)]
        answer = peek(pid, address, len(content)) == content
    world.Barrier()  # `kept` has to live until the other rank has read it
    return answer


def _session(config: RunConfig, seen: Seen) -> SessionFacts:
    """Opens and closes a session as a run would; returns what it chose, the same on every rank."""
    from mpissd.ops.doctor.rehearsal import rehearse

    broken = [rank for rank in seen.ranks if rank.cuda and rank.cuda.error and not rank.cuda.cupy]
    # A failing import of CuPy here could end every rank.
    if broken and config.backend in ("auto", "cupy"):
        return SessionFacts(error=f"CuPy on rank {broken[0].rank}: {broken[0].cuda.error}")  # type: ignore[union-attr]
    return rehearse(config)
