"""Finds the fastest configuration on given GPUs by simulation, and how sure that prediction is.

A predicted rate has a relative error that depends on where its durations come from: ERROR if all
were measured; DERIVED_ERROR if some were computed from others; MODEL_ERROR if another transformer
was measured; DATASHEET_ERROR if nothing was. With --laws (acceptance and cache-hit models fitted to
prompts), the sampling error of the prompts is added, by a jackknife over groups of prompts; the two
errors are independent, so their squares add. A speedup is a verdict if its interval excludes 1,
unless it is based on a datasheet or few prompts, or contradicts measured rows.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Source
from mpissd.common.row import Row
from mpissd.engine.backend.profile import device_kind
from mpissd.engine.law.acceptance import load_laws
from mpissd.lab.plan.candidates import (
    COARSE,
    FULL,
    LOOKUP,
    ROUGH,
    Choice,
    Space,
    Survey,
    candidates,
    job_of,
    ssd_choices,
    weigh,
)
from mpissd.lab.predict.costs import Floats
from mpissd.lab.predict.derive import BY_LAYERS, is_datasheet
from mpissd.lab.tables.compare import claim_or_ratio, jackknife, same_visit
from mpissd.lab.tables.load import began, of_one_group
from mpissd.lab.tables.uses import (
    LOOKUPS,
    TREE,
    WORTH,
    Family,
    Use,
    family_of,
    fastest,
    mode_of,
    uses_of,
)

_FEW = 8  # Up to this batch size, the larger set of configurations is simulated.
_REFINED = 3  # number of SSD configurations around which the search is refined
_FINALISTS = 4  # number of configurations of a mode that are simulated with more rounds at the end
# On an H200, 95% of predictions by measured durations were within 8.4%, by derived ones 19.9%.
# The relative errors of predictions by source of durations are from docs/predictions.md.
ERROR, DERIVED_ERROR, MODEL_ERROR, DATASHEET_ERROR = 0.05, 0.2, 0.3, 0.6
FEWEST_PROMPTS = 8  # With acceptance fitted to fewer prompts than this, no verdict is given.
_BUSIEST = 0.9  # largest share of time that other processes are assumed to take
_LARGEST = math.log(10)  # An interval that is wider than a factor of 10 each way is not shown.
_MEASURED_TO = r"measured up to context=(\d+)"
_FARTHEST = 4  # If the context is longer than 4 times any measured one, DATASHEET_ERROR applies.
_LIGHT = 0.01  # Rows count if their context's reads differ by at most this share of the weights.
_SMALL = 0.05  # The output says how many prompts would reduce the sampling error to this value.
_NAMES = {"ar": "plain decoding", "sd": "SD", TREE: "SD with a tree", LOOKUP: "a lookup"}
_ANSWERS = {
    "yes": "{what} pays",
    "no": "{what} does not pay",
    "no difference": "{what} may or may not pay",
    "datasheet": "A datasheet cannot tell whether {lower} pays",
    "too few": "{prompts} prompts cannot tell whether {lower} pays",
    "busy": "The machine was too busy to tell whether {lower} pays",
    "contradicted": "Measured rows contradict what is predicted of {lower}",
}


@dataclass(frozen=True)
class Estimate:
    """A predicted rate (tokens/s) or speedup with its 95% interval. half: the half-width of the
    logarithm's interval, so that the ends are value · exp(±half)."""

    value: float
    half: float

    @property
    def ends(self) -> tuple[float, float]:
        factor = math.exp(min(self.half, 700.0))
        return self.value / factor, self.value * factor

    def __str__(self) -> str:
        """Returns the value and its interval as text, such as "1.06 (.88–1.27)"."""
        return f"{number(self.value)} ({self.interval})"

    @property
    def interval(self) -> str:
        return "–".join(map(number, self.ends)) if self.half < _LARGEST else "no interval"


def number(value: float) -> str:
    """Returns a positive number as text of three significant digits: "1.06", ".88", "548", "1.23M".
    From 100 to a million, all digits before the decimal point are shown, and none after it."""
    if value >= 999_999.5:
        return f"{value / 1e6:.2f}M"
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}".removeprefix("0")


def name_of(choice: Choice) -> str:
    """Returns a configuration's mode and GPUs (target + draft): "a lookup on 2", "SSD on 1 + 1"."""
    name = _NAMES.get(choice.mode, "SSD" + " with trees" * (choice.tree is not None))
    name += " in one forward" * choice.parallel
    return f"{name} on {choice.tp}" + f" + {choice.num_drafts}" * bool(choice.num_drafts)


class Question(NamedTuple):
    """A question that `plan` answers: does something pay, for example a draft model? what: its
    name. use, other: the fastest configurations with it and without it."""

    what: str
    use: Choice
    other: Choice


@dataclass(frozen=True)
class Plan:
    """The result of a search: the fastest configuration of each Family, which is a mode with its
    numbers of target and draft ranks (judged, fastest first), and evidence. measured: {family:
    measured rows of the same models, batch size and acceptance}. samples: {family: logarithms of
    its predicted tokens/s when the models are fitted without each of G groups of prompts, [G]}; {}
    without --laws, or if a fit without some group is impossible. ssd_gains: {prompts: (measured
    speedup of SSD over the strongest alternative, its name)}, on real text."""

    survey: Survey
    judged: tuple[Choice, ...]
    measured: Mapping[Family, Use] = field(default_factory=dict)
    samples: Mapping[Family, Floats] = field(default_factory=dict)
    ssd_gains: Mapping[str, tuple[float, str]] = field(default_factory=dict)

    def with_evidence(self, rows: Iterable[Row]) -> Plan:
        """Returns this plan with its evidence filled in. rows: measured result rows, of which those
        on another kind of device are ignored. With --laws, the tokens/s are also predicted by the
        models fitted without each group of prompts, for the sampling error."""
        run = self.survey.run
        logs: dict[Family, list[float]] = {}
        parts = () if run.laws is None else load_laws(run.laws).without_each
        with suppress(ConfigError):
            for part in parts:
                survey = replace(self.survey, run=replace(run, laws=part))
                for choice in weigh(self.judged, survey):
                    logs.setdefault(choice.family, []).append(math.log(choice.tok_per_s))
        samples = {
            use: np.array(rates) for use, rates in logs.items() if len(rates) == len(parts) > 1
        }
        here = [
            row
            for row in of_one_group(rows)
            if row.backend != "emulated" and row.other_draft_device is None
            if (row.forward == "transformer") == run.is_transformer
            if device_kind(row.device_name) == self.survey.profile.kind
        ]
        local = [choice for choice in self.judged if self.survey.link_of(choice) is None]
        measured = _measured(run, local, here)
        gains = _ssd_gains(run, self.survey.gpus, here) if len(local) == len(self.judged) else {}
        return replace(self, measured=measured, samples=samples, ssd_gains=gains)

    @property
    def missing(self) -> list[Family]:
        """The modes and numbers of ranks that fit in memory but whose durations are unknown."""
        return sorted(self.survey.unjudged)

    @property
    def best(self) -> Choice:
        """The configuration with the highest predicted tokens/s."""
        return self.judged[0]

    def first(self, *modes: str) -> Choice | None:
        """Returns the fastest configuration whose mode is one of `modes`; None if there is none."""
        return next((choice for choice in self.judged if choice.mode in modes), None)

    def other(self, mode: str, gpus: int) -> Choice | None:
        """Returns the fastest configuration on at most `gpus` GPUs whose mode is not `mode`. None
        if there is none, or if one that would fit has unknown durations: it may be faster."""
        if any(use.mode != mode and use.gpus <= gpus for use in self.missing):
            return None
        uses = (use for use in self.judged if use.mode != mode and use.gpus <= gpus)
        return next(uses, None)

    @property
    def to_probe(self) -> tuple[Choice, ...]:
        """The configurations to measure next, because some of their durations were computed: of the
        two fastest, and the fastest of another mode than the best on no more GPUs."""
        rival = None if self.missing else self.other(self.best.mode, self.best.gpus)
        deciding = (*self.judged[:2], rival)
        return tuple(dict.fromkeys(use for use in deciding if use and use.derived))

    @property
    def prompts(self) -> int | None:
        """The number of prompts to which the --laws file was fitted; None without such a file, 0 if
        the number is unknown."""
        laws = self.survey.run.laws
        return None if laws is None else load_laws(laws).about.get("prompts", 0)

    def error(self, *choices: Choice) -> float:
        """Returns the relative error of predictions about these configurations, which depends on
        where their durations come from (measured, computed from others, or a datasheet)."""
        if is_datasheet(self.survey.profile):
            return DATASHEET_ERROR
        sources = [choice.derived for choice in choices if choice.derived]
        busy = min(max(self.survey.profile.busy.values(), default=0.0), _BUSIEST)
        slower = busy / (1 - busy)  # Other processes may have slowed some of the measurements.
        measured = [int(at) for source in sources for at in re.findall(_MEASURED_TO, source)]
        if measured and self.survey.run.context > _FARTHEST * min(measured):
            return DATASHEET_ERROR + slower
        if any(BY_LAYERS in source for source in sources):
            return MODEL_ERROR + slower
        return (DERIVED_ERROR if sources else ERROR) + slower

    def sampling(self, *pair: Choice) -> float:
        """Returns the sampling error by the choice of prompts, as the half-width of the 95%
        interval of a logarithm: that of the configuration's tokens/s or, if two are given, of the
        ratio of theirs. It is 0 without --laws, and infinite if unknown."""
        if self.survey.run.laws is None:
            return 0.0
        logs = [self.samples[use.family] for use in pair if use.family in self.samples]
        if len(logs) < len(pair):
            return math.inf
        return float(jackknife(logs[0] - logs[1] if len(logs) > 1 else logs[0]))

    def sampling_text(self, questions: Iterable[Sequence[Choice]]) -> str:
        """Returns a text in parentheses: the largest sampling error of some speedups, and how many
        prompts would reduce it to 5%. questions: for each speedup, the compared two."""
        half = max((self.sampling(*uses) for uses in questions), default=math.inf)
        if not self.prompts or half > _LARGEST:
            return " (±: unknown)"
        text = f"±{math.expm1(half):.0%}"
        small = math.log1p(_SMALL)
        if half > small:
            needed = int(self.prompts * (half / small) ** 2)
            about = round(needed, 1 - len(str(needed)))
            text += f"; about {about:,} would give ±{_SMALL:.0%}"
        return f" ({text})"

    def rate(self, use: Choice) -> Estimate:
        half = math.hypot(math.log1p(self.error(use)), self.sampling(use))
        return Estimate(use.tok_per_s, half)

    def gain(self, *pair: Choice) -> Estimate:
        """Returns the predicted speedup of the first over the second, with its interval."""
        half = math.hypot(math.log1p(self.error(*pair)), self.sampling(*pair))
        return Estimate(pair[0].tok_per_s / pair[1].tok_per_s, half)

    def measured_gain(self, *pair: Choice) -> float | None:
        """Returns the speedup of the first configuration over the second as measured, from result
        rows; None if one of the two was not measured."""
        uses = [self.measured.get(choice.family) for choice in pair]
        rates = [use.tok_per_s for use in uses if use is not None]
        return rates[0] / rates[1] if len(rates) == 2 else None

    def answer(self, use: Choice, other: Choice) -> str:
        """Returns whether configuration `use` is faster than `other`: "yes", "no" or "no
        difference". If that cannot be told, returns the reason: "datasheet" (nothing was measured),
        "too few" (prompts), "busy" (machine), or "contradicted" (by measured rows)."""
        low, high = self.gain(use, other).ends
        seen = self.measured_gain(use, other)
        answer = "yes" if low > 1 else "no" if high < 1 else "no difference"
        if is_datasheet(self.survey.profile):
            return "datasheet"
        is_wide = self.sampling(use, other) > math.log1p(self.error(use, other))
        has_few = self.prompts is not None and self.prompts < FEWEST_PROMPTS
        if has_few or (is_wide and answer == "no difference"):
            return "too few"
        if answer == "no difference" and self.survey.profile.busy:
            return "busy"
        if seen is not None and answer == ("no" if seen > 1 else "yes"):
            return "contradicted"
        return answer

    def level(self, best: Choice) -> list[Choice]:
        """Returns `best` and those that may be as fast: the interval of the speedup over them
        includes 1, or they were measured to be faster. Returns [] if `best` surely is."""
        level = [
            choice
            for choice in self.judged
            if choice != best
            if (self.measured_gain(best, choice) or 1) < 1 or self.gain(best, choice).ends[0] <= 1
        ]
        return [best, *level] if level else []

    def sentence(self, what: str, use: Choice, other: Choice) -> str:
        """Returns a sentence on whether something (what, such as "The draft") pays, with the
        speedup of configuration `use`, which has that thing, over `other`, which has not."""
        lower = what[0].lower() + what[1:]
        text = _ANSWERS[self.answer(use, other)]
        answer = text.format(what=what, lower=lower, prompts=self.prompts or "These")
        seen = self.measured_gain(use, other)
        by_rows = "" if seen is None else f", by measured rows {number(seen)}"
        return f"{answer}: {self.comparison(use, other)}{by_rows}."

    def comparison(self, use: Choice, other: Choice) -> str:
        """Returns the predicted speedup of `use` over `other` in words."""
        return f"{name_of(use)} makes {self.gain(use, other)} times {name_of(other)}"


def plan(survey: Survey, *, trees: bool = False) -> Plan:
    """Returns the fastest K, fan-out and drafter after a cache miss for each mode and number of
    ranks. It simulates a coarse grid first, then fine grids around the best few; a test compares
    the result with an exhaustive search. trees: whether draft trees are tried, too. Raises
    ConfigError if rounds take no time by the profile."""
    run = survey.run
    by_tp = {sharding.tp: sharding for sharding in survey.shardings}
    space = COARSE if run.batch_size <= _FEW else ROUGH
    choices: list[Choice] = []
    for sharding in survey.shardings:
        choices += weigh(candidates(run, sharding, space, trees=trees), survey, quick=True)
    for spaces_around in (_fan_outs_around, _policies_around):
        leaders = [choice for choice in by_speed(choices) if choice.mode == "ssd"][:_REFINED]
        around = dict.fromkeys(
            (leader.tp, space) for leader in leaders for space in spaces_around(leader)
        )
        finer = (choice for tp, space in around for choice in ssd_choices(run, by_tp[tp], space))
        choices += weigh(finer, survey, quick=True)
    # To be simulated longer: the fastest of each mode and number of ranks, at most one for each K.
    counts = Counter[Family]()
    finalists: list[Choice] = []
    for choice in firsts(by_speed(choices), lambda c: (c.family, c.lookahead)):
        counts[choice.family] += 1
        if counts[choice.family] <= _FINALISTS:
            finalists.append(choice)
    ranked = firsts(by_speed(weigh(finalists, survey)), lambda c: c.family)
    if any(not choice.round_us for choice in ranked):
        raise ConfigError("plan: this profile's rounds take no time: allowed: one with durations")
    judged = (replace(choice, derived=survey.label(choice)) for choice in ranked)
    return Plan(survey, tuple(judged))


def _fan_outs_around(leader: Choice) -> list[Space]:
    """Returns the parameters for a finer search around a good configuration of SSD: every fan-out,
    at K − 1, K and K + 1, with the same drafter after a cache miss."""
    k = leader.lookahead
    share = leader.backup_lookahead / k
    like = replace(FULL, backup_shares=(share,), fast=(leader.backup == "fast",))
    return [replace(like, lookaheads=(n,)) for n in (k - 1, k, k + 1) if n in FULL.lookaheads]


def _policies_around(leader: Choice) -> list[Space]:
    """Returns the parameters for a finer search around a good configuration of SSD: after a cache
    miss, the draft model or a lookup drafts any number of tokens, at the same K and fan-out."""
    return [Space((leader.lookahead,), (str(leader.fan_out),))]


def by_speed(choices: Iterable[Choice]) -> list[Choice]:
    """Returns the configurations sorted by simulated tokens/s, fastest first. If the rates agree in
    five digits, fewer GPUs and then the smaller K come first."""
    return sorted(choices, key=lambda c: (-float(f"{c.tok_per_s:.5g}"), c.gpus, c.lookahead))


def firsts(choices: Iterable[Choice], kind: Callable[[Choice], Hashable]) -> list[Choice]:
    """Returns the first configuration of each kind, in order. kind: a function that returns the
    kind of a configuration, for example its mode."""
    first: dict[Hashable, Choice] = {}
    for choice in choices:
        first.setdefault(kind(choice), choice)
    return list(first.values())


def _measured(run: RunConfig, judged: Iterable[Choice], rows: Sequence[Row]) -> dict[Family, Use]:
    """Returns {family: rows of the fastest measured options} for each family (mode and numbers of
    ranks) of the configurations `judged`. Only rows with the planned models, batch size, context,
    acceptance model and cache-hit model are taken."""
    names = ("batch_size", "context", *(() if run.is_transformer else ("fuse", "lm_head")))
    shared = {"workload": "gemm", "schedule": None} | {name: getattr(run, name) for name in names}
    measured = {}
    for choice in judged:
        job = job_of(run, choice)
        case = {**shared, "target": job.target.name}
        if choice.mode == LOOKUP:
            case["acceptance_fast"] = job.acceptance[Source.FAST].label
        elif job.draft is not None:
            case["draft"] = job.draft.name
            case["acceptance"] = job.acceptance[Source.CACHE].label
        if choice.mode == "ssd":
            case["hit_law"] = job.hit_law.label
        alike = [
            row
            for row in rows
            if family_of(row) == choice.family
            if bool(row.tree_nodes) == (choice.tree is not None)
            if bool(row.parallel_drafting) == choice.parallel
            if all(row.get(name) == value for name, value in case.items())
        ]
        if alike:
            measured[choice.family] = fastest(uses_of(alike))
    return measured


def _ssd_gains(run: RunConfig, gpus: int, rows: Iterable[Row]) -> dict[str, tuple[float, str]]:
    """Returns {name of the prompts: (measured speedup of SSD over the strongest alternative, name
    of that alternative)} on `gpus` GPUs. Only rows of whole transformers with the planned models
    and batch size are taken, whose acceptance comes from a recording or --laws, and whose context's
    reads differ from the planned ones by at most _LIGHT of the weights. The newest rows of SSD are
    compared with rows of the same commit, machine and context. If none of these is of a draft tree,
    a speedup that pays is left out: a tree might be faster."""
    job = job_of(run, Choice("sd", 1, 0, run.batch_size, 1, backup_lookahead=1))
    case = job.target.name, run.batch_size
    shard = job.target_shard
    most = _LIGHT * shard.weight_bytes(job.options, itemsize=2)
    drafts = (None, job.draft and job.draft.name)
    alike: dict[str, list[Row]] = {}
    for row in sorted(rows, key=began):
        source = row.recording or row.laws
        is_alike = (row.target, row.batch_size) == case
        apart = abs((row.context or 0) - run.context)
        is_alike &= shard.kv_bytes(apart, run.batch_size) <= most
        is_alike &= row.world_size == gpus if row.mode == "ssd" else row.world_size <= gpus
        is_pair = row.draft in drafts or mode_of(row) in LOOKUPS
        if source and is_alike and is_pair and run.is_transformer and row.schedule is None:
            alike.setdefault(str(source), []).append(row)
    gains = {}
    for source, known in alike.items():
        newest = next((row for row in reversed(known) if row.mode == "ssd"), None)
        if newest is None:
            continue
        visit = [row for row in known if row.context == newest.context and same_visit(row, newest)]
        sizes = {row.world_size for row in visit}
        uses = [use for n in sizes for use in uses_of(row for row in visit if row.world_size == n)]
        uses.sort(key=lambda use: -use.tok_per_s)
        ssd = next((use for use in uses if use.family.mode == "ssd"), None)
        others = [use for use in uses if use.family.mode != "ssd"]
        if ssd is None or not others:
            continue
        gain = claim_or_ratio(ssd.rows, others[0].rows).speedup
        if gain < WORTH or TREE in (other.family.mode for other in others):
            gains[Path(source.split()[0]).stem] = gain, others[0].name
    return dict(sorted(gains.items()))
