"""How sure a prediction is: the intervals of rates and gains, and the sentences that they allow.

A prediction errs by ERROR if all its times were measured, by DERIVED_ERROR if some were derived, by
MODEL_ERROR if a whole transformer was derived from another model's, and by DATASHEET_ERROR if the
profile is a datasheet. With --laws the sampling error of the prompts is added, by a jackknife over
groups of them; the two are independent, so their squares add. An interval of a gain on one side of
1 is a verdict, unless it rests on a datasheet, on few prompts, or against measured rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from mpissd.common.compare import jackknife
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.rivals import TREE, Family
from mpissd.engine.backend.profile import Profile
from mpissd.engine.law.acceptance import load_laws
from mpissd.lab.predict.costs import Floats
from mpissd.lab.predict.derive import BY_LAYERS
from mpissd.lab.predict.search import LOOKUP, Choice, Survey, weigh
from mpissd.lab.tables.best import Use as Measured

# The p95 of measured and derived predictions for an H200 are 8.4% and 19.9%, with the luck of each
# row's draws (docs/predictions.md); forwards of another model and of a datasheet: docs/profile.md.
ERROR, DERIVED_ERROR, MODEL_ERROR, DATASHEET_ERROR = 0.05, 0.2, 0.3, 0.6
FEWEST_PROMPTS = 8  # for a verdict on a pair
_BUSIEST = 0.9  # a share of a machine's time that more noise does not exceed
_LARGEST = math.log(10)  # half-width of an interval that is shown
_MEASURED_TO = r"measured up to context=(\d+)"
_FARTHEST = 4  # times the longest measured context, beyond which nothing is known
_SMALL = 0.05  # a sampling error that is small enough
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
    """A rate or a gain, and the half-width of its interval in logarithms."""

    value: float
    half: float

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval."""
        factor = math.exp(min(self.half, 700.0))
        return self.value / factor, self.value * factor

    def __str__(self) -> str:
        """Returns a gain as "1.06 (.88–1.27)", a rate of 100 and more as "548 (501–600)"."""
        return f"{number(self.value)} ({self.interval})"

    @property
    def interval(self) -> str:
        """The ends as text."""
        return "–".join(map(number, self.ends)) if self.half < _LARGEST else "no interval"


def number(value: float) -> str:
    """Returns a positive number with three digits, or all of its whole ones to a million."""
    if value >= 999_999.5:
        return f"{value / 1e6:.2f}M"
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}".removeprefix("0")


def is_datasheet(profile: Profile) -> bool:
    """Returns whether nothing of a profile was measured."""
    return profile.sources["read_bytes_per_s"].startswith("datasheet")


def name_of(choice: Choice) -> str:
    """Returns the use as it stands in a sentence: a lookup on 2, SSD on 1 + 1."""
    name = _NAMES.get(choice.mode, "SSD" + " with trees" * (choice.tree is not None))
    return f"{name} on {choice.tp}" + f" + {choice.num_drafts}" * bool(choice.num_drafts)


@dataclass(frozen=True)
class Evidence:
    """What a verdict rests on.

    samples: logarithms of each use's rate without each group of prompts, [G]; empty without --laws,
    or if a group is all that determines the hits.
    """

    run: RunConfig
    profile: Profile
    measured: Mapping[Family, Measured]
    samples: Mapping[Family, Floats]

    @classmethod
    def of(
        cls,
        run: RunConfig,
        profile: Profile,
        survey: Survey,
        choices: Iterable[Choice],
        measured: Mapping[Family, Measured],
    ) -> Evidence:
        """Weighs the choices without each group of the prompts, if there are laws of any."""
        logs: dict[Family, list[float]] = {}
        parts = () if run.laws is None else load_laws(run.laws).without_each
        with suppress(ConfigError):
            for part in parts:
                for choice in weigh(choices, replace(run, laws=part), survey.placements):
                    logs.setdefault(Family.of(choice), []).append(math.log(choice.tok_per_s))
        whole = {use: np.array(of) for use, of in logs.items() if len(of) == len(parts) > 1}
        return cls(run, profile, measured, whole)

    @property
    def prompts(self) -> int | None:
        """The number of prompts that the laws rest on; None without laws, 0 if it is unknown."""
        return None if self.run.laws is None else load_laws(self.run.laws).about.get("prompts", 0)

    def error(self, *choices: Choice) -> float:
        """Returns the error of predictions, as a share."""
        if is_datasheet(self.profile):
            return DATASHEET_ERROR
        sources = [choice.derived for choice in choices if choice.derived]
        busy = min(max(self.profile.busy.values(), default=0.0), _BUSIEST)
        slower = busy / (1 - busy)  # what others took may have hit some of the times
        measured = [int(at) for source in sources for at in re.findall(_MEASURED_TO, source)]
        if measured and self.run.context > _FARTHEST * min(measured):
            return DATASHEET_ERROR + slower
        if any(BY_LAYERS in source for source in sources):
            return MODEL_ERROR + slower
        return (DERIVED_ERROR if sources else ERROR) + slower

    def sampling(self, *pair: Choice) -> float:
        """Returns the half-width that the choice of prompts gives a use's rate, or its gain over
        another one, in logarithms; infinite if it is not known."""
        if self.run.laws is None:
            return 0.0
        logs = [self.samples[use] for use in map(Family.of, pair) if use in self.samples]
        if len(logs) < len(pair):
            return math.inf
        return float(jackknife(logs[0] - logs[1] if len(logs) > 1 else logs[0]))

    def sampling_text(self, questions: Iterable[Sequence[Choice]]) -> str:
        """Returns the error that the choice of prompts leaves in these gains, and how many prompts
        would leave 5%, as text in parentheses."""
        half = max((self.sampling(*uses) for uses in questions), default=math.inf)
        if not self.prompts or half > _LARGEST:
            return " (±: unknown)"
        text, small = f"±{math.expm1(half):.0%}", math.log1p(_SMALL)
        if half > small:
            needed = int(self.prompts * (half / small) ** 2)
            about = round(needed, 1 - len(str(needed)))
            text += f"; about {about:,} would give ±{_SMALL:.0%}"
        return f" ({text})"

    def rate(self, use: Choice) -> Estimate:
        """Returns a use's tokens a second."""
        half = math.hypot(math.log1p(self.error(use)), self.sampling(use))
        return Estimate(use.tok_per_s, half)

    def gain(self, *pair: Choice) -> Estimate:
        """Returns how many times the rate of the second use the first one makes."""
        half = math.hypot(math.log1p(self.error(*pair)), self.sampling(*pair))
        return Estimate(pair[0].tok_per_s / pair[1].tok_per_s, half)

    def measured_gain(self, *pair: Choice) -> float | None:
        """Returns the gain by measured rows; None if one of the uses has none."""
        rates = [
            self.measured[use].tok_per_s for use in map(Family.of, pair) if use in self.measured
        ]
        return rates[0] / rates[1] if len(rates) == 2 else None

    def answer(self, use: Choice, other: Choice) -> str:
        """Returns whether a use is faster than another one: yes, no, no difference, or why no
        verdict is possible: datasheet, busy, contradicted, too few (prompts)."""
        (low, high), seen = self.gain(use, other).ends, self.measured_gain(use, other)
        answer = "yes" if low > 1 else "no" if high < 1 else "no difference"
        if is_datasheet(self.profile):
            return "datasheet"
        is_wide = self.sampling(use, other) > math.log1p(self.error(use, other))
        has_few = self.prompts is not None and self.prompts < FEWEST_PROMPTS
        if has_few or (is_wide and answer == "no difference"):
            return "too few"
        if answer == "no difference" and self.profile.busy:
            return "busy"
        if seen is not None and answer == ("no" if seen > 1 else "yes"):
            return "contradicted"
        return answer

    def sentence(self, what: str, use: Choice, other: Choice) -> str:
        """Returns whether `what` pays, the gain with its interval, and the uses compared."""
        words = {
            "what": what,
            "lower": what[0].lower() + what[1:],
            "prompts": self.prompts or "These",
        }
        answer = _ANSWERS[self.answer(use, other)].format(**words)
        seen = self.measured_gain(use, other)
        by_rows = "" if seen is None else f", by measured rows {number(seen)}"
        return f"{answer}: {self.comparison(use, other)}{by_rows}."

    def comparison(self, use: Choice, other: Choice) -> str:
        """Returns how many times the rate of another use this one makes, in words."""
        return f"{name_of(use)} makes {self.gain(use, other)} times {name_of(other)}"
