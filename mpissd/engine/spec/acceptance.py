"""The laws of a synthetic workload: how many drafted tokens are accepted, and which outcomes hit.

acceptance  alpha:0.8          every token is accepted with probability 0.8 (short form: 0.8)
            rates:.9,.8,…      K hazards P(x_i accepted | x_1..x_{i−1} accepted)
            marginal:.9,.7,…   K unconditional rates P(x_1..x_i accepted), as vLLM logs them
            histogram:FILE     counts of rounds with k = 0, 1, 2, … tokens accepted, also in the
                               formats of vLLM and SGLang (spec/histogram.py)
hits        p_hit:.9             imposed: every outcome hits with probability .9 if F_k ≥ 1
            power:A=.75,r=1      miss(F) = min(1, A·F^{−r})
            power:A=.64/.23,r=.4/.5    one law after a rejection / another where every served token
                                 was accepted
            smollm2-own, …       measured on a real pair (mpissd/common/real_pairs.py)
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError, unknown
from mpissd.common.real_pairs import ASSUMED, REAL_PAIRS
from mpissd.common.theory import accept_probabilities, power_law_miss
from mpissd.engine.spec.histogram import read_histogram

Ints = NDArray[np.int32]

NEVER = 2**31 - 1  # The rank of a bonus token that lies beyond every fan-out.
DEFAULT_HIT_A, DEFAULT_HIT_R = ASSUMED.hit_a[0], ASSUMED.hit_r[0]


@dataclass(frozen=True)
class AcceptanceLaw:
    """Acceptance hazards a_1..a_K: P(x_i accepted | x_1..x_{i−1} accepted).

    Raises ConfigError for a hazard outside 0..1.
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
    """Returns the acceptance law that `text` names, for K = lookahead.

    The law's label is `text` in its long form. With K = 0 nothing is drafted, and a list of any
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
    known = unknown("acceptance", kind, ("alpha", "rates", "marginal", "histogram"))
    raise ConfigError(f"{known}, as in 0.8, rates:.9,.8,.7 or histogram:FILE")


def hazards_of_counts(counts: list[int], lookahead: int) -> tuple[float, ...]:
    """Converts counts c_k of rounds with k accepted tokens into K hazards.

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
    # True where the run of matches ends; column K is always True.
    ends = np.ones((batch, lookahead + 1), np.bool_)
    np.not_equal(drafts, stream[:, :lookahead], out=ends[:, :lookahead])
    run: Ints = ends.argmax(axis=1).astype(np.int32)
    return np.minimum(run, num_draft)


@dataclass(frozen=True)
class HitLaw:
    """Draws the true bonus token's rank among the draft's candidates (1 is the first) from a
    uniform u.

    With p_hit set, the rank is 1 with that probability and NEVER otherwise. Else it follows a power
    law, P(rank ≤ F) = 1 − min(1, A·F^{−r}). end_a and end_r apply where every served token was
    accepted; None means the same law as after a rejection.
    """

    label: str
    p_hit: float | None = None
    hit_a: float = DEFAULT_HIT_A
    hit_r: float = DEFAULT_HIT_R
    end_a: float | None = None
    end_r: float | None = None

    def __post_init__(self) -> None:
        if self.p_hit is not None:
            _probability("p_hit", self.p_hit)
        for a, r in (self._power(end) for end in self.ends):
            if not 0 <= a < math.inf:
                raise ConfigError(f"hit_a={a}: allowed: at least 0 and finite")
            if not 0 < r < math.inf:
                raise ConfigError(f"hit_r={r}: allowed: above 0 and finite")

    @property
    def ends(self) -> tuple[bool, ...]:
        """The values of `end` (every served token accepted) for which this law differs."""
        return (False,) if self.end_a is None else (False, True)

    def _power(self, end: bool) -> tuple[float, float]:
        """Returns (A, r) after a rejection (end=False), or where every served token was accepted
        (True)."""
        if not end or self.end_a is None or self.end_r is None:
            return self.hit_a, self.hit_r
        return self.end_a, self.end_r

    def powers(self, lookahead: int, served: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Returns A_k and r_k for k = 0..K accepted of `served` tokens, in the form the fan-out
        takes."""
        each = [self._power(k >= served) for k in range(lookahead + 1)]
        return tuple(a for a, _ in each), tuple(r for _, r in each)

    def rank(self, u: float, end: bool = False) -> int:
        """Returns the rank for one u in [0, 1)."""
        return int(self.ranks(np.array([u]), end)[0])

    def ranks(self, u: NDArray[np.float64], end: bool = False) -> Ints:
        """Returns the ranks for an array u, in the same shape; each is from 1 to NEVER."""
        if self.p_hit is not None:
            return np.where(u < self.p_hit, 1, NEVER).astype(np.int32)
        a, r = self._power(end)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            ranks = np.ceil((a / u) ** (1 / r))
        return np.where(u > 0, np.clip(ranks, 1, NEVER), NEVER).astype(np.int32)

    def hit_probability(self, fan_out: float, end: bool = False) -> float:
        """Returns P(the bonus token is among the first F candidates)."""
        if self.p_hit is None:
            return 1.0 - power_law_miss(fan_out, *self._power(end))
        return self.p_hit if fan_out >= 1 else 0.0

    def hit_probabilities(self, widest: int) -> NDArray[np.float64]:
        """Returns hit_probability for F = 0..widest [2, widest + 1]; row 1: all were accepted."""
        counts = range(widest + 1)
        return np.array([[self.hit_probability(f, end) for f in counts] for end in (False, True)])

    def check_fan_out(self, fan_out: tuple[int, ...]) -> None:
        """Raises ConfigError if hits are imposed (p_hit) on an outcome that keeps no candidate."""
        if self.p_hit and not all(fan_out):
            raise ConfigError(
                f"p_hit={self.p_hit} with fan_out {fan_out}: allowed: every F_k from 1"
            )


def resolve_hit_law(
    p_hit: float | None, hit_a: float | None, hit_r: float | None, text: str | None = None
) -> HitLaw:
    """Returns the hit law of the flags: imposed hits, a power law, or the law that `text` names.

    A or r of the power law takes its default where it is None. Raises ConfigError if the flags name
    more than one law.
    """
    if text is not None:
        if not p_hit is hit_a is hit_r is None:
            flags = f"p_hit={p_hit}, hit_a={hit_a}, hit_r={hit_r}"
            raise ConfigError(f"hit_law={text} with {flags}: allowed: one law")
        return named_hit_law(text)
    if p_hit is None:
        a = DEFAULT_HIT_A if hit_a is None else hit_a
        r = DEFAULT_HIT_R if hit_r is None else hit_r
        return _power_law((a, None, r, None))
    if hit_a is not None or hit_r is not None:
        raise ConfigError(f"p_hit={p_hit} with hit_a={hit_a}, hit_r={hit_r}: allowed: one law")
    return HitLaw(f"p_hit:{p_hit}", p_hit)


_POWER = re.compile(r"A=([^/,]+)(?:/([^/,]+))?,r=([^/,]+)(?:/([^/,]+))?")


def named_hit_law(text: str) -> HitLaw:
    """Returns the hit law that `text` names; its label holds the numbers.

    `text` may also be the hit_law of a result row.
    """
    kind, _, values = text.strip().partition(":")
    if text.strip() in REAL_PAIRS:
        pair = REAL_PAIRS[text.strip()]
        return _power_law((*pair.hit_a, *pair.hit_r))
    if kind == "p_hit":
        return resolve_hit_law(_number(text, values), None, None)
    match = _POWER.fullmatch(values)
    if kind != "power" or match is None:
        known = unknown("hit_law", text, ("power:A=.75,r=1", "p_hit:.9", *REAL_PAIRS))
        raise ConfigError(f"{known}, or power:A=.64/.23,r=.4/.5: apart where all were accepted")
    a, end_a, r, end_r = match.groups()
    split = end_a is not None or end_r is not None
    each = (a, end_a or a, r, end_r or r) if split else (a, None, r, None)
    return _power_law(tuple(None if v is None else _number(text, v) for v in each))


def _power_law(numbers: Sequence[float | None]) -> HitLaw:
    """Returns the power law of four numbers: A after a rejection, A after an acceptance of all
    served tokens, and the two values of r likewise.

    If the second and the fourth are None, one law holds in both cases.
    """
    a, end_a, r, end_r = numbers
    ends = ("", "") if end_a is None else (f"/{end_a}", f"/{end_r}")
    assert a is not None and r is not None, numbers
    return HitLaw(f"power:A={a}{ends[0]},r={r}{ends[1]}", None, a, r, end_a, end_r)


def _rates(label: str, values: str, lookahead: int) -> tuple[float, ...]:
    rates = tuple(_number(label, value) for value in values.split(","))
    if lookahead and len(rates) != lookahead:
        raise ConfigError(
            f"acceptance {label!r} has {len(rates)} values: allowed: lookahead = {lookahead}"
        )
    return tuple(_probability(f"acceptance {label!r}", rate) for rate in rates)[:lookahead]


def _conditional(label: str, marginal: tuple[float, ...]) -> tuple[float, ...]:
    """Converts unconditional rates m_i into hazards a_i = m_i / m_{i−1}, with m_0 = 1; 0 after a
    0."""
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
