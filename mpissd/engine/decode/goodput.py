"""Chooses K, and whether the draft speculates ahead, round by round: by goodput [TurboSpec].

Goodput is the expected number of tokens that all live sequences commit in a round, divided by the
expected seconds of the round:

    Σ_i (1 + Σ_{j ≤ K} Π_{n ≤ j} a_in) / (forward of b(K+1) rows + wait for the draft + host)

While prompts wait to be stored, the forward also has rows of prompts: as many as lengthen the round
by 30%, fewer if other rows verify drafted tokens. The round's value is then n_live G + n_store R. G
is its goodput and R its rows of prompts a second, both as shares of the most that any way reaches.
A request that waits for its first token counts as much as one that waits for its next, since mean
latency is the mean number of both over the rate of arrivals (Little's law).

A way is a K and a width of the fan-out: K = 0 is AR, width 0 is SD, others are SSD. Times are
running means measured on the lead. Acceptance rates come from each sequence's outcomes, shrunk to
the rates of all sequences. The choice reads counts and clocks, never the proposed tokens, so
decoding stays lossless (docs/ssd.md, "Sampling").

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
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Source
from mpissd.engine.decode.round import RoundResult
from mpissd.engine.decode.scheduler import Task
from mpissd.engine.job import Job

EXPLORE = 0.003  # largest share of time for trying ways that seem worse
_STALE_ROUNDS = 100
_MARGIN = 1.01  # a change must promise so much more
_OWN = 24.0  # weight, in tokens, of all sequences' acceptance as a prior for one's own
_PRIOR, _PRIOR_WEIGHT = 0.7, 8.0  # acceptance before anything was seen
_LIKE_OTHERS = 8.0  # weight, in tokens, of all places' acceptance as a prior for one place's
_MEMORY = 1 / 512  # share of the acceptance counts forgotten in each round of a sequence
_HITS = 1 / 256  # the same for hits
_SAMPLE = 1 / 8  # weight of a new duration
_STRETCH, _MOST_STRETCH = 1 / 64, 1.5  # weight of a new stretch; the largest stretch
# Samples until a load is known; recent samples whose median is usual; ratio that is far above it.
_LEAST, _RECENT, _FAR = 3, 5, 4.0
_WEIGHT = 1 / 32  # weight of a new sample, once there are more than 32
_KNOWN, _SHIFT = 4, 0.5  # samples after which a new one is clipped, and to what share of the mean
_GROWTH = 0.3  # how much longer a round may take for the prompts stored with it
_APART = 10  # rounds within the limit after one beyond it, so that the 90th percentile is within

Floats = NDArray[np.float64]


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


class Backlog(NamedTuple):
    """Prompts that wait to be stored. rows: their tokens. most_rows: of the largest forward."""

    sequences: int
    rows: int
    most_rows: int


NOTHING = Backlog(0, 0, 0)


class ByLoad:
    """Running means by the number of sequences, in steps of powers of two.

    Rounds now and then compile a kernel or capture a graph, and take ten to a thousand times as
    long. A way that looks slow is not tried again soon, so such a sample must not count. A load is
    unknown until it has three samples; their least is used until there are five; later a sample far
    above the median of the last five counts as that median.
    """

    def __init__(self) -> None:
        self._recent: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))
        self._means: dict[int, float] = {}

    def add(self, load: int, value: float) -> None:
        """Takes a sample at this load."""
        step = load.bit_length()
        recent = self._recent[step]
        recent.append(value)
        if len(recent) == _RECENT:
            usual, mean = sorted(recent)[_RECENT // 2], self._means[step]
            self._means[step] += _SAMPLE * ((value if value <= _FAR * usual else usual) - mean)
        elif len(recent) >= _LEAST:
            self._means[step] = min(recent)

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


@dataclass
class _Growth:
    """Statistics of one width: its hits, and the lead's wait for the draft."""

    hits: float = 0.7  # share of sequences
    all_hit_s: defaultdict[int, ByLoad] = field(default_factory=lambda: defaultdict(ByLoad))  # by K
    a_miss_s: ByLoad = field(default_factory=ByLoad)  # over K, whose steps follow one another

    def late_s(self, lookahead: int, count: int, step_s: float) -> float:
        """Returns the lead's wait for the draft in a round where all sequences hit, in seconds.

        It is the time of the growth steps that end after the target's forward. It starts from the
        wait at the nearest tried K and adds or subtracts a step for each token of difference. If
        that wait was short and K is larger, one of the added steps is assumed to fit.
        """
        if not self.all_hit_s:
            return 0.0
        near = min(self.all_hit_s, key=lambda k: (abs(k - lookahead), k))
        known = self.all_hit_s[near].at(count, 0.0)
        more = lookahead - near
        if more > 0 and known < step_s / 4:
            more -= 1
        return max(0.0, known + more * step_s)


class Goodput:
    """The controller of one server. Call `choose` before a round and `observe` after it."""

    def __init__(self, lookahead: int, widths: Sequence[int | None], times: ForwardTimes) -> None:
        """Takes K, the widths that SSD may have (none: only SD), and the target's times."""
        self._lookahead, self._times = lookahead, times
        self._growths = {width: _Growth() for width in (0, *widths)}
        self._reached, self._accepted = np.zeros((2, lookahead))
        self._host = {True: ByLoad(), False: ByLoad()}  # by whether a draft takes part
        # By kind: a forward's seconds over the mean one's of as many rows. A draft that works at
        # the same time may share cores and memory with the target.
        self._stretch: defaultdict[int | None, float] = defaultdict(lambda: 1.0)
        # (kind of a way, load): number of its last round, counted at that load.
        self._seen: dict[tuple[int | None, int], int] = {}
        self._rounds: Counter[int] = Counter()  # by load
        self._elapsed_s = self._lost_s = 0.0
        # By load: mean seconds of a round with drafts in which an inline draft stores tokens.
        self._stored_s: defaultdict[int, float] = defaultdict(float)
        self.way = self._best = Way(lookahead, widths[0] if widths else 0)
        self.rounds_by = {"ar": 0, "sd": 0, "ssd": 0}

    def observe(self, way: Way, result: RoundResult, round_s: float) -> None:
        """Takes a round that was decoded in this way, in round_s seconds as a whole."""
        served, wait_s, forward_s = result.speculation, result.wait_s, result.t_target_s
        count, lookahead = len(served.rows), way.lookahead
        if not count:
            return
        load, drafts, kind = count.bit_length(), lookahead > 0, _kind(way)
        self._rounds[load] += 1
        self._elapsed_s += round_s
        self.rounds_by[way.mode] += 1
        if not self._best.lookahead:  # the price of having tried
            self._lost_s += result.stored_s
        elif drafts:  # tokens left over from many rounds without drafting are stored only once
            stored_s = min(result.stored_s, forward_s)
            self._stored_s[load] += _STRETCH * (stored_s - self._stored_s[load])
        self._host[drafts].add(count, max(0.0, round_s - wait_s - forward_s - result.stored_s))
        if mean_s := self._times.seconds(result.num_rows):
            ratio = min(forward_s / mean_s, _MOST_STRETCH)
            self._stretch[kind] += _STRETCH * (ratio - self._stretch[kind])
        ready = served.num_draft > 0
        drafted = int(np.count_nonzero(ready))
        if drafted or not drafts:  # nothing is learned of drafting without drafts
            self._seen[kind, load] = self._rounds[load]
        if not (drafts and drafted):
            return
        if not served.is_lost:  # counts the tokens that were reached and accepted, by their place
            k, place = result.outcome.num_accepted, np.arange(self._lookahead)
            keep = (1 - _MEMORY) ** len(k)
            reached = place < np.minimum(k + 1, served.num_draft)[:, None]
            self._reached = keep * self._reached + reached.sum(axis=0)
            self._accepted = keep * self._accepted + (place < k[:, None]).sum(axis=0)
        growth = self._growths[way.width]
        hits = int(np.count_nonzero(ready & (served.source == Source.CACHE)))
        if way.width != 0:
            keep = (1 - _HITS) ** drafted
            growth.hits = keep * growth.hits + (1 - keep) * hits / drafted
        if hits == drafted:
            growth.all_hit_s[lookahead].add(count, wait_s)
        else:
            growth.a_miss_s.add(count, wait_s / lookahead)

    @property
    def is_trying(self) -> bool:
        """Whether the next round tries a way that seems worse than another one."""
        return self.way != self._best

    def choose(self, tasks: Sequence[Task], backlog: Backlog = NOTHING) -> Way:
        """Returns the way of the next round, of these live sequences, given this backlog."""
        count = len(tasks)
        if not count:
            return self.way
        # By way: expected tokens and seconds of a round, and rows of prompts stored in it.
        promises: dict[Way, tuple[float, float, int]] = {}
        load, times = count.bit_length(), self._times
        steps = [growth.a_miss_s.at(count, 0.0) for growth in self._growths.values()]
        step_s = steps[0] or max(steps)  # seconds of a draft step, for all sequences
        for lookahead, tokens in enumerate(self._tokens(tasks).tolist()):
            rows, stored = count * (1 + lookahead), backlog.rows
            if stored:
                stored = min(stored, times.room(rows, backlog.most_rows, lookahead))
            forward_s = times.seconds(rows + stored)
            for width, growth in self._growths.items():
                way = Way(lookahead, width)
                if not lookahead and width != 0:
                    continue
                seconds = self._stretch[_kind(way)] * forward_s
                seconds += self._host[lookahead > 0].at(count, 0.0)
                if lookahead:
                    wait_s = growth.a_miss_s.at(count, step_s) * lookahead
                    if width != 0:
                        all_hit: float = growth.hits**count
                        late_s = growth.late_s(lookahead, count, step_s)
                        wait_s = all_hit * late_s + (1 - all_hit) * wait_s
                    seconds += wait_s + self._stored_s[load]
                promises[way] = tokens, max(seconds, 1e-9), stored
        most_rows = max(stored / seconds for _, seconds, stored in promises.values())
        worth = 0.0  # value of a prompt row, in tokens
        if most_rows:
            most_tokens = max(tokens / seconds for tokens, seconds, _ in promises.values())
            worth = backlog.sequences / count * most_tokens / most_rows
        rates = {way: (n + worth * m) / seconds for way, (n, seconds, m) in promises.items()}
        best = max(rates, key=rates.__getitem__)
        if rates[best] < _MARGIN * rates.get(self.way, 0.0):
            best = self.way
        self._best = self.way = best
        # Tries another (K, width) whose last trial is long ago, if that costs little.
        limit = self._rounds[load] - _STALE_ROUNDS
        fresh = {kind for (kind, at), last in self._seen.items() if at == load and last > limit}
        if stale := [way for way in rates if _kind(way) not in {*fresh, _kind(best)}]:
            way = max(stale, key=rates.__getitem__)
            loss_s = promises[way][1] * (1 - rates[way] / rates[best])
            if self._lost_s + loss_s <= EXPLORE * self._elapsed_s:
                self._lost_s += max(0.0, loss_s)
                self.way = way
        return self.way

    def _tokens(self, tasks: Sequence[Task]) -> Floats:
        """Returns the tokens that K = 0, 1, … are expected to commit, of all sequences [K+1]."""
        reached, accepted = self._reached, self._accepted
        weight = _PRIOR_WEIGHT
        mean = float((accepted.sum() + weight * _PRIOR) / (reached.sum() + weight))
        hazards = (accepted + _LIKE_OTHERS * mean) / (reached + _LIKE_OTHERS)
        own = np.array([[task.accepted, task.rejected] for task in tasks], np.float64)
        share = (own[:, 0] + _OWN * mean) / (own.sum(axis=1) + _OWN)
        each = np.minimum(1.0, hazards * (share / max(mean, 1e-9))[:, None])
        ahead = np.cumprod(each, axis=1).sum(axis=0)
        return len(tasks) + np.concatenate([[0.0], np.cumsum(ahead)])


def _kind(way: Way) -> int | None:
    """Returns the kind of a way, whose times depend on it and on K: its width, or −1 for AR."""
    return way.width if way.lookahead else -1


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
