"""The command `probe`: measures how long the steps of a model pair take on this machine.

    mpirun -np T+D python -m mpi4py -m mpissd probe --pair=8b/1b --fuse

The results are a table on stdout, a JSON object, and a device profile in OUT/profiles, which is a
file of durations for `plan` and for `--backend=emulated --device=FILE` (docs/profile.md). Ranks
measure one after the other, so that they do not disturb each other, except what they do together,
such as all-reduces. Host work and messages are timed by decoding some rounds in each mode that is
possible on these ranks.
"""

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

_GPU_ROWS = (40, 128, 256)  # row counts timed on GPUs only, which have another kernel above 32 rows
MORE_SEQUENCES = 8  # Host work is also measured at this multiple of the batch size.
_FEWEST, _MOST, _ROUNDS_S = 18, 60, 1.0
_SHARDS = (2, 3, 4)  # One rank times, alone, its share of the target if 2, 3 or 4 ranks shared it.


def execute_probe(config: RunConfig, name: str | None = None, brief: bool = False) -> int:
    """Runs the command `probe` on all ranks; returns the exit code. config: flags; in mode "ar"
    only the target is measured, otherwise also the draft model (on rank 0 if there is no draft
    rank). name: of the profile (None: made from the settings). brief: whether to measure a
    transformer only on the given ranks and batch size, and at two context lengths. Raises Refused
    on every rank if the job is impossible, or if an all-reduce gives wrong sums (exit code 3)."""
    sharpen_sleep()
    with opened(config) as session:
        if session.topology.is_lead:
            print_card(session)
        with progress_line(config) as show:
            Prober(session, show, brief=brief).run(name)
    return 0


class Prober:
    """One MPI rank's part in the command `probe`: it runs all stages and collects the results."""

    def __init__(
        self, session: Session, show: Callable[[Callable[[float], str]], None], *, brief: bool
    ) -> None:
        """Prepares the stages. show: function that prints a progress line; its argument makes the
        line from the seconds so far. brief: whether to measure less (see execute_probe)."""
        self._show_line = show
        self._stage = ""
        self._brief = brief
        self._session = session
        self._topology = session.topology
        self._job = session.job
        self._kind = session.backend.info.kind
        self._faults: list[str] = []
        self._tables: dict[str, list[Entry]] = {table: [] for table in TABLES}
        self._peak: float | None = None
        self._notes: list[str] = []
        self._host: list[Entry] = []
        self._busy: dict[str, float] = {}
        self._source = f"measured: {session.backend.info.name}, {session.backend.name}"
        if self._kind == "emulated":
            self._source = f"modelled: profile {session.job.config.device}"

    def run(self, name: str | None) -> None:
        """Runs all stages; then rank 0 writes the profile. All ranks must call this. name: of the
        profile (None: made from the settings)."""
        begun = perf_counter()
        before = counters()
        stages = (self.rates, self.forwards, self.all_reduces, self.hosts)
        for number, stage in enumerate(stages, 1):
            self._stage = f"{number} of {len(stages)} ({stage.__name__.replace('_', '-')})"
            stage()
            # Ranks sleep in this barrier; in MPI's own they would spin on cores that others need.
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
        """Prints the table, writes the profile, and prints the JSON line, on rank 0. gathered:
        (tables, notes on what could not be measured, host and device) of each rank. seconds:
        probe's duration."""
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
        """Measures each rank's memory bandwidth by reading as many bytes as its weights have. Rank
        0 also measures the flop/s of a large matrix product, and the time of an empty program."""
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
        """Measures the target's forwards on all target ranks, then the draft's on one rank."""
        topology = self._topology
        needs = self._job.needs
        if not topology.is_draft:
            shard = replace(needs[TARGET].shard, rank=topology.world.rank)
            target = replace(needs[TARGET], shard=shard)
            self._model(self._probe(topology.group), self._session.group, target)
        if len(needs) > 1:
            probe = partial(self._probe, MPI.COMM_SELF)
            # The first draft rank measures the draft model; without draft ranks, rank 0 does.
            where = topology.tp if topology.num_drafts else 0
            self._turn(where, lambda: self._model(probe(), SoloGroup(), needs[DRAFT]))

    def _model(self, probe: GroupProbe, group: Group, need: Need) -> None:
        """Measures the forwards of one model and adds them to the tables. need: the model's shard,
        options and row counts. Bare matrix products are measured with each of the backend's
        kernels; weights are made anew for each, because their layout differs. A transformer is
        measured at several batch sizes. A lone target rank also measures, for `plan`, the share of
        the target that one of 2, 3 or 4 ranks would hold, without all-reduces."""
        config = self._job.config
        shard = need.shard
        options = need.options
        entries: list[Entry] = []
        shares: list[Entry] = []
        if not config.is_transformer:
            counts = sorted({*FORWARD_ROWS, *need.buckets})
            few = self._session.backend.few_rows  # 0: no further kernel for small row counts
            for limit in (few, None) if few else (None,):
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
                options = replace(options, top_k=max(2, options.top_k))  # trees need the top k
            rest = options, rows, [factor * config.batch_size for factor in batches], need.model
            entries = probe.transformer(group, shard, *rest, ends=self._brief)
            is_alone = self._topology.tp == 1 and need.which == TARGET and not self._brief
            for tp in _SHARDS if is_alone and self._kind != "emulated" else ():
                try:
                    share = replace(shard, tp=tp)
                except ConfigError as error:  # There are too few KV heads for T ranks.
                    self._notes.append(f"a share of T={tp}: {error}")
                    continue
                shares += probe.transformer(SoloGroup(), share, *rest, ends=True)
        if self._topology.group.rank == 0:
            self._tables["forwards"] += entries
        self._tables["shards"] += shares
        self._tables["read_outs"] += probe.read_outs

    def all_reduces(self) -> None:
        """Measures the job's all-reduce; does nothing if there is only one target rank."""
        if not self._topology.is_draft and self._topology.tp > 1:
            probe = self._probe(self._topology.group)
            entry = probe.all_reduces(self._session.group, self._job.target.hidden)
            self._tables["all_reduces"] += [entry] if self._topology.is_lead else []

    def hosts(self) -> None:
        """Measures the host's work in a round and the time of messages, by decoding some rounds in
        each configuration that is possible on these ranks."""
        session = self._session
        probed = self._job
        source = f"measured: ledgers of the decoding loops, {session.backend.name}"
        for config in ways(probed.config, on_host=self._kind == "cpu", brief=self._brief):
            if self._topology.is_lead:
                self._show()
            if config.pair is None and config.target is None:  # The default pair depends on T.
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
        """Calls `work` on one rank only; the other ranks sleep in the next barrier."""
        self._session.barrier()
        if self._topology.world.rank == rank:
            work()


def ways(config: RunConfig, *, on_host: bool = False, brief: bool = False) -> Iterator[RunConfig]:
    """Yields the configurations in which `probe` times host work: SD and SSD if there are draft
    ranks, else AR and SD with the draft model on the target's ranks. Each is yielded at the given
    batch size and at 8 times that size. brief: whether only SSD is yielded at the larger size,
    because its host work grows with the number of branches. on_host: whether forwards run on CPU
    cores; a transformer is then yielded at two contexts, because long contexts leave less of the
    CPU's caches to the host's work."""
    contexts = [config.context]
    if on_host and config.is_transformer and config.context > NEAR:
        contexts = [NEAR, config.context]
    modes = ("sd", "ssd") if config.drafts else ("ar", "sd")
    for mode in modes if config.mode != "ar" else ("ar",):
        flags: dict[str, Any] = {"num_drafts": config.drafts}
        if mode == "ar":
            flags = {"num_drafts": None, "parallel_drafting": False}
        way = replace(config, mode=mode, **flags)
        batches = (config.batch_size, MORE_SEQUENCES * config.batch_size)
        for batch in batches[: 1 if brief and mode != "ssd" else 2]:
            for context in contexts:
                yield replace(way, batch_size=batch, context=context)


def _measured(session: Session, source: str) -> Entry | None:
    """Times one configuration's forwards, decodes some rounds, and computes the durations of host
    work; returns them as an entry of the profile on rank 0, None elsewhere. source: text that says
    how they were measured. Raises Refused on every rank if the models do not fit in memory."""
    job = session.job
    world = session.topology.world
    count = 0
    try:
        rank = Rank(session)
        profile = calibrate(rank)
        if profile is not None:
            # Slow forwards mean fewer rounds: a forward of a large model takes seconds on a CPU.
            round_s = float(profile.device.verify(job.verify_rows))
            if profile.device.draft is not None:
                step_s = float(profile.device.draft_s(job.config.batch_size * job.step_rows))
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
