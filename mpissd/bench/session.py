"""One rank's resources of a job, opened in an order and closed in its reverse.

Opening: topology → backend → group → models → link. Closing: link → programs (graphs) → group
(NCCL) → backend. Graphs that outlive their communicator hang.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from mpissd.backend.base import Backend, DeviceInfo
from mpissd.backend.registry import choose, open_backend
from mpissd.bench.output import make_output
from mpissd.comm.group import Group, SoloGroup
from mpissd.comm.link import LinkShape
from mpissd.comm.mpi_group import open_group
from mpissd.comm.topology import Refused, Topology, agree, open_topology
from mpissd.config import RunConfig
from mpissd.errors import ConfigError, MpissdError
from mpissd.job import Job, resolve
from mpissd.model.shard import ForwardOptions, Shard
from mpissd.model.stepper import Stepper
from mpissd.presets import ModelShape
from mpissd.wait import Waiter
from mpissd.workload.gemm import GemmDraftWorker, GemmTargetWorker
from mpissd.workload.gemm_law import DraftStream, TokenStream


@dataclass
class Session:
    """What one rank holds while a job runs."""

    topology: Topology
    waiter: Waiter
    backend: Backend
    infos: list[DeviceInfo]  # by world rank
    job: Job
    group: Group
    resources: ExitStack

    @property
    def link_shape(self) -> LinkShape:
        """Sizes of the messages of this job."""
        return LinkShape(0, self.job.config.batch_size, self.job.lookahead)

    def target_worker(self) -> GemmTargetWorker:
        """This target rank's share of the target model."""
        job = self.job
        shard = Shard(job.target, job.tp, self.topology.world.rank)
        stepper = self._stepper(self.group, shard, job.options, job.target_buckets(), 0)
        batch, vocab = job.config.batch_size, job.target.vocab_size
        stream = TokenStream(job.config.seed, vocab, batch, job.lookahead)
        return GemmTargetWorker(stepper, stream)

    def draft_worker(self) -> GemmDraftWorker:
        """The whole draft model, on a draft rank or inline on the lead."""
        job = self.job
        shard = Shard(_some(job.draft))
        stepper = self._stepper(SoloGroup(), shard, job.draft_options, job.draft_buckets(), 1)
        batch, vocab = job.config.batch_size, job.target.vocab_size
        laws = job.acceptance, job.hit_law, job.fan_out
        stream = DraftStream(job.config.seed, vocab, batch, *laws)
        return GemmDraftWorker(stepper, stream)

    def _stepper(
        self, group: Group, shard: Shard, options: ForwardOptions, buckets: list[int], model: int
    ) -> Stepper:
        config = self.job.config
        return Stepper(
            self.backend,
            group,
            shard,
            options,
            buckets=buckets,
            num_sequences=config.batch_size,
            seed=2 * config.seed + model,
        )

    def barrier(self, waiter: Waiter | None = None) -> None:
        """All ranks of the world arrive; the wait naps and has a deadline."""
        request = self.topology.world.Ibarrier()
        (waiter or self.waiter).until(request.Test, "barrier")

    def agree(self, error: MpissdError | None) -> None:
        """Refuses on every rank if one rank has an error."""
        agree(self.topology.world, error)


def _some(shape: ModelShape | None) -> ModelShape:
    assert shape is not None, "a draft worker without a draft model"
    return shape


def open_session(config: RunConfig) -> Session:
    """Opens a rank's part of the job; every rank leaves with Refused where one cannot."""
    try:
        topology = open_topology(config.drafts)
    except ConfigError as small:  # the same on every rank
        raise Refused(str(small), small.exit_code) from small
    waiter = topology.waiter(config.deadline_s)
    resources = ExitStack()
    backend, error = _open_backend(config, topology)
    agree(topology.world, error)
    assert backend is not None
    resources.callback(backend.close)
    names = topology.world.allgather(backend.name)
    if len(set(names)) > 1:  # --backend=auto on unlike nodes
        raise Refused(f"backends by rank are {', '.join(names)}: say which with --backend", 2)
    infos = topology.world.allgather(backend.info)
    job, error = _resolve(config, topology, backend, infos)
    agree(topology.world, error)
    assert job is not None
    group: Group = SoloGroup()
    error = None
    if not topology.is_draft:
        try:
            group = open_group(
                backend,
                topology.group,
                config.all_reduce,
                waiter,
                cuda_aware=config.cuda_aware_mpi,
            )
        except ConfigError as refused:
            error = refused
        resources.callback(group.close)
    agree(topology.world, error)
    return Session(topology, waiter, backend, infos, job, group, resources)


def _open_backend(
    config: RunConfig, topology: Topology
) -> tuple[Backend | None, MpissdError | None]:
    try:
        if topology.is_lead:
            make_output(config.out)
        name = choose(config.backend)
        backend = open_backend(
            name, device=config.device, local_rank=topology.local_rank, graph=config.graph
        )
    except MpissdError as error:
        return None, error
    return backend, None


def _resolve(
    config: RunConfig, topology: Topology, backend: Backend, infos: list[DeviceInfo]
) -> tuple[Job | None, MpissdError | None]:
    """Every rank resolves the same job: memory is the smallest of each role's."""
    targets, drafts = infos[: topology.tp], infos[topology.tp :]
    try:
        return (
            resolve(
                config,
                topology.tp,
                backend=backend.name,
                memory_bytes=_least_memory(targets, infos, backend),
                draft_memory_bytes=_least_memory(drafts, infos, backend) if drafts else None,
            ),
            None,
        )
    except MpissdError as error:
        return None, error


def _least_memory(
    infos: list[DeviceInfo], everyone: list[DeviceInfo], backend: Backend
) -> int | None:
    known = [info.memory_bytes for info in infos]
    if any(size is None for size in known):
        return None
    least = int(np.min([size for size in known if size is not None]))
    if backend.info.kind == "cpu":  # one memory holds all ranks of a host
        return least // max(1, len(everyone))
    return least
