"""The live sequences of one rank: their tokens, their rounds, and their places in the KV cache.

Every rank keeps a Batch of its own, equal to the others' because all apply the same outcomes. All
state of a sequence is here; an oracle (round.oracle), which decides its tokens, only reads it.

Places. A sequence's committed tokens have positions 0, 1, …; of the last one only the token is
known, and its K and V are stored by the forward that reads it. `filled` positions of a slot are
stored and valid: a rollback is a smaller number. Rows of the trunk (the committed tokens and those
that are served) write the cache; branches that a draft grows write scratch, so a hit copies
nothing: the next glue (the draft's forward over the trunk) writes it again, with equal bits. Of a
tree only the principal path is in the trunk; another accepted path is copied from its lane.
"""

from __future__ import annotations

from collections import abc
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ProtocolError
from mpissd.common.rounds import Event, Ints, Outcome, Request, Speculation
from mpissd.engine.law.lookup import LONGEST, Lookup, make_lookup
from mpissd.engine.law.tree import CHAIN, Branched, Tree
from mpissd.engine.model.forwards import SPAN, Places
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.text.grammar import Grammar

Index = NDArray[np.int64]
Prompt = abc.Callable[[Request], abc.Sequence[int]]
TRUNK = -1  # the lane of a row that writes the cache
_ROUND = 512  # draws of a stream reserved for a round; a lookahead is at most 256
_EPOCH = 1 << 32  # limit of rounds in an epoch
_ALL = 1 << 30


@dataclass(frozen=True)
class Placement:
    """How sequences use a model's KV cache.

    context: tokens before the first one of a sequence without a prompt. They are never computed:
    the attention reads their bytes, and no token depends on their values. window: the committed
    tokens after which such a sequence's positions begin again, so that a run of any length stays
    within the cache (None: never). keeps: whether sequences reuse pages that store the same first
    tokens. stateless: of a draft without keys and values, which never lacks a token. lag: of a
    draft that reads the hidden states of the target's verification. Keys and values of its last
    accepted tokens come from its own states: its first step computes them again, so it leaves as
    many as a round accepts, and no part of a prompt is stored before the target's states of it are
    known.
    """

    context: int = 0
    window: int | None = None
    keeps: bool = False
    stateless: bool = False
    lag: int = 0


class Gap(NamedTuple):
    """Committed tokens of a slot that are not in its cache: positions start … stop − 1."""

    slot: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of these tokens."""
        return self.stop - self.start


@dataclass(frozen=True)
class LanePlaces:
    """Places where a rollout's lanes (branch slots) grow; all are [lanes].

    slots: the cache slot. first: the position of the token that the first step reads; of a tree's
    branch, of the last committed token when it began. ids: the lane's scratch, of a tree's branch
    its place (Branched), or TRUNK for a lane that continues the committed tokens in the cache.
    """

    slots: Index
    first: Index
    ids: Index

    def keep(self, lanes: Index) -> LanePlaces:
        """Returns the places of only these lanes."""
        return LanePlaces(self.slots[lanes], self.first[lanes], self.ids[lanes])


@dataclass(eq=False)
class Sequence:
    """One sequence on this rank.

    slot: its place on this rank, which other ranks never see. tokens: its committed tokens, prompt
    included; served: its tokens under verification; both are kept only if the oracle reads tokens.
    rounds: its number of committed rounds. lookups: by kind, the index of its tokens. grammar: the
    state of its request's grammar, once it is read.
    """

    request: Request
    slot: int
    tokens: list[int] = field(default_factory=list)
    served: list[int] = field(default_factory=list)
    rounds: int = 0
    lookups: dict[str, Lookup] = field(default_factory=dict)
    grammar: Grammar | None = None

    @property
    def answer(self) -> list[int]:
        """The committed tokens after the prompt, those before a preemption included."""
        return self.tokens[len(self.request.prompt) - self.request.answered :]

    def commit(self, path: abc.Sequence[int], bonus: int) -> None:
        """Appends the served tokens at these places, which were accepted, and the bonus token."""
        self.tokens += [self.served[column] for column in path]
        self.tokens.append(bonus)
        self.served = []
        self.rounds += 1

    def first_draw(self, later: int = 0) -> int:
        """Returns the index of the round's first draw in the sequence's random streams.

        later: rounds from now. No two rounds of a sequence share a draw, in any of its epochs.
        """
        return (self.request.epoch * _EPOCH + self.rounds + later) * _ROUND

    def stream(self, seed: int) -> tuple[int, int]:
        """Returns (seed, sequence), the key of its random draws; seed: the job's."""
        own = self.request.seed
        return (seed, self.request.request_id) if own is None else (own, 0)

    def copied(
        self, count: int, kind: str = "prompt", longest: int = LONGEST, filler: int | None = None
    ) -> list[int]:
        """Returns the `count` tokens that a fast backup drafts, by this kind of lookup."""
        if kind not in self.lookups:
            self.lookups[kind] = make_lookup(kind, longest)
        lookup = self.lookups[kind]
        lookup.follow(self.tokens)
        return lookup.padded(count, filler)


class Change(NamedTuple):
    """What an outcome changed.

    left: of each sequence that left, its slot and the tokens that its cache stores. placed: the
    sequences that have taken a slot. started: those whose first round comes next. moves: lanes that
    begin with accepted tokens, and the gaps that these fill.
    """

    left: abc.Sequence[tuple[int, list[int]]] = ()
    placed: abc.Sequence[Sequence] = ()
    started: abc.Sequence[Sequence] = ()
    moves: abc.Sequence[tuple[int, Gap]] = ()


_UNCHANGED = Change()


class Batch:
    """The live sequences, in the order of messages, with their lengths, last tokens and places.

    By batch row: sequences, ids, slots, lengths (committed tokens, the prompt counted as
    one), last_tokens, and identity [b, 5], the rows of an outcome without its decisions. By slot:
    filled, the positions that the cache holds. opened: by slot, the sequences whose prompts are
    being stored, in the order in which they came. digest: CRC-32 of the applied outcomes, to
    compare between ranks. forced: by batch row, the tokens that its grammar forced after the last
    bonus token.
    """

    tree: Tree = CHAIN
    layout: Branched | None = None  # the places of nodes and branches; None: the tree's own
    _has_leaves = False  # whether the last round stored nodes without children
    _moves_itself = False  # whether the device copied the last round's accepted paths itself

    def __init__(
        self, capacity: int, placement: Placement | None = None, prompt: Prompt | None = None
    ) -> None:
        """Starts empty. placement: None without a KV cache. prompt: returns a request's tokens up
        to its first_token (None: tokens are not kept)."""
        self.capacity, self.placement, self._prompt = capacity, placement, prompt
        self.sequences: list[Sequence] = []
        self._by_slot: dict[int, Sequence] = {}  # the last one in each slot
        self.opened: dict[int, Sequence] = {}
        self.ids: Ints = np.zeros(0, np.int32)
        self.slots = np.zeros(0, np.int64)
        self.lengths = np.zeros(0, np.int64)
        self.last_tokens: Ints = np.zeros(0, np.int32)
        self.identity: Ints = np.zeros((0, Outcome.WIDTH), np.int32)
        self.digest = 0
        self.forced: dict[int, list[int]] = {}
        self._steady = b""  # columns 0 to 2, as bytes, of an outcome without changes
        self._base = np.zeros(capacity, np.int64)  # position of the first counted token
        self.filled = np.zeros(capacity, np.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def after(self, accepted: Ints, bonus: Ints) -> Batch:
        """Returns this batch as it will be after a round of this outcome, to look ahead."""
        following = copy(self)
        following.lengths = self.lengths + self.tree.depths[accepted] + 1
        following.last_tokens = bonus
        return following

    def apply(self, outcome: Outcome) -> Change:
        """Applies an outcome; returns the changes.

        Raises ProtocolError if the outcome's sequences differ from the batch's.
        """
        self.digest = crc32(outcome.rows.tobytes(), self.digest)
        change = _UNCHANGED
        moves = self._moves(outcome) if self.tree.num_lanes and self.placement else ()
        self.forced = {}
        if outcome.rows[:, :3].tobytes() != self._steady:  # ten times as fast as comparing arrays
            change = self._apply_changes(outcome)
        else:
            nodes, depths = outcome.num_accepted, self.tree.depths
            self.lengths += depths[nodes] if self.tree.num_lanes else nodes
            self.lengths += 1
            self.last_tokens = outcome.bonus
            if self._prompt is not None:
                paths = self.tree.paths
                for sequence, row in zip(self.sequences, outcome.rows.tolist(), strict=True):
                    sequence.commit(paths[row[3]], row[4])
        if self.placement is not None:  # positions after the last committed token become invalid
            self.filled[self.slots] = np.minimum(self.filled[self.slots], self.last())
        if change is not _UNCHANGED:
            self._force(outcome)
        return change._replace(moves=moves) if moves else change

    def _force(self, outcome: Outcome) -> None:
        """Appends the tokens that grammars forced."""
        names = self.identity[:, :2].tolist()
        for name, epoch, event, _, token in outcome.rows.tolist():
            if event == Event.FORCED:
                if [name, epoch] not in names:
                    raise self._mismatch(outcome)
                row = names.index([name, epoch])
                self.forced.setdefault(row, []).append(token)
                self.sequences[row].tokens.append(token)
                self.lengths[row] += 1
                self.last_tokens[row] = token

    def _moves(self, outcome: Outcome) -> list[tuple[int, Gap]]:
        """Returns the moves of an outcome, and notes what the cache holds after them."""
        tree, moves = self.layout or self.tree, list[tuple[int, Gap]]()
        places = zip(self.slots.tolist(), self.last().tolist(), outcome.rows.tolist(), strict=False)
        for slot, last, (_, _, event, node, _) in places:
            if event == Event.COMMIT and tree.lanes[node] >= 0:
                stop = last + int(tree.depths[node]) + self._has_leaves
                gap = Gap(slot, last + int(tree.forks[node]), stop)
                if not self._moves_itself:
                    moves.append((slot * tree.num_lanes + int(tree.lanes[node]), gap))
                self.filled[slot] = stop
        return moves

    def _apply_changes(self, outcome: Outcome) -> Change:
        known = len(self.ids)
        old, others = outcome.rows[:known], outcome.rows[known:].tolist()
        is_same = len(old) == known and (old[:, :2] == self.identity[:, :2]).all()
        if not is_same or (old[:, 2] > Event.RELEASE).any() or (old[:, 2] == Event.ADMIT).any():
            raise self._mismatch(outcome)
        stays = old[:, 2] == Event.COMMIT
        kept = [self.sequences[n] for n in np.flatnonzero(stays)]
        gone = [self.sequences[n] for n in np.flatnonzero(~stays)]
        started, placed = list[Sequence](), list[Sequence]()
        for name, epoch, event, *_ in others:  # opened sequences that join or are released
            if event not in (Event.ADMIT, Event.PREFILL, Event.FORCED):
                slots = [
                    slot
                    for slot, one in self.opened.items()
                    if (one.request.request_id, one.request.epoch) == (name, epoch)
                ]
                if event == Event.COMMIT or not slots:
                    raise self._mismatch(outcome)
                (started if event == Event.START else gone).append(self.opened.pop(slots[0]))
        left = [(one.slot, self.stored_of(one)) for one in gone]
        held = {*self.opened, *(one.slot for one in (*kept, *started))}
        free = sorted(set(range(self.capacity)) - held)
        fresh = outcome.fresh
        if len(fresh) > len(free):
            raise ProtocolError(
                f"round {outcome.round}: {len(fresh)} admissions, room for {len(free)}"
            )
        for slot, (name, epoch, event, _, token) in zip(free, fresh.tolist(), strict=False):
            request = outcome.prompts.get((name, epoch)) or Request(name, token, epoch)
            if request.prompt:  # the digest covers it
                self.digest = crc32(np.array(request.prompt, np.int32).tobytes(), self.digest)
            placed.append(self._place(slot, request))
            if event == Event.PREFILL:
                self.opened[slot] = placed[-1]
            else:
                started.append(placed[-1])
        rows = old[stays]
        if self._prompt is not None:
            for sequence, row in zip(kept, rows.tolist(), strict=True):
                sequence.commit(self.tree.paths[row[3]], row[4])
        new = Outcome.admission(0, [one.request for one in started]).rows
        lengths = self.lengths[stays] + self.tree.depths[rows[:, 3]] + 1
        self.lengths = np.concatenate([lengths, np.ones(len(new), np.int64)])
        rows = np.concatenate([rows, new])
        self.sequences = [*kept, *started]
        self.ids, self.last_tokens = rows[:, 0], rows[:, 4]
        self.slots = np.array([one.slot for one in self.sequences], np.int64)
        self.identity = np.zeros_like(rows)
        self.identity[:, :2] = rows[:, :2]
        self._steady = self.identity[:, :3].tobytes()
        return Change(left, placed, started)

    def _place(self, slot: int, request: Request) -> Sequence:
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
        self._by_slot[slot] = sequence = Sequence(request, slot, tokens)
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
            sequence.served = tokens[:count]

    def committed(self, gap: Gap) -> Ints:
        """Returns the tokens of a gap, int32; zeros if their values decide nothing: of a sequence
        without a prompt, or if tokens are not kept."""
        one = self._by_slot[gap.slot]
        if not one.tokens or not one.request.prompt:
            return np.zeros(gap.size, np.int32)
        return np.array(one.tokens[gap.start : gap.stop], np.int32)

    def last(self) -> Index:
        """Returns the position of each sequence's last committed token, [b]."""
        assert self.placement is not None, "positions without a cache"
        later, window = self.lengths - 1, self.placement.window
        if window is not None:
            later %= window
        position: Index = self._base[self.slots] + later
        return position

    def gaps(self, rows: abc.Sequence[int] | Index, spare: int = 0) -> list[Gap]:
        """Returns the committed tokens that the cache lacks, without each row's last one.

        Sequences that lack at most `spare` tokens are left out.
        """
        if self.placement is None or self.placement.stateless or not len(rows):
            return []
        chosen = np.asarray(rows, np.int64)
        slots, last = self.slots[chosen], self.last()[chosen]
        filled = self.filled[slots]
        short = np.flatnonzero(last - filled > max(spare, self.placement.lag))
        return [Gap(int(slots[n]), int(filled[n]), int(last[n])) for n in short]

    def opened_gaps(self, most: int = _ALL) -> list[Gap]:
        """Returns the next `most` tokens of opened prompts that the cache lacks; the last token of
        a prompt is never one of them, since its first round reads it."""
        gaps: list[Gap] = []
        if self.placement is None or self.placement.lag:
            return gaps
        for slot, one in self.opened.items():
            start, end = int(self.filled[slot]), len(one.request.prompt) - 1
            stop = min(end, start + most)
            if stop > start:
                gaps.append(Gap(slot, start, stop))
                most -= stop - start
        return gaps

    def stored_of(self, sequence: Sequence) -> list[int]:
        """Returns the tokens that a sequence's cache stores, if tokens are kept."""
        return sequence.tokens[: int(self.filled[sequence.slot])]

    def stored(self) -> list[Request]:
        """Returns the opened sequences whose whole prompts are stored."""
        short = {gap.slot for gap in self.opened_gaps()}
        return [one.request for slot, one in self.opened.items() if slot not in short]

    def fill(self, gaps: abc.Sequence[Gap]) -> Places:
        """Returns the places of all tokens of these gaps, which are filled from then on."""
        for gap in gaps:
            self.filled[gap.slot] = gap.stop
        return places_of(gaps)

    def trunk(self, num_draft: Ints) -> Places:
        """Returns the places of each sequence's last token and its num_draft served tokens."""
        if len(num_draft) == 1 and not self.tree.num_lanes:
            return self._trunk_of_one(int(num_draft[0]) + 1)
        counts, last = num_draft + 1, self.last()
        rows = np.repeat(np.arange(len(counts)), counts)
        ahead = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
        assert (self.filled[self.slots] >= last).all(), "a trunk after tokens that are missing"
        if self.tree.num_lanes:
            self._has_leaves = True
            return self._nodes(self.slots[rows], last[rows], ahead)
        self.filled[self.slots] = last + counts
        return _trunk(self.slots[rows], last[rows] + ahead)

    def _nodes(self, slots: Index, last: Index, nodes: Index) -> Places:
        """Returns the places of nodes, or of branches' (Branched), after the positions `last`; all
        are [n]."""
        self._moves_itself = False
        tree = self.layout or self.tree
        lanes, positions = tree.lanes[nodes], last + tree.depths[nodes]
        in_trunk = lanes < 0
        self.filled[slots[in_trunk]] = positions[in_trunk] + 1  # the deepest comes last
        ids = slots * tree.num_lanes + lanes + SPAN * (tree.spans[nodes] - 1)
        return _places(slots, positions, np.where(in_trunk, TRUNK, ids), last + tree.forks[nodes])

    def _trunk_of_one(self, count: int) -> Places:
        """Returns `trunk` of a batch of one sequence in a third of its time, for which every round
        waits: Python's integers instead of arrays of one."""
        assert self.placement is not None, "a trunk without a cache"
        slot, later = int(self.slots[0]), int(self.lengths[0]) - 1
        if self.placement.window is not None:
            later %= self.placement.window
        first = int(self._base[slot]) + later
        assert self.filled[slot] >= first, "a trunk after tokens that are missing"
        self.filled[slot] = first + count
        positions = np.arange(first, first + count, dtype=np.int32)
        slots, lanes = np.full(count, slot, np.int32), np.full(count, TRUNK, np.int32)
        return Places(slots, positions, lanes, positions)

    def grow(self, count: int, *, has_leaves: bool) -> None:
        """Notes that the tokens from each sequence's last one on are stored, `count` of them, and
        lanes, with nodes without children or not, from which the device copies accepted paths."""
        last, self._has_leaves, self._moves_itself = self.last(), has_leaves, True
        assert (self.filled[self.slots] >= last - 1).all(), "tokens after some that are missing"
        self.filled[self.slots] = last + count

    def room(self, capacity: int) -> Index:
        """Returns how many positions follow each sequence's last token, [b], before the cache
        ends, or before its positions begin again."""
        assert self.placement is not None, "positions without a cache"
        last, window = self.last(), self.placement.window
        if window is None:
            return capacity - 1 - last
        return np.minimum(capacity, self._base[self.slots] + window) - 1 - last

    def lanes(self, rows: Index, k: Ints, place: Ints) -> LanePlaces:
        """Returns the places of branches after k accepted tokens (in a tree: after node k) of batch
        rows `rows`; place: among the branches after those.

        Imposed tokens also make branches after tokens that a short trunk lacks. These never hit.
        They are placed at its end, so that they read only stored positions.
        """
        slots = self.slots[rows]
        if self.layout is not None:
            ids = self.layout.firsts[k] + place * self.layout.size
            return LanePlaces(slots, self.last()[rows], ids)
        first = np.minimum(self.last()[rows] + k + 1, self.filled[slots])
        return LanePlaces(slots, first, np.arange(len(rows)))

    def restart(self, rows: Index) -> LanePlaces:
        """Returns the places of lanes that continue batch rows `rows` in the cache."""
        return LanePlaces(self.slots[rows], self.last()[rows], np.full(len(rows), TRUNK))

    def step(self, lanes: LanePlaces, steps: int) -> Places:
        """Returns the places of the next step of these lanes, which have grown `steps` levels."""
        if self.tree.num_lanes:
            nodes = self.tree.inner[steps]
            slots, last = (np.repeat(of, len(nodes)) for of in (lanes.slots, lanes.first))
            if self.layout is not None and (lanes.ids != TRUNK).all():
                nodes = (lanes.ids[:, None] + self.layout.inner[nodes]).reshape(-1)
            else:
                self._has_leaves, nodes = False, np.tile(nodes, len(lanes.slots))
            return self._nodes(slots, last, nodes)
        positions = lanes.first + steps
        in_trunk = lanes.ids == TRUNK
        self.filled[lanes.slots[in_trunk]] = positions[in_trunk] + 1
        return _places(lanes.slots, positions, lanes.ids, lanes.first)

    def missing(self, lanes: LanePlaces, steps: int) -> list[Gap]:
        """Returns the gaps that lanes in the trunk have to fill before their first token."""
        assert self.placement is not None, "places without a cache"
        is_trunk = len(lanes.ids) and lanes.ids[0] == TRUNK
        if steps or not is_trunk or self.placement.stateless:
            return []
        filled = self.filled[lanes.slots]
        short = np.flatnonzero(lanes.first > filled).tolist()
        return [Gap(int(lanes.slots[n]), int(filled[n]), int(lanes.first[n])) for n in short]


def places_of(gaps: abc.Sequence[Gap]) -> Places:
    """Returns the places of all tokens of these gaps, in their order."""
    slots = np.repeat([gap.slot for gap in gaps], [gap.size for gap in gaps])
    return _trunk(slots, np.concatenate([np.arange(gap.start, gap.stop) for gap in gaps]))


def timed_places(rows: int, sequences: int, options: ForwardOptions) -> Places | None:
    """Returns places of `rows` rows after the mean context, for timing; None without a cache.

    Rows are grouped by sequence as in a verification, so that neighbours read the same keys and
    values. Their results are not used.
    """
    if not options.capacity:
        return None
    number = np.arange(rows)
    slots = number * min(sequences, rows) // rows
    later = number - np.searchsorted(slots, slots)
    return _trunk(slots, np.minimum(options.context + later, options.capacity - 1))


def _trunk(slots: Index, positions: Index) -> Places:
    return _places(slots, positions, np.full(len(slots), TRUNK), positions)


def _places(slots: Index, positions: Index, lanes: Index, trunks: Index) -> Places:
    return Places(
        slots.astype(np.int32),
        positions.astype(np.int32),
        lanes.astype(np.int32),
        trunks.astype(np.int32),
    )
