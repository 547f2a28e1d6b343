"""What the laws of a synthetic workload say: how many drafted tokens are accepted, and what hits.

acceptance  alpha:0.8          every token with 0.8 (0.8 alone says the same)
            rates:.9,.8,…      K hazards P(x_i accepted | x_1..x_{i−1} accepted)
            marginal:.9,.7,…   K unconditional rates P(x_1..x_i accepted), as vLLM logs them
            histogram:FILE     counts of rounds with k = 0, 1, 2, … tokens accepted, also as vLLM
                               and SGLang tell them (spec/histogram.py)
hits        p_hit:.9             imposed: every outcome with .9, whatever the fan-out (from 1 on)
            power:A=.75,r=1      miss(F) = min(1, A·F^{−r})
            power:A=.64/.23,r=.4/.5    apart behind a rejection / where every served token was
                                 accepted
            smollm2-own, …       as measured on a real pair (mpissd/common/real_pairs.py)
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

NEVER = 2**31 - 1  # the rank of a bonus token that no fan-out reaches
DEFAULT_HIT_A, DEFAULT_HIT_R = ASSUMED.hit_a[0], ASSUMED.hit_r[0]


@dataclass(frozen=True)
class AcceptanceLaw:
    """hazards a_1..a_K: P(x_i accepted | x_1..x_{i−1} accepted); ConfigError outside 0..1."""

    hazards: tuple[float, ...]
    label: str

    def __post_init__(self) -> None:
        for rate in self.hazards:
            _probability(f"acceptance {self.label!r}", rate)

    def probabilities(self) -> tuple[float, ...]:
        """P(k accepted) for k = 0..K."""
        return accept_probabilities(self.hazards)

    @property
    def mean_accepted(self) -> float:
        """Mean k, 0..K."""
        return math.fsum(k * p for k, p in enumerate(self.probabilities()))

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a round, bonus included."""
        return 1.0 + self.mean_accepted


def resolve_acceptance(text: str, lookahead: int) -> AcceptanceLaw:
    """The law that `text` names, for K = lookahead; its label is the text in its long form.

    K = 0 drafts nothing and takes a list of any length. ConfigError names what is wrong.
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
    """a_i = Σ_{k≥i} c_k / Σ_{k≥i−1} c_k, i = 1..K; 0 beyond the counts' last k and after a 0.

    Counts that reach beyond K are read as "at least K accepted": truncation loses nothing.
    """
    at_least = list(accumulate(reversed(counts)))[::-1] + [0] * (lookahead + 1)
    pairs = pairwise(at_least[: lookahead + 1])
    return tuple(reached / before if before else 0.0 for before, reached in pairs)


def count_accepted(drafts: Ints, stream: Ints, num_draft: Ints) -> Ints:
    """k per sequence: leading i with drafts[:, i] = stream[:, i], at most num_draft.

    drafts: [b, K]; stream: [b, ≥ K], the target's own tokens; num_draft: [b]. Returns int32 [b].
    """
    batch, lookahead = drafts.shape
    ends = np.ones((batch, lookahead + 1), np.bool_)  # where the run of matches is over
    np.not_equal(drafts, stream[:, :lookahead], out=ends[:, :lookahead])
    run: Ints = ends.argmax(axis=1).astype(np.int32)
    return np.minimum(run, num_draft)


@dataclass(frozen=True)
class HitLaw:
    """The rank, from 1, of the true bonus token among the draft's candidates, from a uniform u.

    Imposed: rank 1 with p_hit, else NEVER. Power law: P(rank ≤ F) = 1 − min(1, A·F^{−r}).
    end_a, end_r: of a bonus behind tokens that were all accepted; None: as behind a rejection.
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
        """The values of `end` (all served tokens accepted) that this law tells apart."""
        return (False,) if self.end_a is None else (False, True)

    def _power(self, end: bool) -> tuple[float, float]:
        """(A, r) behind a rejection, or at the end."""
        if not end or self.end_a is None or self.end_r is None:
            return self.hit_a, self.hit_r
        return self.end_a, self.end_r

    def powers(self, lookahead: int, served: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """A_k and r_k for k = 0 … K accepted of `served` tokens, as the fan-out takes them."""
        each = [self._power(k >= served) for k in range(lookahead + 1)]
        return tuple(a for a, _ in each), tuple(r for _, r in each)

    def rank(self, u: float, end: bool = False) -> int:
        """Rank for one u in [0, 1)."""
        return int(self.ranks(np.array([u]), end)[0])

    def ranks(self, u: NDArray[np.float64], end: bool = False) -> Ints:
        """Ranks, of the shape of u; from 1 to NEVER."""
        if self.p_hit is not None:
            return np.where(u < self.p_hit, 1, NEVER).astype(np.int32)
        a, r = self._power(end)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            ranks = np.ceil((a / u) ** (1 / r))
        return np.where(u > 0, np.clip(ranks, 1, NEVER), NEVER).astype(np.int32)

    def hit_probability(self, fan_out: float, end: bool = False) -> float:
        """P(the bonus token is among the first F candidates)."""
        if self.p_hit is None:
            return 1.0 - power_law_miss(fan_out, *self._power(end))
        return self.p_hit if fan_out >= 1 else 0.0

    def hit_probabilities(self, widest: int) -> NDArray[np.float64]:
        """hit_probability of F = 0 … widest behind a rejection and at the end, [2, widest + 1]."""
        counts = range(widest + 1)
        return np.array([[self.hit_probability(f, end) for f in counts] for end in (False, True)])

    def check_fan_out(self, fan_out: tuple[int, ...]) -> None:
        """ConfigError where a hit is imposed on an outcome that keeps no candidate."""
        if self.p_hit and not all(fan_out):
            raise ConfigError(
                f"p_hit={self.p_hit} with fan_out {fan_out}: allowed: every F_k from 1"
            )


def resolve_hit_law(
    p_hit: float | None, hit_a: float | None, hit_r: float | None, text: str | None = None
) -> HitLaw:
    """Imposed hits, the power law with its defaults where A or r is None, or what `text` names;
    not two of them."""
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
    """The law that a text names, which may be a row's hit_law; its label is the numbers."""
    kind, _, values = text.strip().partition(":")
    if text.strip() in REAL_PAIRS:
        pair = REAL_PAIRS[text.strip()]
        return _power_law((*pair.hit_a, *pair.hit_r))
    if kind == "p_hit":
        return resolve_hit_law(_number(text, values), None, None)
    found = _POWER.fullmatch(values)
    if kind != "power" or found is None:
        known = unknown("hit_law", text, ("power:A=.75,r=1", "p_hit:.9", *REAL_PAIRS))
        raise ConfigError(f"{known}, or power:A=.64/.23,r=.4/.5: apart where all were accepted")
    a, end_a, r, end_r = found.groups()
    split = end_a is not None or end_r is not None
    each = (a, end_a or a, r, end_r or r) if split else (a, None, r, None)
    return _power_law(tuple(None if v is None else _number(text, v) for v in each))


def _power_law(numbers: Sequence[float | None]) -> HitLaw:
    """The law of A, A at the end, r, r at the end (None at the ends: as behind a rejection)."""
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
    """Hazards a_i = m_i / m_{i−1}, m_0 = 1, and 0 after a 0."""
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
    if not 0 <= value <= 1:  # refuses NaN as well
        raise ConfigError(f"{what}: {value}: allowed: 0 to 1")
    return value
