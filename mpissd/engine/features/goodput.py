"""Chooses K, and whether the draft speculates ahead, for each round by its goodput [TurboSpec]: the
expected number of tokens that all live sequences commit in a round, divided by the expected seconds
of the round,

    Σ_i (1 + Σ_{j ≤ K_i} Π_{n ≤ j} a_in) / (seconds of a forward of Σ_i (1 + K_i) rows + the rest)

K_i is the smaller one of K and sequence i's limit. a_in is the acceptance rate of sequence i's n-th
drafted token, from its own outcomes, shrunk to the rates of all sequences. Prompts that are stored
with a verification lengthen all rounds by the same share and do not count.

A *way* to decode is a K and a *width*, the most bonus candidates for each number of accepted
tokens: K = 0 is AR, width 0 is SD, other ways are SSD. The rest of a round (all but the forward) is
measured for each way: work on the host, drafting or waiting for the draft, and a target that a
working draft slows. In SSD, rounds in which all sequences hit the cache count separately, with the
rest of the nearest measured K. In other rounds the rest is a straight line in the number of draft
forwards, fitted to the measured K.

A draft on the target's own device stores nothing in its KV cache while K = 0, and all lacking
tokens before it drafts again; the mean seconds of storing them count as a cost of drafting. The
choice reads counts and clocks, never the drafted tokens, so that decoding stays lossless
(docs/ssd.md, "Sampling").

Means are kept by the number of sequences, the *load*. At a load that was not measured, a way is
assumed to cost as much as at the nearest larger load, in proportion; that is optimistic, so that
the way is tried. A way that was not used for _STALE_ROUNDS rounds of a load is tried again, in at
most a share EXPLORE of the time.
"""

from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Source
from mpissd.engine.job import Job
from mpissd.engine.round.scheduler import Task
from mpissd.engine.round.target import RoundResult

EXPLORE = 0.003  # the largest share of time spent on trying ways to decode that seem slower
_STALE_ROUNDS = 100
_MARGIN = 1.01  # a way to decode replaces the current one if its goodput is larger by this factor
_OWN = 24.0  # a new sequence's acceptance rate is the mean rate, with the weight of 24 tokens
_PRIOR = 0.7  # the acceptance rate that is assumed before the first round
_PRIOR_WEIGHT = 8.0  # the weight of the assumed acceptance rate, as a number of tokens
_LIKE_OTHERS = 8.0  # the n-th token's rate begins as the mean rate, with the weight of 8 tokens
_MEMORY = 1 / 512  # the share of the acceptance counts that each round of a sequence forgets
_SAMPLE = 1 / 64  # the least weight of a new duration in a running mean
_MOST_SAMPLES = 16  # the largest weight, in samples, of one measured K in the fitted line
_STORED = 1 / 64  # the weight of a new round in the mean seconds of storing tokens for the draft
_HITS = np.array([5.6, 8.0])  # assumed counts of (cache hits, drafts) before the first round
_LEAST = 3  # the number of samples from which a mean counts as known
_RECENT = 5  # the number of last samples whose median is the usual sample
_FAR = 4.0  # a sample more than 4 times as large as the usual sample counts as the usual one
_WEIGHT = 1 / 32  # the least weight of a new sample in the mean seconds of a forward
_KNOWN = 4  # the number of samples after which one sample changes the mean seconds less
_SHIFT = 0.5  # a later sample counts as at most this share of the mean away from the mean
_GROWTH = 0.3  # the share of its seconds by which stored prompts may lengthen a round
_APART = 10  # at most one round in 11 exceeds _GROWTH, so that 90% of the rounds keep to it

Floats = NDArray[np.float64]
Point = tuple[int, float, int]  # (K or its draft forwards, seconds beyond the forward, weight)


class ForwardTimes:
    """Estimates the seconds of the target's forwards by their number of rows, and from these how
    many rows of prompts to store together with a verification.

    Seconds are running means at the measured sizes, and linear between two sizes. The controller
    avoids a size that seems slow, so that a chance delay must not count: the seconds of a size
    measured fewer than four times are interpolated between its neighbours, or a median.

    The rows of prompts fill the largest forward with which the round takes at most 30% longer. If
    these are few, because the sizes of forwards are far apart, every eleventh round may be longer:
    each round saves 30% of its seconds, and the saved seconds pay for a larger forward.
    """

    def __init__(self, buckets: Sequence[int] = (), tokens_a_forward: int = 1) -> None:
        """buckets: the row counts to which forwards are padded, rising (empty: no padding).
        tokens_a_forward: how many tokens one forward of the draft drafts for a sequence."""
        self._buckets = list(buckets)
        self._tokens_a_forward = tokens_a_forward
        self._rows: list[int] = []  # the measured numbers of rows, rising
        self._seconds: dict[int, float] = {}
        self._samples: dict[int, int] = {}
        self._first: dict[int, list[float]] = {}  # {rows: seconds}, if fewer than 4 samples
        self._asked: dict[int, float] = {}  # {rows: seconds}, the cached results of `seconds`
        self._saved_s = self._step_s = 0.0
        self._within = 0

    def _size(self, rows: int) -> int:
        at = bisect_left(self._buckets, rows)
        return self._buckets[at] if at < len(self._buckets) else rows

    def add(self, rows: int, seconds: float) -> None:
        """Counts a forward of `rows` rows that took `seconds`."""
        self._asked.clear()
        size = self._size(rows)
        self._samples[size] = count = self._samples.get(size, 0) + 1
        if count > _KNOWN:
            self._seconds[size] = _mean(self._seconds[size], seconds, count)
        else:
            if size not in self._first:
                insort(self._rows, size)
            samples = self._first.setdefault(size, [])
            samples.append(seconds)
            if len(samples) == _KNOWN:
                self._seconds[size] = median(self._first.pop(size))
        sure = [n for n in self._rows if n not in self._first]
        for size, samples in self._first.items():
            at = bisect_left(sure, size)
            is_between = 0 < at < len(sure)
            self._seconds[size] = (
                self._line(sure[at - 1], sure[at], size) if is_between else median(samples)
            )

    def seconds(self, rows: int) -> float:
        """Returns the expected seconds of a forward of `rows` rows. Below the smallest measured
        size, these are its seconds. Above the largest size, the line through the two largest sizes
        goes on; with one measured size, seconds are in proportion to rows."""
        if (answer := self._asked.get(rows)) is not None:
            return answer
        sizes = self._rows
        size = self._size(rows)
        at = bisect_left(sizes, size)
        if at < len(sizes) and (at == 0 or sizes[at] == size):
            answer = self._seconds[sizes[at]]
        elif len(sizes) < 2:
            answer = self._seconds[sizes[0]] * size / sizes[0] if sizes else 0.0
        else:
            high = min(at, len(sizes) - 1)
            answer = self._line(sizes[high - 1], sizes[high], size)
        self._asked[rows] = answer
        return answer

    def _line(self, low: int, high: int, rows: int) -> float:
        below = self._seconds[low]
        above = self._seconds[high]
        if rows > high:
            above = max(above, below)  # more rows never make a forward faster
        return below + (above - below) * (rows - low) / (high - low)

    def steps(self, lookahead: int) -> int:
        """Returns how many forwards the draft needs for `lookahead` tokens of a sequence."""
        return -(-lookahead // self._tokens_a_forward)

    def drafted(self, lookahead: int, seconds: float) -> None:
        """Counts that a draft on the target's device drafted `lookahead` tokens in `seconds`."""
        step_s = seconds / self.steps(lookahead)
        self._step_s = _mean(self._step_s or step_s, step_s)

    def prefill_rows(self, rows: int, limit: int, lookahead: int = 0) -> int:
        """Returns how many rows (tokens) of prompts the next forward stores beside the `rows` rows
        that it verifies. limit: the most rows of a forward. lookahead: K, its drafted tokens."""
        if not rows:
            return limit
        plain_s = self.seconds(rows)
        round_s = plain_s + self.steps(lookahead) * self._step_s
        next_s = self.seconds(min(limit, self._size(rows) + 1)) - plain_s
        self._saved_s = min(self._saved_s + _GROWTH * round_s, max(round_s, next_s))
        total = rows + self.room(rows, limit, lookahead)
        self._within += 1
        if self._within > _APART:
            larger = self._largest(rows, limit, plain_s + self._saved_s)
            if larger - rows > _APART * (total - rows):
                total = larger
                self._within = 0
        self._saved_s -= max(0.0, self.seconds(total) - plain_s)
        return total - rows

    def room(self, rows: int, limit: int, lookahead: int = 0) -> int:
        """Returns the most rows (tokens) of prompts that lengthen a round which verifies `rows`
        rows by at most 30%. limit: the most rows of a forward. lookahead: K, its drafted tokens."""
        plain_s = self.seconds(rows)
        round_s = plain_s + self.steps(lookahead) * self._step_s
        grown_s = plain_s + _GROWTH * round_s
        return self._largest(rows, limit, grown_s) - rows

    def _largest(self, rows: int, limit: int, limit_s: float) -> int:
        """Returns the rows of the largest forward, between `rows` and `limit` rows, that takes at
        most limit_s seconds; `rows` if there is none."""
        sizes = self._buckets or range(rows, limit + 1)
        low = bisect_left(sizes, rows) - 1
        high = bisect_left(sizes, limit + 1) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(sizes[middle]) <= limit_s:
                low = middle
            else:
                high = middle - 1
        return max(rows, sizes[low]) if 0 <= low < len(sizes) else rows


def _mean(before: float, new: float, count: int = _KNOWN + 1) -> float:
    """Returns a running mean. before: the mean so far. new: the new sample. count: its number, from
    1 on. The change is limited, because other work on the machine delays a forward now and then."""
    limit = _SHIFT * before if count > _KNOWN else float("inf")
    return before + max(_WEIGHT, 1 / count) * min(max(new - before, -limit), limit)


class Way(NamedTuple):
    """A way to decode a round. lookahead: K, the tokens to draft. width: the most bonus candidates
    that get a branch after each number of accepted tokens (None: as many as the job's fan-out says;
    0: none, SD)."""

    lookahead: int
    width: int | None = 0

    @property
    def mode(self) -> str:
        """The value of --mode that decodes in this way: "ar", "sd" or "ssd"."""
        if not self.lookahead:
            return "ar"
        return "sd" if self.width == 0 else "ssd"


AR = Way(0)


class ByLoad:
    """Running means of a duration, one for each load: 1, 2–3, 4–7, … sequences.

    Rounds that compile a kernel or capture a graph take 10 to 1000 times as long and must not
    count. So a mean is unknown before three samples, is their median before five, and later counts
    a sample far above the median of the last five as this median.
    """

    def __init__(self) -> None:
        self._recent: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))
        self._means: dict[int, float] = {}
        self.samples = Counter[int]()  # by load

    def add(self, load: int, value: float) -> None:
        """Adds the sample `value`, in seconds, which was measured with `load` sequences."""
        step = load.bit_length()
        recent = self._recent[step]
        recent.append(value)
        self.samples[step] += 1
        if len(recent) == _RECENT:
            usual = sorted(recent)[_RECENT // 2]
            weight = max(_SAMPLE, 1 / self.samples[step])
            counted = value if value <= _FAR * usual else usual
            self._means[step] += weight * (counted - self._means[step])
        elif len(recent) >= _LEAST:
            self._means[step] = median(recent)

    def at(self, load: int, otherwise: float) -> float:
        """Returns the mean seconds with `load` sequences. If unknown, returns that of the nearest
        larger known load, in proportion, else of the nearest smaller one, or `otherwise`."""
        step = load.bit_length()
        means = self._means
        if step in means:
            return means[step]
        larger = min((n for n in means if n > step), default=None)
        if larger is not None:
            return means[larger] / (1 << larger - step)
        return means[max(means)] if means else otherwise


class Goodput:
    """Chooses for a server how to decode each round, for the most expected tokens per second. The
    server calls `choose` before a round and `observe` after it. way: the way to decode (K, width)
    of the next round. rounds_by: {mode: number of rounds}."""

    def __init__(self, lookahead: int, widths: Sequence[int | None], times: ForwardTimes) -> None:
        """lookahead: the most drafted tokens. widths: the limits of bonus candidates that SSD may
        choose (empty: only AR and SD). times: estimates the seconds of the target's forwards."""
        self._lookahead = lookahead
        self._times = times
        self.ways = [AR, *(Way(k, w) for w in (0, *widths) for k in range(1, lookahead + 1))]
        self._reached, self._accepted = np.zeros((2, lookahead))
        # {(way to decode, whether all sequences hit the cache): seconds beyond the forward}
        self._rest = defaultdict[tuple[Way, bool], ByLoad](ByLoad)
        # {width: (cache hits, drafts)}, with assumed counts at first
        self._hits = defaultdict[int | None, Floats](_HITS.copy, {0: _HITS * (0, 1)})
        # {(way, load): the last round at this load, by its number, that was decoded in this way}
        self._seen: dict[tuple[Way, int], int] = {}
        self._rounds: Counter[int] = Counter()  # by load
        self._elapsed_s = self._lost_s = 0.0
        # {load: mean seconds a round of storing lacking tokens, by a draft on the target's device}
        self._stored_s: defaultdict[int, float] = defaultdict(float)
        self._return_s = ByLoad()  # seconds of storing lacking tokens in the first round after AR
        self.way = self._best = self._last = Way(lookahead, widths[0] if widths else 0)
        self.rounds_by = {"ar": 0, "sd": 0, "ssd": 0}

    def time(self, way: Way, result: RoundResult, round_s: float) -> None:
        """Counts the cache hits of a round, and its seconds beyond the target's forward. way: how
        it was decoded. round_s: its seconds."""
        served = result.speculation
        count = len(served.rows)
        if way.lookahead and not served.num_draft.any():
            return  # Nothing was drafted, so that drafting cost nothing.
        rest_s = max(0.0, round_s - result.stored_s - self._times.seconds(result.num_rows))
        ready = served.num_draft > 0
        hit = served.source[ready] == Source.CACHE
        self._rest[way, bool(hit.all())].add(count, rest_s)
        self._seen[way, count.bit_length()] = self._rounds[count.bit_length()]
        if way.width != 0:
            keep = (1 - _MEMORY) ** len(hit)
            self._hits[way.width] = keep * self._hits[way.width] + (hit.sum(), len(hit))

    def observe(self, way: Way, result: RoundResult, round_s: float) -> None:
        """Counts tokens and times of a round, decoded by `way`, which lasted round_s seconds."""
        served = result.speculation
        count = len(served.rows)
        if not count:
            return
        load = count.bit_length()
        self._rounds[load] += 1
        self._elapsed_s += round_s
        self.rounds_by[way.mode] += 1
        self.time(way, result, round_s)
        if way.lookahead and not self._last.lookahead:
            self._return_s.add(count, result.stored_s)
        self._last = way
        if not self._best.lookahead:  # the cost of a trial
            self._lost_s += result.stored_s
        elif way.lookahead:  # limits the first round after AR, which stores much
            stored_s = min(result.stored_s, result.t_target_s)
            self._stored_s[load] += _STORED * (stored_s - self._stored_s[load])
        if served.num_draft.any() and not served.is_lost:
            # Counts, by place in the draft, the tokens that were judged, and the accepted ones.
            k = result.outcome.num_accepted
            place = np.arange(self._lookahead)
            keep = (1 - _MEMORY) ** len(k)
            reached = place < np.minimum(k + 1, served.num_draft)[:, None]
            self._reached = keep * self._reached + reached.sum(axis=0)
            self._accepted = keep * self._accepted + (place < k[:, None]).sum(axis=0)

    @property
    def is_trying(self) -> bool:
        """Whether the next round tries a way that does not seem to be the fastest to decode."""
        return self.way != self._best

    def choose(self, tasks: Sequence[Task]) -> Way:
        """Returns the way (K and width) to decode the next round of the live sequences `tasks`."""
        count = len(tasks)
        if not count:
            return self.way
        load = count.bit_length()
        rest = self._rest_s(count)
        seconds = dict[Way, float]()
        rates = dict[Way, float]()
        for lookahead, (tokens, rows) in enumerate(self._expected(tasks)):
            forward_s = self._times.seconds(rows) + self._stored_s[load] * (lookahead > 0)
            for way in self.ways:
                if way.lookahead == lookahead:
                    seconds[way] = max(forward_s + rest[way], 1e-9)
                    rates[way] = tokens / seconds[way]
        best = max(rates, key=rates.__getitem__)
        margin = _MARGIN
        if best.lookahead and not self._best.lookahead:  # after AR, lacking tokens are stored first
            margin += self._return_s.at(count, 0.0) / (_STALE_ROUNDS * seconds[best])
        if rates[best] < margin * rates[self._best]:
            best = self._best
        self._best = self.way = best
        # Tries a way to decode that was not used for long, if the trial costs little time.
        limit = self._rounds[load] - _STALE_ROUNDS
        tried = {self._kind(way) for (way, at), n in self._seen.items() if at == load and n > limit}
        if stale := [way for way in rates if self._kind(way) not in {*tried, self._kind(best)}]:
            way = max(stale, key=rates.__getitem__)
            loss_s = seconds[way] * (1 - rates[way] / rates[best])
            stored_s = 0.0 if best.lookahead else self._return_s.at(count, 0.0)
            if self._lost_s + loss_s + stored_s <= EXPLORE * self._elapsed_s:
                self._lost_s += max(0.0, loss_s)
                self.way = way
        return self.way

    def _kind(self, way: Way) -> tuple[bool, int | None, bool]:
        """Returns the group of `way`; only the best way of a group is tried. The largest K of the
        current width is its own group, because it best shows the seconds of a draft forward."""
        is_most = way.lookahead == self._lookahead and way.width == self._best.width
        return way.lookahead > 0, way.width, is_most and self._best.lookahead > 0

    def _rest_s(self, count: int) -> dict[Way, float]:
        """Returns, for each way, the seconds of a round of `count` sequences beyond the forward."""
        ar_s = self._rest[AR, True].at(count, 0.0)
        rest = {AR: ar_s}
        steps = self._times.steps
        line = (0.0, ar_s, 0.0)  # without a miss at this width: the line of SD
        for width in dict.fromkeys(way.width for way in self.ways):
            hit = self._points(width, count, all_hit=True)
            if missed := self._points(width, count, all_hit=False):
                line = _line([(steps(k), mean_s, weight) for k, mean_s, weight in missed], ar_s)
            mean_steps, mean_s, step_s = line
            hits, served = self._hits[width]
            all_hit = (hits / served) ** count
            for k in range(1, self._lookahead + 1):
                hit_s = min(hit, key=lambda point: abs(point[0] - k))[1] if hit else ar_s
                miss_s = max(0.0, mean_s + (steps(k) - mean_steps) * step_s)
                rest[Way(k, width)] = all_hit * hit_s + (1 - all_hit) * miss_s
        return rest

    def _points(self, width: int | None, count: int, *, all_hit: bool) -> list[Point]:
        """Returns (K, mean seconds beyond the forward, number of samples) of each measured K of a
        width: for about `count` sequences, or, if none was measured, for any number. all_hit:
        selects rounds in which all sequences hit the cache, or (False) rounds with a miss."""
        load = count.bit_length()
        means = [(k, self._rest[Way(k, width), all_hit]) for k in range(1, self._lookahead + 1)]
        here = [(k, mean) for k, mean in means if mean.samples[load] >= _LEAST]
        return [
            (k, mean.at(count, 0.0), max(1, min(mean.samples[load], _MOST_SAMPLES)))
            for k, mean in here or means
            if mean.samples.total() >= _LEAST
        ]

    def _expected(self, tasks: Sequence[Task]) -> list[tuple[float, int]]:
        """Returns, for K = 0, 1, … drafted tokens, (expected committed tokens, rows to verify)."""
        accepted_sum = self._accepted.sum() + _PRIOR_WEIGHT * _PRIOR
        mean = float(accepted_sum / (self._reached.sum() + _PRIOR_WEIGHT))
        hazards = (self._accepted + _LIKE_OTHERS * mean) / (self._reached + _LIKE_OTHERS)
        counts = np.array([[task.accepted, task.rejected] for task in tasks], np.float64)
        share = (counts[:, 0] + _OWN * mean) / (counts.sum(axis=1) + _OWN)
        rates = np.minimum(1.0, hazards * (share / max(mean, 1e-9))[:, None])
        asked = (task.request.sampling.lookahead for task in tasks)
        limits = [self._lookahead if limit is None else limit for limit in asked]
        drafts = np.arange(self._lookahead) < np.array(limits)[:, None]
        ahead = len(tasks) + np.cumsum((np.cumprod(rates, axis=1) * drafts).sum(axis=0))
        rows = len(tasks) + np.cumsum(drafts.sum(axis=0))
        return [(len(tasks), len(tasks)), *zip(ahead.tolist(), rows.tolist(), strict=True)]


def _line(points: Sequence[Point], ar_s: float) -> tuple[float, float, float]:
    """Fits a straight line, seconds over the number of draft forwards, to weighted points. Returns
    (mean number of forwards, mean seconds, slope: seconds a forward). If all points have the same
    number of forwards, the line goes through ar_s, the seconds of AR, at 0 forwards."""
    steps, seconds, weights = np.array(points, np.float64).T
    weights = weights / weights.sum()
    mean_steps = float(weights @ steps)
    mean_s = float(weights @ seconds)
    spread = float(weights @ (steps - mean_steps) ** 2)
    if spread:
        step_s = float(weights @ ((steps - mean_steps) * (seconds - mean_s))) / spread
    else:
        step_s = (mean_s - ar_s) / mean_steps
    return mean_steps, mean_s, max(0.0, step_s)


def widths_of(job: Job) -> list[int | None]:
    """Returns the limits, from which a job's controller may choose, of the bonus candidates at any
    branch point: None (the job's fan-out) and 1. Empty if nothing is drafted ahead."""
    if not job.fan_outs.branches or job.inline:
        return []
    return [None, 1] if job.widest > 1 else [None]


def warm_sizes(job: Job) -> list[int]:
    """Returns the batch sizes to measure before a server begins: 2, 4, 8, … and the largest."""
    largest = job.config.batch_size
    return sorted({largest, *(1 << n for n in range(1, largest.bit_length()))})
