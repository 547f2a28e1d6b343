"""The probe runs the kernels that runs run."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mpissd.common.config import RunConfig
from mpissd.common.wait import Waiter
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.comm.topology import Topology
from mpissd.engine.job import Job, resolve
from mpissd.engine.model.shard import Shard
from mpissd.engine.session.session import Models
from mpissd.lab.probe.measure import FORWARD_ROWS, GroupProbe

pytestmark = pytest.mark.gpu
WAITER = Waiter(60.0, spin=True)
TARGET = "gen:layers=2,hidden=1024,ffn=4096,heads=8,vocab=4096"


def job(**flags: Any) -> Job:
    config = RunConfig(mode="ar", target=TARGET, fuse=True, **flags)
    return resolve(config, 1, backend="cupy", memory_bytes=None)


def of_a_run(backend: Any, found: Job) -> str:
    """The kernel of a run's forwards, as its session opens them."""
    from mpi4py import MPI

    models = Models(backend, SoloGroup(), 0)
    alone = SimpleNamespace(world=MPI.COMM_SELF, group=MPI.COMM_SELF, is_draft=False, is_lead=True)
    models.expect([found])
    target, _ = models.open(found, cast(Topology, alone))
    assert target is not None
    kernel = target.stack.weights.kernel
    models.close()
    return kernel


def probed(backend: Any, found: Job) -> dict[int | None, dict[str, Any]]:
    """ "forwards" entries of the job's target by most_rows."""
    from mpi4py import MPI

    faults: list[str] = []
    group = GroupProbe(backend, MPI.COMM_SELF, WAITER, faults, "measured: here")
    entries = {}
    for most in (backend.few_rows, None) if backend.few_rows else (None,):
        rows = [n for n in FORWARD_ROWS if most is None or n <= most]
        shard = Shard(found.target)
        entries[most] = group.forwards(SoloGroup(), shard, found.options, rows, 1, most)
    assert faults == []
    return entries


def test_every_kernel_of_a_run_is_probed_and_named(backend: Any) -> None:
    entries = probed(backend, job())
    assert None in entries and entries[None]["kernel"] in ("cublas", "cupy")
    for batch in (1, 32, 33, 64):
        most = backend.few_rows if batch <= backend.few_rows else None
        assert entries[most]["kernel"] == of_a_run(backend, job(batch_size=batch)), batch
