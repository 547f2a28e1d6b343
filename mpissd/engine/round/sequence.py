"""The live sequences of one rank: their tokens, their rounds, and their places in the KV cache.

Every rank keeps a Batch. The batches of all ranks are equal, because all ranks apply the same
outcomes. An oracle, the object that decides tokens, only reads the batch, but stores a sequence's
grammar in `constraint`.

A sequence has a *slot* of the KV cache for its committed tokens, at positions 0, 1, …. The first
`filled` positions are stored and valid, so that a rollback only lowers this number. The forward
that reads a token stores the token's K and V. The *trunk* is the committed tokens and the *served*
tokens (the drafted tokens that the target verifies now); its K and V are stored in the slot.
*Branches*, the drafts that are grown for possible results of the verification, are stored in
*lanes*, scratch rows of the cache. A cache hit copies no K and V, because the draft's next forward
over the trunk writes the slot.
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
Prompt = Callable[[Request], Sequence[int]]  # maps a request to its prompt's tokens
_DRAWS = 512  # random numbers reserved for each round, which has at most 256 drafted tokens
_ROUNDS = 1 << 32  # more rounds than a run has; keeps random numbers of two epochs apart
_ALL = 1 << 30  # a number of tokens that no prompt reaches


@dataclass(frozen=True)
class Placement:
    """How sequences use a model's KV cache.

    context: the number of positions before a sequence without a prompt. They are never computed:
    attention reads their bytes, and no token depends on them. window: the number of committed
    tokens after which a sequence without a prompt reuses its positions, so that a run of any length
    fits (None: never). keeps: whether pages are kept for later sequences that begin with the same
    tokens. stateless: whether the model has no K and V, so that the cache never lacks a token. lag:
    for a draft that reads the target's hidden states, the number of tokens that it drafts in a
    round, else 0. Up to `lag` accepted tokens may be missing, because the draft's next step
    computes them again from these states; and no part of a prompt is stored before the target has
    computed these states. masks: the mask tokens that a parallel draft reads after the last token
    of a branch; their K and V are never read again. batches: makes a batch that can store draft
    trees (None: the class Batch).
    """

    context: int = 0
    window: int | None = None
    keeps: bool = False
    stateless: bool = False
    lag: int = 0
    masks: Sequence[int] = ()
    batches: Callable[[int, Placement | None, Prompt | None, Shape], Batch] | None = None


class Gap(NamedTuple):
    """Committed tokens that a slot of the KV cache has not stored: positions start … stop − 1."""

    slot: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of tokens that are not stored."""
        return self.stop - self.start


@dataclass(eq=False)
class LiveSequence:
    """One sequence that is being decoded, as this rank stores it.

    request: what the sequence answers. slot: the index of the sequence's part of the KV cache.
    tokens: the committed tokens, with the prompt. served: the drafted tokens that the target
    verifies now. rounds: the number of committed rounds. tokens, served and rounds are kept only if
    the oracle, which decides tokens, reads them. constraint: the grammar and its state, made by the
    oracle (None: no grammar, or not made yet).
    """

    request: Request
    slot: int
    tokens: list[int] = field(default_factory=list)
    served: list[int] = field(default_factory=list)
    rounds: int = 0
    constraint: Any = None
    _lookups: dict[str, Lookup] = field(default_factory=dict)  # {--lookup value: lookup}

    @property
    def name(self) -> tuple[int, int]:
        """The sequence's identity: (request id, number of its preemptions so far, the "epoch")."""
        return self.request.request_id, self.request.epoch

    @property
    def answer(self) -> list[int]:
        """The committed tokens of the answer, also those emitted before a preemption."""
        return self.tokens[len(self.request.prompt) - self.request.answered :]

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are asked for."""
        return self.request.sampling.prompt_logprobs is not None

    def path(self, columns: Sequence[int]) -> list[int]:
        """Returns the tokens under verification at `columns`, a path of the chain or tree."""
        return [self.served[column] for column in columns]

    def commit(self, columns: Sequence[int], bonus: int) -> None:
        """Appends the accepted tokens (the drafted ones at `columns`) and the bonus token."""
        self.tokens += self.path(columns)
        self.tokens.append(bonus)
        self.served = []
        self.rounds += 1

    def first_draw(self, later: int = 0) -> int:
        """Returns where the numbers of a round begin in the sequence's stream of random numbers.
        later: how many rounds it is after the current one. No two rounds share a number, even after
        a preemption, so that draws are independent."""
        return (self.request.epoch * _ROUNDS + self.rounds + later) * _DRAWS

    def stream(self, seed: int) -> tuple[int, int]:
        """Returns the key of the sequence's random draws: (the job's `seed`, request id), or (the
        request's seed, 0) if the request has one."""
        given = self.request.sampling.seed
        return (seed, self.request.request_id) if given is None else (given, 0)

    def looked_up(
        self, count: int, kind: str = "prompt", longest: int = LONGEST, filler: int | None = None
    ) -> list[int]:
        """Drafts `count` tokens without a model: copies the tokens that followed an earlier
        occurrence of the sequence's last tokens. kind: a value of --lookup. longest: the most last
        tokens to compare. filler: the token in missing places (None: the last token)."""
        if kind not in self._lookups:
            self._lookups[kind] = make_lookup(kind, longest)
        lookup = self._lookups[kind]
        lookup.follow(self.tokens)
        return lookup.padded(count, filler)


class Part(NamedTuple):
    """A part of a prompt that a forward stores. row: the forward's row of its first token."""

    sequence: LiveSequence
    gap: Gap
    row: int


class Change(NamedTuple):
    """The sequences that left or joined a batch with a round's outcome; the KV cache must follow.

    left: (slot, tokens that the slot stores) of each sequence that left. placed: the sequences that
    took a slot. started: the sequences whose first round comes next. moves: only for draft trees,
    (number of the scratch memory that stores an accepted path, the positions of the slot to copy
    the path to).
    """

    left: Sequence[tuple[int, list[int]]] = ()
    placed: Sequence[LiveSequence] = ()
    started: Sequence[LiveSequence] = ()
    moves: Sequence[tuple[int, Gap]] = ()


_UNCHANGED = Change()


class Batch:
    """The live sequences of a rank. A sequence's index, its "batch row", is the same in messages.

    Indexed by batch row: sequences; ids, the request ids; slots, of the KV cache; lengths, the
    numbers of committed tokens, with the prompt counted as one; last_tokens; identity, [b, 5],
    (request id, epoch, 0, 0, 0), an outcome's rows before tokens are entered; forced, the tokens
    that a grammar forced after the last bonus token. Indexed by slot: filled, how many positions
    the KV cache holds; opened, the sequences whose prompts are stored in parts (chunked prefill)
    before they join. digest: a CRC-32 of the applied outcomes, which ranks compare to detect that
    they differ.
    """

    def __init__(
        self,
        capacity: int,
        placement: Placement | None = None,
        prompt: Prompt | None = None,
        shape: Shape = CHAIN,
    ) -> None:
        """Makes an empty batch. capacity: the most sequences. placement: how sequences use the KV
        cache (None: there is none). prompt: maps a request to its prompt's tokens (None: tokens are
        not kept). shape: the chain or tree of drafted tokens; a tree in a KV cache needs TreeBatch.
        """
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
        self._by_slot: dict[int, LiveSequence] = {}  # the latest sequence of each slot
        self._steady = b""  # columns 0–2 of an outcome with which no sequence joins or leaves
        self._base = np.zeros(capacity, np.int64)  # by slot, where the prompt's last token is

    def __len__(self) -> int:
        return len(self.ids)

    def apply(self, outcome: Outcome) -> Change:
        """Applies the outcome of a round: commits accepted and bonus tokens, and returns which
        sequences join or leave. Raises ProtocolError if the outcome is of other sequences."""
        self.digest = crc32(outcome.rows.tobytes(), self.digest)
        change = _UNCHANGED
        moves = () if self.placement is None else self._moves(outcome)
        self.forced = {}
        if outcome.rows[:, :3].tobytes() != self._steady:  # bytes: ten times faster than arrays
            change = self._apply_changes(outcome)
        else:
            nodes = outcome.num_accepted
            self.lengths += nodes if self.shape.is_chain else self.shape.depths[nodes]
            self.lengths += 1
            self.last_tokens = outcome.bonus
            self._commit(self.sequences, outcome.rows)
        if self.placement is not None:  # invalidates rejected tokens
            self.filled[self.slots] = np.minimum(self.filled[self.slots], self.last())
        if change is not _UNCHANGED:
            self._force(outcome)
        return change._replace(moves=moves) if moves else change

    def _commit(self, sequences: Sequence[LiveSequence], rows: Ints) -> None:
        """Appends the accepted and bonus tokens in an outcome's `rows`, if tokens are kept."""
        if self._prompt is not None:
            paths = self.shape.paths
            for sequence, row in zip(sequences, rows.tolist(), strict=True):
                sequence.commit(paths[row[3]], row[4])

    def _force(self, outcome: Outcome) -> None:
        """Appends the tokens, one a row of the outcome, that grammars forced after bonus tokens."""
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
        """Returns the copies from scratch memory to slots that the accepted paths of draft trees
        need, and counts the copied tokens as stored. This class drafts chains, which need none."""
        return ()

    def _apply_changes(self, outcome: Outcome) -> Change:
        """Applies an outcome after which sequences join or leave the batch; returns the changes."""
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
        for request_id, epoch, event, *_ in others:  # sequences in `opened` join or leave
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
        """Gives a KV slot to each new sequence of an outcome, and returns these sequences. used:
        the slots of live sequences. Raises ProtocolError if too few slots are free."""
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
        """Stores the drafted tokens that the target verifies now, if this batch keeps tokens."""
        if self.placement is not None and self.placement.lag:
            self.filled[self.slots] = np.minimum(self.filled[self.slots], self.last() + 1)
        if self._prompt is None:
            return
        served = zip(speculation.tokens.tolist(), speculation.num_draft.tolist(), strict=True)
        for sequence, (tokens, count) in zip(self.sequences, served, strict=True):
            sequence.served = tokens[:count]

    def committed(self, gap: Gap) -> Ints:
        """Returns the committed tokens at the positions of `gap`, int32. Returns zeros if the
        sequence has no prompt or this batch keeps no tokens: nothing depends on them then."""
        sequence = self._by_slot[gap.slot]
        if not sequence.tokens or not sequence.request.prompt:
            return np.zeros(gap.size, np.int32)
        return np.array(sequence.tokens[gap.start : gap.stop], np.int32)

    def last(self) -> Index:
        """Returns the KV position of each sequence's last committed token, int64 [b]."""
        assert self.placement is not None, "positions without a cache"
        later = self.lengths - 1
        if self.placement.window is not None:
            later %= self.placement.window
        return self._base[self.slots] + later

    def gaps(self, rows: Sequence[int] | Index, spare: int = 0) -> list[Gap]:
        """Returns the positions that are not stored in the KV cache, as one Gap for each batch row
        of `rows` that lacks more than `spare` committed tokens. The last committed token never
        counts as lacking, because the next forward reads it."""
        if self.placement is None or self.placement.stateless or not len(rows):
            return []
        chosen = np.asarray(rows, np.int64)
        slots = self.slots[chosen]
        last = self.last()[chosen]
        filled = self.filled[slots]
        short = np.flatnonzero(last - filled > spare)
        return [Gap(int(slots[n]), int(filled[n]), int(last[n])) for n in short]

    def opened_gaps(self, most: int = _ALL) -> list[Gap]:
        """Returns which positions, at most `most` in all, to store next of the prompts that are
        stored in parts (chunked prefill). A prompt's last token is left to its first round."""
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
        """Returns the tokens of a sequence whose K and V are stored; [] if tokens are not kept."""
        return sequence.tokens[: int(self.filled[sequence.slot])]

    def stored(self) -> list[Request]:
        """Returns the requests, among those stored in parts, whose whole prompts are stored now."""
        short = {gap.slot for gap in self.opened_gaps()}
        return [opened.request for slot, opened in self.opened.items() if slot not in short]

    def store(self, gaps: Sequence[Gap]) -> Places:
        """Returns where a forward over the tokens of `gaps` (ranges of positions that are not
        stored yet) stores K and V in the KV cache, and counts these tokens as stored."""
        for gap in gaps:
            self.filled[gap.slot] = gap.stop
        return places_of(gaps)

    def trunk(self, num_draft: Ints) -> Places:
        """Returns where the forward that verifies (or, on the draft, scores) drafted tokens stores
        its rows in the KV cache, and counts them as stored. The rows are each sequence's last token
        and its drafted tokens, as many as num_draft [b] gives."""
        if len(num_draft) == 1:
            return self._trunk_of_one(int(num_draft[0]) + 1)
        counts = num_draft + 1
        last = self.last()
        rows = np.repeat(np.arange(len(counts)), counts)
        ahead = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
        assert (self.filled[self.slots] >= last).all(), "a trunk after tokens that are missing"
        return self._served_places(self.slots[rows], last[rows], ahead)

    def _served_places(self, slots: Index, last: Index, nodes: Index) -> Places:
        """Returns the KV places of rows that verify drafted tokens, and counts them as stored.
        slots, last: by row, the sequence's slot and the position of its last committed token.
        nodes: 0 for the row of that token, i for that of the i-th drafted token."""
        positions = last + nodes
        self.filled[slots] = positions + 1  # The last row of each slot counts.
        return trunk_places(slots, positions)

    def _trunk_of_one(self, count: int) -> Places:
        """Returns what `trunk` returns, for a batch of one sequence and `count` rows, in a third of
        the time, for which every round waits."""
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
        """Returns branches for possible outcomes of this round, with places in the KV cache. The
        parameters are the attributes of Branches. Synthetic and recorded drafts may have branches
        for more accepted tokens than are being verified. No outcome can hit these, so they are
        placed right after the verified tokens."""
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
        """Returns branches that continue the committed tokens of batch rows `rows`. Their K and V
        are stored in the sequences' slots. tokens, states: the attributes of Branches."""
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
        """Returns where the next draft forward stores its rows in the KV cache. places: where the
        branches begin. steps: how many levels they have already. With mask tokens (a parallel
        draft), their rows follow the row of each branch."""
        assert self.placement is not None, "places without a cache"
        slots, starts, lanes = places
        positions = starts + steps
        in_trunk = lanes == TRUNK
        self.filled[slots[in_trunk]] = positions[in_trunk] + 1
        if count := len(self.placement.masks):  # mask tokens do not count as stored
            ahead = np.tile(np.arange(1 + count), len(slots))
            columns = (slots, starts, lanes, positions)
            slots, starts, lanes, positions = (np.repeat(column, 1 + count) for column in columns)
            positions += ahead
        return int32_places(slots, positions, lanes, starts)


def places_of(gaps: Sequence[Gap]) -> Places:
    """Returns where a forward over `gaps` (ranges of positions not stored yet) stores K and V."""
    slots = np.repeat([gap.slot for gap in gaps], [gap.size for gap in gaps])
    return trunk_places(slots, np.concatenate([np.arange(gap.start, gap.stop) for gap in gaps]))


def trunk_places(slots: Index, positions: Index) -> Places:
    """Returns where rows store K and V, by their slots and positions, if not in scratch memory."""
    return int32_places(slots, positions, np.full(len(slots), TRUNK), positions)


def int32_places(slots: Index, positions: Index, lanes: Index, trunks: Index) -> Places:
    """Returns the arguments, one number a row of a forward, as int32 fields of Places."""
    return Places(*np.array((slots, positions, lanes, trunks), np.int32))
