"""Compares a finished run with alternatives on the same ranks, to tell whether speculation pays.

The alternatives are AR and inline SD (the draft model runs on the target's ranks). Each is measured
on the run's target ranks and on all its ranks, at its best K (tokens drafted a round). On text,
inline SD is also tried with all K tokens from one draft forward, if the draft model has mask
tokens. The measurements are made in turns: a turn measures the run's configuration and each
alternative once, with one seed and the same prompts. The order changes from turn to turn; if the
run has many prompts, each turn takes others. Configurations on which no verdict depends any more
are left out of later turns. The rows are written to OUT/beside.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from mpissd.common.config import RunConfig, with_measured
from mpissd.common.errors import GateError
from mpissd.common.flags import flags_of
from mpissd.common.output import make_output
from mpissd.common.rounds import Source
from mpissd.common.row import Row
from mpissd.engine.comm.topology import Refused, agreed
from mpissd.engine.session.session import Machine, Session, opened_machine, rest
from mpissd.lab.measure.calibrate import best_k, choose
from mpissd.lab.measure.load import counters, disturbances
from mpissd.lab.measure.verdict import FEWEST_TURNS, TRIMMED, UNKNOWN, TimedUse, UseComparison
from mpissd.lab.tables.uses import LOOKUPS, Family

Measure = Callable[[Session, dict[str, Any]], Row | None]
Say = Callable[[str], None]
_OWN = """lookahead fan_out backup backup_lookahead lookup saguaro_c tree tree_shape
    parallel_drafting draft_backend draft_device""".split()
_WIDTH = 0.03  # The comparison ends when the intervals of all speed ratios are within ±3%.
_TURNS = 4  # Narrow intervals end the comparison only after this number of turns (repeats).
_LATE_S = 20.0  # extra time in s that is granted if a verdict still needs turns
_PASS_S = 0.25  # intended duration of one measurement in s
_ANSWER = 0.05  # A measurement over many prompts may take this share of the comparison's time.
_FEWEST = 32  # A measurement decodes at least this number of tokens of a sequence.
_MOST = 4000
_WARM_ROUNDS = 4  # warm-up rounds before every measurement
_SPARE_BYTES = 4 << 30  # memory to leave for activations and CUDA graphs while two jobs are open
_MOST_SEED = 2**64


@dataclass
class Place:
    """One of the configurations that are compared with a run. use: its name and measured speeds.
    Its other fields are its flags and the ranks that measure it."""

    use: TimedUse
    machine: Machine
    config: RunConfig


def compared(
    machine: Machine, run: RunConfig, row: Row | None, measure: Measure, say: Say
) -> UseComparison | str | None:
    """Compares a finished run with alternatives (AR, inline SD) on its ranks; all ranks must call
    this. Returns on rank 0 the comparison, or a text that says why there is none; None elsewhere.
    row: the run's result row, on rank 0. measure: function that measures one configuration and
    returns its row. say: function that shows progress on rank 0."""
    try:
        comparison = _Beside(machine, run, row, measure, say).compared()
    except Refused as refused:  # raised on all ranks
        return str(refused)
    return None if row is None else comparison


class _Beside:
    def __init__(
        self, machine: Machine, run: RunConfig, row: Row | None, measure: Measure, say: Say
    ) -> None:
        """Chooses how many tokens and prompts each measurement decodes. All ranks must call this.
        machine, run, row: ranks, configuration and result row (on rank 0) of the finished run."""
        job = machine.resolve(run)
        if run.pair is None and run.target is None:  # The default pair depends on the ranks.
            run = replace(run, target=job.target_where, draft=job.draft_where or None)
        self._machine = machine
        self._run = run
        self._measure = measure
        self._say = say if machine.topology.is_lead else lambda _: None
        facts = None
        if row is not None:
            count = job.workload.num_sequences
            facts = *pass_of(row, run, count), count, acceptance_rates(row)
        facts = machine.topology.world.bcast(facts)
        self._tokens, self._per_pass, self._prompts, self._rates = facts
        self._comparison = UseComparison([], num_rounds=_MOST)
        is_cut = row is not None and row.num_tokens > row.batch_size * self._tokens
        if is_cut and not job.workload.is_imposed and self._tokens < (run.token_limit or _MOST):
            note = f"Passes decode at most the first {self._tokens} tokens of an answer."
            self._comparison.notes.append(note)
        self._probes: list[dict[str, float]] = []

    def compared(self) -> UseComparison:
        """Measures the run's configuration and the alternatives in turns; all ranks must call this.
        Returns the comparison, which has the speeds only on rank 0. An alternative that cannot run
        is kept in it with the reason. Raises Refused if OUT/beside cannot be written."""
        machine = self._machine
        run = self._run
        topology = machine.topology
        with agreed(topology.world):
            if topology.is_lead:
                make_output(str(Path(run.out, "beside")))
        machine.divide([0])
        has_draft = run.beside != "ar" and (run.target is None or run.draft is not None)
        modes = ("ar", "sd") if has_draft else ("ar",)
        mode = {"prompt": LOOKUPS[0]}.get(run.lookup, run.lookup) if run.is_lookup else run.mode
        first = Family(mode, topology.tp, topology.num_drafts)
        self._masks = self._tried_masks() if has_draft else 0
        ways = [(m, False) for m in modes] + [("sd", True)] * bool(self._masks)
        narrow, wide = ([(Family(m, tp, 0), p) for m, p in ways] for tp in (first.tp, first.gpus))
        own = first, run.parallel_drafting
        # Whether the run's own mode is also measured at its best K.
        has_best_k = first.mode == "sd" and not run.tree
        others = [use for use in narrow if use != own or has_best_k]
        is_chain = run.mode == "ssd" and run.backup == "jit" and not run.tree
        others += [(first, True)] * bool(is_chain and self._masks and not run.parallel_drafting)
        places = [self._place(machine, *use) for use in (own, *others)]
        again = [place for place in places[1:] if place.use == places[0].use]
        places = [place for place in places if place not in again]
        self._comparison.uses[:] = [place.use for place in places]
        with ExitStack() as stack:
            if first.num_drafts:
                if not (is_whole := self._holds_both(places)):
                    self._turns(places, run.beside_s / 2)
                    machine.models.close()
                self._say(f"opening all {first.gpus} ranks for the target")
                try:
                    other = stack.enter_context(opened_machine(rival(run, "ar"), 0))
                    wide_places = [self._place(other, *use) for use in wide]
                except Refused as refused:  # raised on all ranks
                    wide_places = []
                    uses = self._comparison.uses
                    unit = uses[0].unit
                    why = str(refused)
                    uses += [TimedUse(f, unit, refused=why, parallel=p) for f, p in wide]
                places = places + wide_places if is_whole else wide_places
                self._turns(places, run.beside_s / (2 - is_whole))
                note = "Memory holds one division of the ranks at a time: one after the other."
                self._comparison.notes += [note] * (not is_whole)
            elif len(places) > 1:
                self._turns(places, run.beside_s)
        if self._per_pass < self._prompts:
            turns = max(len(use.speeds) for use in self._comparison.uses)
            count = min(self._prompts, self._per_pass * turns)
            self._comparison.prompts = f"{count} of {self._prompts} prompts"
        return self._comparison

    def _tried_masks(self) -> int:
        """Returns how many mask tokens the draft has, by which one forward drafts several tokens; 0
        if flags rather than text decide acceptance, because flags give only the acceptance of the
        run's own drafts. All ranks must call this."""
        run = self._run
        if not (run.is_text or run.parallel_drafting):
            return 0
        with suppress(Refused), agreed(self._machine.topology.world):
            return self._machine.resolve(rival(run, "sd")).most_masks
        return 0

    def _place(self, machine: Machine, family: Family, parallel: bool) -> Place:
        """Adds a configuration to the comparison and chooses its K; returns it with its machine.
        family: its mode and numbers of ranks. parallel: whether one forward drafts all K tokens.
        All ranks must call this."""
        unit = {"cupy": "GPU", "numpy": "core"}.get(machine.target_backend, "emulated GPU")
        run = self._run
        use = TimedUse(family, unit, parallel=parallel)
        is_own = not self._comparison.uses  # The run itself is added first.
        self._comparison.uses.append(use)
        self._say(f"preparing {use}")
        values: dict[str, Any] = {
            "num_tokens": self._tokens, "rounds": None, "warmup_rounds": _WARM_ROUNDS,
            "out": str(Path(run.out, "beside")), "progress": "off", "show": False, "trace": None,
            "beside": "off",
        }  # fmt: skip
        keeps = is_own or family.num_drafts > 0
        config = replace(run if keeps else rival(run, family.mode), **values)
        if parallel and not is_own:
            # K costs SSD no further forward, but rows: one token more than by K forwards.
            most = min(config.lookahead + (family.num_drafts > 0), 1 + self._masks)
            config = replace(config, parallel_drafting=True, lookahead=most)
        try:
            if family.num_drafts and parallel and not is_own:
                config = choose(machine, config, frozenset())
            if not is_own and family.mode == "sd" and not config.tree:
                config = best_k(machine, config, self._rates)
            with agreed(machine.topology.world):
                job = machine.resolve(config)
            use.lookahead = job.lookahead
            machine.models.expect([job])  # lets all jobs share compiled forwards
        except Refused as refused:
            use.refused = str(refused)
        return Place(use, machine, config)

    def _holds_both(self, places: Sequence[Place]) -> bool:
        """Returns whether each rank has memory for two sets of models at once: one for the run's
        target and draft ranks, and one with all ranks as target ranks. All ranks must call this."""
        machine = self._machine
        jobs = [machine.resolve(place.config) for place in places if not place.use.refused]
        sizes = [job.rank_bytes(machine.backend.itemsize) for job in jobs]
        is_draft = machine.topology.is_draft
        room = machine.memory[is_draft]
        both = sum(max((size[n] for size in sizes), default=0) for n in (is_draft, 0))
        return all(machine.topology.world.allgather(room is None or both + _SPARE_BYTES <= room))

    def _turns(self, places: Sequence[Place], budget_s: float) -> None:
        """Measures the configurations `places` in turns, until the intervals of all speed ratios
        are narrow or the time is over; all ranks must call this. The first turn only warms up. A
        turn begins if it should end within budget_s; within twice that if a verdict is still
        unknown; or up to _LATE_S later if there were fewer turns than a verdict needs."""
        begun = perf_counter()
        world = self._machine.topology.world
        left = [place for place in places if not place.use.refused]
        turn = 0
        is_over = False
        while left and not is_over:
            start = perf_counter()
            count = turn % len(left)
            before = counters()
            for place in left[count:] + left[:count]:
                self._say(f"comparing: {f'turn {turn}' if turn else 'warm-up'}, {place.use}")
                speed = self._speed(place, turn)
                if turn:
                    place.use.speeds.append(speed)
            if turn:
                self._probes.append(disturbances(before, self._machine))
                worst = sorted(self._probes, key=lambda probe: max(probe.values(), default=-1))
                # If more turns were disturbed than the trimmed mean drops, the machine is busy.
                is_busy = worst[-1 - int(TRIMMED * len(worst))]
                self._comparison.busy = sorted(worst[-1]) if is_busy else []
            now = perf_counter()
            is_open = UNKNOWN in {answer.verdict for answer in self._comparison.answers()}
            more_s = budget_s * (is_open and not self._comparison.busy)
            more_s = more_s if turn >= FEWEST_TURNS else _LATE_S
            is_late = turn > 0 and 2 * now - start > begun + budget_s + more_s
            needed = self._comparison.uses
            if turn > 1:
                is_part = turn < max(_TURNS, self._prompts / self._per_pass)
                needed = self._comparison.needed(-1 if is_part else _WIDTH)
            kept = [place.use in needed and not place.use.refused for place in left]
            is_over, kept = world.bcast((is_late, kept))  # Rank 0 decides; it knows the speeds.
            left = list(compress(left, kept))
            turn += 1

    def _speed(self, place: Place, turn: int) -> float | None:
        """Measures one configuration once; returns its tokens/s on rank 0, None elsewhere and after
        a failure. All ranks must call this. turn: its number, added to the seed."""
        machine = place.machine
        session = row = None
        seed = (self._run.seed + turn) % _MOST_SEED
        try:
            with agreed(machine.topology.world):
                job = machine.resolve(replace(place.config, seed=seed))
            is_part = self._per_pass < self._prompts
            if is_part and (machine.topology.is_lead or not self._run.is_text):
                job.workload.keep((max(turn, 1) - 1) * self._per_pass, self._per_pass)
            if (session := machine.session(job)) is not None:
                row = self._measure(session, {"beside": str(place.use.family), "turn": turn})
        except Refused as refused:
            if refused.exit_code != GateError.exit_code:  # A faulty row is only left out.
                place.use.refused = str(refused)
        if session is not None:
            session.resources.close()
        rest(machine.topology)
        if row is None:
            return None
        if turn and self._run.is_text:  # Without text, each turn draws acceptance anew.
            self._comparison.num_rounds = min(self._comparison.num_rounds, row.num_rounds)
        is_whole = job.config.backup == "jit" and job.backup_lookahead == job.lookahead
        if job.workload.is_imposed and is_whole and not job.config.tree:
            mean = 1 + job.acceptance[Source.JIT].mean_accepted  # expected tokens a round
            return speed(row) * mean / row.acceptance_length
        return speed(row)


def pass_of(row: Row, run: RunConfig, prompts: int) -> tuple[int, int]:
    """Returns the most (tokens of a sequence, number of sequences) that a measurement should
    decode. It should take .25 s at the run's speed. With more prompts than fit in a batch, it may
    take up to a 20th of the comparison's time, so that longer answers are decoded to their end.
    row: the run's result row. prompts: the run's number of prompts."""
    is_long = prompts > row.batch_size
    per_s = row.tok_per_s / row.batch_size
    seconds = max(_PASS_S, _ANSWER * run.beside_s) if is_long else _PASS_S
    given = [run.token_limit, None if is_long else run.max_rounds]
    limits = [n for n in given if n is not None and (is_long or run.is_transformer)]
    tokens = min(max(int(seconds * per_s), _FEWEST), _MOST, *limits)
    mean = tokens if run.max_rounds else min(tokens, row.num_tokens / prompts)
    count = max(1, round(_PASS_S * per_s / mean)) * row.batch_size
    return tokens, min(count, prompts) if is_long else prompts


def acceptance_rates(row: Row) -> tuple[float, ...] | None:
    """Returns the acceptance rate of each draft position by a result row, given that the positions
    before were accepted; 8 further positions repeat the last rate, for larger K. Returns None if
    the run decoded draft trees or drafted nothing."""
    counts = np.array(row.accept_histogram, np.float64)
    if row.tree_nodes or len(counts) < 2:
        return None
    reached = counts[::-1].cumsum()[::-1]  # rounds that accepted at least k tokens
    rates = (reached[1:] + 0.5) / (reached[:-1] + 1)
    return (*rates.tolist(), *[float(rates[-1])] * 8)


def rival(run: RunConfig, mode: str) -> RunConfig:
    """Returns the configuration that decodes the same as `run` in another mode, without a draft
    rank. Flags of the run's mode alone get their defaults; SD keeps the run's draft tree."""
    fields = flags_of(RunConfig)
    reset = [n for n, f in fields.items() if n in _OWN or mode not in f.metadata["modes"]]
    values: dict[str, Any] = {name: fields[name].default for name in reset}
    about = {"mode": mode, "pair": run.pair or "", "workload": run.workload, "backend": run.backend}
    if (measured := with_measured(about).get("lookahead")) is not None:
        values["lookahead"] = int(measured)
    if mode == "sd" and run.mode != "ar" and run.tree:
        values |= {"tree": run.tree, "lookahead": run.lookahead}
    values |= {"mode": mode, "num_drafts": 0, "out": str(Path(run.out, "beside"))}
    values |= {"on_draft_loss": "abort", "beside": "off"}
    return replace(run, **values)


def speed(row: Row) -> float:
    """Returns the decoding speed of a result row in tokens/s. For text, the first round and the
    time of storing later prompts are left out. If all sequences reached the token limit, tokens
    that their last rounds emitted beyond it count, because these rounds took as long as others."""
    prompts = row.num_prompts or row.batch_size or 1
    tokens = float(row.num_tokens)
    if tokens == prompts * (row.token_limit or 0):
        tokens = float(sum((k + 1) * n for k, n in enumerate(row.accept_histogram)))
    if row.time_to_first_token_s is None:
        return tokens / row.wall_s
    first = min(row.batch_size or 1, prompts)
    later_s = row.wall_s - row.time_to_first_token_s
    later_s -= (1 - first / prompts) * (row.t_prefill_s or 0.0)
    return (tokens - first * row.acceptance_length) / later_s if later_s > 0 else row.tok_per_s
