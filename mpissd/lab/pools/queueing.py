"""Queueing theory of a server whose one forward carries a turn of every customer that is seated.

A draft that several targets share works in *frames*: one forward for the next turn of everybody who
has one, which takes f(n) seconds with n of the G targets seated. As all turns of a frame are served
together, whoever is seated advances by 1/f(n) turns a second: processor sharing whose rate depends
on the load. With a station of delays for the time away from the draft this is a closed network of
two stations of the kinds "infinite servers" and "processor sharing", which has a product form:

    p(n) = p(0) · C(G, n) · Π_{i=1..n} w·f(i)/z         z seconds away, w turns a visit

    [R]  Reiser, Lavenberg, Mean-value analysis of closed multichain queuing networks, JACM 1980
    [B]  Baskett, Chandy, Muntz, Palacios, Open, closed, and mixed networks of queues with
         different classes of customers, JACM 1975: only the means of z and w matter

Every function raises ConfigError for an argument outside its range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mpissd.common.errors import ConfigError


@dataclass(frozen=True)
class Closed:
    """The stationary distribution of G customers between a delay and a shared server.

    share: P(n seated), n = 0..G. cycle_s: mean seconds of a delay and the following visit. visit_s:
    mean seconds of a visit.
    """

    share: tuple[float, ...]
    cycle_s: float
    visit_s: float

    @property
    def seated(self) -> float:
        """The mean number of customers at the server."""
        return math.fsum(n * p for n, p in enumerate(self.share))

    @property
    def busy(self) -> float:
        """The probability that anybody is seated."""
        return 1.0 - self.share[0]


def closed_network(away_s: float, turns: float, frame_s: Sequence[float]) -> Closed:
    """Returns the distribution of G = len(frame_s) customers [B, theorem; R, section 4].

    away_s: mean seconds z of a delay, at least 0. turns: mean turns w of a visit, above 0. frame_s:
    f(n), seconds of a frame with n = 1..G seated, above 0. Only the means of distributions matter,
    as long as turns are served together and customers are independent.
    """
    if not away_s >= 0 or not turns > 0 or not frame_s or not min(frame_s) > 0:
        raise ConfigError(
            f"closed network: away {away_s} s, {turns} turns, {len(frame_s)} frames: allowed: "
            "a delay from 0, turns above 0 and at least one frame above 0 s"
        )
    count = len(frame_s)
    if not away_s:
        visit_s = turns * frame_s[-1]
        return Closed((*(0.0,) * count, 1.0), visit_s, visit_s)
    n, frames = np.arange(count + 1), np.asarray(frame_s, np.float64)
    ways = np.array(
        [math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) for k in n]
    )
    logs = ways + np.concatenate([[0.0], np.cumsum(np.log(turns * frames / away_s))])
    share = np.exp(logs - logs.max())
    share /= share.sum()
    rate = float((share[1:] * n[1:] / (turns * frames)).sum())
    return Closed(tuple(share.tolist()), count / rate, float((share * n).sum()) / rate)


@dataclass(frozen=True)
class SharedDraft:
    """A draft that G targets share, in mean values.

    window_s: from a sent answer until the next outcome reaches the draft. lookahead: K. all_hit,
    none_hit: P(all, none of a target's sequences hit). backup: draft steps after a miss (K_b, or 0
    for looked-up tokens). grows: whether branches grow at all. targets: G. frames: maps the mean
    turns of a round (glue and growth, answer) to the seconds of a frame with n = 1..G seated.
    """

    window_s: float
    lookahead: int
    all_hit: float
    none_hit: float
    backup: int
    grows: bool
    targets: int
    frames: Callable[[float, float], Sequence[float]]


@dataclass(frozen=True)
class Shared:
    """Means of a target of a shared draft.

    cycle_s: its round. wait_s: the part from an outcome's arrival to its answer. grown: growth
    steps that the draft has taken by then. frame_s: of the draft's frames. seated: targets in one
    of them, on average over time; busy: P(anybody is).
    """

    cycle_s: float
    wait_s: float
    grown: float
    frame_s: float
    seated: float
    busy: float


_ITERATIONS = 60
_LEAST = 1e-9  # turns of a round


def shared_draft(pool: SharedDraft) -> Shared:
    """Solves the fixed point of growth that overlaps with the window [B; R, arrival theorem].

    A target's round is 1 + g turns of glue and growth, which end with the window if they have not
    before, the rest of the window away from the draft, and the turns of its answer: K − g after
    late hits, K_b after a miss, and half a turn for the frame in flight when the outcome comes (an
    arriving target sees the network of the G − 1 others [R]). Turns and time away follow from the
    mean frame, and the mean frame from them; the iteration halves its steps.
    """
    most, answer = 1.0 + pool.lookahead, float(pool.backup)
    frame_s = pool.frames(most * pool.grows, answer)[-1]
    for _ in range(_ITERATIONS):
        ahead = min(most, pool.window_s / frame_s) if pool.grows else 0.0
        idle_s = max(0.0, pool.window_s - ahead * frame_s)
        frames = pool.frames(ahead, answer)
        turns = max(ahead + answer, _LEAST)
        others = closed_network(idle_s, turns, frames[:-1]).busy if pool.targets > 1 else 0.0
        answer += (_answer(pool, ahead, others) - answer) / 2
        network = closed_network(idle_s, max(ahead + answer, _LEAST), frames)
        frame_s += (network.visit_s / max(ahead + answer, _LEAST) - frame_s) / 2
    wait_s = answer * frame_s
    grown = max(0.0, ahead - 1.0)
    return Shared(pool.window_s + wait_s, wait_s, grown, frame_s, network.seated, network.busy)


def _answer(pool: SharedDraft, ahead: float, others: float) -> float:
    """Returns the mean turns between an outcome's arrival and its answer.

    ahead: turns of glue and growth before it. others: P(a frame of other targets is in flight).
    """
    left = 1.0 + pool.lookahead - ahead if pool.grows else 0.0
    flight = 0.5 if left > 0 else 0.5 * others
    late = left if left > 0 else flight
    missed = pool.backup + flight
    some_hit = 1 - pool.all_hit - pool.none_hit
    return pool.all_hit * late + pool.none_hit * missed + some_hit * max(missed, late)
