"""The acceptance model of a synthetic workload: how many drafted tokens are accepted.

alpha:0.8          every token is accepted with probability 0.8 (short form: 0.8)
rates:.9,.8,…      K acceptance rates P(x_i accepted | x_1..x_{i−1} accepted)
marginal:.9,.7,…   K unconditional rates P(x_1..x_i accepted), as vLLM logs them
histogram:FILE     counts of rounds with k = 0, 1, 2, … tokens accepted, also in the formats of
                   vLLM and SGLang (spec/histogram.py)
laws:FILE          of a real pair's draft, measured (spec/lawfile.py)
prompt:FILE, suffix:FILE    the same for looked-up tokens
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError, unknown
from mpissd.common.theory import accept_probabilities
from mpissd.engine.spec.histogram import read_histogram
from mpissd.engine.spec.lawfile import load_laws

Ints = NDArray[np.int32]
DEFAULT_FAST = "alpha:0.3"  # assumed of looked-up tokens that were not measured
_LAW_FILES = ("laws", "prompt", "suffix")


@dataclass(frozen=True)
class AcceptanceLaw:
    """Acceptance rates a_1..a_K ("hazards"): P(x_i accepted | x_1..x_{i−1} accepted).

    Raises ConfigError for a rate outside 0..1.
    """

    hazards: tuple[float, ...]
    label: str

    def __post_init__(self) -> None:
        for rate in self.hazards:
            _probability(f"acceptance {self.label!r}", rate)

    def probabilities(self) -> tuple[float, ...]:
        """Returns P(k accepted) for k = 0..K."""
        return accept_probabilities(self.hazards)

    @property
    def mean_accepted(self) -> float:
        """The mean number of accepted tokens, 0..K."""
        return math.fsum(k * p for k, p in enumerate(self.probabilities()))

    @property
    def acceptance_length(self) -> float:
        """The mean number of tokens a round, including the bonus token."""
        return 1.0 + self.mean_accepted


def resolve_acceptance(text: str, lookahead: int) -> AcceptanceLaw:
    """Returns the acceptance model that `text` names, for K = lookahead.

    The model's label is `text` in its long form. With K = 0 nothing is drafted, and a list of any
    length is allowed. Raises ConfigError, naming the value and what is allowed.
    """
    kind, colon, values = text.strip().partition(":")
    if not colon:
        kind, values = ("alpha", kind) if _is_number(kind) else (kind, "")
    label = f"{kind}:{values}"
    if kind == "alpha":
        alpha = _probability(f"acceptance {label!r}", _number(label, values))
        return AcceptanceLaw((alpha,) * lookahead, f"alpha:{alpha}")
    if kind == "rates":
        return AcceptanceLaw(_rates(label, values, lookahead), label)
    if kind == "marginal":
        return AcceptanceLaw(_conditional(label, _rates(label, values, lookahead)), label)
    if kind == "histogram":
        counts = read_histogram(Path(values).expanduser())
        return AcceptanceLaw(hazards_of_counts(counts, lookahead), label)
    if kind in _LAW_FILES:
        return _measured(kind, values, lookahead)
    known = unknown("acceptance", kind, ("alpha", "rates", "marginal", "histogram", *_LAW_FILES))
    raise ConfigError(f"{known}, as in 0.8, rates:.9,.8,.7 or histogram:FILE")


def _measured(kind: str, path: str, lookahead: int) -> AcceptanceLaw:
    """Returns the acceptance model of a file; its label holds the numbers, to four digits.

    Looked-up tokens that the file has no counts of follow DEFAULT_FAST.
    """
    measured = load_laws(path).behind(lookahead)
    counts = measured.accepted if kind == "laws" else measured.fast.get(kind)
    if counts is None:
        return resolve_acceptance(DEFAULT_FAST, lookahead)
    hazards = tuple(round(rate, 4) for rate in hazards_of_counts(list(counts), lookahead))
    return AcceptanceLaw(hazards, f"rates:{','.join(map(str, hazards))}")


def hazards_of_counts(counts: list[int], lookahead: int) -> tuple[float, ...]:
    """Converts counts c_k of rounds with k accepted tokens into K acceptance rates.

    a_i = Σ_{k≥i} c_k / Σ_{k≥i−1} c_k for i = 1..K, and 0 beyond the last k counted and after a 0. A
    round with more than K accepted tokens counts as one that accepted all K.
    """
    at_least = list(accumulate(reversed(counts)))[::-1] + [0] * (lookahead + 1)
    pairs = pairwise(at_least[: lookahead + 1])
    return tuple(reached / before if before else 0.0 for before, reached in pairs)


def count_accepted(drafts: Ints, stream: Ints, num_draft: Ints) -> Ints:
    """Counts the accepted tokens k of each sequence: the leading i where drafts[:, i] = stream[:,
    i].

    drafts: [b, K]; stream: [b, ≥ K], the target's own tokens; num_draft: [b], an upper bound of k.
    Returns int32 [b].
    """
    batch, lookahead = drafts.shape
    # True at the end of the run of matches; column K is always True.
    ends = np.ones((batch, lookahead + 1), np.bool_)
    np.not_equal(drafts, stream[:, :lookahead], out=ends[:, :lookahead])
    run: Ints = ends.argmax(axis=1).astype(np.int32)
    return np.minimum(run, num_draft)


def _rates(label: str, values: str, lookahead: int) -> tuple[float, ...]:
    rates = tuple(_number(label, value) for value in values.split(","))
    if lookahead and len(rates) != lookahead:
        raise ConfigError(
            f"acceptance {label!r} has {len(rates)} values: allowed: lookahead = {lookahead}"
        )
    return tuple(_probability(f"acceptance {label!r}", rate) for rate in rates)[:lookahead]


def _conditional(label: str, marginal: tuple[float, ...]) -> tuple[float, ...]:
    """Converts unconditional rates m_i into conditional ones a_i = m_i / m_{i−1}, with m_0 = 1; 0
    after a 0."""
    before = (1.0, *marginal[:-1]) if marginal else ()
    if any(rate > previous for previous, rate in zip(before, marginal, strict=True)):
        raise ConfigError(f"acceptance {label!r}: allowed: rates that never rise")
    return tuple(m / p if p else 0.0 for p, m in zip(before, marginal, strict=True))


def _number(label: str, value: str) -> float:
    if not _is_number(value):
        raise ConfigError(f"acceptance {label!r}: {value!r}: allowed: numbers from 0 to 1")
    return float(value)


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _probability(what: str, value: float) -> float:
    if not 0 <= value <= 1:  # This comparison refuses NaN as well.
        raise ConfigError(f"{what}: {value}: allowed: 0 to 1")
    return value
