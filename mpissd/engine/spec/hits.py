"""The hit model of a synthetic workload: which outcomes are keys of the speculation cache.

p_hit:.9                imposed: every outcome hits with probability .9 if F_k ≥ 1
power:A=.75,r=1         miss(F) = min(1, A·F^{−r})
power:A=.64/.23,r=.4/.5       after a rejection / after a round that accepted every
                        served token
power:…,floor=.03/.02   floor + A·F^{−r}: the share of tokens that the draft does not know
laws:FILE               measured on a real pair, in a file of laws (spec/lawfile.py)
smollm2, …              measured on a real pair (mpissd/common/real_pairs.py)
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpissd.common.config import WorkloadFlags
from mpissd.common.errors import ConfigError, unknown
from mpissd.common.real_pairs import ASSUMED, DEFAULT, NAMED
from mpissd.common.theory import power_law_miss
from mpissd.engine.spec.lawfile import FittedHits, load_laws

Ints = NDArray[np.int32]

NEVER = 2**31 - 1  # The rank of a bonus token that lies beyond every fan-out.
DEFAULT_HIT_A, DEFAULT_HIT_R = ASSUMED.hit_a[0], ASSUMED.hit_r[0]


@dataclass(frozen=True)
class HitLaw:
    """The hit model: draws the true bonus token's rank among the draft's candidates, from 1.

    With p_hit set, the rank is 1 with that probability, and NEVER if not. Without p_hit, P(rank ≤
    F) = 1 − min(1, floor + A·F^{−r}). end_a, end_r and end_floor apply if every served token was
    accepted; None means the values after a rejection.
    """

    label: str
    p_hit: float | None = None
    hit_a: float = DEFAULT_HIT_A
    hit_r: float = DEFAULT_HIT_R
    end_a: float | None = None
    end_r: float | None = None
    floor: float = 0.0
    end_floor: float = 0.0

    def __post_init__(self) -> None:
        if self.p_hit is not None:
            _probability("p_hit", self.p_hit)
        for a, r, floor in (self._power(end) for end in self.ends):
            _probability("floor", floor)
            if not 0 <= a < math.inf:
                raise ConfigError(f"hit_a={a}: allowed: at least 0 and finite")
            if not 0 < r < math.inf:
                raise ConfigError(f"hit_r={r}: allowed: above 0 and finite")

    @property
    def ends(self) -> tuple[bool, ...]:
        """The values of `end` (every served token accepted) for which this model differs."""
        return (False,) if self.end_a is None else (False, True)

    def _power(self, end: bool) -> tuple[float, float, float]:
        """Returns (A, r, floor) after a rejection (end=False), or if every served token was
        accepted (True)."""
        if not end or self.end_a is None or self.end_r is None:
            return self.hit_a, self.hit_r, self.floor
        return self.end_a, self.end_r, self.end_floor

    def powers(self, lookahead: int, served: int) -> tuple[tuple[float, ...], ...]:
        """Returns A_k, r_k and floor_k for k = 0..K accepted of `served` tokens, in the form the
        fan-out takes."""
        return tuple(zip(*(self._power(k >= served) for k in range(lookahead + 1)), strict=True))

    def rank(self, u: float, end: bool = False) -> int:
        """Returns the rank for one u in [0, 1)."""
        return int(self.ranks(np.array([u]), end)[0])

    def ranks(self, u: NDArray[np.float64], end: bool = False) -> Ints:
        """Returns the ranks for an array u, in the same shape; each is from 1 to NEVER."""
        if self.p_hit is not None:
            return np.where(u < self.p_hit, 1, NEVER).astype(np.int32)
        a, r, floor = self._power(end)
        above = u - floor
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            ranks = np.ceil((a / above) ** (1 / r))
        return np.where(above > 0, np.clip(ranks, 1, NEVER), NEVER).astype(np.int32)

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


def hit_law_of(flags: WorkloadFlags, lookahead: int) -> HitLaw:
    """Returns the hit model of a configuration's flags at K = lookahead; raises ConfigError."""
    if flags.hit_law is not None:
        return named_hit_law(flags.hit_law, lookahead)
    if flags.p_hit is not None:
        return named_hit_law(f"p_hit:{flags.p_hit}")
    if flags.laws is not None:
        return named_hit_law(f"laws:{flags.laws}", lookahead)
    return _power_law(*DEFAULT.laws)


_PAIR = r"([^/,]+)(?:/([^/,]+))?"
_POWER = re.compile(rf"A={_PAIR},r={_PAIR}(?:,floor={_PAIR})?")


def named_hit_law(text: str, lookahead: int = 1) -> HitLaw:
    """Returns the hit model that `text` names; its label holds the numbers.

    `text` may also be the hit_law of a result row. lookahead: K, which selects the entry of a file.
    """
    kind, _, values = text.strip().partition(":")
    if text.strip() in NAMED:
        return _power_law(*NAMED[text.strip()].laws)
    if kind == "p_hit":
        p_hit = _number(text, values)
        return HitLaw(f"p_hit:{p_hit}", p_hit)
    if kind == "laws":
        return _measured(values, lookahead)
    match = _POWER.fullmatch(values)
    if kind != "power" or match is None:
        known = unknown("hit_law", text, ("power:A=.75,r=1", "p_hit:.9", "laws:FILE", *NAMED))
        raise ConfigError(f"{known}, or power:A=.64/.23,r=.4/.5: apart where all were accepted")
    rejected = match[1], match[3], match[5] or "0"
    complete = [own or same for own, same in zip(match.group(2, 4, 6), rejected, strict=True)]
    numbers = [tuple(_number(text, v) for v in each) for each in (rejected, complete)]
    return _power_law(*numbers[: 1 + any(match.group(2, 4, 6))])


def _measured(path: str, lookahead: int) -> HitLaw:
    """Returns the hit model of a file at K, its numbers to four digits."""
    laws = load_laws(path).behind(lookahead)
    if laws.rejected is None or laws.complete is None:
        which = "a rejection" if laws.rejected is None else "K accepted tokens"
        few = f"laws={path}: too few outcomes behind {which} for a hit law"
        raise ConfigError(f"{few}: allowed: hit_law=… beside it")
    return _power_law(*(_rounded(law) for law in (laws.rejected, laws.complete)))


def _rounded(law: FittedHits) -> tuple[float, ...]:
    return round(law.hit_a, 4), round(law.hit_r, 4), round(law.floor, 4)


def _power_law(rejected: Sequence[float], complete: Sequence[float] | None = None) -> HitLaw:
    """Returns the power model of (A, r, floor) after a rejection, and after a round that accepted
    every served token (None: the same)."""
    both = [rejected] if complete is None else [rejected, complete]
    parts = ["/".join(map(str, numbers)) for numbers in zip(*both, strict=True)]
    floors = f",floor={parts[2]}" if any(law[2] for law in both) else ""
    label = f"power:A={parts[0]},r={parts[1]}{floors}"
    (a, r, floor), (end_a, end_r, end_floor) = rejected, complete or (None, None, 0.0)
    return HitLaw(label, None, a, r, end_a, end_r, floor, end_floor or 0.0)


def _number(label: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"hit_law {label!r}: {value!r}: allowed: a number") from None


def _probability(what: str, value: float) -> None:
    if not 0 <= value <= 1:  # This comparison refuses NaN as well.
        raise ConfigError(f"{what}: {value}: allowed: 0 to 1")
