"""Two models of a round's outcome: the acceptance model says how many drafted tokens the target
accepts, and the hit model whether the bonus token that the target emits after them is among the
draft's candidates, so that the speculation cache is hit.

Acceptance models:

alpha:0.8          every token is accepted with probability 0.8 (short form: 0.8)
rates:.9,.8,…      K acceptance rates P(x_i accepted | x_1..x_{i−1} accepted)
marginal:.9,.7,…   K unconditional rates P(x_1..x_i accepted), as vLLM logs them
laws:FILE          measured on a real target and draft
parallel:FILE      measured on a real target and a draft whose forward drafts all K tokens
prompt:FILE, suffix:FILE    measured on tokens copied from earlier text (lookup.py)

Hit models, where F is the number of bonus candidates kept after k accepted tokens:

p_hit:.9           every round hits with probability .9 if F ≥ 1
power:A=.75,r=1         the probability of a miss is miss(F) = min(1, A·F^{−r})
power:A=.64/.23,r=.4/.5       after a rejection / after a round that accepted all tokens
power:…,floor=.03/.02   miss(F) = min(1, floor + A·F^{−r}); the draft never finds a share `floor`
laws:FILE               measured on a real target and draft
smollm2, …              measured on the target and draft of this name (common/real_pairs.py)

`python -m mpissd pair` measures a real target and draft, and writes a *laws file* with counts of
accepted tokens and fitted hit models (docs/laws.md). A run with `--laws=FILE` draws its rounds from
this file: the acceptance rates follow from the counts at its K, the number of drafted tokens, and
the hit model from the fitted A, r and floor.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.config import WorkloadFlags
from mpissd.common.errors import ConfigError, unknown
from mpissd.common.files import read_file
from mpissd.common.real_pairs import ASSUMED, DEFAULT, NAMED, MissLaw
from mpissd.common.rounds import Ints
from mpissd.common.theory import accept_probabilities, power_law_miss
from mpissd.common.workloads import LOOKUPS

DEFAULT_FAST = "alpha:0.3"  # the acceptance model of tokens from a lookup, if none was measured
NEVER = 2**31 - 1  # the rank of a bonus token that no number of candidates would include
SCHEMA = 1  # the version of the format of files of measured models ("laws files")
PARALLEL = "parallel"
LAW_FILES = ("laws", *LOOKUPS, PARALLEL)  # the kinds of acceptance models that are read from a file
_BROKEN = (ValueError, LookupError, TypeError, RecursionError, AttributeError)
_PAIR = r"([^/,]+)(?:/([^/,]+))?"
_POWER = re.compile(rf"A={_PAIR},r={_PAIR}(?:,floor={_PAIR})?")


@dataclass(frozen=True)
class AcceptanceLaw:
    """An acceptance model: the probabilities that K drafted tokens x_1 … x_K are accepted.

    hazards[i − 1]: P(x_i accepted | x_1..x_{i−1} accepted). label: the model as text. levels: known
    only if one forward drafts all K tokens; levels[i − 1][r] is the probability that the target's
    i-th token is the draft's (r + 1)-th likeliest one. Raises ConfigError for a rate outside 0..1.
    """

    hazards: tuple[float, ...]
    label: str
    levels: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        for rate in self.hazards:
            _probability(f"acceptance {self.label!r}", rate)

    def probabilities(self) -> tuple[float, ...]:
        """Returns P(exactly k tokens are accepted) for k = 0..K."""
        return accept_probabilities(self.hazards)

    @property
    def mean_accepted(self) -> float:
        """The mean number of accepted tokens a round, 0..K."""
        return math.fsum(k * p for k, p in enumerate(self.probabilities()))


def resolve_acceptance(text: str, lookahead: int) -> AcceptanceLaw:
    """Returns the acceptance model that `text` describes, as in `alpha:0.8`, for K = lookahead
    drafted tokens. Rates from a laws file are rounded to four digits. With K = 0 a list of rates
    may have any length. Raises ConfigError, which names the value and the allowed ones."""
    kind, colon, values = text.strip().partition(":")
    if not colon:
        try:
            values = str(float(kind))
            kind = "alpha"
        except ValueError:
            values = ""
    label = f"{kind}:{values}"
    what = f"acceptance {label!r}"
    if kind == "alpha":
        alpha = _probability(what, _number(what, values))
        return AcceptanceLaw((alpha,) * lookahead, f"alpha:{alpha}")
    if kind in ("rates", "marginal"):
        rates = [_number(what, value) for value in values.split(",")]
        if lookahead and len(rates) != lookahead:
            raise ConfigError(f"{what} has {len(rates)} values: allowed: lookahead = {lookahead}")
        rates = [_probability(what, rate) for rate in rates][:lookahead]
        if kind == "marginal":  # rate i = m_i / m_{i−1}, with m_0 = 1; 0 after a 0
            if any(rate > before for before, rate in pairwise(rates)):
                raise ConfigError(f"{what}: allowed: rates that never rise")
            rates = [m / p if p else 0.0 for p, m in pairwise([1.0, *rates])]
        return AcceptanceLaw(tuple(rates), label)
    if kind in LAW_FILES:
        measured = load_laws(values).behind(lookahead)
        counts = measured.accepted if kind == "laws" else measured.fast.get(kind)
        if counts is None and kind == PARALLEL:
            what = f"parallel_drafting with laws={values}: it has no rounds of one draft forward"
            allowed = "allowed: laws of recordings whose draft has mask tokens"
            raise ConfigError(f"{what} at lookahead={lookahead}: {allowed}")
        if counts is None:
            return resolve_acceptance(DEFAULT_FAST, lookahead)
        hazards = tuple(round(rate, 4) for rate in hazards_of_counts(list(counts), lookahead))
        levels = measured.levels[:lookahead] if kind == PARALLEL else ()
        return AcceptanceLaw(hazards, f"rates:{','.join(map(str, hazards))}", levels)
    error = unknown("acceptance", kind, ("alpha", "rates", "marginal", *LAW_FILES))
    raise ConfigError(f"{error}, as in 0.8 or rates:.9,.8,.7")


def hazards_of_counts(counts: list[int], lookahead: int) -> tuple[float, ...]:
    """Returns the K = lookahead acceptance rates a_i = Σ_{k≥i} c_k / Σ_{k≥i−1} c_k, where c_k =
    counts[k] is the number of rounds that accepted k tokens. Rates are 0 beyond the largest k that
    occurred. A round with more than K accepted tokens counts as one that accepted all K."""
    at_least = list(accumulate(reversed(counts)))[::-1] + [0] * (lookahead + 1)
    pairs = pairwise(at_least[: lookahead + 1])
    return tuple(reached / before if before else 0.0 for before, reached in pairs)


def rounds(runs: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields (c, k) for each SD round that decodes an answer: it begins after c tokens and accepts
    k. runs: how many drafted tokens a round accepts that begins after 0, 1, … tokens, [end]."""
    c = 0
    while c < len(runs):
        yield c, runs[c]
        c += runs[c] + 1


def count_accepted(drafts: Ints, stream: Ints, num_draft: Ints) -> Ints:
    """Returns how many drafted tokens of each sequence the target accepts, int32 [b]: those before
    the first one that differs from the target's own token. drafts: the drafted tokens, [b, K].
    stream: the target's own tokens, [b, ≥ K]. num_draft: how many tokens are drafted, [b]."""
    batch, lookahead = drafts.shape
    # True where a drafted token differs. Column K is always True, so that argmax finds an end.
    ends = np.ones((batch, lookahead + 1), np.bool_)
    np.not_equal(drafts, stream[:, :lookahead], out=ends[:, :lookahead])
    run: Ints = ends.argmax(axis=1).astype(np.int32)
    return np.minimum(run, num_draft)


@dataclass(frozen=True)
class HitLaw:
    """A model of cache hits: the distribution of the rank, from 1, that the target's bonus token
    has among the draft's candidates for it. With F candidates, a rank above F is a miss.

    p_hit: if set, the rank is 1 with this probability, and else NEVER (no candidate). by_end: if
    p_hit is None, the parameters of P(rank > F) = min(1, floor + A·F^{−r}) after a rejection, and,
    if they differ, after a round that accepted all drafted tokens. label: the model as text. Raises
    ConfigError for impossible values.
    """

    label: str
    p_hit: float | None = None
    by_end: tuple[MissLaw, ...] = ASSUMED[:1]

    def __post_init__(self) -> None:
        if self.p_hit is not None:
            _probability("p_hit", self.p_hit)
        for a, r, floor in self.by_end:
            _probability("floor", floor)
            if not 0 <= a < math.inf:
                raise ConfigError(f"hit_a={a}: allowed: at least 0 and finite")
            if not 0 < r < math.inf:
                raise ConfigError(f"hit_r={r}: allowed: above 0 and finite")

    @property
    def ends(self) -> tuple[bool, ...]:
        """The cases with parameters of their own: (False,) if all rounds have the same, else
        (False, True), for rounds with a rejection and for rounds that accepted all."""
        return (False, True)[: len(self.by_end)]

    def powers(self, lookahead: int, served: int) -> tuple[tuple[float, ...], ...]:
        """Returns ((A_0 … A_K), (r_0 … r_K), (floor_0 … floor_K)), K = lookahead: the parameters of
        the probability min(1, floor_k + A_k·F^{−r_k}) that none of F candidates is the bonus token,
        after k of the `served` verified tokens were accepted."""
        powers = (self.by_end[-1 if k >= served else 0] for k in range(lookahead + 1))
        return tuple(zip(*powers, strict=True))

    def ranks(self, u: NDArray[np.float64], end: bool = False) -> Ints:
        """Draws ranks, from 1 to NEVER, of the bonus token among the draft's candidates, one by
        each uniform number of `u`, in [0, 1). end: whether all drafted tokens were accepted."""
        if self.p_hit is not None:
            return np.where(u < self.p_hit, 1, NEVER).astype(np.int32)
        a, r, floor = self.by_end[-end]
        above = u - floor
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            ranks = np.ceil((a / above) ** (1 / r))
        return np.where(above > 0, np.clip(ranks, 1, NEVER), NEVER).astype(np.int32)

    def hit_probability(self, fan_out: float, end: bool = False) -> float:
        """Returns P(the bonus token is among `fan_out` candidates). end: if all K were accepted."""
        if self.p_hit is None:
            return 1.0 - power_law_miss(fan_out, *self.by_end[-end])
        return self.p_hit if fan_out >= 1 else 0.0

    def hit_probabilities(self, widest: int) -> NDArray[np.float64]:
        """Returns the probability of a cache hit with F = 0 … widest candidates, [2, widest + 1]:
        row 0 after a rejection, row 1 after a round that accepted all drafted tokens."""
        counts = range(widest + 1)
        return np.array([[self.hit_probability(f, end) for f in counts] for end in (False, True)])


def hit_law_of(flags: WorkloadFlags, lookahead: int) -> HitLaw:
    """Returns the model of cache hits for K = lookahead drafted tokens, which the flags hit_law,
    p_hit or laws choose (a default without these flags). Raises ConfigError for a bad value."""
    if flags.hit_law is not None:
        return named_hit_law(flags.hit_law, lookahead)
    if flags.p_hit is not None:
        return named_hit_law(f"p_hit:{flags.p_hit}")
    if flags.laws is not None:
        return named_hit_law(f"laws:{flags.laws}", lookahead)
    return _power_law(*DEFAULT)


def named_hit_law(text: str, lookahead: int = 1) -> HitLaw:
    """Returns the model of cache hits that `text` describes, as in `power:A=.75,r=1`, `p_hit:.9`,
    `laws:FILE` or the name of a measured target and draft. lookahead: K, the number of drafted
    tokens, for which a laws file has a model of its own. Its numbers are rounded to four digits."""
    what = f"hit_law {text!r}"
    kind, _, values = text.strip().partition(":")
    if text.strip() in NAMED:
        return _power_law(*NAMED[text.strip()])
    if kind == "p_hit":
        p_hit = _number(what, values)
        return HitLaw(f"p_hit:{p_hit}", p_hit)
    if kind == "laws":
        laws = load_laws(values).behind(lookahead)
        if laws.rejected is None or laws.complete is None:
            which = "a rejection" if laws.rejected is None else "K accepted tokens"
            few = f"laws={values}: too few outcomes after {which} for a hit model"
            raise ConfigError(f"{few}: allowed: hit_law=… in addition")
        fits = laws.rejected, laws.complete
        return _power_law(*([round(value, 4) for value in fit] for fit in fits))
    match = _POWER.fullmatch(values)
    if kind != "power" or match is None:
        error = unknown("hit_law", text, ("power:A=.75,r=1", "p_hit:.9", "laws:FILE", *NAMED))
        raise ConfigError(f"{error}, or power:A=.64/.23,r=.4/.5: apart where all were accepted")
    rejected = match[1], match[3], match[5] or "0"
    pairs = zip(match.group(2, 4, 6), rejected, strict=True)
    complete = [value or same for value, same in pairs]
    numbers = [[_number(what, value) for value in values] for values in (rejected, complete)]
    return _power_law(*numbers[: 1 + any(match.group(2, 4, 6))])


def _power_law(*by_end: Sequence[float]) -> HitLaw:
    """Returns the hit model of one or two triples (A, r, floor); see MissLaw. The second one holds
    after rounds that accepted all drafted tokens."""
    parts = ["/".join(map(str, numbers)) for numbers in zip(*by_end, strict=True)]
    floors = f",floor={parts[2]}" if any(floor for _, _, floor in by_end) else ""
    laws = tuple(MissLaw(*numbers) for numbers in by_end)
    return HitLaw(f"power:A={parts[0]},r={parts[1]}{floors}", None, laws)


def _number(what: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"{what}: {value!r}: allowed: a number") from None


def _probability(what: str, value: float) -> float:
    if not 0 <= value <= 1:  # This comparison refuses NaN as well.
        raise ConfigError(f"{what}: {value}: allowed: 0 to 1")
    return value


@dataclass(frozen=True)
class LawsAt:
    """The part of a laws file, which holds measured outcomes, for K = lookahead drafted tokens.

    accepted[k]: the number of rounds that accepted k = 0 … K tokens. fast: such counts for tokens
    copied by a lookup, by kind of lookup, and under PARALLEL for K tokens drafted by one forward.
    rejected, complete: the model of cache hits after a rejection, and after K accepted tokens
    (None: too few rounds to fit one). levels[i − 1][r]: with PARALLEL, the probability that the
    target's i-th token is the draft's (r + 1)-th likeliest one.
    """

    lookahead: int
    accepted: tuple[int, ...]
    fast: Mapping[str, tuple[int, ...]]
    rejected: MissLaw | None
    complete: MissLaw | None
    levels: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class LawFile:
    """A laws file: models of acceptance and of cache hits, measured on a real target and draft.

    at: the models, by rising number K of drafted tokens. about: the origin of the measured rounds.
    without_each: values of the flag --laws; each selects the models fitted without one group of
    prompts, to show their uncertainty.
    """

    name: str
    sha256: str
    about: Mapping[str, Any]
    at: tuple[LawsAt, ...]
    without_each: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The file's name and 16 digits of its SHA-256, which identify it in result rows."""
        return f"{self.name} sha256:{self.sha256[:16]}"

    @property
    def longest_fitted(self) -> int:
        """The largest K with enough rounds to fit a model of cache hits both after a rejection and
        after K accepted tokens; if there is none, the largest K in the file."""
        fitted = [laws.lookahead for laws in self.at if laws.rejected and laws.complete]
        return max(fitted, default=self.at[-1].lookahead)

    def behind(self, lookahead: int) -> LawsAt:
        """Returns the models at the smallest measured K ≥ lookahead, or raises ConfigError."""
        for laws in self.at:
            if laws.lookahead >= lookahead:
                return laws
        longest = self.at[-1].lookahead
        raise ConfigError(
            f"lookahead={lookahead} with laws={self.name}: allowed: at most {longest}, as measured"
        )


def load_laws(path: str) -> LawFile:
    """Reads a laws file; a file that has not changed is read only once. The path FILE#n selects the
    models fitted without the n-th group of prompts. Raises ConfigError for any other file."""
    try:
        file, _, group = path.rpartition("#") if not Path(path).exists() else (path, "", "")
        stat = Path(file or path).stat()
        return _load(file or path, group if file else "", stat.st_mtime_ns, stat.st_size)
    except (OSError, *_BROKEN) as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
        reason = " ".join(reason.split())
        raise ConfigError(
            f"laws={path}: {reason}: allowed: a whole file of `mpissd pair`"
        ) from error


@lru_cache(maxsize=32)
def _load(path: str, group: str, changed: int, size: int) -> LawFile:
    data = read_file(Path(path))
    read = json.loads(data)
    if read["kind"] != "laws" or read["schema"] != SCHEMA:
        raise ValueError(f"schema {read['schema']} of {read['kind']}: allowed: {SCHEMA}")
    laws = read["without"][int(group)] if group else read["laws"]
    at = tuple(sorted(map(_laws_at, laws), key=lambda laws: laws.lookahead))
    if not at:
        raise ValueError("it holds no laws")
    without = [f"{path}#{n}" for n in range(len(read.get("without", ())))]
    about = dict(read["about"])
    return LawFile(Path(path).name, hashlib.sha256(data).hexdigest(), about, at, tuple(without))


def _laws_at(read: Mapping[str, Any]) -> LawsAt:
    lookahead = int(read["lookahead"])

    def checked(counts: list[int]) -> tuple[int, ...]:
        if len(counts) != lookahead + 1 or not all(type(n) is int and n >= 0 for n in counts):
            raise ValueError(f"counts {tuple(counts)} with K = {lookahead}")
        if not any(counts):
            raise ValueError(f"no round with K = {lookahead}")
        return tuple(counts)

    fast = {name: checked(counts) for name, counts in read["fast"].items()}
    fits = [read[end]["fit"] for end in ("rejected", "complete")]
    rejected, complete = (
        None if fit is None else MissLaw(*(float(fit[name]) for name in MissLaw._fields))
        for fit in fits
    )
    counts = np.array(read.get("levels") or np.zeros((0, 2)), np.float64)
    is_table = counts.ndim == 2 and counts.shape[1] > 1 and len(counts) in (0, lookahead)
    if not is_table or (counts < 0).any():
        raise ValueError(f"levels of {counts.shape} counts with K = {lookahead}")
    shares = counts[:, :-1] / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    levels = tuple(tuple(round(share, 4) for share in row) for row in shares.tolist())
    return LawsAt(lookahead, checked(read["accepted"]), fast, rejected, complete, levels)
