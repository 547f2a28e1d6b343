"""Decides whether speculation pays, and whether a separate core or GPU for the draft pays.

The compared configurations were measured in turns. The ratio of two speeds is the trimmed mean of
the logarithms of the turns' ratios (a fifth is dropped at each end), with a 95% interval [Tukey and
McLaughlin, 1963]. A disturbance of a whole turn cancels in the turn's ratio, and a disturbance of a
single measurement is dropped.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mpissd.lab.tables.compare import bound, student_t
from mpissd.lab.tables.uses import WORTH, Family

FEWEST_TURNS = 3  # A verdict needs 3 turns, because the interval of two values is unreliable.
TRIMMED = 0.2  # The trimmed mean drops this share of the turns at each end.
_CLOSE = 0.85  # Configurations slower than this share of the fastest are not measured again.
_NEAR = 1.05  # A gain is called "near 5%" if its upper bound is within this factor of 1.05.
_TELLING = 2  # An interval is not printed if its upper bound exceeds twice the mean.
_COLUMNS = 100
PAID = "pays"
LOST = "does not pay"
UNKNOWN = "cannot tell"


@dataclass(frozen=True)
class Ratio:
    """A ratio of two speeds, or one speed in tokens/s, with the ends of its 95% interval. turns:
    the number of turns that it is the mean of."""

    mean: float
    low: float
    high: float
    turns: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratio:
        """Returns the trimmed geometric mean of the values, one from each turn, with its 95%
        interval. A single value has a practically infinite interval."""
        logs = np.sort(np.log(values))
        count = len(values)
        half = 700.0
        trimmed = int(TRIMMED * count)
        inner = logs[trimmed : count - trimmed]
        if count > 1:
            spread = float(logs.clip(inner[0], inner[-1]).std(ddof=1))  # winsorized
            error = spread * math.sqrt(count) / len(inner)
            half = min(half, student_t(len(inner) - 1) * error)
        mean = math.exp(inner.mean())
        return cls(mean, mean * math.exp(-half), mean * math.exp(half), count)

    def interval(self, text: Callable[[float], str]) -> str:
        """Returns the 95% interval as text. If it is too wide, the number of turns is returned
        instead. text: function that formats one end of the interval."""
        if self.high > _TELLING * self.mean:
            return f"{self.turns} turn{'s' * (self.turns > 1)}"
        return f"{text(self.low)}–{text(self.high)}"

    def judgement(self, *, is_busy: bool) -> str:
        """Returns the verdict on a speedup. It "pays" if the mean is at least 5% and the interval
        excludes a loss; it "does not pay" if the whole interval is below 5%; otherwise "cannot
        tell". On a busy machine the whole interval must be above 5%, or below a loss of 5%."""
        if self.turns < FEWEST_TURNS:
            return UNKNOWN
        if self.low > (WORTH if is_busy else 1) and self.mean >= WORTH:
            return PAID
        return LOST if self.high < (1 / WORTH if is_busy else WORTH) else UNKNOWN


@dataclass
class TimedUse:
    """One of the compared configurations with its tokens/s in each turn (None: not measured in that
    turn). family: its mode and numbers of ranks. unit: what a rank runs on, "core" or "GPU".
    lookahead: K, the number of tokens drafted a round. refused: why it cannot run, if so. parallel:
    whether one forward drafts all K tokens."""

    family: Family
    unit: str
    lookahead: int = 0
    speeds: list[float | None] = field(default_factory=list)
    refused: str = ""
    parallel: bool = False

    @property
    def method(self) -> str:
        """The mode and K (tokens drafted a round) as text, such as "SD inline K=2"."""
        name = self.family.name + " in one forward" * self.parallel
        return name + (f" K={self.lookahead}" if self.lookahead else "")

    def __str__(self) -> str:
        count = self.family.gpus
        return f"{self.method} on {count} {self.unit}{'s' * (count > 1)}"

    @property
    def speed(self) -> Ratio | None:
        """The mean tokens/s of all turns, with its interval; None if no turn measured it."""
        speeds = [speed for speed in self.speeds if speed]
        return Ratio.of(speeds) if speeds else None

    @property
    def mean(self) -> float:
        """The mean tokens/s; 0 if no turn measured this configuration."""
        return self.speed.mean if self.speed else 0.0

    def over(self, other: TimedUse) -> Ratio | None:
        """Returns the ratio of this configuration's speed to that of `other`, over the turns that
        measured both configurations; None if there is no such turn."""
        pairs = zip(self.speeds, other.speeds, strict=False)
        ratios = [mine / theirs for mine, theirs in pairs if mine and theirs]
        return Ratio.of(ratios) if ratios else None


@dataclass(frozen=True)
class Answer:
    """The answer to the question whether something pays. what: its name, such as "Speculation on 1
    GPU". use: the fastest configuration that has it. rival: the fastest without it. ratio: speed of
    `use` / `rival`. candidates: the configurations from which one of these was chosen."""

    what: str
    use: TimedUse
    rival: TimedUse
    ratio: Ratio
    verdict: str
    candidates: Sequence[TimedUse]


@dataclass
class UseComparison:
    """The comparison of a run's configuration (uses[0]) with alternatives on the same ranks: SSD in
    one forward counts as its own, if the run's draft has mask tokens. busy:
    what disturbed the machine so much that verdicts are uncertain. notes: sentences on how it was
    measured. num_rounds: rounds of the shortest measurement. prompts: text that says how many of
    the run's prompts were decoded, if each turn took other prompts."""

    uses: list[TimedUse]
    busy: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_rounds: int = 0
    prompts: str = ""

    FEWEST_ROUNDS = 6  # A verdict needs at least 6 rounds in each measurement.

    def answers(self) -> list[Answer]:
        """Returns the answers to two questions, if measured: does speculation pay on the run's
        target ranks, and does a separate rank for the draft model pay?"""
        first = self.uses[0]
        plain = [use for use in self.uses if use.mean and not use.family.num_drafts]
        narrow = [use for use in plain if use.family.tp == first.family.tp]
        inline = [use for use in narrow if use.family.mode != "ar"] or [first]
        drafted = max(inline, key=lambda use: use.mean)
        what = f"Speculation on {first.family.tp} {first.unit}{'s' * (first.family.tp > 1)}"
        pairs = [(what, drafted, use, inline) for use in narrow if use.family.mode == "ar"]
        if first.family.num_drafts and plain:
            what = f"{'An' if first.unit[0] in 'aeiou' else 'A'} {first.unit} for the draft"
            apart = [use for use in self.uses if use.mean and use.family.num_drafts] or [first]
            best = max(apart, key=lambda use: use.mean)
            pairs.append((what, best, max(plain, key=lambda use: use.mean), plain))
        answers = []
        for what, use, rival, candidates in pairs:
            if use is not rival and (ratio := use.over(rival)) is not None:
                verdict = ratio.judgement(is_busy=bool(self.busy))
                verdict = verdict if self.num_rounds >= self.FEWEST_ROUNDS else UNKNOWN
                answers.append(Answer(what, use, rival, ratio, verdict, candidates))
        return answers

    def needed(self, width: float) -> list[TimedUse]:
        """Returns the configurations to measure in another turn: those compared in an answer that
        has no verdict, or an interval wider than ±width; and any that may be as fast as these."""
        is_long = self.num_rounds >= self.FEWEST_ROUNDS
        needed = list[TimedUse]()
        for answer in self.answers():
            is_small = answer.ratio.high <= (1 + width) * answer.ratio.mean
            if not is_small or (is_long and answer.verdict == UNKNOWN):
                least = _CLOSE * max(use.mean for use in answer.candidates)
                needed += [use for use in answer.candidates if use.mean >= least]
                needed += [answer.use, answer.rival]
        return needed

    def lines(self) -> list[str]:
        """Returns the printed lines: a table of all configurations, what disturbed the
        measurements, and a sentence with each answer."""
        counts = sorted({use.speed.turns for use in self.uses if use.speed})
        turns = " to ".join(map(str, [*counts[:1], *counts[1:][-1:]])) or "0"
        lines = [f"tok/s in {turns} turns (95% interval):" if turns != "1" else "tok/s in 1 turn:"]
        width = max(len(str(use)) for use in self.uses)
        for use in sorted(self.uses, key=lambda use: -use.mean):
            text = f"not measured: {use.refused}" if use.refused else "not measured"
            if (speed := use.speed) is not None:
                text = f"{speed.mean:.1f}"
                text += f" ({speed.interval('{:.1f}'.format)})" * (turns != "1")
            lines.append(f"  {use!s:{width}}  {text}")
        busy = f"The machine is busy, in the worst turn: {', '.join(self.busy)}."
        lines += [busy] * bool(self.busy)
        alone = "Cannot tell what pays: no two uses were measured that can be compared."
        sentences = [self.sentence(answer) for answer in self.answers()] or [alone]
        lines += self.notes + [f"→ {sentence}" for sentence in sentences]
        return [part for x in lines for part in textwrap.wrap(x, _COLUMNS, subsequent_indent="  ")]

    def sentence(self, answer: Answer) -> str:
        use = answer.use
        rival = answer.rival
        ratio = answer.ratio
        name = use.method if use.family.gpus == rival.family.gpus else str(use)
        makes = f"{name} makes {ratio.mean:.2f}× ({ratio.interval(bound)}) of {rival}"
        kinds = list(dict.fromkeys(candidate.family.name for candidate in answer.candidates))
        if rival in answer.candidates and len(kinds) > 1:
            makes += f", best of {', '.join(kinds[:-1])} and {kinds[-1]}"
        makes += f", on {self.prompts}" * bool(self.prompts)
        later = f"{answer.what[0].lower()}{answer.what[1:]}"
        if answer.verdict != UNKNOWN:
            what = f"While it is busy, {later}" if self.busy else answer.what
            return f"{what} {answer.verdict}: {makes}."
        is_near = ratio.low < WORTH < ratio.high < WORTH * _NEAR
        why = " the gain is near 5%:" if is_near else " the turns differ too much:"
        why = "" if self.busy else why
        if ratio.turns < FEWEST_TURNS:
            why = " too few turns to show how much they differ:"
        if self.num_rounds < self.FEWEST_ROUNDS:
            why = f" an answer of fewer than {self.FEWEST_ROUNDS} rounds is too short:"
        state = " while it is busy" * bool(self.busy)
        return f"Cannot tell{state} whether {later} pays:{why} {makes}."

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as the JSON object that `run` prints under the key "beside"."""
        uses: list[dict[str, Any]] = [
            {"name": str(use), **asdict(use), "tok_per_s": use.speed and asdict(use.speed)}
            for use in self.uses
        ]
        verdicts = [
            {"what": a.what, "verdict": a.verdict, "use": str(a.use), "rival": str(a.rival)}
            | asdict(a.ratio)
            for a in self.answers()
        ]
        about = {"busy": self.busy, "notes": self.notes, "prompts": self.prompts or None}
        return {"verdicts": verdicts, **about, "uses": uses}
