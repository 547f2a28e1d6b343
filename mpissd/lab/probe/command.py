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

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from typing import Any

from mpi4py import MPI

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError, MpissdError
from mpissd.common.output import json_line
from mpissd.common.wait import sharpen_sleep
from mpissd.engine.backend.base import Backend
from mpissd.engine.comm.group import Group, SoloGroup
from mpissd.engine.comm.topology import Refused
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stacks import AnyShard
from mpissd.engine.model.stepper import ModelSource
from mpissd.engine.session.session import Session, opened
from mpissd.lab.measure.provenance import provenance
from mpissd.lab.probe.group import (
    FORWARD_ROWS,
    GPU_ROWS,
    SHARDS,
    TRANSFORMER_ROWS,
    GroupProbe,
    open_groups,
)
from mpissd.lab.probe.host import MORE_SEQUENCES, host_entries
from mpissd.lab.probe.link import link_curves
from mpissd.lab.probe.printed import print_probe_card, print_table
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
        if session.topology.is_lead:
            print_probe_card(session)
        Prober(session).run(name)
    return 0


class Prober:
    """One rank's part in every stage, and its measurements."""

    def __init__(self, session: Session) -> None:
        self._session, self._topology, self._job = session, session.topology, session.job
        self.checks = Checks()
        self.tables: dict[str, list[Entry]] = {table: [] for table in TABLES}
        self.peak: float | None = None
        self.notes: list[str] = []
        self.host: list[Entry] = []
        self._source = f"measured: {session.backend.info.name}, {session.backend.name}"
        if session.backend.info.kind == "emulated":
            self._source = f"modelled: profile {session.job.config.device}"
        # The lead if the draft is inline, or the first draft rank.
        self._draft_rank = self._topology.tp if self._topology.num_drafts else 0

    def run(self, name: str | None) -> None:
        """Runs all stages, then writes the profile on the lead; collective over the world."""
        seconds: dict[str, float] = {}
        stages = self.rates, self.forwards, self.all_reduces, self.links, self.hosts
        for stage in stages:
            begun = perf_counter()
            stage()
            # The barrier naps; a blocking collective would occupy cores that others measure on.
            self._session.barrier()
            self._session.agree(self.checks.error())
            seconds[stage.__name__] = perf_counter() - begun
        place = self._topology.place(self._session.backend.info)
        every = self._topology.world.gather((self.tables, self.notes, place))
        error: MpissdError | None = None
        if every is not None:
            try:
                self._conclude(every, name, seconds)
            except MpissdError as failed:
                error = failed
        self._session.agree(error)

    def _conclude(self, every: list[Any], name: str | None, seconds: dict[str, float]) -> None:
        """Writes the table, the profile and the JSON line; on the lead."""
        session, job, backend = self._session, self._job, self._session.backend
        tables: dict[str, list[Entry]] = {
            table: [entry for own, *_ in every for entry in own[table]] for table in TABLES
        }
        notes = [note for _, own, _ in every for note in own]
        places = [place for *_, place in every]
        memory = [info.memory_bytes for info in session.infos]
        fitted = fit(job, backend.itemsize, tables, self.peak, memory, self._source)
        print_table(tables, notes, self.host, places)
        name = name or profile_name(job, backend.info)
        data = {
            "name": name,
            "device_name": backend.info.name.removesuffix(" (emulated)"),
            **fitted,
            "tables": tables,
            "host": self.host,
            "backend": backend.name,
            "dtype": backend.dtype_name,
            "topology": places,
            "not_measured": notes,
            "stage_seconds": seconds,
            "provenance": provenance(session.infos, session.topology.hosts),
        }
        path = save_profile(job.config.out, name, data)
        covers = list(dict.fromkeys(f"{e['model']} T={e['tp']}" for e in tables["forwards"]))
        values = {key: number["value"] for key, number in fitted["numbers"].items()}
        summary = {"profile": str(path), "name": name, "covers": covers, **values}
        summary["seconds"] = sum(seconds.values())
        print(json_line(summary), flush=True)

    def rates(self) -> None:
        """Measures every rank's read bandwidth over as many bytes as its weights have, and on the
        lead the peak of a large product and an empty launch."""
        backend, alone = self._session.backend, self._group(MPI.COMM_SELF)
        sizes = self._job.rank_bytes(backend.itemsize)

        def read() -> None:
            rank, size = self._topology.world.rank, sizes[self._topology.is_draft]
            rate = {"bytes": size, "read_bytes_per_s": backend.read_bandwidth(size)}
            self.tables["bandwidths"].append({"rank": rank, "from": self._source, **rate})

        def of_lead() -> None:
            self.peak = backend.peak_flops()
            self.tables["launches"].append(alone.empty())

        for rank in range(self._topology.world.size):
            self._turn(rank, read)
        self._turn(0, of_lead)

    def forwards(self) -> None:
        """Measures the target's forwards on all its ranks, then the draft's, with each possible
        kernel."""
        job, group = self._job, self._session.group
        if not self._topology.is_draft:
            here, shard = self._group(self._topology.group), self._target
            self._forwards(here, group, shard, job.options, job.target_buckets(), "target_model")
        if (draft := job.draft_shard) is not None:
            alone, options = self._group(MPI.COMM_SELF), job.draft_options
            parts = draft, options, job.draft_buckets(), "draft_model"
            self._turn(self._draft_rank, lambda: self._forwards(alone, SoloGroup(), *parts))

    def _forwards(
        self,
        ranks: GroupProbe,
        group: Group,
        shard: AnyShard,
        options: ForwardOptions,
        buckets: Sequence[int],
        which: str,
    ) -> None:
        """Measures one model's forwards, with the kernel of small jobs if it differs, and the
        common one.

        The weights are made anew for each kernel, because their order differs.
        """
        config, entries = self._job.config, list[Entry]()
        if config.is_transformer:
            model: ModelSource = getattr(self._session.workload, which)
            entries = self._transformer(ranks, group, shard, options, buckets, model)
        else:
            every = sorted({*FORWARD_ROWS, *buckets})
            for most in kinds(self._session.backend):
                rows = [n for n in every if most is None or n <= most]
                parts = shard, options, rows, config.batch_size, most
                entries.append(ranks.forwards(group, *parts))
        if self._topology.group.rank == 0:
            self.tables["forwards"] += entries
        self.tables["read_outs"] += ranks.read_outs

    def _transformer(
        self,
        ranks: GroupProbe,
        group: Group,
        shard: AnyShard,
        options: ForwardOptions,
        buckets: Sequence[int],
        model: ModelSource,
    ) -> list[Entry]:
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
        entries = ranks.transformer(group, shard, options, rows, batches, model)
        is_measured = self._session.backend.info.kind != "emulated"
        is_alone = self._topology.tp == 1 and shard == self._target
        for tp in SHARDS if is_measured and is_alone else ():
            try:
                share = replace(shard, tp=tp)
            except ConfigError as error:  # more ranks than KV heads
                self.notes.append(f"a share of T={tp}: {error}")
                continue
            parts = share, options, rows, batches, model
            self.tables["shards"] += ranks.transformer(SoloGroup(), *parts, ends=True)
        return entries

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
        if pair != MPI.COMM_NULL:
            curves = link_curves(pair, self._session.waiter, self.checks, "measured: MPI")
            if self._topology.is_lead:
                self.tables["links"] += curves

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

    def _group(self, comm: MPI.Comm) -> GroupProbe:
        session = self._session
        return GroupProbe(session.backend, comm, session.waiter, self.checks, self._source)

    def _turn(self, rank: int, work: Callable[[], Any]) -> None:
        """Runs `work` on one rank, while the others nap."""
        self._session.barrier()
        if self._topology.world.rank == rank:
            work()


def kinds(backend: Backend) -> list[int | None]:
    """Returns the row limit (most_rows) of each kernel that jobs may run, smallest first."""
    return [backend.few_rows, None] if backend.few_rows else [None]
