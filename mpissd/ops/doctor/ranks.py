"""Starts the ranks of a run, compares their facts, and opens and closes a session on them.

The command starts `mpirun -np N … doctor --json`. Rank 0 prints one line of JSON after each step,
so that the last line shows how far a job came that hangs or ends early.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib.util
import json
import os
import platform
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import mpissd
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.flags import said
from mpissd.common.ranks import ranks_command
from mpissd.common.wait import sharpen_sleep
from mpissd.engine.comm.topology import (
    Refused,
    Topology,
    launcher_rank,
    launcher_size,
    open_topology,
    usable_cores,
)
from mpissd.ops.doctor.machine import (
    ASK_S,
    Answer,
    CudaView,
    ask,
    build,
    library_path,
    one_line,
    read_cuda,
    refusal,
)

if TYPE_CHECKING:
    from mpissd.engine.session.session import Session  # importing it starts MPI

MARK = "mpissd-doctor "  # begins rank 0's lines of facts on stdout
_RAISED = re.compile(r"(?:[\w.]+\.)?\w*(?:Error|Exception|Exit): ")  # a traceback's last line
_MORE_S = 10.0  # time beyond the deadline for mpirun to start and to end
_HEAD_START_S = 3.0  # if all ranks fail alike, rank 0 reports first
_NOT_PASSED = ("dry_run", "progress")
_WHY = {
    "mpi": "host arrays",
    "oneshot": "the target's GPUs map each other's memory",
    "device": "--all_reduce=mpi",
}


@dataclass(frozen=True)
class RankFacts:
    """One rank; world_size is MPI's, launcher_size is from the environment."""

    rank: int
    host: str
    python_version: str
    mpissd: str
    folder: str
    role: str = "?"
    local_rank: int = 0
    world_size: int | None = None
    launcher_size: int | None = None
    library: str = ""
    library_path: str = ""
    cores: list[int] = field(default_factory=list)
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    cuda: CudaView | None = None  # None: CuPy is not installed


@dataclass(frozen=True)
class SessionFacts:
    """The choices of a run, from a session that was opened and closed again."""

    error: str = ""
    backend: str = ""
    device_name: str = ""
    all_reduce: str = ""
    all_reduce_why: str = ""
    target: str = ""
    draft: str = ""
    needs: list[int] = field(default_factory=list)  # each rank's bytes of weights
    memory: list[int | None] = field(default_factory=list)  # each rank's bytes of free memory
    doubts: list[str] = field(default_factory=list)  # drafts that were made for another target


@dataclass
class Seen:
    """The facts so far; step: the ranks' current step, "" at the end."""

    ranks: list[RankFacts] = field(default_factory=list)
    session: SessionFacts | None = None
    step: str = ""

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
            None if session is None else build(SessionFacts, session),
            data["step"],
        )


def build_rank(data: dict[str, object]) -> RankFacts:
    """Returns a RankFacts, with its CudaView, from its fields as JSON."""
    cuda = data.get("cuda")
    view = build(CudaView, cuda) if isinstance(cuda, dict) else None
    return build(RankFacts, {**data, "cuda": view})


def try_ranks(config: RunConfig, num_ranks: int) -> tuple[Seen, str]:
    """Starts the ranks; returns (their facts, why there are none).

    Takes the deadline and 14 s at most.
    """
    given = [f"--{name}={text}" for name, text in said(config).items() if name not in _NOT_PASSED]
    command = ranks_command(["doctor", "--json", *given], num_ranks)
    return read(ask(command, config.deadline_s + _MORE_S, signal.SIGTERM))


def read(answer: Answer) -> tuple[Seen, str]:
    """Returns the ranks' last report and "", or an empty report and mpirun's complaint."""
    for line in reversed(answer.out.splitlines()):
        _, mark, text = line.partition(MARK)
        if not mark:
            continue
        try:
            seen = Seen.from_json(text)
        except (ValueError, TypeError, KeyError):  # a line that was cut off or mixed with another
            continue
        if seen.step and seen.session is None:
            seen.session = SessionFacts(error=f"{seen.step}: {answer.error or complaint(answer)}")
        return seen, ""
    return Seen(), answer.error or complaint(answer)


def complaint(answer: Answer) -> str:
    """Returns the informative part of mpirun's output, in one line of up to 300 characters."""
    lines = [line.strip() for line in f"{answer.err}\n{answer.out}".splitlines()]
    printed = [line for line in lines if not set(line) <= set("-=*") and MARK not in line]
    if not printed:
        return f"mpirun printed nothing and ended with code {answer.code}"
    raised = [line for line in printed if _RAISED.match(line)]
    return (raised[-1] if raised else " ".join(printed[:4]))[:300]


def examine_rank(
    config: RunConfig, check: Callable[[RunConfig], None], report: Callable[[Seen], int]
) -> int:
    """Examines the machine as one of the ranks; returns the exit code. Collective.

    check: raises ConfigError for flags that a rank of `run` refuses before MPI starts. report:
    called on rank 0 before each step at the end, and if a rank fails; returns the exit code.
    """
    from mpissd.engine.comm import mpi_library

    seen = Seen(step="MPI_Init")
    # A library that hangs while it holds Python's lock stops every Python thread, so C ends it.
    faulthandler.dump_traceback_later(config.deadline_s + 2 * _MORE_S, exit=True)
    if launcher_rank() == 0:
        report(seen)
    rank, size, library = mpi_library.identity()
    mine = _myself(rank, size, library)
    seen.ranks = [mine]
    code = 2
    try:
        topology = open_topology(config.drafts, config.groups)
        _compare(topology, mine, seen, config.deadline_s)
        seen.step = "opening a session"
        if rank == 0:
            report(seen)
        refused = list(filter(None, topology.world.allgather(refusal(config, check))))
        seen.session = SessionFacts(refused[0]) if refused else _session(config, seen)
        seen.step = ""
        code = topology.world.bcast(report(seen) if rank == 0 else None)
    except ConfigError as error:  # from open_topology, on every rank
        seen.session, seen.step = SessionFacts(error=str(error)), ""
        code = report(seen) if launcher_rank() == 0 else 2
    except Exception as error:  # noqa: BLE001  (the examined code may raise any error)
        problem = f"rank {rank}: {type(error).__name__}: {error}"
        seen.session, seen.step = SessionFacts(error=problem), ""
        if launcher_rank():
            time.sleep(_HEAD_START_S)
        mpi_library.abort(report(seen) or 2)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return int(code)


def _myself(rank: int, size: int, library: str) -> RankFacts:
    maps = Path("/proc/self/maps")
    return RankFacts(
        rank=rank,
        host=socket.gethostname(),
        python_version=platform.python_version(),
        mpissd=mpissd.__version__,
        folder=str(Path(mpissd.__file__).parent),
        world_size=size,
        launcher_size=launcher_size(),
        library=one_line(library),
        library_path=library_path(maps.read_text()) if maps.exists() else "",
        cores=sorted(usable_cores()),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _compare(topology: Topology, mine: RankFacts, seen: Seen, deadline_s: float) -> None:
    """Puts the facts of every rank into `seen`, on every rank. Collective."""
    has_cupy = importlib.util.find_spec("cupy") is not None
    cuda = read_cuda(topology.local_rank, min(ASK_S, deadline_s / 2)) if has_cupy else None
    role = "draft" if topology.is_draft else "lead" if topology.leads_group else "target"
    own = dataclasses.replace(mine, role=role, local_rank=topology.local_rank, cuda=cuda)
    ranks = topology.world.allgather(json.dumps(dataclasses.asdict(own)))
    seen.ranks = [build_rank(json.loads(rank)) for rank in ranks]


def _session(config: RunConfig, seen: Seen) -> SessionFacts:
    """Opens and closes a session as a run would; returns its choices, equal on every rank.

    Removes the empty folders that it made. Collective.
    """
    from mpissd.engine.session.session import open_session

    broken = [rank for rank in seen.ranks if rank.cuda and rank.cuda.error and not rank.cuda.cupy]
    if broken and config.backend in ("auto", "cupy"):  # its import could end every rank
        return SessionFacts(error=f"CuPy on rank {broken[0].rank}: {broken[0].cuda.error}")  # type: ignore[union-attr]
    sharpen_sleep()
    out = Path(config.out)
    made = [p for p in (out / "rounds", out / "profiles", out, *out.parents) if not p.exists()]
    try:
        session = open_session(config)
    except Refused as refused:
        return SessionFacts(error=str(refused))
    finally:
        for folder in made:
            with suppress(OSError):  # another rank removed it
                folder.rmdir()
    try:
        return _choices(session)
    finally:
        session.resources.close()


def _choices(session: Session) -> SessionFacts:
    from mpissd.engine.session.doubts import doubts
    from mpissd.engine.session.session import memory_shares

    job, topology, infos = session.job, session.topology, session.infos
    target, draft = job.rank_bytes(4 if session.backend.name == "numpy" else 2)
    device, first = infos[0].name, topology.first_draft
    if len(infos) > first and infos[first].name != device:
        device = f"{device}, drafts on {infos[first].name}"
    return SessionFacts(
        backend=session.backend.name,
        device_name=device,
        all_reduce=topology.world.bcast(session.group.name),
        all_reduce_why=topology.world.bcast(_reason(session)),
        target=job.target.name,
        draft="" if job.draft is None else job.draft.name,
        needs=[target] * topology.first_draft + [draft] * topology.num_drafts,
        memory=memory_shares(infos, topology.hosts),
        doubts=topology.world.bcast(doubts(job) if topology.is_lead else None),
    )


def _reason(session: Session) -> str:
    """Returns why this all-reduce was chosen, or why the fastest one was not."""
    from mpissd.engine.comm.mpi_group import open_group

    group, asked = session.group, session.job.config.all_reduce
    if session.topology.tp == 1:
        return "one target rank"
    if session.backend.name == "emulated":
        return "modelled"
    if session.topology.is_draft or group.name not in ("nccl", "staged") or asked != "auto":
        return "asked for" if asked == group.name else _WHY.get(group.name, "")
    try:
        open_group(session.backend, session.topology.group, "oneshot", session.waiter).close()
    except ConfigError as error:  # all target ranks raise the same error here
        return str(error).partition("; allowed")[0]
    return "oneshot opens now, but did not a moment ago"
