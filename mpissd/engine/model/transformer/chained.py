"""Rounds of greedy decoding that the device decides by itself (`ChainedForwards`).

A round is K forwards of the draft (none in AR) and one of the target on the same device. Between
two of them a tiny operation (*stage*) writes the next forward's tokens and places, and after the
last one it applies the acceptance rule; so all of a round is launched at once, and the next round
before this one is over. Nothing waits for the host.

With T ranks, only the lead drafts. Before the target's forward the other ranks' devices get the
drafted tokens; the stages before and after it run on every rank, over the candidates of all.

A draft is a tree of K levels, in a chain of one node each. Stage 0 places the draft's first
forward, of two rows a sequence, and the target's. Its first row computes the token before the last
committed one once more: the draft may lack its keys and values, elsewhere they are equal, since a
row's numbers never depend on other rows. Stage j = 1 … K takes the drafted tokens of level j; stage
K + 1 walks the tree and begins the next round's state. Then an accepted path is copied from its
lane into the trunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import HostArray, Program
from mpissd.engine.model.forwards import SPAN
from mpissd.engine.model.stacks import Best
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.cache import RowPlaces
from mpissd.engine.model.transformer.stack import TransformerStack
from mpissd.engine.spec.tree import Tree

Index = NDArray[np.int64]
SLOT, POSITION, LAST, BEFORE = range(4)  # columns of Sheet.state
PARENT, LEVEL, RANK, LINE, ROW, LANE, SPANS, FORK = range(8)  # rows of table_of
NOBODY = -1  # an empty slot, or a token that is not given
NOT_FINITE = -2  # the accepted tokens of a sequence with a logit that is not finite
RING = 3  # rounds whose numbers are kept: the one that runs, the one before and the one after it
_IN_FLIGHT = 2  # rounds at once: one that runs, and the next one


def table_of(tree: Tree) -> Ints:
    """Returns what stages read of a tree by node, int32 [8, N + 1].

    A node's parent (NOBODY: none), its level and its rank among its siblings; the rows, of one
    sequence, that its parent and the node itself have in the draft's forwards (NOBODY: none); its
    lane (NOBODY: the trunk), SPAN times the further lanes that hold it, and Tree.forks.
    """
    table = np.full((FORK + 1, len(tree.levels)), NOBODY, np.int32)
    table[PARENT, 1:] = tree.parents
    table[LINE, 1:] = np.concatenate([[], *tree.lines])
    table[LINE, tree.depths == 1] = 1  # after the row of the token before the last one
    for inner in tree.inner:
        table[ROW, inner] = np.arange(len(inner))
    table[[LEVEL, RANK, LANE, FORK]] = tree.depths, tree.ranks, tree.lanes, tree.forks
    table[SPANS] = SPAN * (tree.spans - 1)
    return table


class Sheet:
    """Host arrays that stages read and write, views of one int32 buffer.

    state: [S, 4], each sequence's slot, the position of its last committed token, that token, and
    the token before it (NOBODY: its keys and values are stored). moves: [S, 4], the lane of the
    path that was accepted last (NOBODY: the trunk), its slot, the position of the lane's first
    node, and the nodes of the lane before the accepted one. forced: [RING, S, N + K + 1], by round
    modulo RING, imposed tokens of the draft's nodes and of the target by level (NOBODY: none).
    decided: [RING, S, N + 2], also by round, the accepted node, the bonus and the drafts.
    """

    def __init__(self, ints: HostArray, sequences: int, tree: Tree) -> None:
        """Lays the arrays out in `ints`, which has `size(sequences, tree)` elements."""
        self.ints, self.sequences, self.tree, self.table = ints, sequences, tree, table_of(tree)
        nodes = len(tree.parents)
        widths = 4, 4, RING * (nodes + tree.depth + 1), RING * (nodes + 2)
        ends = np.cumsum([sequences * width for width in widths[:3]])
        state, moves, forced, decided = np.split(ints, ends)
        self.state: Ints = state.reshape(sequences, 4)
        self.moves: Ints = moves.reshape(sequences, 4)
        self.forced: Ints = forced.reshape(RING, sequences, -1)
        self.decided: Ints = decided.reshape(RING, sequences, -1)
        ints[...] = NOBODY

    @staticmethod
    def size(sequences: int, tree: Tree) -> int:
        """Returns the number of elements of the buffer."""
        return sequences * (8 + RING * (2 * len(tree.parents) + tree.depth + 3))


@dataclass(frozen=True)
class Ends:
    """Both ends of one model's forwards.

    tokens: host int32 [max_rows], which the next one computes; seats: their places; best: the
    likeliest tokens of each row of the last one, on the device: rank after rank, each counted from
    its first.
    """

    tokens: HostArray
    seats: RowPlaces
    best: Best

    @classmethod
    def of(cls, stack: TransformerStack, k: int = 1) -> Ends:
        """Returns the ends of a stack's forwards, the last of which gave k tokens a row."""
        best = stack.candidates.by_k[k]
        if stack.group.size > 1:
            best = replace(best, ids=best.all_ids, values=best.all_values)
        return cls(stack.buffers.tokens, stack.pages.seats, best)


@dataclass(frozen=True)
class Stage:
    """One stage of a round: what an Ops needs to compute it.

    number: 0 … K + 1. turn: the round modulo 3. table: the sheet's, on the device. firsts: each
    rank's first token of the target's vocabulary, on the device. ids: the tokens of the draft's
    outputs on the device (None: output n is token n).
    """

    number: int
    turn: int
    sheet: Sheet
    draft: Ends | None
    target: Ends
    table: Any
    firsts: Any
    ids: Any = None

    @property
    def level(self) -> tuple[int, int, int, int]:
        """Of one sequence: the stage's first node, the number of its nodes, and the rows of the
        draft's forwards before and after it."""
        tree, number = self.sheet.tree, self.number
        if number == 0 or number > tree.depth:
            return 0, 1 if number else len(tree.levels), 0, 0
        first, rows = tree.ends[number - 1] + 1, [2, *map(len, tree.inner[1:]), 0]
        return first, tree.ends[number] + 1 - first, rows[number - 1], rows[number]

    def _put(self, ends: Ends, row: int, node: int, token: int, slot: int, position: int) -> None:
        """Sets a row of the next forward to a node; position: of node 0."""
        level, lane, spans, fork = self.sheet.table[[LEVEL, LANE, SPANS, FORK], node].tolist()
        lane = NOBODY if lane < 0 else slot * self.sheet.tree.num_lanes + lane + spans
        ends.tokens[row] = token
        ends.seats.rows[:, row] = slot, position + level, lane, position + fork

    def _best(self, rows: slice) -> tuple[Ints, bool]:
        """Returns the target's likeliest tokens, and whether the logits are finite."""
        best, ranks = self.target.best, len(self.firsts)
        every = ranks * self.sheet.sequences * len(self.sheet.tree.levels)
        both = best.ids, best.values
        ids, values = (part[:every, 0].reshape(ranks, -1)[:, rows] for part in both)
        own = values.argmax(axis=0)[None]  # of equal logits the lowest rank's
        tokens = np.take_along_axis(ids + self.firsts[:, None], own, axis=0)[0]
        return tokens, bool(np.isfinite(values).all())

    def run(self) -> None:
        """Computes the stage on host arrays, as chained.cu does on a device."""
        sheet, number, draft, target = self.sheet, self.number, self.draft, self.target
        tree, forced, every = sheet.tree, sheet.forced[self.turn], sheet.decided[self.turn]
        count, (first, width, reads, puts) = len(tree.levels), self.level
        for row, decided in enumerate(every):
            slot, position, last, before = sheet.state[row].tolist()
            rows = slice(row * count, (row + 1) * count)  # the target's
            if number == 0 and draft is not None:
                none = NOBODY if before < 0 else slot
                self._put(draft, 2 * row, 0, before, none, position - 1)
                self._put(draft, 2 * row + 1, 0, last, slot, position)
            for node in range(first, first + width):
                if number == 0:
                    token = 0 if node else last
                    self._put(target, rows.start + node, node, token, slot, position)
                elif number <= tree.depth:
                    assert draft is not None
                    rank, line, own = sheet.table[[RANK, LINE, ROW], node].tolist()
                    token = int(forced[row, node - 1])
                    if token < 0:
                        token = int(draft.best.ids[row * reads + line, rank])
                        token = token if self.ids is None else int(self.ids[token])
                    target.tokens[rows.start + node] = token
                    if own >= 0:
                        self._put(draft, row * puts + own, node, token, slot, position)
            if number > tree.depth:
                given = forced[row, count - 1 :][tree.depths]
                tokens, is_finite = self._best(rows)
                best = np.where(given >= 0, given, tokens)
                decided[2:] = target.tokens[rows][1:]
                node = tree.walk(decided[2:].tolist(), best.tolist(), range(count), count)
                decided[:2] = node if is_finite or slot < 0 else NOT_FINITE, best[node]
                before = int(decided[1 + node]) if node else last
                level, lane, fork = sheet.table[[LEVEL, LANE, FORK], node].tolist()
                sheet.state[row] = slot, position + level + 1, best[node], before
                if tree.num_lanes:
                    lane = NOBODY if lane < 0 else slot * tree.num_lanes + lane
                    sheet.moves[row] = lane, slot, position + fork, level - fork


class ChainedForwards:
    """The programs of such rounds, over the steppers of a draft (None: AR) and of its target.

    Two rounds may be under way, of which the second takes its state from the first. The steppers,
    whose stacks are transformers, must not be used meanwhile. stored: drafted tokens of a round
    whose keys and values the target stores in the trunk.
    """

    is_on = False  # whether the present round is chained; set by its speculator

    def __init__(self, draft: Stepper | None, target: Stepper, sequences: int, tree: Tree) -> None:
        """Compiles the programs for `sequences` sequences; both steppers share a backend.

        draft: also None on a rank that does not draft. Collective over the target ranks."""
        assert draft is None or tree.depth, f"K={tree.depth}"
        self._steppers = draft or target, target
        stacks: list[Any] = [None if draft is None else draft.stack, target.stack]
        self._draft, self._target = stacks
        ints = target.backend.host_ints(Sheet.size(sequences, tree))
        self.sheet, ops = Sheet(ints, sequences, tree), self._target.weights.ops
        self.tree, self.stored = tree, int((tree.lanes[1:] < 0).sum())
        self._table = ops.ids(self.sheet.table)
        ids = None if self._draft is None else self._draft.weights.head_ids
        self._ids = None if ids is None else ops.ids(ids)
        self._firsts = ops.ids(self._target.firsts)
        self._begin = tree.depth if draft is None else 0  # the first program of a round
        self._programs: list[list[Program]] = [
            [self._program(number, turn) for number in range(self._begin, tree.depth + 1)]
            for turn in range(RING)
        ]
        self._flying: list[int] = []  # rounds that are launched and not yet read

    def _program(self, number: int, turn: int) -> Program:
        """Compiles the draft's forward number + 1, or the target's, with the stages around it."""
        sheet, tree, is_last = self.sheet, self.tree, number == self.tree.depth
        stepper = self._steppers[is_last]
        stack: Any = stepper.stack
        wide = not is_last and any(len(tree.children[node]) > 1 for node in tree.inner[number])
        k = stepper.options.top_k if wide else 1
        draft = None if self._draft is None else Ends.of(self._draft, 1 if is_last else k)
        parts = turn, sheet, draft, Ends.of(self._target), self._table, self._firsts, self._ids
        first, last = (Stage(n, *parts) for n in (0, number + 1))
        each = len(tree.levels) if is_last else len(tree.inner[number]) if number else 2
        rows, ops = sheet.sequences * each, self._target.weights.ops
        forward, is_spread = stack.body(rows, k), self.nodes > 0 and stack.group.size > 1

        def body() -> None:
            if number == self._begin:
                ops.chained(first)
            if is_spread:
                ops.spread(stack.group, stack.buffers.tokens, rows)
            stack.steer()
            forward()
            ops.chained(last)
            if is_last and tree.num_lanes:
                for more, one in enumerate((self._draft, self._target)):
                    if one is not None:
                        one.weights.ops.adopt(one.cache, sheet.moves, more)

        return stepper.backend.program(body, stepper.cost(rows, k))

    def begin(self, state: Ints) -> None:
        """Sets the sequences' places, [S, 4] like Sheet.state; no round may be under way."""
        assert not self._flying, f"rounds {self._flying} are under way"
        self.sheet.state[...] = state

    def hold(self, slots: Index, positions: Index) -> None:
        """Reserves the pages of both caches up to these positions, those included."""
        for stack in (self._draft, self._target):
            if stack is not None:
                stack.pages.hold(slots, positions)

    def launch(self, round_: int, forced: Ints) -> None:
        """Launches a round after the rounds under way; forced: [S, N + K + 1] like Sheet.forced."""
        assert len(self._flying) < _IN_FLIGHT, f"rounds {self._flying} are under way"
        self.sheet.forced[round_ % RING] = forced
        for program in self._programs[round_ % RING]:
            program.launch()
        self._flying.append(round_)

    @property
    def nodes(self) -> int:
        """N, 0 in AR."""
        return len(self.tree.parents)

    @property
    def lookahead(self) -> int:
        """K, 0 in AR."""
        return self.tree.depth

    def is_flying(self, round_: int) -> bool:
        """Returns whether a round was launched, and neither read nor dropped."""
        return round_ in self._flying

    def last_of(self, round_: int) -> Program:
        """Returns the target's forward of a round, the last of its programs."""
        return self._programs[round_ % RING][-1]

    def outcome(self, round_: int) -> Ints:
        """Returns the outcome of a finished round, a copy of [S, N + 2] (Sheet.decided)."""
        first = self._flying.pop(0)
        assert round_ == first, f"round {round_} out of turn, {first} is the next one"
        outcome: Ints = self.sheet.decided[round_ % RING].copy()
        return outcome

    def dropped(self) -> list[Program]:
        """Forgets all rounds under way; returns the programs to wait for."""
        last = [self.last_of(round_) for round_ in self._flying]
        self._flying.clear()
        return last

    def draft_s(self, round_: int) -> float:
        """Returns the device time of a finished round before its target's forward, in seconds."""
        programs = self._programs[round_ % RING]
        return programs[-1].after_s(programs[0]) + programs[0].elapsed_s()

    def close(self) -> None:
        """Frees the programs."""
        for programs in self._programs:
            for program in programs:
                program.close()
