"""The live sequences of one rank: their tokens, their rounds, and their places in the KV cache.

Every rank keeps its own Batch, equal to the others' because all apply the same outcomes. All state
of a sequence is here; an oracle, which decides its tokens, only reads it (and keeps its grammar in
`constraint`).

Places. A sequence's committed tokens have positions 0, 1, …; K and V of the last one are stored by
the forward that reads it. `filled` positions of a sequence's slot of the cache are stored and
valid, so that a rollback is a smaller number. The *trunk* is the committed tokens and the served
ones, those that the target verifies now; its rows write the slot. Branches, which a draft grows for
possible outcomes, write scratch memory, in which a path has a *lane*. A hit copies nothing: the
draft's next forward over the trunk writes the slot again, with equal bits. Of a tree only the
principal path (first children) is in the trunk; another accepted path is copied from its lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ProtocolError
from mpissd.common.rounds import Event, Ints, Outcome, Request, Speculation
from mpissd.engine.law.lookup import LONGEST, Lookup, make_lookup
from mpissd.engine.law.tree import CHAIN, Shape
from mpissd.engine.model.forwards import Places
from mpissd.engine.round.branches import TRUNK, Branches, BranchPlaces

Index = NDArray[np.int64]
Prompt = Callable[[Request], Sequence[int]]  # returns a request's tokens up to its first_token
_DRAWS = 512  # draws of a stream reserved for a round; a lookahead is at most 256
_ROUNDS = 1 << 32  # limit of rounds in an epoch
_ALL = 1 << 30


@dataclass(frozen=True)
class Placement:
    """How sequences use a model's KV cache.

    context: tokens before the first one of a sequence without a prompt. They are never computed:
    the attention reads their bytes, and no token depends on their values. window: the committed
    tokens after which such a sequence's positions begin again, so that a run of any length stays
    within the cache (None: never). keeps: whether sequences reuse pages that store the same first
    tokens. stateless: whether a draft has no keys and values, so that it never lacks a token. lag:
    K of a draft that reads the target's hidden states, else 0. K and V of the last accepted tokens
    come from the draft's own states, and its first step computes them again; so up to `lag` tokens
    may be missing, and no part of a prompt is stored before the target has computed it. masks: the
    mask tokens that follow the last token of a branch in a step of a parallel draft; their keys and
    values are scratch. batches: makes a batch whose drafts are not stored as chains are
    (features.trees); None: Batch does.
    """

    context: int = 0
    window: int | None = None
    keeps: bool = False
    stateless: bool = False
    lag: int = 0
    masks: Sequence[int] = ()
    batches: Callable[[int, Placement | None, Prompt | None, Shape], Batch] | None = None


class Gap(NamedTuple):
    """Committed tokens of a slot that are not in its cache: positions start … stop − 1."""

    slot: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of these tokens."""
        return self.stop - self.start


@dataclass(eq=False)
class LiveSequence:
    """One sequence on this rank.

    slot: its place in this rank's cache, which other ranks do not know. tokens: its committed
    tokens, prompt included. served: the drafted tokens that the target verifies now. Both are kept
    only if the oracle reads tokens. rounds: its number of committed rounds, counted where tokens
    are kept. constraint: its grammar with its state, which the oracle makes (None: it has none, or
    not yet).
    """

    request: Request
    slot: int
    tokens: list[int] = field(default_factory=list)
    served: list[int] = field(default_factory=list)
    rounds: int = 0
    constraint: Any = None
    _lookups: dict[str, Lookup] = field(default_factory=dict)  # the index of its tokens, by kind

    @property
    def name(self) -> tuple[int, int]:
        """(request id, epoch)."""
        return self.request.request_id, self.request.epoch

    @property
    def answer(self) -> list[int]:
        """The committed tokens after the prompt, also those from before a preemption."""
        return self.tokens[len(self.request.prompt) - self.request.answered :]

    def path(self, columns: Sequence[int]) -> list[int]:
        """Returns the served tokens of these columns, a path in the draft's tree."""
        return [self.served[column] for column in columns]

    def serve(self, tokens: list[int]) -> None:
        """Notes the drafted tokens that the target verifies now."""
        self.served = tokens

    def commit(self, columns: Sequence[int], bonus: int) -> None:
        """Appends the accepted tokens (the columns of the served ones), and the bonus token."""
        self.tokens += self.path(columns)
        self.tokens.append(bonus)
        self.served = []
        self.rounds += 1

    def first_draw(self, later: int = 0) -> int:
        """Returns the index of the first draw, in the sequence's random streams, of the round that
        comes `later` rounds from now. No two rounds of a sequence share a draw, in any epoch."""
        return (self.request.epoch * _ROUNDS + self.rounds + later) * _DRAWS

    def stream(self, seed: int) -> tuple[int, int]:
        """Returns (seed, sequence), which key its random draws: by default the job's seed and the
        request's id."""
        given = self.request.sampling.seed
        return (seed, self.request.request_id) if given is None else (given, 0)

    def looked_up(
        self, count: int, kind: str = "prompt", longest: int = LONGEST, filler: int | None = None
    ) -> list[int]:
        """Returns the `count` tokens that a lookup of this kind drafts from the last `longest`
        tokens; filler: fills missing ones (None: the last token does)."""
        if kind not in self._lookups:
            self._lookups[kind] = make_lookup(kind, longest)
        lookup = self._lookups[kind]
        lookup.follow(self.tokens)
        return lookup.padded(count, filler)


class Change(NamedTuple):
    """The changes that an outcome made to a batch.

    left: of each sequence that left, its slot and the tokens that the slot stores. placed: the
    sequences that have taken a slot. started: those whose first round comes next. moves: of each
    accepted path in scratch memory, its lane, and the gap in the slot that it is copied to.
    """

    left: Sequence[tuple[int, list[int]]] = ()
    placed: Sequence[LiveSequence] = ()
    started: Sequence[LiveSequence] = ()
    moves: Sequence[tuple[int, Gap]] = ()


_UNCHANGED = Change()


class Batch:
    """The live sequences, in the order of messages, with their lengths, last tokens and places.

    By batch row: sequences, ids, slots, lengths (committed tokens, the prompt counted as one),
    last_tokens, and identity [b, 5], the rows of an outcome without its decisions. By slot: filled,
    the positions that the cache holds. opened: by slot, the sequences whose prompts are stored in
    parts (chunked prefill) before they join, in their order. digest: CRC-32 of the applied
    outcomes, to compare between ranks. forced: by batch row, the tokens after the last bonus token
    that the grammar forced.
    """

    def __init__(
        self,
        capacity: int,
        placement: Placement | None = None,
        prompt: Prompt | None = None,
        shape: Shape = CHAIN,
    ) -> None:
        """capacity: the most sequences. placement: None without a KV cache. prompt: returns a
        request's tokens up to its first_token (None: tokens are not kept). shape: of a draft; a
        tree in a KV cache needs a features.trees.TreeBatch."""
        self.capacity = capacity
        self.placement = placement
        self.shape = shape
        self.sequences: list[LiveSequence] = []
        self.opened: dict[int, LiveSequence] = {}
        self.ids: Ints = np.zeros(0, np.int32)
        self.slots = np.zeros(0, np.int64)
        self.lengths = np.zeros(0, np.int64)
        self.last_tokens: Ints = np.zeros(0, np.int32)
        self.identity: Ints = np.zeros((0, Outcome.WIDTH), np.int32)
        self.digest = 0
        self.forced: dict[int, list[int]] = {}
        self.filled = np.zeros(capacity, np.int64)
        self._prompt = prompt
        self._by_slot: dict[int, LiveSequence] = {}  # the last one in each slot
        self._steady = b""  # columns 0 to 2, as bytes, of an outcome without changes
        self._base = np.zeros(capacity, np.int64)  # position of the first counted token

    def __len__(self) -> int:
        return len(self.ids)

    def apply(self, outcome: Outcome) -> Change:
        """Applies an outcome; returns the changes. Raises ProtocolError if the outcome's sequences
        differ from the batch's."""
        self.digest = crc32(outcome.rows.tobytes(), self.digest)
        change = _UNCHANGED
        moves = () if self.placement is None else self._moves(outcome)
        self.forced = {}
        if outcome.rows[:, :3].tobytes() != self._steady:  # ten times as fast as comparing arrays
            change = self._apply_changes(outcome)
        else:
            self.lengths += self.shape.depths[outcome.num_accepted] + 1
            self.last_tokens = outcome.bonus
            self._commit(self.sequences, outcome.rows)
        if self.placement is not None:  # positions after the last committed token become invalid
            self.filled[self.slots] = np.minimum(self.filled[self.slots], self.last())
        if change is not _UNCHANGED:
            self._force(outcome)
        return change._replace(moves=moves) if moves else change

    def _commit(self, sequences: Sequence[LiveSequence], rows: Ints) -> None:
        """Commits the accepted tokens of these rows of an outcome, if tokens are kept."""
        if self._prompt is not None:
            paths = self.shape.paths
            for sequence, row in zip(sequences, rows.tolist(), strict=True):
                sequence.commit(paths[row[3]], row[4])

    def _force(self, outcome: Outcome) -> None:
        """Appends the tokens that grammars forced."""
        names = self.identity[:, :2].tolist()
        for request_id, epoch, event, _, token in outcome.rows.tolist():
            if event == Event.FORCED:
                if [request_id, epoch] not in names:
                    raise self._mismatch(outcome)
                row = names.index([request_id, epoch])
                self.forced.setdefault(row, []).append(token)
                self.sequences[row].tokens.append(token)
                self.lengths[row] += 1
                self.last_tokens[row] = token

    def _moves(self, outcome: Outcome) -> Sequence[tuple[int, Gap]]:
        """Returns Change.moves, and counts the tokens of these paths as stored."""
        return ()

    def _apply_changes(self, outcome: Outcome) -> Change:
        """Applies an outcome by which sequences join or leave, and returns the changes."""
        count = len(self.ids)
        rows = outcome.rows[:count]
        others = outcome.rows[count:].tolist()
        is_same = len(rows) == count and (rows[:, :2] == self.identity[:, :2]).all()
        if not is_same or (rows[:, 2] > Event.RELEASE).any() or (rows[:, 2] == Event.ADMIT).any():
            raise self._mismatch(outcome)
        stays = rows[:, 2] == Event.COMMIT
        kept = [self.sequences[row] for row in np.flatnonzero(stays)]
        gone = [self.sequences[row] for row in np.flatnonzero(~stays)]
        started = list[LiveSequence]()
        for request_id, epoch, event, *_ in others:  # opened sequences that join or are released
            if event not in (Event.ADMIT, Event.PREFILL, Event.FORCED):
                name = request_id, epoch
                slots = [slot for slot, opened in self.opened.items() if opened.name == name]
                if event == Event.COMMIT or not slots:
                    raise self._mismatch(outcome)
                (started if event == Event.START else gone).append(self.opened.pop(slots[0]))
        left = [(sequence.slot, self.stored_of(sequence)) for sequence in gone]
        placed = self._placed(outcome, {sequence.slot for sequence in (*kept, *started)})
        started += [sequence for sequence in placed if sequence.slot not in self.opened]
        rows = rows[stays]
        self._commit(kept, rows)
        added = Outcome.admission(0, [sequence.request for sequence in started]).rows
        lengths = self.lengths[stays] + self.shape.depths[rows[:, 3]] + 1
        self.lengths = np.concatenate([lengths, np.ones(len(added), np.int64)])
        rows = np.concatenate([rows, added])
        self.sequences = [*kept, *started]
        self.ids = rows[:, 0]
        self.last_tokens = rows[:, 4]
        self.slots = np.array([sequence.slot for sequence in self.sequences], np.int64)
        self.identity = np.zeros_like(rows)
        self.identity[:, :2] = rows[:, :2]
        self._steady = self.identity[:, :3].tobytes()
        return Change(left, placed, started)

    def _placed(self, outcome: Outcome, used: set[int]) -> list[LiveSequence]:
        """Places the new sequences of an outcome in free slots; used: slots that are not free."""
        free = sorted(set(range(self.capacity)) - used - self.opened.keys())
        added = outcome.fresh
        if len(added) > len(free):
            raise ProtocolError(
                f"round {outcome.round}: {len(added)} admissions, room for {len(free)}"
            )
        placed = list[LiveSequence]()
        for slot, (request_id, epoch, event, _, token) in zip(free, added.tolist(), strict=False):
            request = outcome.prompts.get((request_id, epoch)) or Request(request_id, token, epoch)
            if request.prompt:  # the digest covers it
                self.digest = crc32(np.array(request.prompt, np.int32).tobytes(), self.digest)
            placed.append(self._place(slot, request))
            if event == Event.PREFILL:
                self.opened[slot] = placed[-1]
        return placed

    def _place(self, slot: int, request: Request) -> LiveSequence:
        """Returns a new sequence in a free slot; raises ProtocolError if its prompt does not end
        in the request's first token."""
        tokens = [] if self._prompt is None else list(self._prompt(request))
        if self._prompt is not None and tokens[-1:] != [request.first_token]:
            raise ProtocolError(
                f"sequence {request.request_id} begins after token {request.first_token}, "
                f"its prompt ends in {tokens[-1:]}"
            )
        if self.placement is not None:
            context = self.placement.context
            self._base[slot] = len(request.prompt) - 1 if request.prompt else context
            self.filled[slot] = 0 if request.prompt else context
        self._by_slot[slot] = sequence = LiveSequence(request, slot, tokens)
        return sequence

    def _mismatch(self, outcome: Outcome) -> ProtocolError:
        return ProtocolError(
            f"round {outcome.round}: outcome rows {outcome.rows[:, :3].tolist()} do not fit the "
            f"batch of ids {self.ids.tolist()}"
        )

    def serve(self, speculation: Speculation) -> None:
        """Notes the drafted tokens that the target verifies now, if tokens are kept."""
        if self.placement is not None and self.placement.lag:
            self.filled[self.slots] = np.minimum(self.filled[self.slots], self.last() + 1)
        if self._prompt is None:
            return
        served = zip(speculation.tokens.tolist(), speculation.num_draft.tolist(), strict=True)
        for sequence, (tokens, count) in zip(self.sequences, served, strict=True):
            sequence.serve(tokens[:count])

    def committed(self, gap: Gap) -> Ints:
        """Returns the tokens of a gap, int32; zeros if the sequence has no prompt or its tokens are
        not kept, because then no token depends on their values."""
        sequence = self._by_slot[gap.slot]
        if not sequence.tokens or not sequence.request.prompt:
            return np.zeros(gap.size, np.int32)
        return np.array(sequence.tokens[gap.start : gap.stop], np.int32)

    def last(self) -> Index:
        """Returns the position of each sequence's last committed token, [b]."""
        assert self.placement is not None, "positions without a cache"
        later = self.lengths - 1
        if self.placement.window is not None:
            later %= self.placement.window
        position: Index = self._base[self.slots] + later
        return position

    def gaps(self, rows: Sequence[int] | Index, spare: int = 0) -> list[Gap]:
        """Returns the committed tokens of batch rows `rows` that the cache lacks, without the last
        one of each, and without rows that lack at most `spare` tokens."""
        if self.placement is None or self.placement.stateless or not len(rows):
            return []
        chosen = np.asarray(rows, np.int64)
        slots = self.slots[chosen]
        last = self.last()[chosen]
        filled = self.filled[slots]
        short = np.flatnonzero(last - filled > spare)
        return [Gap(int(slots[n]), int(filled[n]), int(last[n])) for n in short]

    def opened_gaps(self, most: int = _ALL) -> list[Gap]:
        """Returns the next tokens of prompts in parts (opened) that the cache lacks, at most
        `most`, without the last token of each prompt, which its first round stores."""
        gaps: list[Gap] = []
        if self.placement is None or self.placement.lag:
            return gaps
        for slot, sequence in self.opened.items():
            start = int(self.filled[slot])
            stop = min(len(sequence.request.prompt) - 1, start + most)
            if stop > start:
                gaps.append(Gap(slot, start, stop))
                most -= stop - start
        return gaps

    def stored_of(self, sequence: LiveSequence) -> list[int]:
        """Returns the tokens of a sequence that the cache stores; none if tokens are not kept."""
        return sequence.tokens[: int(self.filled[sequence.slot])]

    def stored(self) -> list[Request]:
        """Returns the requests whose prompts, stored in parts (opened), are complete."""
        short = {gap.slot for gap in self.opened_gaps()}
        return [opened.request for slot, opened in self.opened.items() if slot not in short]

    def store(self, gaps: Sequence[Gap]) -> Places:
        """Returns the places of all tokens of these gaps, and counts them as stored."""
        for gap in gaps:
            self.filled[gap.slot] = gap.stop
        return places_of(gaps)

    def fill(self, slots: Index | int | slice, stored: Index | int) -> None:
        """Counts exactly the first `stored` positions of these slots as stored."""
        self.filled[slots] = stored

    def trunk(self, num_draft: Ints) -> Places:
        """Returns the places of each sequence's last token and its num_draft [b] served tokens, and
        counts them as stored."""
        if len(num_draft) == 1:
            return self._trunk_of_one(int(num_draft[0]) + 1)
        counts = num_draft + 1
        last = self.last()
        rows = np.repeat(np.arange(len(counts)), counts)
        ahead = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
        assert (self.filled[self.slots] >= last).all(), "a trunk after tokens that are missing"
        return self._served_places(self.slots[rows], last[rows], ahead)

    def _served_places(self, slots: Index, last: Index, nodes: Index) -> Places:
        """Returns the places of n rows, and counts them as stored. nodes: the number of the row's
        token, from 0 for the sequence's last token, whose position is `last`; all are [n]."""
        positions = last + nodes
        self.filled[slots] = positions + 1  # of equal slots the last row counts
        return trunk_places(slots, positions)

    def _trunk_of_one(self, count: int) -> Places:
        """Returns the places of `trunk`, for a batch of one sequence and count = num_draft + 1, in
        a third of the time, for which every round waits."""
        assert self.placement is not None, "a trunk without a cache"
        slot = int(self.slots[0])
        later = int(self.lengths[0]) - 1
        if self.placement.window is not None:
            later %= self.placement.window
        first = int(self._base[slot]) + later
        assert self.filled[slot] >= first, "a trunk after tokens that are missing"
        self.filled[slot] = first + count
        positions = np.arange(first, first + count, dtype=np.int32)
        slots = np.full(count, slot, np.int32)
        return Places(slots, positions, np.full(count, TRUNK, np.int32), positions)

    def grown_ahead(
        self,
        rows: Index,
        nodes: Ints,
        ranks: Ints,
        first: Ints,
        tokens: Ints,
        states: list[Any] | None = None,
    ) -> Branches:
        """Returns branches for possible outcomes of this round, with their places in the cache: in
        batch rows `rows` after `nodes` accepted tokens (in a tree: after that node). The arguments
        are those of Branches.

        A table of synthetic tokens also has branches after more tokens than are served. No outcome
        equals theirs. They are placed after the served ones, so that they read stored positions.
        """
        places = None if self.placement is None else self._branch_places(rows, nodes, ranks)
        return Branches(
            rows, nodes, ranks, first, tokens, shape=self.shape, places=places, states=states
        )

    def _branch_places(self, rows: Index, nodes: Ints, ranks: Ints) -> BranchPlaces:
        slots = self.slots[rows]
        starts = np.minimum(self.last()[rows] + nodes + 1, self.filled[slots])
        return BranchPlaces(slots, starts, np.arange(len(rows)))

    def restarted(
        self, rows: Sequence[int] | Index, tokens: Ints, states: list[Any] | None = None
    ) -> Branches:
        """Returns branches that continue the committed tokens of batch rows `rows`, and write the
        slots themselves; tokens, states: as of Branches."""
        chosen = np.asarray(rows, np.int64)
        zeros = np.zeros(len(chosen), np.int32)
        places = None
        if self.placement is not None:
            lanes = np.full(len(chosen), TRUNK)
            places = BranchPlaces(self.slots[chosen], self.last()[chosen], lanes)
        first = self.last_tokens[chosen]
        return Branches(
            chosen, zeros, zeros, first, tokens, shape=self.shape, places=places, states=states
        )

    def step(self, places: BranchPlaces, steps: int) -> Places:
        """Returns the places of the rows of the next draft step, of branches that have `steps`
        levels, in a parallel draft with the masks after each row; places: of the branches."""
        assert self.placement is not None, "places without a cache"
        slots, starts, lanes = places
        positions = starts + steps
        in_trunk = lanes == TRUNK
        self.filled[slots[in_trunk]] = positions[in_trunk] + 1
        if count := len(self.placement.masks):  # their keys and values are not counted as stored
            ahead = np.tile(np.arange(1 + count), len(slots))
            columns = (slots, starts, lanes, positions)
            slots, starts, lanes, positions = (np.repeat(column, 1 + count) for column in columns)
            positions += ahead
        return int32_places(slots, positions, lanes, starts)


def places_of(gaps: Sequence[Gap]) -> Places:
    """Returns the places of all tokens of these gaps, in their order."""
    slots = np.repeat([gap.slot for gap in gaps], [gap.size for gap in gaps])
    return trunk_places(slots, np.concatenate([np.arange(gap.start, gap.stop) for gap in gaps]))


def trunk_places(slots: Index, positions: Index) -> Places:
    """Returns the places of rows of the trunk."""
    return int32_places(slots, positions, np.full(len(slots), TRUNK), positions)


def int32_places(slots: Index, positions: Index, lanes: Index, trunks: Index) -> Places:
    """Returns these places as a forward takes them, int32."""
    return Places(
        slots.astype(np.int32),
        positions.astype(np.int32),
        lanes.astype(np.int32),
        trunks.astype(np.int32),
    )
