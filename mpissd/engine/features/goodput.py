"""Chooses K, and whether the draft speculates ahead, round by round: by goodput [TurboSpec].

Goodput is the expected number of tokens that all live sequences commit in a round, divided by the
expected seconds of the round:

    Σ_i (1 + Σ_{j ≤ K_i} Π_{n ≤ j} a_in) / (seconds of a forward of Σ_i (1 + K_i) rows + the rest)

K_i is K or sequence i's own limit. Prompts that are stored with a verification lengthen the rounds
of all ways by the same share, so they do not count.

A way is a K and a width of the fan-out: K = 0 is AR, width 0 is SD, others are SSD. A round lasts
from its beginning to the next one's. What it takes beyond the mean forward of its rows, the rest,
is measured as a whole for each way: work on the host, drafting or waiting for the draft, and a
target that a working draft slows. In SSD, rounds in which all sequences hit count separately: a K
has the rest of the nearest measured one. Otherwise a draft's steps follow one another, so the rest
of all K is a line through the measured ones.
Acceptance rates come from each sequence's outcomes, shrunk to the rates of all sequences. The
choice reads counts and clocks, never the proposed tokens, so decoding stays lossless (docs/ssd.md,
"Sampling").

A draft on the lead's own device stores nothing while K = 0, and all tokens that it lacks before it
drafts again. Their mean seconds a round are a cost of drafting.

An untried load is assumed to cost as much as the nearest larger load, in proportion: the controller
is optimistic and tries it. A way not tried for _STALE_ROUNDS rounds of a load is tried again, at a
cost of at most EXPLORE of the time.
"""

from __future__ import annotations

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

EXPLORE = 0.003  # largest share of time for trying ways that seem worse
_STALE_ROUNDS = 100
_MARGIN = 1.01  # a change must promise so much more
_OWN = 24.0  # weight, in tokens, of all sequences' acceptance as a prior for one's own
_PRIOR, _PRIOR_WEIGHT = 0.7, 8.0  # acceptance before anything was seen
_LIKE_OTHERS = 8.0  # weight, in tokens, of all places' acceptance as a prior for one place's
_MEMORY = 1 / 512  # share of the acceptance counts forgotten in each round of a sequence
_SAMPLE = 1 / 64  # least weight of a new duration
_MOST_SAMPLES = 16  # weight of a K that was measured as often, or more
_STORED = 1 / 64  # weight of a round's new seconds of storing
_HITS = np.array([5.6, 8.0])  # hits and sequences before any was seen
# Samples until a load is known; recent samples whose median is usual; ratio that is far above it.
_LEAST, _RECENT, _FAR = 3, 5, 4.0
_WEIGHT = 1 / 32  # weight of a new sample, once there are more than 32
_KNOWN, _SHIFT = 4, 0.5  # samples after which a new one is clipped, and to what share of the mean
_GROWTH = 0.3  # how much longer a round may take for the prompts stored with it
_APART = 10  # rounds within the limit after one beyond it, so that the 90th percentile is within

Floats = NDArray[np.float64]
Known = tuple[int, float, int]  # K, seconds beyond the forward, weight


class ForwardTimes:
    """The seconds of the target's forwards, and the rows of prompts to store with a verification.

    Seconds are running means of the measured sizes, and lines between them. A size that looks slow
    is avoided, so a chance delay must not count: a size measured fewer than four times gets the
    prediction of two better known ones, or the median of its samples.

    The rows of prompts fill the largest forward with which the round takes at most 30% longer. If
    it stores few rows, since the device computes whole buckets, every eleventh round may be longer:
    each round earns 30% of its own seconds, and unused seconds pay for a larger forward.
    """

    def __init__(self, buckets: Sequence[int] = ()) -> None:
        """Takes the sizes of forwards, rising; if empty, a forward computes exactly its rows."""
        self._buckets = list(buckets)
        self._rows: list[int] = []  # measured, in rising order
        self._seconds: dict[int, float] = {}
        self._samples: dict[int, int] = {}
        self._first: dict[int, list[float]] = {}  # samples of sizes measured fewer than four times
        self._asked: dict[int, float] = {}  # answers since the last sample, by rows
        self._earned_s, self._within, self._step_s = 0.0, 0, 0.0

    def _size(self, rows: int) -> int:
        at = bisect_left(self._buckets, rows)
        return self._buckets[at] if at < len(self._buckets) else rows

    def add(self, rows: int, seconds: float) -> None:
        """Takes a measured forward."""
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
        for few, samples in self._first.items():
            at = bisect_left(sure, few)
            between = 0 < at < len(sure)
            self._seconds[few] = (
                self._line(sure[at - 1], sure[at], few) if between else median(samples)
            )

    def seconds(self, rows: int) -> float:
        """Returns the seconds of a forward.

        Fewer rows than measured count as the smallest measured size. More rows lie on the line
        through the two largest sizes, or are in proportion if only one was measured.
        """
        if (answer := self._asked.get(rows)) is not None:
            return answer
        known, size = self._rows, self._size(rows)
        at = bisect_left(known, size)
        if at < len(known) and (at == 0 or known[at] == size):
            answer = self._seconds[known[at]]
        elif len(known) < 2:
            answer = self._seconds[known[0]] * size / known[0] if known else 0.0
        else:
            high = min(at, len(known) - 1)
            answer = self._line(known[high - 1], known[high], size)
        self._asked[rows] = answer
        return answer

    def _line(self, low: int, high: int, rows: int) -> float:
        below, above = self._seconds[low], self._seconds[high]
        if rows > high:
            above = max(above, below)  # no forward gets faster by more rows
        return below + (above - below) * (rows - low) / (high - low)

    def drafted(self, lookahead: int, seconds: float) -> None:
        """Takes the seconds in which a draft on the same device drafted K tokens for the round."""
        step_s = seconds / lookahead
        self._step_s = _mean(self._step_s or step_s, step_s)

    def prefill_rows(self, rows: int, most: int, lookahead: int = 0) -> int:
        """Returns how many rows of prompts the next forward stores in addition to `rows` others.

        most: the rows of the largest forward, which an empty round fills. lookahead: K of the
        round.
        """
        if not rows:
            return most
        own_s = self.seconds(rows)
        round_s = own_s + lookahead * self._step_s
        next_s = self.seconds(min(most, self._size(rows) + 1)) - own_s
        self._earned_s = min(self._earned_s + _GROWTH * round_s, max(round_s, next_s))
        total = rows + self.room(rows, most, lookahead)
        self._within += 1
        if self._within > _APART:
            larger = self._largest(rows, most, own_s + self._earned_s)
            if larger - rows > _APART * (total - rows):
                total, self._within = larger, 0
        self._earned_s -= max(0.0, self.seconds(total) - own_s)
        return total - rows

    def room(self, rows: int, most: int, lookahead: int = 0) -> int:
        """Returns the rows of prompts with which a round of `rows` others takes 30% longer."""
        own_s = self.seconds(rows)
        grown_s = own_s + _GROWTH * (own_s + lookahead * self._step_s)
        return self._largest(rows, most, grown_s) - rows

    def _largest(self, rows: int, most: int, limit_s: float) -> int:
        """Returns the rows of the largest forward that takes at most limit_s, at least `rows`."""
        sizes = self._buckets or range(rows, most + 1)
        low, high = bisect_left(sizes, rows) - 1, bisect_left(sizes, most + 1) - 1
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.seconds(sizes[middle]) <= limit_s
            low, high = (middle, high) if fits else (low, middle - 1)
        return max(rows, sizes[low]) if 0 <= low < len(sizes) else rows


def _mean(before: float, new: float, count: int = _KNOWN + 1) -> float:
    """Returns a running mean after sample number `count`, from 1 on.

    A sample far off is clipped: other work on the machine delays a forward now and then.
    """
    shift, most = new - before, _SHIFT * before if count > _KNOWN else float("inf")
    return before + max(_WEIGHT, 1 / count) * min(max(shift, -most), most)


class Way(NamedTuple):
    """One way to decode a round. width: candidates for a row (None: the whole fan-out, 0: SD)."""

    lookahead: int
    width: int | None = 0

    @property
    def mode(self) -> str:
        """The mode whose round this is."""
        if not self.lookahead:
            return "ar"
        return "sd" if self.width == 0 else "ssd"


AR = Way(0)


class ByLoad:
    """Running means by the number of sequences, in steps of powers of two.

    Rounds now and then compile a kernel or capture a graph, and take ten to a thousand times as
    long. A way that looks slow is not tried again soon, so such a sample must not count. A load is
    unknown until it has three samples. Their median is used until there are five; later a sample
    far above the median of the last five counts as that median.
    """

    def __init__(self) -> None:
        self._recent: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))
        self._means: dict[int, float] = {}
        self.samples = Counter[int]()  # by step

    def add(self, load: int, value: float) -> None:
        """Takes a sample at this load."""
        step = load.bit_length()
        recent = self._recent[step]
        recent.append(value)
        self.samples[step] += 1
        if len(recent) == _RECENT:
            usual, mean = sorted(recent)[_RECENT // 2], self._means[step]
            weight = max(_SAMPLE, 1 / self.samples[step])
            self._means[step] += weight * ((value if value <= _FAR * usual else usual) - mean)
        elif len(recent) >= _LEAST:
            self._means[step] = median(recent)

    def at(self, load: int, otherwise: float) -> float:
        """Returns the mean at this load; if unknown, the nearest larger load's in proportion, then
        the nearest smaller's, then `otherwise`."""
        step, known = load.bit_length(), self._means
        if step in known:
            return known[step]
        larger = min((n for n in known if n > step), default=None)
        if larger is not None:
            return known[larger] / (1 << larger - step)
        return known[max(known)] if known else otherwise


class Goodput:
    """The controller of one server. Call `choose` before a round and `observe` after it."""

    def __init__(self, lookahead: int, widths: Sequence[int | None], times: ForwardTimes) -> None:
        """Takes K, the widths that SSD may have (none: only SD), and the target's times."""
        self._lookahead, self._times = lookahead, times
        self.ways = [AR, *(Way(k, w) for w in (0, *widths) for k in range(1, lookahead + 1))]
        self._reached, self._accepted = np.zeros((2, lookahead))
        # Seconds beyond the forward, by whether all sequences hit (True in AR, False in SD).
        self._rest = defaultdict[tuple[Way, bool], ByLoad](ByLoad)
        # Hits, and sequences that drafts were served to, by width, with a prior.
        self._hits = defaultdict[int | None, Floats](_HITS.copy, {0: _HITS * (0, 1)})
        # (way, load): number of its last round, counted at that load.
        self._seen: dict[tuple[Way, int], int] = {}
        self._rounds: Counter[int] = Counter()  # by load
        self._elapsed_s = self._lost_s = 0.0
        # By load: mean seconds of a round with drafts in which an inline draft stores tokens.
        self._stored_s: defaultdict[int, float] = defaultdict(float)
        self._return_s = ByLoad()  # seconds of storing in a first round with drafts after AR
        self.way = self._best = self._last = Way(lookahead, widths[0] if widths else 0)
        self.rounds_by = {"ar": 0, "sd": 0, "ssd": 0}

    def time(self, way: Way, result: RoundResult, round_s: float) -> None:
        """Takes the times of a round that was decoded in this way, and its hits."""
        served, count = result.speculation, len(result.speculation.rows)
        if way.lookahead and not served.num_draft.any():
            return  # nothing is learned of drafting without drafts
        rest_s = max(0.0, round_s - result.stored_s - self._times.seconds(result.num_rows))
        ready = served.num_draft > 0
        hit = served.source[ready] == Source.CACHE
        self._rest[way, bool(hit.all())].add(count, rest_s)
        self._seen[way, count.bit_length()] = self._rounds[count.bit_length()]
        if way.width != 0:
            keep = (1 - _MEMORY) ** len(hit)
            self._hits[way.width] = keep * self._hits[way.width] + (hit.sum(), len(hit))

    def observe(self, way: Way, result: RoundResult, round_s: float) -> None:
        """Takes a round that was decoded in this way, in round_s seconds as a whole."""
        served, forward_s = result.speculation, result.t_target_s
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
        if not self._best.lookahead:  # the price of having tried
            self._lost_s += result.stored_s
        elif way.lookahead:  # tokens left over from many rounds without drafting are stored once
            stored_s = min(result.stored_s, forward_s)
            self._stored_s[load] += _STORED * (stored_s - self._stored_s[load])
        if served.num_draft.any() and not served.is_lost:
            # Counts the tokens that were reached and accepted, by their place.
            k, place = result.outcome.num_accepted, np.arange(self._lookahead)
            keep = (1 - _MEMORY) ** len(k)
            reached = place < np.minimum(k + 1, served.num_draft)[:, None]
            self._reached = keep * self._reached + reached.sum(axis=0)
            self._accepted = keep * self._accepted + (place < k[:, None]).sum(axis=0)

    @property
    def is_trying(self) -> bool:
        """Whether the next round tries a way that seems worse than another one."""
        return self.way != self._best

    def choose(self, tasks: Sequence[Task]) -> Way:
        """Returns the way of the next round, of these live sequences."""
        count = len(tasks)
        if not count:
            return self.way
        load, times = count.bit_length(), self._times
        rest = self._rest_s(count)
        seconds, rates = dict[Way, float](), dict[Way, float]()
        for lookahead, (tokens, rows) in enumerate(self._expected(tasks)):
            forward_s = times.seconds(rows) + self._stored_s[load] * (lookahead > 0)
            for way in self.ways:
                if way.lookahead == lookahead:
                    seconds[way] = max(forward_s + rest[way], 1e-9)
                    rates[way] = tokens / seconds[way]
        best = max(rates, key=rates.__getitem__)
        margin = _MARGIN
        if best.lookahead and not self._best.lookahead:  # a return must pay for what it stores
            margin += self._return_s.at(count, 0.0) / (_STALE_ROUNDS * seconds[best])
        if rates[best] < margin * rates[self._best]:
            best = self._best
        self._best = self.way = best
        # Tries another way whose last trial is long ago, if that costs little.
        limit = self._rounds[load] - _STALE_ROUNDS
        fresh = {self._kind(way) for (way, at), n in self._seen.items() if at == load and n > limit}
        if stale := [way for way in rates if self._kind(way) not in {*fresh, self._kind(best)}]:
            way = max(stale, key=rates.__getitem__)
            loss_s = seconds[way] * (1 - rates[way] / rates[best])
            stored_s = 0.0 if best.lookahead else self._return_s.at(count, 0.0)
            if self._lost_s + loss_s + stored_s <= EXPLORE * self._elapsed_s:
                self._lost_s += max(0.0, loss_s)
                self.way = way
        return self.way

    def _kind(self, way: Way) -> tuple[bool, int | None, bool]:
        """Returns the group of a way, one of which is tried: of the width in use there are two,
        since the largest K shows what a draft's step takes."""
        is_most = way.lookahead == self._lookahead and way.width == self._best.width
        return way.lookahead > 0, way.width, is_most and self._best.lookahead > 0

    def _rest_s(self, count: int) -> dict[Way, float]:
        """Returns each way's seconds beyond its forward at this load."""
        ar_s = self._rest[AR, True].at(count, 0.0)
        rest, line = {AR: ar_s}, (0.0, ar_s, 0.0)  # of SD if a width of SSD had no miss
        for width in dict.fromkeys(way.width for way in self.ways):
            hit = self._known(width, count, all_hit=True)
            if missed := self._known(width, count, all_hit=False):
                line = _line(missed, ar_s)
            mean_k, mean_s, step_s = line
            hits, served = self._hits[width]
            all_hit = (hits / served) ** count
            for k in range(1, self._lookahead + 1):
                hit_s = min(hit, key=lambda known: abs(known[0] - k))[1] if hit else ar_s
                miss_s = max(0.0, mean_s + (k - mean_k) * step_s)
                rest[Way(k, width)] = all_hit * hit_s + (1 - all_hit) * miss_s
        return rest

    def _known(self, width: int | None, count: int, *, all_hit: bool) -> list[Known]:
        """Returns the measured K of a width: those at this load, or if there are none all."""
        ways = [Way(k, width) for k in range(1, self._lookahead + 1)]
        every = [(way.lookahead, self._rest[way, all_hit]) for way in ways]
        here = [(k, one) for k, one in every if one.samples[count.bit_length()] >= _LEAST]
        return [
            (k, one.at(count, 0.0), max(1, min(one.samples[count.bit_length()], _MOST_SAMPLES)))
            for k, one in here or every
            if one.samples.total() >= _LEAST
        ]

    def _expected(self, tasks: Sequence[Task]) -> list[tuple[float, int]]:
        """Returns by K (expected tokens of all sequences, rows that verify them)."""
        reached, accepted = self._reached, self._accepted
        weight = _PRIOR_WEIGHT
        mean = float((accepted.sum() + weight * _PRIOR) / (reached.sum() + weight))
        hazards = (accepted + _LIKE_OTHERS * mean) / (reached + _LIKE_OTHERS)
        own = np.array([[task.accepted, task.rejected] for task in tasks], np.float64)
        share = (own[:, 0] + _OWN * mean) / (own.sum(axis=1) + _OWN)
        each = np.minimum(1.0, hazards * (share / max(mean, 1e-9))[:, None])
        limits = (task.request.sampling.lookahead for task in tasks)
        most = [self._lookahead if limit is None else limit for limit in limits]
        drafts = np.arange(self._lookahead) < np.array(most)[:, None]
        ahead = len(tasks) + np.cumsum((np.cumprod(each, axis=1) * drafts).sum(axis=0))
        rows = len(tasks) + np.cumsum(drafts.sum(axis=0))
        return [(len(tasks), len(tasks)), *zip(ahead.tolist(), rows.tolist(), strict=True)]


def _line(known: Sequence[Known], ar_s: float) -> tuple[float, float, float]:
    """Returns (mean K, mean seconds, seconds of a step) of the line through (K, seconds, weight).

    If only one K is known, the line begins at AR's seconds.
    """
    k, seconds, weights = np.array(known, np.float64).T
    weights = weights / weights.sum()
    mean_k, mean_s = float(weights @ k), float(weights @ seconds)
    spread = float(weights @ (k - mean_k) ** 2)
    if spread:
        step_s = float(weights @ ((k - mean_k) * (seconds - mean_s))) / spread
    else:
        step_s = (mean_s - ar_s) / mean_k
    return mean_k, mean_s, max(0.0, step_s)


def widths_of(job: Job) -> list[int | None]:
    """Returns the widths of a job's growth that a controller may choose: its fan-out, and one
    candidate a row."""
    if not job.fan_outs.branches or job.inline:
        return []
    return [None, 1] if job.widest > 1 else [None]


def warm_sizes(job: Job) -> list[int]:
    """Returns the batch sizes whose forwards are measured before the first request: 2, 4, … and
    the largest one."""
    most = job.config.batch_size
    return sorted({most, *(1 << n for n in range(1, most.bit_length()))})
