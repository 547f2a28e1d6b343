"""One rank's resources of a job, opened in an order and closed in its reverse.

Opening: topology → backend → group → models → link. Closing: link → programs (graphs) → group
(NCCL) → backend. Graphs that outlive their communicator hang.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from mpissd.backend.base import Backend, DeviceInfo
from mpissd.backend.registry import choose, open_backend
from mpissd.bench.output import make_output
from mpissd.comm.group import Group, SoloGroup
from mpissd.comm.link import LinkShape
from mpissd.comm.mpi_gather import MpiLogitsGather
from mpissd.comm.mpi_group import open_group
from mpissd.comm.topology import Refused, Topology, agree, open_topology
from mpissd.config import RunConfig
from mpissd.errors import ConfigError, MpissdError
from mpissd.job import Job, resolve
from mpissd.model.shard import ForwardOptions, Shard
from mpissd.model.stepper import Stepper
from mpissd.presets import ModelShape
from mpissd.rounds import Request
from mpissd.wait import Waiter
from mpissd.workload.base import DraftWorker, TargetWorker
from mpissd.workload.gemm import GemmDraftWorker, GemmTargetWorker
from mpissd.workload.gemm_law import DraftStream, TokenStream
from mpissd.workload.markov_draft import MarkovDraftWorker
from mpissd.workload.markov_target import MarkovTargetWorker
from mpissd.workload.tail import TailWorker


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
        laws, config = self.job.laws, self.job.config
        sampled = laws is not None and self.job.lookahead > 0 and laws.temperature > 0
        vocab = laws.vocab if laws is not None and sampled else 0  # greedy tokens are certain
        return LinkShape(
            0, config.batch_size, self.job.lookahead, vocab=vocab, num_drafts=config.drafts
        )

    def target_worker(self) -> TargetWorker:
        """This target rank's share of the target model."""
        job = self.job
        shard = Shard(job.target, job.tp, self.topology.world.rank)
        stepper = self._stepper(self.group, shard, job.options, job.target_buckets(), 0)
        if job.laws is not None:
            rank, gather = self.topology.group.rank, None
            if job.tp > 1:
                gather = MpiLogitsGather(self.topology.group.Dup())
            return MarkovTargetWorker(stepper, job.laws, tp=job.tp, rank=rank, gather=gather)
        batch, vocab = job.config.batch_size, job.target.vocab_size
        stream = TokenStream(job.config.seed, vocab, batch, job.lookahead)
        return GemmTargetWorker(stepper, stream)

    def draft_worker(self) -> DraftWorker:
        """The whole draft model, on a draft rank or inline on the lead."""
        worker = self._draft_worker()
        return TailWorker(worker) if self.job.is_tail else worker

    def _draft_worker(self) -> DraftWorker:
        job = self.job
        shard = Shard(_some(job.draft))
        stepper = self._stepper(SoloGroup(), shard, job.draft_options, job.draft_buckets(), 1)
        if job.laws is not None:
            return MarkovDraftWorker(stepper, job.laws, job.lookahead, job.fan_outs)
        batch, vocab = job.config.batch_size, job.target.vocab_size
        stream = DraftStream(
            job.config.seed, vocab, batch, job.acceptance, job.hit_law, job.widest
        )
        return GemmDraftWorker(stepper, stream, shard.shape.num_tokens)

    def requests(self, first_id: int, count: int) -> list[Request]:
        """`count` sequences to decode, numbered from first_id."""
        if self.job.laws is not None:
            return self.job.laws.requests(first_id, count)
        return [Request(first_id + n, first_token=n) for n in range(count)]

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
    memory = memory_shares(infos, topology.hosts)
    try:
        return (
            resolve(
                config,
                topology.tp,
                backend=backend.name,
                memory_bytes=_least(memory[: topology.tp]),
                draft_memory_bytes=_least(memory[topology.tp :]),
            ),
            None,
        )
    except MpissdError as error:
        return None, error


def memory_shares(infos: Sequence[DeviceInfo], hosts: Sequence[str]) -> list[int | None]:
    """Bytes that each rank may fill: its GPU's, or its share of the one memory of a host's CPUs."""
    ranks = Counter(hosts)
    shares: list[int | None] = []
    for info, host in zip(infos, hosts, strict=True):
        sharers = ranks[host] if info.kind == "cpu" else 1
        shares.append(None if info.memory_bytes is None else info.memory_bytes // sharers)
    return shares


def _least(sizes: Sequence[int | None]) -> int | None:
    """The smallest; None where one is unknown, or there is none."""
    known = [size for size in sizes if size is not None]
    return min(known) if known and len(known) == len(sizes) else None
