"""The command `probe`: measures a pair of models on this machine, in one job.

    mpirun -np T+D python -m mpi4py -m mpissd probe --pair=8b/1b --fuse

The result is a table on stdout, one JSON object, and a device profile in OUT/profiles, which `plan`
and `--backend=emulated --device=FILE` read (docs/profile.md). Ranks measure in turns, unless they
have to act together, so that they do not disturb each other. For host work and link time, each
configuration that the ranks allow decodes some rounds, as a run's warm-up does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from mpi4py import MPI

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError, GateError
from mpissd.common.output import json_line
from mpissd.common.wait import sharpen_sleep
from mpissd.engine.backend.base import Backend
from mpissd.engine.comm.group import Group, SoloGroup
from mpissd.engine.comm.topology import Refused, agree, agreed
from mpissd.engine.job import DRAFT, TARGET, Need, resolve
from mpissd.engine.session.rank import Rank
from mpissd.engine.session.session import Session, opened
from mpissd.lab.measure.calibrate import WarmUp, calibrate, host_costs, warm_up
from mpissd.lab.measure.card import print_card, progress_line
from mpissd.lab.measure.load import counters, disturbances
from mpissd.lab.measure.provenance import provenance
from mpissd.lab.probe.measure import FORWARD_ROWS, NEAR, TRANSFORMER_ROWS, Entry, GroupProbe
from mpissd.lab.probe.report import TABLES, fit, print_table, profile_name, save_profile

_GPU_ROWS = (40, 128, 256)  # of transformers: a GPU's kernel for more than 32 rows is another one
MORE_SEQUENCES = 8  # Factor from the first batch size to the second; host work grows with it.
_FEWEST, _MOST, _ROUNDS_S = 18, 60, 1.0
_SHARDS = (2, 3, 4)  # numbers of ranks whose share one rank measures, without all-reduces


def execute_probe(config: RunConfig, name: str | None = None, brief: bool = False) -> int:
    """Probes on all ranks and returns the exit code; `name` names the profile (default: generated).
    mode selects the models: ar means no draft, sd and ssd a draft (on the lead with D=0). brief:
    measures a transformer for a plan of its T and batch size only. Raises Refused on every rank for
    an impossible configuration or wrong sums (exit code 3)."""
    sharpen_sleep()
    with opened(config) as session:
        if session.topology.is_lead:
            print_card(session)
        with progress_line(config) as show:
            Prober(session, show, brief=brief).run(name)
    return 0


def kinds(backend: Backend) -> list[int | None]:
    """Returns the row limit (most_rows) of each kernel that jobs may run, smallest first."""
    return [backend.few_rows, None] if backend.few_rows else [None]


class Prober:
    """One rank's part in every stage, and its measurements."""

    def __init__(
        self, session: Session, show: Callable[[Callable[[float], str]], None], *, brief: bool
    ) -> None:
        """show: of `progress_line`. brief: as `execute_probe` takes it."""
        self._show_line = show
        self._stage = ""
        self._brief = brief
        self._session = session
        self._topology = session.topology
        self._job = session.job
        self._kind = session.backend.info.kind
        self._faults: list[str] = []  # in this rank's data
        self._tables: dict[str, list[Entry]] = {table: [] for table in TABLES}
        self._peak: float | None = None
        self._notes: list[str] = []
        self._host: list[Entry] = []
        self._busy: dict[str, float] = {}
        self._source = f"measured: {session.backend.info.name}, {session.backend.name}"
        if self._kind == "emulated":
            self._source = f"modelled: profile {session.job.config.device}"

    def run(self, name: str | None) -> None:
        """Runs all stages, then writes the profile on the lead; collective over the world."""
        begun = perf_counter()
        before = counters()
        stages = (self.rates, self.forwards, self.all_reduces, self.hosts)
        for number, stage in enumerate(stages, 1):
            self._stage = f"{number} of {len(stages)} ({stage.__name__.replace('_', '-')})"
            stage()
            # The barrier naps; a blocking collective would occupy cores that others measure on.
            self._session.barrier()
            wrong = GateError(f"probe: {self._faults[0]}") if self._faults else None
            agree(self._session.topology.world, wrong)
        place = self._topology.place(self._session.backend.info)
        gathered = self._topology.world.gather((self._tables, self._notes, place))
        self._busy = disturbances(before, self._session)
        with agreed(self._topology.world):
            if gathered is not None:
                self._conclude(gathered, name, perf_counter() - begun)

    def _conclude(self, gathered: list[Any], name: str | None, seconds: float) -> None:
        """Writes the table, the profile and the JSON line; on the lead. gathered: tables, notes and
        place of each rank. seconds: that the probe took."""
        session = self._session
        job = self._job
        backend = session.backend
        of_ranks, notes_of_ranks, places = zip(*gathered, strict=True)
        tables = {name: [entry for rank in of_ranks for entry in rank[name]] for name in TABLES}
        notes = [note for rank in notes_of_ranks for note in rank]
        memory = [info.memory_bytes for info in session.infos]
        fitted = fit(job, backend.itemsize, tables, self._peak, memory, self._source)
        notes += [f"the machine was busy: {text}" for text in self._busy]
        print_table(tables, notes, self._host, places)
        name = name or profile_name(job, backend.info)
        data = {
            "name": name,
            "device_name": backend.info.name.removesuffix(" (emulated)"),
            **fitted,
            "tables": tables,
            "host": self._host,
            "busy": self._busy,
            "backend": backend.name,
            "dtype": backend.dtype_name,
            "topology": places,
            "not_measured": notes,
            "provenance": provenance(session.infos, session.topology.hosts),
        }
        path = save_profile(job.config.out, name, data)
        covers = list(dict.fromkeys(f"{of['model']} T={of['tp']}" for of in tables["forwards"]))
        values = {key: number["value"] for key, number in fitted["numbers"].items()}
        summary = {"profile": str(path), "name": name, "covers": covers, **values}
        print(json_line({**summary, "seconds": seconds}), flush=True)

    def rates(self) -> None:
        """Measures every rank's read bandwidth over as many bytes as its weights have, and on the
        lead the peak of a large product and an empty launch."""
        backend = self._session.backend
        rank = self._topology.world.rank
        size = self._job.rank_bytes(backend.itemsize)[self._topology.is_draft]

        def read() -> None:
            rate = {"bytes": size, "read_bytes_per_s": backend.read_bandwidth(size)}
            self._tables["bandwidths"].append({"rank": rank, "from": self._source, **rate})
            if rank == 0:
                self._peak = backend.peak_flops()
                self._tables["launches"].append(self._probe(MPI.COMM_SELF).empty())

        for turn in range(self._topology.world.size):
            self._turn(turn, read)

    def forwards(self) -> None:
        """Measures the target's forwards on its ranks, then the draft's, with each kernel."""
        topology = self._topology
        needs = self._job.needs
        if not topology.is_draft:
            shard = replace(needs[TARGET].shard, rank=topology.world.rank)
            target = replace(needs[TARGET], shard=shard)
            self._model(self._probe(topology.group), self._session.group, target)
        if len(needs) > 1:
            probe = partial(self._probe, MPI.COMM_SELF)
            # It is measured on the lead if the draft is inline, or on the first draft rank.
            where = topology.tp if topology.num_drafts else 0
            self._turn(where, lambda: self._model(probe(), SoloGroup(), needs[DRAFT]))

    def _model(self, probe: GroupProbe, group: Group, need: Need) -> None:
        """Measures one model's forwards; need: its weights, options and rows. Products are measured
        with the kernel of small jobs if it differs, and with the common one; the weights are made
        anew for each, because their order differs. A transformer is measured at the probe's batch
        size and at the batch size of its second host costs. A probe with one target rank also
        measures the share of the target that rank 0 of T > 1 would hold, without all-reduces:
        derive.py adds them, so that `plan` knows these T."""
        config = self._job.config
        shard = need.shard
        options = need.options
        entries: list[Entry] = []
        shares: list[Entry] = []
        if not config.is_transformer:
            counts = sorted({*FORWARD_ROWS, *need.buckets})
            for limit in kinds(self._session.backend):
                rows = [count for count in counts if limit is None or count <= limit]
                entry = probe.forwards(group, shard, options, rows, config.batch_size, limit)
                entries.append(entry)
        else:
            options = replace(options, context=config.context)
            on_gpu = self._kind == "gpu"
            factors = (1, MORE_SEQUENCES, 4 * MORE_SEQUENCES)
            batches = factors[: 1 if self._brief else 3 if on_gpu else 2]
            rows = sorted({*TRANSFORMER_ROWS, *(_GPU_ROWS if on_gpu else ()), *need.buckets})
            if self._brief and need.which == DRAFT and self._topology.world.size == 1:
                options = replace(options, top_k=max(2, options.top_k))  # measures lists for trees
            rest = options, rows, [factor * config.batch_size for factor in batches], need.model
            entries = probe.transformer(group, shard, *rest, ends=self._brief)
            is_alone = self._topology.tp == 1 and need.which == TARGET and not self._brief
            for tp in _SHARDS if is_alone and self._kind != "emulated" else ():
                try:
                    share = replace(shard, tp=tp)
                except ConfigError as error:  # more ranks than KV heads
                    self._notes.append(f"a share of T={tp}: {error}")
                    continue
                shares += probe.transformer(SoloGroup(), share, *rest, ends=True)
        if self._topology.group.rank == 0:
            self._tables["forwards"] += entries
        self._tables["shards"] += shares
        self._tables["read_outs"] += probe.read_outs

    def all_reduces(self) -> None:
        """Measures the job's all-reduce over the target ranks; none with one rank."""
        if not self._topology.is_draft and self._topology.tp > 1:
            probe = self._probe(self._topology.group)
            entry = probe.all_reduces(self._session.group, self._job.target.hidden)
            self._tables["all_reduces"] += [entry] if self._topology.is_lead else []

    def hosts(self) -> None:
        """Measures host work and link time for every configuration that these ranks allow."""
        session = self._session
        probed = self._job
        source = f"measured: ledgers of the decoding loops, {session.backend.name}"
        for config in ways(probed.config, on_host=self._kind == "cpu", brief=self._brief):
            if self._topology.is_lead:
                self._show()
            if config.pair is None and config.target is None:  # another pair would be its default
                draft = None if probed.draft is None else probed.draft.name
                config = replace(config, target=probed.target.name, draft=draft)
            try:
                job = resolve(config, probed.tp, backend=session.backend.name, memory_bytes=None)
                entry = _measured(replace(session, job=job, resources=ExitStack()), source)
            except (ConfigError, Refused) as error:  # All ranks raise the same error here.
                note = f"host costs of {config.mode}, b={config.batch_size}: {error}"
                self._notes += [note] * self._topology.is_lead
                continue
            self._host += [] if entry is None else [entry]

    def _probe(self, comm: MPI.Comm) -> GroupProbe:
        session = self._session
        probe = GroupProbe(session.backend, comm, session.waiter, self._faults, self._source)
        if comm.rank == 0:
            probe.show = self._show
        return probe

    def _show(self) -> None:
        self._show_line(lambda seconds: f"probing: stage {self._stage}, {seconds:.0f} s so far")

    def _turn(self, rank: int, work: Callable[[], Any]) -> None:
        """Runs `work` on one rank, while the others nap."""
        self._session.barrier()
        if self._topology.world.rank == rank:
            work()


def ways(config: RunConfig, *, on_host: bool = False, brief: bool = False) -> Iterator[RunConfig]:
    """Yields the configurations for the probe's draft ranks: AR and inline SD without any, or SD
    and SSD. Each is measured at the probe's batch size and at eight times that size; brief: only
    SSD, whose host work grows with the branches of all sequences. on_host: forwards run on the
    host's cores; a transformer's then disturb the caches more at longer contexts, so two are
    measured."""
    contexts = [config.context]
    if on_host and config.is_transformer and config.context > NEAR:
        contexts = [NEAR, config.context]
    modes = ("sd", "ssd") if config.drafts else ("ar", "sd")
    for mode in modes if config.mode != "ar" else ("ar",):
        way = replace(config, mode=mode, num_drafts=config.drafts if mode != "ar" else None)
        batches = (config.batch_size, MORE_SEQUENCES * config.batch_size)
        for batch in batches[: 1 if brief and mode != "ssd" else 2]:
            for context in contexts:
                yield replace(way, batch_size=batch, context=context)


def _measured(session: Session, source: str) -> Entry | None:
    """Times one configuration's forwards and runs its rounds; returns its entry on the lead. Raises
    Refused on every rank if its models do not fit in memory."""
    job = session.job
    world = session.topology.world
    count = 0
    try:
        rank = Rank(session)
        profile = calibrate(rank)
        if profile is not None:
            # The forwards' times limit the rounds: a large model takes seconds a round on a CPU.
            round_s = float(profile.device.verify(job.verify_rows))
            if profile.device.draft is not None:
                step_s = float(profile.device.draft_s(job.config.batch_size))
                round_s += job.num_forwards(job.lookahead) * step_s
            count = int(min(max(_ROUNDS_S / max(round_s, 1e-6), _FEWEST), _MOST))
        count = world.bcast(count)
        drafters = rank.make_drafters()
        lead = rank.run_pass(rank.target, drafters, partial(warm_up, rank=rank, count=count))
        rounds = WarmUp.of_draft(drafters[0].log, count) if drafters else None
        drafts = [draft for draft in world.gather(rounds) or () if draft is not None]
        if profile is not None and lead is not None and rank.device_rounds is None:
            costs = host_costs(job, profile.device, lead, drafts[0] if drafts else None)
            profile = replace(profile, host=costs)
        rank.close()
    finally:
        session.resources.close()
    if profile is None:
        return None
    about: dict[str, Any] = {
        "mode": job.config.mode,
        "tp": job.tp,
        "num_drafts": job.config.drafts,
        "batch_size": job.config.batch_size,
        "lookahead": job.lookahead,
        "lanes": job.fan_outs.branches,
        "context": job.options.context if job.config.is_transformer else 0,
        "forward": "transformer" if job.config.is_transformer else "gemm",
    }
    return {**about, "from": source, "seconds": vars(profile.host)}
