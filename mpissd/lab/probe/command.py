"""The command `probe`: measures a pair of models on this machine, in one job.

    mpirun -np T+D python -m mpi4py -m mpissd probe --pair=8b/1b --fuse

Everything goes through the application's own code: backend programs, steppers, groups, links. The
result is a table on stdout and a device profile in OUT/profiles, which `plan` and
`--backend=emulated --device=FILE` read (docs/profile.md). The last line is one JSON object.

Ranks measure in turns, unless they have to act together, so that they do not disturb each other.
Wrong data (a sum, a NaN, a message that changed) ends the job with exit code 3, and nothing is
saved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from mpi4py import MPI

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError, MpissdError
from mpissd.common.wait import sharpen_sleep
from mpissd.engine.backend.base import Backend
from mpissd.engine.comm.group import Group, SoloGroup
from mpissd.engine.comm.topology import Refused
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stacks import AnyShard
from mpissd.engine.model.stepper import ModelSource
from mpissd.engine.session.session import Session, opened
from mpissd.lab.measure.provenance import provenance
from mpissd.lab.probe.device import DeviceProbe, product_shapes
from mpissd.lab.probe.group import (
    FORWARD_ROWS,
    GPU_ROWS,
    SHARDS,
    TRANSFORMER_ROWS,
    GroupProbe,
    open_groups,
)
from mpissd.lab.probe.host import MORE_SEQUENCES, host_entries
from mpissd.lab.probe.link import LinkProbe
from mpissd.lab.probe.printed import print_host, print_probe_card, print_seats, print_tables
from mpissd.lab.probe.profile import TABLES, check_name, fit, profile_name, save_profile
from mpissd.lab.probe.sample import Checks, Entry


def execute_probe(config: RunConfig, name: str | None = None) -> int:
    """Probes on all ranks and returns the exit code; `name` names the profile (default: generated).

    mode selects the models: ar means no draft, sd and ssd a draft (on the lead with D=0). Raises
    Refused on every rank for an impossible configuration or wrong data (exit code 3).
    """
    sharpen_sleep()
    if name is not None:
        try:
            check_name(name)
        except ConfigError as error:  # All ranks raise the same error here.
            raise Refused(str(error), error.exit_code) from error
    with opened(config) as session:
        _probe(session, name)
    return 0


def _probe(session: Session, name: str | None) -> None:
    seconds: dict[str, float] = {}
    if session.topology.is_lead:
        print_probe_card(session)
    prober = Prober(session)
    for stage in (
        prober.bandwidths,
        prober.products,
        prober.launches,
        prober.forwards,
        prober.all_reduces,
        prober.links,
        prober.hosts,
    ):
        begun = perf_counter()
        stage()
        # The barrier naps; a blocking collective would occupy cores that others measure on.
        session.barrier()
        session.agree(prober.checks.error())
        seconds[stage.__name__] = perf_counter() - begun
    world, place = session.topology.world, session.topology.place(session.backend.info)
    every = world.gather((prober.tables, prober.peak, prober.notes, place, prober.host))
    error: MpissdError | None = None
    if every is not None:
        try:
            _conclude(session, every, name, seconds)
        except MpissdError as failed:
            error = failed
    session.agree(error)


def _conclude(
    session: Session, every: list[Any], name: str | None, seconds: dict[str, float]
) -> None:
    """Writes the tables, the profile and the JSON line; runs on the lead after all measurements."""
    job, backend, infos = session.job, session.backend, session.infos
    tables: dict[str, list[Entry]] = {
        table: [entry for own, *_ in every for entry in own[table]] for table in TABLES
    }
    notes = [note for _, _, own, *_ in every for note in own]
    seats, host = [place for *_, place, _ in every], every[0][-1]
    memory = [info.memory_bytes for info in infos]
    fitted = fit(job, backend.itemsize, tables, every[0][1], memory, _source(session))
    print_tables(tables, notes)
    print_host(host)
    print_seats(seats)
    name = name or profile_name(job, backend.info)
    data = {
        "name": name,
        "device_name": backend.info.name.removesuffix(" (emulated)"),
        **fitted,
        "tables": tables,
        "host": host,
        "backend": backend.name,
        "dtype": backend.dtype_name,
        "topology": seats,
        "not_measured": notes,
        "stage_seconds": seconds,
        "provenance": provenance(infos, session.topology.hosts, _mpi_library()),
    }
    path = save_profile(job.config.out, name, data)
    covers = list(dict.fromkeys(f"{e['model']} T={e['tp']}" for e in tables["forwards"]))
    values = {key: number["value"] for key, number in fitted["numbers"].items()}
    summary = {"profile": str(path), "name": name, "covers": covers, **values}
    summary["seconds"] = sum(seconds.values())
    print(json.dumps(summary), flush=True)


def _source(session: Session) -> str:
    """Returns the "from" text for everything that this job measured."""
    if session.backend.info.kind == "emulated":
        return f"modelled: profile {session.job.config.device}"
    return f"measured: {session.backend.info.name}, {session.backend.name}"


def _mpi_library() -> str:
    return str(MPI.Get_library_version()).strip("\x00").splitlines()[0].strip()


class Prober:
    """One rank's part in every stage, and its measurements."""

    def __init__(self, session: Session) -> None:
        self._session, self._topology, self._job = session, session.topology, session.job
        self.checks = Checks()
        self.tables: dict[str, list[Entry]] = {table: [] for table in TABLES}
        self.peak: tuple[str, float | None] = ("none", None)
        self.notes: list[str] = []
        self.host: list[Entry] = []
        self._source = _source(session)
        self._device = DeviceProbe(session.backend, session.waiter, self.checks, self._source)
        drafts = self._topology.num_drafts
        # The lead if the draft is inline, or the first draft rank.
        self._draft_rank = self._topology.tp if drafts else 0

    def bandwidths(self) -> None:
        """Measures every rank's bandwidth over as many bytes as its weights have."""
        target, draft = self._job.rank_bytes(self._session.backend.itemsize)
        for rank in range(self._topology.world.size):
            size = draft if rank >= self._topology.tp else target
            self._turn(rank, partial(self._bandwidth, size))

    def products(self) -> None:
        """Measures the target shard's products, the draft's on its rank, then one large product."""
        target = product_shapes(self._target, self._job.options)
        self._turn(0, lambda: self._products(target))
        if self._draft is not None:
            own = product_shapes(self._draft, self._job.draft_options)
            new = [shape for shape in own if shape not in target]
            self._turn(self._draft_rank, lambda: self._products(new))
        self._turn(0, self._square)

    def launches(self) -> None:
        """Measures launches, and copies to and from the host, on the lead."""
        self._turn(0, lambda: self.tables["launches"].append(self._device.launch()))
        self._turn(0, lambda: self.tables["copies"].extend(self._device.copies()))

    def forwards(self) -> None:
        """Measures the target's forwards on all its ranks, then the draft's, with each possible
        kernel."""
        job, group = self._job, self._session.group
        if not self._topology.is_draft:
            here = self._group(self._topology.group)
            rows, model = job.target_buckets(), self._model("target_model")
            self._forwards(here, group, self._target, job.options, rows, model)
        if self._draft is not None:
            draft, rows, model = self._draft, job.draft_buckets(), self._model("draft_model")
            alone, options = self._group(MPI.COMM_SELF), job.draft_options
            self._turn(
                self._draft_rank,
                lambda: self._forwards(alone, SoloGroup(), draft, options, rows, model),
            )

    def _forwards(
        self,
        ranks: GroupProbe,
        group: Group,
        shard: AnyShard,
        options: ForwardOptions,
        buckets: Sequence[int],
        model: ModelSource | None,
    ) -> None:
        """Measures one model's forwards, with the kernel of small jobs if it differs, and the
        common one.

        The weights are made anew for each kernel, because their order differs.
        """
        if model is not None:
            self._transformer(ranks, group, shard, options, buckets, model)
        every, batch = sorted({*FORWARD_ROWS, *buckets}), self._job.config.batch_size
        for most in kinds(self._session.backend) if model is None else ():
            rows = [n for n in every if most is None or n <= most]
            tables = ranks.forwards(group, shard, options, rows, batch, most)
            if self._topology.group.rank == 0:
                self.tables["forwards"].append(tables[0])
                self.tables["launches"].append(tables[1])
        self.tables["read_outs"] += ranks.read_outs

    def _transformer(
        self,
        ranks: GroupProbe,
        group: Group,
        shard: AnyShard,
        options: ForwardOptions,
        buckets: Sequence[int],
        model: ModelSource,
    ) -> None:
        """Measures a transformer at the probe's batch size and at that of its second host costs.

        A probe with one target rank also measures the share of the target that rank 0 of T > 1
        would hold, without all-reduces: derive.py adds them, so that `plan` knows these T.
        """
        config = self._job.config
        options = replace(options, context=config.context)
        on_gpu = self._session.backend.info.kind == "gpu"
        factors = (1, MORE_SEQUENCES, 4 * MORE_SEQUENCES) if on_gpu else (1, MORE_SEQUENCES)
        batches = [factor * config.batch_size for factor in factors]
        rows = sorted({*TRANSFORMER_ROWS, *(GPU_ROWS if on_gpu else ()), *buckets})
        forwards, launches = ranks.transformer(group, shard, options, rows, batches, model)
        if self._topology.group.rank == 0:
            self.tables["forwards"] += forwards
            self.tables["launches"] += launches[:1]
        if self._topology.tp > 1 or shard != self._target or self._source.startswith("modelled"):
            return
        for tp in SHARDS:
            try:
                share = replace(shard, tp=tp)
            except ConfigError as error:  # more ranks than KV heads
                self.notes.append(f"a share of T={tp}: {error}")
                continue
            parts = share, options, rows, batches, model
            self.tables["shards"] += ranks.transformer(SoloGroup(), *parts, ends=True)[0]

    def all_reduces(self) -> None:
        """Measures every all-reduce that can be opened over the target ranks; none with one
        rank."""
        session, config = self._session, self._job.config
        if self._topology.is_draft or self._topology.tp == 1:
            return
        comm, aware = self._topology.group, config.all_reduce == "mpi"
        with ExitStack() as opened:
            groups, refused = open_groups(
                session.group, session.backend, comm, session.waiter, cuda_aware=aware
            )
            for group in groups.values():
                if group is not session.group:
                    opened.callback(group.close)
            entries = self._group(comm).all_reduces(groups, self._job.target.hidden)
        if self._topology.is_lead:
            self.tables["all_reduces"] += entries
            self.notes += refused

    def links(self) -> None:
        """Measures between the lead and the first draft rank, while the others nap."""
        world, draft = self._topology.world, self._topology.tp
        if not self._topology.num_drafts:
            return
        pair = world.Split(0 if world.rank in (0, draft) else MPI.UNDEFINED, world.rank)
        if pair == MPI.COMM_NULL:
            return
        session, config = self._session, self._job.config
        source = "measured: host MPI" if session.backend.info.kind == "emulated" else self._source
        link = LinkProbe(session.backend, pair, session.waiter, self.checks, source)
        curves, refused = link.measure(cuda_aware=config.all_reduce == "mpi")
        if self._topology.is_lead:
            self.tables["links"] += curves
            self.notes += refused

    def hosts(self) -> None:
        """Measures host work and link for every configuration that these ranks allow, on all of
        them."""
        source = f"measured: ledgers of the decoding loops, {self._session.backend.name}"
        self.host, notes = host_entries(self._session, source)
        self.notes += notes if self._topology.is_lead else []

    @property
    def _target(self) -> AnyShard:
        rank = 0 if self._topology.is_draft else self._topology.world.rank
        return replace(self._job.target_shard, rank=rank)

    @property
    def _draft(self) -> AnyShard | None:
        return self._job.draft_shard

    def _model(self, which: str) -> ModelSource | None:
        """Returns the factory of a transformer; None for matrix products."""
        if not self._job.config.is_transformer:
            return None
        model: ModelSource = getattr(self._session.workload, which)
        return model

    def _group(self, comm: MPI.Comm) -> GroupProbe:
        session = self._session
        return GroupProbe(session.backend, comm, session.waiter, self.checks, self._source)

    def _turn(self, rank: int, work: Callable[[], Any]) -> None:
        """Runs `work` on one rank, while the others nap."""
        self._session.barrier()
        if self._topology.world.rank == rank:
            work()

    def _bandwidth(self, num_bytes: int) -> None:
        rates = self._device.bandwidths(num_bytes)
        self.tables["bandwidths"].append({"rank": self._topology.world.rank, **rates})

    def _products(self, shapes: list[tuple[int, int]]) -> None:
        rate = self.tables["bandwidths"][0]["read_bytes_per_s"]
        self.tables["products"] += self._device.products(shapes, rate)

    def _square(self) -> None:
        self.peak = self._device.square()


def kinds(backend: Backend) -> list[int | None]:
    """Returns the row limit (most_rows) of each kernel that jobs may run, smallest first."""
    return [backend.few_rows, None] if backend.few_rows else [None]
