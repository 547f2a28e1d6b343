"""The exact distribution of the real loop's tokens, by decoding every path of its choices.

States after a round that have the same future are merged and their probabilities added.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Control, Ints, Outcome, Source, Speculation
from mpissd.engine.comm.link import queue_link
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.oracle import markov, sampled
from mpissd.engine.oracle.sampled import SampledDraft, SampledTarget
from mpissd.engine.round.branches import Branches
from mpissd.engine.round.draft import Drafter
from mpissd.engine.round.oracle import Proposals
from mpissd.engine.round.rows import DraftWorker, TargetWorker
from mpissd.engine.round.sequence import Batch
from mpissd.engine.round.speculator import RemoteSpeculator
from mpissd.engine.round.target import TargetLoop
from tests.loop.choices import Choices, Name, Path
from tests.loop.harness import WAITER, CountingForwards
from tests.loop.markov_rig import Pair, joint_law

Law = dict[tuple[int, ...], float]
Served = tuple[tuple[Source, int], ...]  # (source, num_draft), by batch row
Rows = dict[int, list[NDArray[np.float32]]]  # by batch row: the distributions of its tokens
EXACT = 1e-12  # the rounding error allowed in a total variation of 0
_UNSEEN = 0.5  # a number for draws that no path depends on


class Watching(SampledDraft):
    """A draft oracle; lanes known to have lost draw numbers that fork no paths."""

    decoding: Decoding
    grown: Branches | None = None
    lanes: list[Any]

    def branches(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        found = super().branches(batch, speculation, fan_outs)
        self.grown = found
        self.ranks = found.ranks
        self.lanes = list(found.states)
        return found

    def winner(self, row: int, k: int, bonus: int) -> int | None:
        """The lane of an outcome."""
        if self.grown is None:
            return None
        is_key = self.grown.first == bonus
        lanes = np.flatnonzero((self.grown.rows == row) & (self.grown.nodes == k) & is_key)
        return int(lanes[0]) if len(lanes) else None


class Watched(Watching, markov.MarkovDraft):
    """The draft oracle of the `markov` workload, watched."""


class Judging(SampledTarget):
    """A target oracle whose verdict in the last round forks into every possible verdict."""

    decoding: Decoding

    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        decoding, judge = self.decoding, super().judge
        if decoding.loop.round < decoding._last:
            return judge(batch, speculation, proposals)
        decoding.ways = decoding.choices.fork(lambda: judge(batch, speculation, proposals))
        return decoding.ways[0][2]


class Judged(Judging, markov.MarkovTarget):
    """The target oracle of the `markov` workload, forked."""


@dataclass(frozen=True)
class Case:
    """The decoded case, and the enumerated part of it: the first `count` tokens.

    watched: sequences that are enumerated; all others draw their usual numbers.
    steps: growth steps in the time of a round. tamper: a biased draft's change of its answer.
    pushes: whether the lead has a cache, to which whole branches are sent.
    confirms: whether the round's distributions have arrived at verification (Speculator.confirm).
    judge: the target oracle. rename: which uniform replaces a named one. fresh: a uniform serves
    one round (checked).
    remembers: state that `steps`, `control` and `tamper` read besides tokens and k of past rounds.
    merged: states with one future are one state, and losing branches are not enumerated.
    """

    pair: Pair
    count: int = 3
    watched: tuple[int, ...] = (0,)
    steps: Callable[[Decoding], int] = lambda decoding: decoding.case.pair.K
    control: Callable[[Decoding], Control] = lambda decoding: Control()
    worker: type[Watched] = Watched
    workers: Callable[[Case], tuple[DraftWorker, TargetWorker]] | None = None  # None: markov's
    tamper: Callable[[Decoding, Speculation, Rows], None] | None = None
    pushes: bool = False
    confirms: Callable[[Decoding], bool] = lambda decoding: True
    judge: type[Judged] = Judged
    rename: Callable[[Name], Name] = lambda name: name
    fresh: bool = True
    remembers: Callable[[Decoding], Hashable] = lambda decoding: None
    merged: bool = True
    rounds: int | None = None


class Way(NamedTuple):
    """A possible end of a round: probability, path, tokens, and the state its future depends on."""

    chance: float
    path: Path
    tokens: list[list[int]]
    key: Hashable


class Decoding(RemoteSpeculator):
    """One path through a case up to round `last`: the real loop, links and draft in one thread."""

    def __init__(self, case: Case, choices: Choices, last: int) -> None:
        pair = case.pair
        branches = pair.fans.branches if case.pushes else 0
        lead, self._end = queue_link(replace(pair.shape, branches=branches), WAITER)
        super().__init__(lead)
        self.case, self.choices, self._last = case, choices, last
        drafts, target = (case.workers or _markov)(case)
        self.worker, judge = drafts.oracle, target.oracle
        self.worker.decoding, judge.decoding = self, self
        self.drafter = Drafter(drafts, pair.policy, pair.batch, WAITER)
        self.loop = TargetLoop(target, self, None, pair.batch, WAITER)
        self.emitted: list[list[int]] = [[] for _ in range(pair.batch)]
        self.accepted: list[int] = []  # k of the first watched sequence, round by round
        self._previous: Speculation | None = None
        self.last_q = 0.0  # a value that a case may store
        self.ways: list[tuple[float, Path, tuple[Ints, Ints]]] = []

    @property
    def served(self) -> Served:
        """Source and num_draft of the last round, by batch row."""
        assert self._previous is not None, "before the first round"
        told = zip(self._previous.source.tolist(), self._previous.num_draft.tolist(), strict=True)
        return tuple((Source(source), num_draft) for source, num_draft in told)

    def run(self) -> Iterator[Way]:
        """Every way that round `last` can end."""
        self.loop.admit(self.case.pair.requests())
        for _ in range(self._last):
            self.loop.control = self.case.control(self)
            self.loop.step()
            accepted, bonus = self.loop._decided[:, 3], self.loop._decided[:, 4]
            self._emit(self.emitted, accepted, bonus)
            self.accepted.append(int(accepted[self.case.watched[0]]))
        self.loop.control = self.case.control(self)
        self.loop.step()
        for weight, path, (accepted, bonus) in self.ways:
            emitted = [list(tokens) for tokens in self.emitted]
            self._emit(emitted, accepted, bonus)
            key = self._key(emitted, accepted, bonus) if self.case.merged else path
            yield Way(weight, path, [emitted[n] for n in self.case.watched], key)

    def _emit(self, emitted: list[list[int]], accepted: Ints, bonus: Ints) -> None:
        paths, drafts = self.case.pair.tree.paths, self._previous.tokens.tolist()
        for row, tokens in enumerate(emitted):
            tokens += [*(drafts[row][n] for n in paths[accepted[row]]), int(bonus[row])]
            tokens += self.case.pair.forced(tokens)

    def _key(self, emitted: list[list[int]], accepted: Ints, bonus: Ints) -> Hashable:
        lanes = []
        for row, (k, token) in enumerate(zip(accepted.tolist(), bonus.tolist(), strict=True)):
            lane = self.worker.winner(row, k, token)
            if lane is not None:
                won: Any = self.worker.lanes[lane]
                place = int(self.worker.ranks[lane])
                lanes.append((won.context, won.fan_out, place))
            else:
                lanes.append(None)
        known = () if self.case.fresh else tuple(sorted(self.choices.intervals().items()))
        past = *self.accepted, int(accepted[self.case.watched[0]]), self.case.remembers(self)
        return tuple(map(tuple, emitted)), tuple(lanes), past, known

    def ask(self, outcome: Outcome) -> None:
        """The end of the draft's growth, then the outcome."""
        if self._previous is not None:
            if self.case.merged:  # later than it really is, when it is known who lost
                self._forget_losers(outcome)
                self._grow()
            ready = None if self.drafter.growing else self.drafter._ready(outcome.round)
            if self.case.pushes and ready is not None:
                self._end.send_branches(ready)
                self.drafter._pushed = self.drafter.cache
            self.drafter.log.close_round(self._previous.round)
        super().ask(outcome)

    def answer(self, round_: int, count: int) -> Speculation:
        """The draft's turn, then the answer that the lead receives."""
        outcome, _ = self._end.outcome(round_ - 1)
        self.choices.round = round_
        answer = self.drafter.answer(outcome)
        if self.case.pushes and self.case.control is Case.control:
            assert (outcome.taken is not None) == answer.hit.all(), "every hit is the lead's"
        rows: Any = answer.drawn_from
        if self.case.tamper is not None:
            self.case.tamper(self, answer, rows)
        if outcome.taken is None:
            self._end.send_speculation(answer)
        if flat := [row for _, found in sorted(rows.items()) for row in found]:
            self._end.send_proposals(round_, flat)
        self.drafter.start_round(answer)
        self._previous = answer
        self.worker.grown = None
        if self.drafter.begin_growth(answer) and not self.case.merged:
            self._grow()
        return super().answer(round_, count)

    def confirm(self, speculation: Speculation) -> bool:
        return self.case.confirms(self)

    def _forget_losers(self, outcome: Outcome) -> None:
        pairs = zip(outcome.num_accepted.tolist(), outcome.bonus.tolist(), strict=True)
        won = {self.worker.winner(row, k, bonus) for row, (k, bonus) in enumerate(pairs)}
        if self.worker.grown is not None:
            for n, lane in enumerate(self.worker.lanes):
                if n not in won:  # so have its copies, in a tree
                    lane.u = lambda place, drawn: _UNSEEN

    def _grow(self) -> None:
        for _ in range(self.case.steps(self)):
            if self.drafter.growing:
                self.drafter.grow_step()


def _markov(case: Case) -> tuple[DraftWorker, TargetWorker]:
    pair = case.pair
    draft = case.worker(pair.laws, pair.K, pair.fans, pair.tree)
    target = case.judge(pair.laws, pair.tree)
    return DraftWorker(CountingForwards(), draft), TargetWorker(CountingForwards(), target)


@dataclass
class Found:
    """The distribution of a case's tokens, sequence by sequence, and all served sources."""

    law: Law
    served: set[Served]
    bias: float = 0.0  # total variation from the target's own distribution


def enumerate_(case: Case) -> Found:
    """The distribution of the first `count` tokens; given that `rounds` emit them, if it is set."""
    found = Found({}, set())
    states: dict[Hashable, tuple[float, Path]] = {None: (1.0, ())}
    for last in range(case.rounds or case.count):
        following: dict[Hashable, tuple[float, Path]] = {}
        for reached, prefix in states.values():
            for chance, path, emitted, key in _ways(case, prefix, last, found.served):
                if min(map(len, emitted)) >= case.count:
                    first = tuple(token for tokens in emitted for token in tokens[: case.count])
                    found.law[first] = found.law.get(first, 0.0) + reached * chance
                else:
                    before, old = following.get(key, (0.0, path))
                    following[key] = before + reached * chance, old
        states = following
    found.bias = _bias(case, found.law, 1.0 if case.rounds is None else sum(found.law.values()))
    return found


def _ways(case: Case, prefix: Path, last: int, served: set[Served]) -> Iterator[Way]:
    stack = [prefix]
    while stack:
        choices = Choices(stack.pop(), len(prefix), case)
        with mock.patch.object(sampled, "uniforms", choices.uniforms):
            decoding = Decoding(case, choices, last)
            yield from decoding.run()
        served.add(decoding.served)
        stack += choices.others


def _bias(case: Case, law: Law, total: float) -> float:
    """Total variation between `law` / total and the product of the target's conditionals."""
    pair, want = case.pair, {(): 1.0}
    for n in case.watched:
        own = joint_law(pair, pair.laws.prompt(n), case.count)
        want = {(*a, *b): p * q for a, p in want.items() for b, q in own.items()}
    assert law.keys() <= want.keys()
    return sum(abs(law.get(first, 0.0) / total - chance) for first, chance in want.items()) / 2
