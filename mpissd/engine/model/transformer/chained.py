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

The device may decide the tree's shape as well (trees.py). Then stages 1 … K find its nodes, stage
PLANT places the chosen ones before the target's forward, and the host sees a chain: the accepted
path.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import HostArray, Program
from mpissd.engine.law.tree import Tree
from mpissd.engine.model.stacks import Best
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.cache import RowPlaces
from mpissd.engine.model.transformer.stack import TransformerStack
from mpissd.engine.model.transformer.trees import (
    ABOVE,
    FORK,
    KEPT,
    KEPT_LANE,
    LANE,
    LEVEL,
    LINE,
    NOBODY,
    PARENT,
    PLANT,
    RANK,
    ROW,
    SEAT,
    SPANS,
    TOKEN,
    WIDTH,
    Shapes,
    Size,
    choose,
    find,
    plant,
    table_of,
)

Index = NDArray[np.int64]
SLOT, POSITION, LAST, BEFORE = range(4)  # columns of Sheet.state
NOT_FINITE = -2  # the accepted tokens of a sequence with a logit that is not finite
RING = 3  # rounds whose numbers are kept: the one that runs, the one before and the one after it
_IN_FLIGHT = 2  # rounds at once: one that runs, and the next one


class Sheet:
    """Host arrays that stages read and write, views of one int32 buffer.

    state: [S, 4], each sequence's slot, the position of its last committed token, that token, and
    the token before it (NOBODY: its keys and values are stored). moves: [2, S, 4], of the draft's
    cache and of the target's, the lane of the path that was accepted last (NOBODY: the trunk), its
    slot, the position of the lane's first node, and how many nodes to copy. parents: [S, N], of a
    dynamic tree. forced: [RING, S, N + K + 1], by round modulo RING, imposed tokens of the draft's
    nodes and of the target by level (NOBODY: none). decided: [RING, S, N + 2], also by round, the
    accepted node, the bonus and the drafts. Of a dynamic tree N is K here, and the accepted node
    and the drafts are the accepted tokens.
    """

    def __init__(
        self, ints: HostArray, sequences: int, tree: Tree, dynamic: Size | None = None
    ) -> None:
        """Lays the arrays out in `ints`, which has `size(sequences, tree, dynamic)` elements.

        dynamic: the sizes of a dynamic tree, of which `tree` is the longest chain.
        """
        self.ints, self.sequences, self.tree, self.dynamic = ints, sequences, tree, dynamic
        self.table, self.nodes = table_of(tree), dynamic.nodes if dynamic else len(tree.parents)
        self.lanes = self.draft_lanes = tree.num_lanes
        if dynamic:
            self.lanes, self.draft_lanes = dynamic.nodes, dynamic.draft_lanes
        ends = np.cumsum([sequences * width for width in self._widths(tree, dynamic)])
        state, moves, parents, forced, decided, _ = np.split(ints, ends)
        self.state: Ints = state.reshape(sequences, 4)
        self.moves: Ints = moves.reshape(2, sequences, 4)
        self.parents: Ints = parents.reshape(sequences, -1)
        self.forced: Ints = forced.reshape(RING, sequences, -1)
        self.decided: Ints = decided.reshape(RING, sequences, -1)
        ints[...] = NOBODY
        self.parents[...] = 0

    @staticmethod
    def _widths(tree: Tree, dynamic: Size | None) -> tuple[int, ...]:
        drafts, depth = len(tree.parents), tree.depth
        parents = dynamic.nodes if dynamic else 0
        return 4, 8, parents, RING * (drafts + depth + 1), RING * (drafts + 2)

    @classmethod
    def size(cls, sequences: int, tree: Tree, dynamic: Size | None = None) -> int:
        """Returns the number of elements of the buffer."""
        return sequences * sum(cls._widths(tree, dynamic))


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

    number: 0 … K + 1, or PLANT. turn: the round modulo 3. On the device: table, the sheet's;
    firsts, each rank's first token of the target's vocabulary; ids, the tokens of the draft's
    outputs (None: output n is token n); shapes, of dynamic trees.
    """

    number: int
    turn: int
    sheet: Sheet
    draft: Ends | None
    target: Ends
    table: Any
    firsts: Any
    ids: Any = None
    shapes: Shapes | None = None

    @property
    def level(self) -> tuple[int, int, int, int]:
        """Of one sequence: the stage's first node, the number of its nodes, and the rows of the
        draft's forwards before and after it."""
        tree, number = self.sheet.tree, self.number
        if number == 0 or number > tree.depth:
            return 0, 1 if number else self.sheet.nodes + 1, 0, 0
        first, rows = tree.ends[number - 1] + 1, [2, *map(len, tree.inner[1:]), 0]
        return first, tree.ends[number] + 1 - first, rows[number - 1], rows[number]

    def _table(self, s: int) -> Ints:
        """Returns the table of sequence s's tree."""
        table: Ints = self.sheet.table if self.shapes is None else self.shapes.tables[s]
        return table

    def _put(
        self, ends: Ends, row: int, s: int, node: int, token: int, slot: int, position: int
    ) -> None:
        """Sets a row of the next forward to a node of sequence s; position: of node 0."""
        level, lane, spans, fork = self._table(s)[[LEVEL, LANE, SPANS, FORK], node].tolist()
        lane = NOBODY if lane < 0 else slot * self.sheet.lanes + lane + spans
        ends.tokens[row] = token
        ends.seats.rows[:, row] = slot, position + level, lane, position + fork

    def _best(self, rows: slice) -> tuple[Ints, bool]:
        """Returns the target's likeliest tokens, and whether the logits are finite."""
        best, ranks = self.target.best, len(self.firsts)
        every = ranks * self.sheet.sequences * (self.sheet.nodes + 1)
        both = best.ids, best.values
        ids, values = (part[:every, 0].reshape(ranks, -1)[:, rows] for part in both)
        own = values.argmax(axis=0)[None]  # of equal logits the lowest rank's
        tokens = np.take_along_axis(ids + self.firsts[:, None], own, axis=0)[0]
        return tokens, bool(np.isfinite(values).all())

    def run(self) -> None:
        """Computes the stage on host arrays, as chained.cu and dynamic.cu do on a device."""
        sheet, number, draft, target = self.sheet, self.number, self.draft, self.target
        tree, forced, every = sheet.tree, sheet.forced[self.turn], sheet.decided[self.turn]
        count, (first, width, reads, puts) = sheet.nodes + 1, self.level
        is_level = 0 < number <= tree.depth
        for s, decided in enumerate(every):
            slot, position, last, before = sheet.state[s].tolist()
            rows = slice(s * count, (s + 1) * count)  # the target's
            if self.shapes is not None and (is_level or number == PLANT):
                if is_level:
                    self._find(s, rows, slot, position)
                else:
                    plant(self.shapes.tables[s], sheet.parents[s])
                    for node, token in enumerate([last, *target.tokens[rows][1:]]):
                        self._put(target, rows.start + node, s, node, token, slot, position)
                continue
            if number == 0 and draft is not None:
                none = NOBODY if before < 0 else slot
                self._put(draft, 2 * s, s, 0, before, none, position - 1)
                self._put(draft, 2 * s + 1, s, 0, last, slot, position)
            for node in range(first, first + width):
                if number == 0:
                    token = 0 if node else last
                    self._put(target, rows.start + node, s, node, token, slot, position)
                elif is_level:
                    assert draft is not None
                    rank, line, own = sheet.table[[RANK, LINE, ROW], node].tolist()
                    token = int(forced[s, node - 1])
                    if token < 0:
                        token = self._token(int(draft.best.ids[s * reads + line, rank]))
                    target.tokens[rows.start + node] = token
                    if own >= 0:
                        self._put(draft, s * puts + own, s, node, token, slot, position)
            if number > tree.depth:
                self._walk(s, rows, forced[s], decided)

    def _token(self, output: int) -> int:
        """Returns the token of one of the draft's outputs."""
        return output if self.ids is None else int(self.ids[output])

    def _find(self, s: int, rows: slice, slot: int, position: int) -> None:
        """Finds a level of a dynamic tree, and places its nodes that the draft computes; after the
        last level, gives the target the chosen tokens."""
        sheet, level, draft, shapes = self.sheet, self.number, self.draft, self.shapes
        assert draft is not None and shapes is not None
        reads = slice(2 * s + 1, 2 * s + 2) if level == 1 else slice(s * WIDTH, (s + 1) * WIDTH)
        tokens, found = draft.best.ids[reads], shapes.found[s]
        if self.ids is not None:
            tokens = self.ids[tokens]
        chosen = find(shapes, s, level, tokens, draft.best.values[reads])
        if level == sheet.tree.depth:
            choose(shapes, s, sheet.parents[s], self.target.tokens[rows][1:])
            return
        lane = slot * sheet.draft_lanes + WIDTH * (level - 1)
        for seat, node in enumerate(chosen.tolist()):
            row, above = s * WIDTH + seat, int(found[ABOVE, node])
            draft.tokens[row] = found[TOKEN, node]
            draft.seats.rows[:, row] = slot, position + level, lane + seat, position + 1
            of = NOBODY if above < 0 or slot < 0 else lane - WIDTH + int(found[SEAT, above])
            shapes.copies[row] = of, lane + seat, level - 1

    def _walk(self, s: int, rows: slice, forced: Ints, decided: Ints) -> None:
        """Applies the acceptance rule, and begins sequence s's next round."""
        sheet, nodes, table = self.sheet, self.sheet.nodes, self._table(s)
        slot, position, before, _ = sheet.state[s].tolist()
        drafts, (tokens, is_finite) = self.target.tokens[rows], self._best(rows)
        given = forced[len(sheet.tree.parents) :][np.maximum(table[LEVEL], 0)]
        best = np.where(given >= 0, given, tokens)
        decided[2:] = 0 if sheet.dynamic else drafts[1:]
        node = 0
        for child in range(1, nodes + 1):  # a node's children are behind it
            if table[PARENT, child] == node and drafts[child] == best[node]:
                node, before = child, int(drafts[child])
                if sheet.dynamic:
                    decided[1 + table[LEVEL, node]] = before
        level, lane, fork = table[[LEVEL, LANE, FORK], node].tolist()
        accepted = level if sheet.dynamic else node
        decided[:2] = accepted if is_finite or slot < 0 else NOT_FINITE, best[node]
        sheet.state[s] = slot, position + level + 1, best[node], before
        if sheet.lanes:
            kept_lane, kept = table[[KEPT_LANE, KEPT], node].tolist()
            ways = (kept_lane, sheet.draft_lanes, kept), (lane, sheet.lanes, level - fork + 1)
            for move, (own, lanes, count) in zip(sheet.moves[:, s], ways, strict=True):
                move[:] = NOBODY if own < 0 else slot * lanes + own, slot, position + fork, count


class ChainedForwards:
    """The programs of such rounds, over the steppers of a draft (None: AR) and of its target.

    Two rounds may be under way, of which the second takes its state from the first. The steppers,
    whose stacks are transformers, must not be used meanwhile. stored: drafted tokens of a round
    whose keys and values the target stores in the trunk. goes_ahead: whether a launch returns
    before its round is over.
    """

    is_on = False  # whether the present round is chained

    def __init__(
        self,
        draft: Stepper | None,
        target: Stepper,
        sequences: int,
        tree: Tree,
        dynamic: Size | None = None,
    ) -> None:
        """Compiles the programs for `sequences` sequences; both steppers share a backend.

        draft: also None on a rank that does not draft. dynamic: like Sheet's. Collective over the
        target ranks."""
        assert draft is None or tree.depth, f"K={tree.depth}"
        self._steppers = draft or target, target
        stacks: list[Any] = [None if draft is None else draft.stack, target.stack]
        self._draft, self._target = stacks
        ints = target.backend.host_ints(Sheet.size(sequences, tree, dynamic))
        self.sheet, ops = Sheet(ints, sequences, tree, dynamic), self._target.weights.ops
        self.tree, self.stored = tree, int((tree.lanes[1:] < 0).sum())
        self._table, self._shapes = ops.ids(self.sheet.table), None
        if dynamic is not None:
            self._shapes = Shapes.made(dynamic, sequences, ops.ids)
        ids = None if self._draft is None else self._draft.weights.head_ids
        self._ids = None if ids is None else ops.ids(ids)
        self._firsts = ops.ids(self._target.firsts)
        self.goes_ahead = target.backend.chains
        self._begin = tree.depth if draft is None else 0  # the first program of a round
        self._programs: list[list[Program]] = [
            [self._program(number, turn) for number in range(self._begin, tree.depth + 1)]
            for turn in range(RING)
        ]
        self._flying: list[int] = []  # rounds that are launched and not yet read

    def _program(self, number: int, turn: int) -> Program:
        """Compiles the draft's forward number + 1, or the target's, with the stages around it."""
        sheet, tree, is_last = self.sheet, self.tree, number == self.tree.depth
        stepper, shapes = self._steppers[is_last], self._shapes
        stack: Any = stepper.stack
        wide = not is_last and any(len(tree.children[node]) > 1 for node in tree.inner[number])
        k = stepper.options.top_k if wide or (shapes and not is_last) else 1
        draft = None if self._draft is None else Ends.of(self._draft, 1 if is_last else k)
        parts = turn, sheet, draft, Ends.of(self._target), self._table, self._firsts, self._ids
        first, plant, last = (Stage(n, *parts, shapes) for n in (0, PLANT, number + 1))
        inner = WIDTH if shapes else 0 if is_last else len(tree.inner[number])
        each = sheet.nodes + 1 if is_last else inner if number else 2
        rows, ops = sheet.sequences * each, self._target.weights.ops
        forward, is_spread = stack.body(rows, k), self.nodes > 0 and stack.group.size > 1

        def body() -> None:
            if number == self._begin:
                ops.chained(first)
            if is_spread:
                ops.spread(stack.group, stack.buffers.tokens, rows)
            if shapes is not None and is_last:
                if is_spread:
                    ops.spread(stack.group, sheet.parents.reshape(-1), sheet.parents.size)
                ops.chained(plant)
            stack.steer()
            forward()
            ops.chained(last)
            if shapes is not None and 0 < number < tree.depth - 1:
                stack.weights.ops.inherit(stack.cache, shapes.copies)
            if is_last and sheet.lanes:
                for moves, one in zip(sheet.moves, (self._draft, self._target), strict=True):
                    if one is not None:
                        one.weights.ops.adopt(one.cache, moves)

        return stepper.backend.program(body, stepper.cost(rows, k))

    def enter(self, sequences: int) -> None:
        """Begins a round of so many sequences: it is chained if its batch is full."""
        self.is_on = sequences == self.sheet.sequences

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
        """N, 0 in AR; of a dynamic tree K."""
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
