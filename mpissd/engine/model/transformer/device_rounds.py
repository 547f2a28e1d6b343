"""Rounds of greedy decoding that the GPU runs without the host (`DeviceRounds`).

A round is K forwards of the draft (none in AR) and one of the target on the same GPU. Between two
forwards a small kernel, a *stage*, writes the next forward's tokens and their places in the KV
cache; after the last forward a stage applies the acceptance rule. So a whole round is launched at
once, and the next round before this one is over; nothing waits for the host.

A draft is a tree of N nodes (tokens) in K levels; a chain has one node a level, and AR none. Stage
0 places the rows of the draft's first forward, two a sequence, and of the target's forward. The
first of the two computes the token before the last committed one: the draft may lack its keys and
values, and where it has them it gets equal ones, since a row's numbers never depend on other rows.
Stage j = 1 … K takes the tokens that the draft proposes for level j. Stage K + 1 walks the tree
along accepted tokens and begins the next round. Then the accepted path's keys and values are copied
from its lane (scratch memory) into the sequence's cache slot.

The device may decide the tree's shape as well (trees.py). Then stages 1 … K find its nodes, stage
PLANT places the chosen ones before the target's forward, and the host sees the accepted path only.

A parallel draft drafts all levels in one forward, which has 2K rows a sequence: up to K tokens
before the last committed one, that token, and K − 1 mask tokens. Then stage 1 takes or finds all
levels at once, and stage K + 1 follows. The draft stores no drafted token, so that the next round's
first rows store the accepted ones. What the masks store is overwritten before it is read.

A prompt lookup needs no draft's forward: stage COPY searches the sequence's tokens, which the host
gives when it begins a round and stage K + 1 extends, and writes what it copies to the target's
forward.

With T target ranks only rank 0 drafts. It sends its drafted tokens to the other ranks before the
target's forward; the stages before and after that forward run on every rank, which gathers the
likeliest tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import HostArray, Program
from mpissd.engine.law.lookup import latest_match
from mpissd.engine.law.tree import Shape
from mpissd.engine.model.stacks import Best
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer import trees
from mpissd.engine.model.transformer.cache import RowPlaces
from mpissd.engine.model.transformer.stack import TransformerStack
from mpissd.engine.model.transformer.trees import COPY, NOBODY, WIDTH, Shapes, Size

Index = NDArray[np.int64]
SLOT, POSITION, LAST, BEFORE = range(4)  # columns of Sheet.state; BEFORE: the first of several
NOT_FINITE = -2  # reported instead of the accepted node if a logit is not finite
RING = 3  # number of rounds that have buffers: the previous, the running and the next one
_IN_FLIGHT = 2  # the most rounds that are launched before the host reads the first one's results


class Copying(NamedTuple):
    """How a prompt lookup drafts without a model: it compares the last `longest` tokens, and puts
    `filler` (NOBODY: the last token) in missing places. capacity: the most tokens of a sequence."""

    longest: int
    filler: int
    capacity: int


class Sheet:
    """Arrays that the host and the kernels between forwards (stages) share; −1 (NOBODY): absent.

    state: [S, 3 + back], for each of S sequences its cache slot, the position of its last committed
    token, that token, and the `back` tokens before it (NOBODY: the draft has its keys and values);
    back is 1, or K if the draft's forward also reads the mask tokens `masks`. moves: [2, S, 4], how
    to copy the last accepted path in the draft's cache and in the target's: from which lane
    (scratch memory; NOBODY: nothing to copy), to which slot, the first position, and how many
    tokens. A draft tree has N nodes in K levels. parents: [S, N], the nodes' parents in trees that
    change shape each round (dynamic trees). forced: [RING, S, N + K + 1], by round modulo RING (3),
    prescribed tokens of the draft's nodes, then of the target by level (NOBODY: the model decides);
    of a dynamic tree [RING, S, 2N + K + 1], where the parents of a parallel draft's nodes follow
    their tokens. decided: [RING, S, N + 2], by round, the accepted node, the bonus token and the
    drafted tokens; of a dynamic tree [RING, S, K + 2], the number of accepted tokens, the bonus
    token and the accepted tokens. history: [S, capacity + 1], for a lookup the tokens of each
    sequence by KV position.
    """

    def __init__(
        self,
        host_ints: Callable[[int], HostArray],
        sequences: int,
        tree: Shape,
        dynamic: Size | None = None,
        masks: range = range(0),
        copying: Copying | None = None,
    ) -> None:
        """Makes all arrays as views of one buffer. host_ints(n): allocates n int32. dynamic: the
        sizes of trees that change each round; `tree` is then a chain of as many levels. masks: the
        ids of a parallel draft's K − 1 mask tokens; empty for other drafts. copying: how a lookup
        drafts (None: a model does, or nothing)."""
        self.sequences = sequences
        self.copying = copying
        self.tree = tree
        self.dynamic = dynamic
        self.masks = masks
        self.back = len(masks) + 1
        self.table = trees.table_of(tree, len(masks))
        self.nodes = dynamic.nodes if dynamic else len(tree.parents)
        self.lanes = dynamic.nodes if dynamic else tree.num_lanes
        draft_lanes = dynamic.draft_lanes if dynamic else tree.num_lanes
        self.draft_lanes = 0 if masks else draft_lanes
        drafts = len(tree.parents)
        nodes = dynamic.nodes if dynamic else 0
        forced_width = (2 * nodes or drafts) + tree.depth + 1
        kept = copying.capacity + 1 if copying else 0
        widths = 3 + self.back, 8, nodes, RING * forced_width, RING * (drafts + 2), kept
        self.ints = host_ints(sequences * sum(widths))
        self.ints[...] = NOBODY
        ends = sequences * np.cumsum(widths[:-1])
        state, moves, parents, forced, decided, history = np.split(self.ints, ends)
        self.state: Ints = state.reshape(sequences, -1)
        self.moves: Ints = moves.reshape(2, sequences, 4)
        self.parents: Ints = parents.reshape(sequences, -1)
        self.forced: Ints = forced.reshape(RING, sequences, -1)
        self.decided: Ints = decided.reshape(RING, sequences, -1)
        self.history: Ints = history.reshape(sequences, kept)
        self.parents[...] = 0


@dataclass(frozen=True)
class Ends:
    """One model's buffers that stages (the kernels between forwards) use: the next forward's input
    and the last one's output. tokens: input tokens, int32 [max_rows] on the host. row_places: where
    these tokens lie in the KV cache. best: the likeliest tokens of each row on the device, rank
    after rank; ids count from the first column of each rank's logits."""

    tokens: HostArray
    row_places: RowPlaces
    best: Best

    @classmethod
    def of(cls, stack: TransformerStack, k: int = 1) -> Ends:
        """Returns the buffers of a model whose last forward reads out k candidates per row."""
        best = stack.candidates.by_k[k]
        if stack.group.size > 1:
            best = replace(best, ids=best.all_ids, values=best.all_values)
        return cls(stack.buffers.tokens, stack.pages.row_places, best)


@dataclass(frozen=True)
class RoundStage:
    """One stage, the kernel between two forwards of a round, with all that Ops.run_stage needs to
    run it. number: 0 before the first forward, j after the draft's forward j = 1 … K (one for each
    level of the tree), K + 1 after the target's, trees.PLANT before the target's forward if the
    tree changes shape each round, trees.COPY if a lookup drafts. turn: the round modulo RING (3),
    which selects buffers. draft: None on a rank that does not draft. On the device: table, the tree
    as trees.table_of returns it; firsts, int32 [T], the first token of each rank's share of the
    target's vocabulary; ids, the token of each column of the draft's logits (None: column n is
    token n); shapes, the trees that change shape each round (None: all rounds have sheet.tree);
    draft_firsts, int32, the first column of each rank's share of the draft's logits (None: of one
    rank). Only chains have a draft that ranks share."""

    number: int
    turn: int
    sheet: Sheet
    draft: Ends | None
    target: Ends
    table: Any
    firsts: Any
    ids: Any = None
    shapes: Shapes | None = None
    draft_firsts: Any = None

    @property
    def level(self) -> tuple[int, int, int, int]:
        """What the stage handles of one sequence, as four numbers: the first node of a level of the
        tree, the number of the level's nodes, the number of rows in the draft's forward before the
        stage, and that in the draft's forward after the stage."""
        tree = self.sheet.tree
        number = self.number
        if number == 0 or number > tree.depth:
            return 0, 1 if number else self.sheet.nodes + 1, 0, 0
        if self.sheet.masks:
            return 1, self.sheet.nodes, 2 * self.sheet.back, 0
        first = tree.ends[number - 1] + 1
        rows = [2, *map(len, tree.inner[1:]), 0]
        return first, tree.ends[number] + 1 - first, rows[number - 1], rows[number]

    def run(self) -> None:
        """Runs the stage on host arrays, as chained.cu and dynamic.cu do on a GPU."""
        steps = {0: self._begin, trees.PLANT: self._plant, COPY: self._copy}
        steps[self.sheet.tree.depth + 1] = self._walk
        search = self._search if self.sheet.masks else self._find
        step = steps.get(self.number, self._take if self.shapes is None else search)
        count = self.sheet.nodes + 1
        for s, (slot, position, *_) in enumerate(self.sheet.state.tolist()):
            step(s, slice(s * count, (s + 1) * count), slot, position)

    def _table(self, s: int) -> Ints:
        return self.sheet.table if self.shapes is None else self.shapes.tables[s]

    def _put(
        self, ends: Ends, row: int, s: int, node: int, token: int, slot: int, position: int
    ) -> None:
        """Writes a tree node of sequence s into row `row` of a model's next forward: its token, and
        its place in the KV cache. ends: the model's buffers. slot: the sequence's part of the
        cache. position: the position of the tree's root (node 0), the last committed token."""
        fields = [trees.LEVEL, trees.LANE, trees.SPANS, trees.FORK]
        level, lane, spans, fork = self._table(s)[fields, node].tolist()
        lane = NOBODY if lane < 0 else slot * self.sheet.lanes + lane + spans
        ends.tokens[row] = token
        ends.row_places.rows[:, row] = slot, position + level, lane, position + fork

    def _begin(self, s: int, rows: slice, slot: int, position: int) -> None:
        """Begins a round for sequence s (stage 0): writes the input rows of the draft's first
        forward, and each tree node's place in `rows`, the sequence's rows of the target's."""
        _, _, last, *before = self.sheet.state[s].tolist()
        if self.draft is not None:
            tokens = [*before, last, *self.sheet.masks]
            for n, token in enumerate(tokens):
                at = position - self.sheet.back + n
                stored = NOBODY if token < 0 else slot
                self._put(self.draft, s * len(tokens) + n, s, 0, token, stored, at)
        for node in range(self.sheet.nodes + 1):
            token = 0 if node else last
            self._put(self.target, rows.start + node, s, node, token, slot, position)

    def _take(self, s: int, rows: slice, slot: int, position: int) -> None:
        """Takes the drafted tokens of one level of sequence s (stages 1 … K, one for each level):
        writes them to the target's forward (`rows`), and those of nodes with children to the
        draft's next forward."""
        assert self.draft is not None
        first, width, reads, puts = self.level
        for node in range(first, first + width):
            rank, line, row = self.sheet.table[[trees.RANK, trees.LINE, trees.ROW], node].tolist()
            token = int(self.sheet.forced[self.turn, s, node - 1])
            if token < 0:
                token = self._drafted(s * reads + line, rank, self.sheet.sequences * reads)
            self.target.tokens[rows.start + node] = token
            if row >= 0:
                self._put(self.draft, s * puts + row, s, node, token, slot, position)

    def _drafted(self, row: int, rank: int, rows: int) -> int:
        """Returns the likeliest token, or the one of this rank, after row `row` of the `rows` rows
        of the draft's last forward."""
        assert self.draft is not None
        firsts = [0] if self.draft_firsts is None else self.draft_firsts
        best = self.draft.best
        rows_of = row + rows * np.arange(len(firsts))
        shard = int(best.values[rows_of, 0].argmax())  # Of equal logits the lowest rank's wins.
        column = int(firsts[shard] + best.ids[rows_of[shard], rank])
        return column if self.ids is None else int(self.ids[column])

    def _find(self, s: int, rows: slice, slot: int, position: int) -> None:
        """Finds one level of sequence s's draft tree if its shape changes each round (stages 1 … K,
        one for each level), and writes the likeliest nodes to the draft's next forward. After the
        last level, the likeliest nodes on all levels are chosen, and their tokens are written to
        the target's forward (`rows`)."""
        level = self.number
        draft = self.draft
        shapes = self.shapes
        assert draft is not None and shapes is not None
        reads = slice(2 * s + 1, 2 * s + 2) if level == 1 else slice(s * WIDTH, (s + 1) * WIDTH)
        chosen = trees.find(shapes, s, level, *self._candidates(reads))
        if level == self.sheet.tree.depth:
            trees.choose(shapes, s, self.sheet.parents[s], self.target.tokens[rows][1:])
            return
        nodes = shapes.nodes[s]
        first_lane = slot * self.sheet.draft_lanes + WIDTH * (level - 1)
        for n, node in enumerate(chosen.tolist()):
            row = s * WIDTH + n
            lane = first_lane + n
            above = int(nodes[trees.ABOVE, node])
            draft.tokens[row] = nodes[trees.TOKEN, node]
            draft.row_places.rows[:, row] = slot, position + level, lane, position + 1
            has_lane = above >= 0 and slot >= 0
            source = first_lane - WIDTH + int(nodes[trees.NEXT_ROW, above]) if has_lane else NOBODY
            shapes.copies[row] = source, lane, level - 1

    def _search(self, s: int, rows: slice, slot: int, position: int) -> None:
        """Finds sequence s's draft tree, whose shape changes each round, in the one forward of a
        parallel draft, and writes its tokens to the target's forward (`rows`)."""
        back = self.sheet.back
        tokens, logits = self._candidates(slice((2 * s + 1) * back, (2 * s + 2) * back))
        chosen = self.target.tokens[rows][1:]
        parents = self.sheet.parents[s]
        trees.search(logits, tokens, parents, chosen)
        forced = self.sheet.forced[self.turn, s, : 2 * len(parents)].reshape(2, -1)
        is_forced = forced[0] >= 0
        chosen[is_forced], parents[is_forced] = forced[:, is_forced]

    def _candidates(self, reads: slice) -> tuple[Ints, NDArray[np.float32]]:
        """Returns the likeliest tokens of these rows of the draft's forward, and their logits."""
        assert self.draft is not None
        best = self.draft.best
        ids = best.ids[reads]
        return ids if self.ids is None else self.ids[ids], best.values[reads]

    def _plant(self, s: int, rows: slice, slot: int, position: int) -> None:
        """Places the nodes of sequence s's draft tree, whose shape changes each round, in the
        target's forward (`rows`) and in its KV cache, just before that forward."""
        assert self.shapes is not None
        trees.plant(self.shapes.tables[s], self.sheet.parents[s])
        tokens = [int(self.sheet.state[s, LAST]), *self.target.tokens[rows][1:]]
        for node, token in enumerate(tokens):
            self._put(self.target, rows.start + node, s, node, token, slot, position)

    def _copy(self, s: int, rows: slice, slot: int, position: int) -> None:
        """Drafts sequence s's tokens by a prompt lookup: copies those that followed the latest
        earlier occurrence of the last ones to the target's forward (`rows`)."""
        assert self.sheet.copying is not None
        longest, filler, _ = self.sheet.copying
        count = self.sheet.nodes
        history = self.sheet.history[s, : position + 1]
        start = latest_match(history, longest)
        found = history[:0] if start is None else history[start : start + count]
        chosen = self.target.tokens[rows][1:]
        chosen[: len(found)] = found
        chosen[len(found) :] = history[-1] if filler < 0 else filler
        forced = self.sheet.forced[self.turn, s, :count]
        chosen[forced >= 0] = forced[forced >= 0]

    def _best(self, rows: slice) -> tuple[Ints, bool]:
        """Returns the target's likeliest token after each of these rows, over the logits of all
        ranks, and whether the largest logits are finite."""
        ranks = len(self.firsts)
        count = ranks * self.sheet.sequences * (self.sheet.nodes + 1)
        best = self.target.best.ids, self.target.best.values
        ids, values = (part[:count, 0].reshape(ranks, -1)[:, rows] for part in best)
        rank = values.argmax(axis=0)[None]  # Of equal logits the lowest rank's wins.
        tokens = np.take_along_axis(ids + self.firsts[:, None], rank, axis=0)[0]
        return tokens, bool(np.isfinite(values).all())

    def _walk(self, s: int, rows: slice, slot: int, position: int) -> None:
        """Ends a round for sequence s (stage K + 1, after the target's forward): follows the
        drafted tokens that the target accepts down the tree, writes the accepted node and the bonus
        token to sheet.decided, and sets the sequence's state for the next round. rows: its rows of
        the target's forward. slot: its part of the KV cache. position: the root's."""
        sheet = self.sheet
        table = self._table(s)
        decided = sheet.decided[self.turn, s]
        drafts = self.target.tokens[rows]
        tokens, is_finite = self._best(rows)
        imposed = sheet.forced[self.turn, s, -1 - sheet.tree.depth :]
        imposed = imposed[np.maximum(table[trees.LEVEL], 0)]
        best = np.where(imposed >= 0, imposed, tokens)
        decided[2:] = 0 if sheet.dynamic else drafts[1:]
        before = [NOBODY] * (sheet.back - 1) + [sheet.state[s, LAST]]
        node = 0
        for child in range(1, sheet.nodes + 1):  # children have larger numbers than their parent
            if table[trees.PARENT, child] == node and drafts[child] == best[node]:
                node = child
                before = [*before[1:], drafts[child]]
                if sheet.dynamic:
                    decided[1 + table[trees.LEVEL, node]] = drafts[child]
        level, lane, fork = table[[trees.LEVEL, trees.LANE, trees.FORK], node].tolist()
        if sheet.copying:  # The accepted path of a chain is its first nodes.
            later = [*drafts[1 : node + 1], best[node]]
            sheet.history[s, position + 1 : position + 2 + node] = later
        accepted = level if sheet.dynamic else node
        decided[:2] = accepted if is_finite or slot < 0 else NOT_FINITE, best[node]
        sheet.state[s] = slot, position + level + 1, best[node], *before
        if sheet.lanes:
            kept_lane, kept = table[[trees.KEPT_LANE, trees.KEPT], node].tolist()
            paths = (kept_lane, sheet.draft_lanes, kept), (lane, sheet.lanes, level - fork + 1)
            for move, (lane, lanes, count) in zip(sheet.moves[:, s], paths, strict=True):
                move[:] = NOBODY if lane < 0 else slot * lanes + lane, slot, position + fork, count


class DeviceRounds:
    """Runs rounds of greedy decoding (the draft's forwards, then the target's) on the GPU without
    the host. Two rounds may be under way, of which the second takes its state from the
    first; meanwhile the steppers must not be used otherwise. is_on: whether the GPU runs the
    present round. nodes: how many drafted tokens of a round the host sees. lookahead: the number of
    levels of the draft's tree; both are 0 in AR. stored: how many drafted tokens the target stores
    in the sequence's cache slot, not in scratch memory (a lane). goes_ahead: whether a launch
    returns before its round is over. is_shared: whether the target ranks share the draft."""

    is_on = False

    def __init__(
        self,
        draft: Stepper | None,
        target: Stepper,
        sequences: int,
        tree: Shape,
        dynamic: Size | None = None,
        masks: range = range(0),
        copying: Copying | None = None,
    ) -> None:
        """Compiles the programs for rounds of `sequences` sequences; all target ranks must call it.
        draft: None in AR, and on a rank that does not draft. Both models are transformers on one
        backend. dynamic: the sizes of a tree that changes shape each round (None: `tree` stays).
        masks: the ids of a parallel draft's mask tokens. copying: how a lookup drafts on this rank
        (None: none does); `tree` is then a chain."""
        assert draft is None or tree.depth, f"K={tree.depth}"
        self._steppers = draft or target, target
        stacks: list[Any] = [None if draft is None else draft.stack, target.stack]
        self._draft, self._target = stacks
        ops = self._target.weights.ops
        self.sheet = Sheet(target.backend.host_ints, sequences, tree, dynamic, masks, copying)
        self.shape = tree
        self.nodes = len(tree.parents)
        self.lookahead = tree.depth
        self.stored = int((tree.lanes[1:] < 0).sum())
        self._table = ops.ids(self.sheet.table)
        self._shapes = None if dynamic is None else Shapes.made(dynamic, sequences, ops.ids)
        ids = None if self._draft is None else self._draft.weights.head_ids
        self._ids = None if ids is None else ops.ids(ids)
        self._firsts = ops.ids(self._target.firsts)
        self.is_shared = self._draft is not None and self._draft.group.size > 1
        self._draft_firsts = ops.ids(self._draft.firsts) if self.is_shared else None
        self.goes_ahead = target.backend.chains
        drafts = 0 if draft is None else 1 if masks else tree.depth  # the draft's forwards
        numbers = [*range(drafts), tree.depth]
        self._begin = numbers[0]  # number of a round's first program
        self._programs: list[list[Program]] = [
            [self._program(number, turn) for number in numbers] for turn in range(RING)
        ]
        self._flying: list[int] = []  # rounds that are launched and whose results are not yet read

    def _program(self, number: int, turn: int) -> Program:
        """Compiles one forward of a round, with the small kernels (stages) before and after it: the
        draft's forward `number`, or the target's if `number` is K. turn: the round modulo RING,
        which selects the buffers."""
        sheet = self.sheet
        tree = self.shape
        shapes = self._shapes
        is_target = number == tree.depth
        stepper = self._steppers[is_target]
        stack: Any = stepper.stack
        rows = sheet.sequences * (sheet.nodes + 1 if is_target else 2 * sheet.back)
        k = 1
        if not is_target:
            inner = np.concatenate(tree.inner) if sheet.masks else tree.inner[number]
            if number:
                rows = sheet.sequences * (WIDTH if shapes else len(inner))
            if shapes or any(len(tree.children[node]) > 1 for node in inner):
                k = stepper.options.top_k
        draft = None if self._draft is None else Ends.of(self._draft, k)
        parts = turn, sheet, draft, Ends.of(self._target), self._table, self._firsts, self._ids
        numbers = 0, COPY, trees.PLANT, number + 1
        of = shapes, self._draft_firsts
        first, copy, plant, last = (RoundStage(n, *parts, *of) for n in numbers)
        ops = self._target.weights.ops
        forward = stack.body(rows, k)
        is_spread = self.nodes > 0 and stack.group.size > 1 and not self.is_shared

        def body() -> None:
            if number == self._begin:
                ops.run_stage(first)
            if sheet.copying:
                ops.run_stage(copy)
            if is_spread:
                ops.spread(stack.group, stack.buffers.tokens, rows)
            if shapes is not None and is_target:
                if is_spread:
                    ops.spread(stack.group, sheet.parents.reshape(-1), sheet.parents.size)
                ops.run_stage(plant)
            stack.steer()
            forward()
            ops.run_stage(last)
            if shapes is not None and 0 < number < tree.depth - 1:
                stack.weights.ops.inherit(stack.cache, shapes.copies)
            if is_target and sheet.lanes:
                stored = None if sheet.masks else self._draft  # a parallel draft has no lanes
                for moves, model in zip(sheet.moves, (stored, self._target), strict=True):
                    if model is not None:
                        model.weights.ops.adopt(model.cache, moves)

        return stepper.backend.program(body, stepper.cost(rows, k))

    def enter(self, sequences: int) -> None:
        """Sets is_on for a round of so many sequences: the GPU runs the round only if all sequences
        for which the programs were compiled take part."""
        self.is_on = sequences == self.sheet.sequences

    def begin(self, state: Ints, tokens: Sequence[Sequence[int]] = ()) -> None:
        """Sets the state from which the next launched round starts. state: for each sequence its
        cache slot, the position of its last committed token, and its last tokens (Sheet.state).
        tokens: all committed tokens of each, which a lookup searches (imposed ones: none)."""
        assert not self._flying, f"rounds {self._flying} are under way"
        self.sheet.state[...] = state
        if self.sheet.copying:
            for history, known in zip(self.sheet.history, tokens, strict=True):
                history[: len(known)] = known

    def hold(self, slots: Index, positions: Index) -> None:
        """Reserves the draft's and the target's KV pages for each slot, its position included."""
        for stack in (self._draft, self._target):
            if stack is not None:
                stack.pages.hold(slots, positions)

    def launch(self, round_: int, forced: Ints) -> None:
        """Launches round `round_` after the rounds that are under way. forced: what is prescribed
        for each of S sequences, a row of Sheet.forced."""
        assert len(self._flying) < _IN_FLIGHT, f"rounds {self._flying} are under way"
        self.sheet.forced[round_ % RING] = forced
        for program in self._programs[round_ % RING]:
            program.launch()
        self._flying.append(round_)

    def is_flying(self, round_: int) -> bool:
        """Returns whether a round is under way: launched, and neither read nor dropped."""
        return round_ in self._flying

    def last_of(self, round_: int) -> Program:
        """Returns the target's forward of a round, the last of its programs."""
        return self._programs[round_ % RING][-1]

    def outcome(self, round_: int) -> Ints:
        """Returns a finished round's outcome, int32 [S, N + 2]: of each sequence the accepted node,
        the bonus token and the N drafted tokens. Rounds must be read in the order of launches."""
        first = self._flying.pop(0)
        assert round_ == first, f"round {round_} out of turn, {first} is the next one"
        outcome: Ints = self.sheet.decided[round_ % RING].copy()
        return outcome

    def dropped(self) -> list[Program]:
        """Forgets all rounds under way; returns their last programs, for which the caller waits."""
        programs = [self.last_of(round_) for round_ in self._flying]
        self._flying.clear()
        return programs

    def draft_s(self, round_: int) -> float:
        """Returns the seconds on the device from a round's start to its target forward."""
        programs = self._programs[round_ % RING]
        return programs[-1].after_s(programs[0]) + programs[0].elapsed_s()

    def close(self) -> None:
        for programs in self._programs:
            for program in programs:
                program.close()
