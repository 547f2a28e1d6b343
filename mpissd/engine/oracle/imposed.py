"""The `gemm` workload: synthetic tokens; flags say how often drafted tokens are accepted, and how
often the draft predicts the bonus token.

A random draw depends only on (seed, purpose, sequence, absolute position), so that AR, SD and SSD
with any number of drafted tokens, any cache-hit probability or timing emit the same tokens. The
target's tokens, the drafted tokens and the bonus candidates are drawn for a window of positions at
a time, and kept in tables.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.rng import Purpose, uniforms
from mpissd.common.rounds import Ints, Request, Source, Speculation
from mpissd.engine.law.acceptance import AcceptanceLaw, HitLaw, count_accepted
from mpissd.engine.law.fanout import FanOuts, lanes_of
from mpissd.engine.law.lookup import LONGEST
from mpissd.engine.law.tree import CHAIN, Shape
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.oracle.workload import Workload, laws_label
from mpissd.engine.round.branches import Branches
from mpissd.engine.round.oracle import DraftOracle, Oracle, Proposals, TargetOracle
from mpissd.engine.round.sequence import Batch, Index, LiveSequence

WINDOW = 4096  # the positions of a sequence that are drawn at a time, in about a millisecond
_CANDIDATES = 1 << 18  # the most bonus candidates drawn at a time for a sequence
_MARGIN = 4  # the number of positions before the current one that newly drawn tables still hold


class Stream:
    """A table of the synthetic or recorded tokens that the target emits. Subclasses for a draft
    also have tables of drafted tokens; only they implement `grown` and the methods after it.

    Let n be the position after a sequence's newest committed token; offsets are relative to n. In
    begin_round a subclass sets `_origin` [b], the table index of each sequence's position n.
    """

    lookahead: int
    _table: Ints
    _origin: Index = np.zeros(0, np.int64)

    def prepare(self, requests: Iterable[Request]) -> None:
        """Draws the first tokens of these requests' sequences in advance, before any sequence is
        live. The default does nothing."""

    def begin_round(self, batch: Batch, started: Sequence[LiveSequence]) -> None:
        """Sets `_origin`, the table index of each sequence's next position, for the coming round.
        started: the sequences whose first round it is."""
        raise NotImplementedError

    def true(self, offsets: Index) -> Ints:
        """Returns the target's tokens at the positions `offsets` after the next one, of every
        sequence: int32 [b, …] for offsets […]."""
        return self._table.take(self._index(offsets))

    def trees(self) -> tuple[Ints, Ints] | None:
        """Returns the trees of this round (Branches.trees) if they change shape each round. Then
        `restarts` returns their accepted tokens, and −1 after them. The default returns None."""
        return None

    def row(self, count: int) -> list[int]:
        """Returns the next `count` tokens of the target, for a batch of one sequence."""
        first = int(self._origin[0])
        tokens: list[int] = self._table[first : first + count].tolist()
        return tokens

    def grown(
        self, speculation: Speculation, fan_out: tuple[int, ...], rows: Index | None = None
    ) -> tuple[Ints, Ints]:
        """Returns (the bonus candidates of each of n sequences, [n, ΣF]; the K tokens drafted after
        each candidate, [n, ΣF, K]), while `speculation` is verified. fan_out: F, the candidates
        after each number of accepted tokens. rows: their batch rows (None: all)."""
        raise NotImplementedError

    def restarts(self, source: Source, rows: Index) -> Ints:
        """Returns the K tokens that `source` drafts for each of the n batch rows `rows`, which
        missed the speculation cache: int32 [n, K]."""
        raise NotImplementedError

    def ranked(self, rows: Index, depths: Index, ranks: Index, ahead: Index | int = 0) -> Ints:
        """Returns m predictions of the draft for each of n sequences, int32 [n, m]: number j has
        rank ranks[j] (0: the likeliest token), and follows the sequence's next ahead + depths[j]
        tokens of the target. rows: the batch rows of the sequences. ahead: [n], or one number."""
        raise NotImplementedError

    def nodes(self, shape: Shape, rows: Index, ahead: Index | int = 0) -> Ints:
        """Returns the N tokens of a draft tree of this shape for each of n batch rows, int32 [n,
        N]. The tree begins after the sequence's next `ahead` tokens of the target."""
        return self.ranked(rows, shape.depths[1:] - 1, shape.ranks[1:], ahead)

    def after(
        self, speculation: Speculation, shape: Shape, rows: Index, nodes: Ints, ranks: Ints
    ) -> Ints:
        """Returns m bonus candidates for each of n batch rows `rows`, int32 [n, m]. Number j comes
        after node nodes[j] of the draft tree that is being verified (`speculation`, of this
        `shape`). It has rank ranks[j] among the tokens that are not the node's children."""
        taken: Index = np.array([len(children) for children in shape.children])
        return self.ranked(rows, shape.depths[nodes], taken[nodes] + ranks)

    def _index(self, offsets: Index, rows: Index | None = None) -> Index:
        """Returns the table indices, [b, …], of the positions `offsets` […] after the next one.
        rows: the batch rows (None: all)."""
        origin = self._origin if rows is None else self._origin[rows]
        return np.asarray(origin.reshape(-1, *(1,) * offsets.ndim) + offsets)


class TokenStream(Stream):
    """A table of the synthetic tokens that the target emits, by KV cache slot and position. Each is
    drawn uniformly from the vocabulary, by a random number of the sequence and the position."""

    def __init__(
        self, seed: int, vocab: int, capacity: int, lookahead: int, window: int = WINDOW
    ) -> None:
        self._seed = seed
        self.vocab = vocab
        self.lookahead = lookahead
        self._reach = 2 * lookahead + 4  # how many positions after the current one a round may read
        self._window = max(window, 4 * self._reach)
        self._request = np.full(capacity, -1, np.int64)
        # By slot: the table index of position 0, and the sequence length that needs a refill.
        self._base, self._limit = np.zeros((2, capacity), np.int64)
        self._true = np.zeros((capacity, self._window), np.int32)
        self._table = self._true.reshape(-1)
        self._prepared: dict[int, list[NDArray[np.int32]]] = {}
        self._safe_rounds = 0  # for so many rounds no sequence needs a refill

    def prepare(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._request[0] = request.request_id
            self._fill(0, 0)
            self._prepared[request.request_id] = [view.copy() for view in self._views(0)]

    def begin_round(self, batch: Batch, started: Sequence[LiveSequence]) -> None:
        for sequence in started:
            name = sequence.request.request_id
            slot = sequence.slot
            self._request[slot] = name
            if (prepared := self._prepared.pop(name, None)) is None:
                self._fill(slot, 0)
                continue
            for view, saved in zip(self._views(slot), prepared, strict=True):
                view[...] = saved
            self._place(slot, 0)
        self._safe_rounds -= 1  # while it is ≥ 0, no sequence needs a refill
        if started or self._safe_rounds < 0:
            for row in np.flatnonzero(batch.lengths >= self._limit[batch.slots]):
                self._fill(int(batch.slots[row]), max(0, int(batch.lengths[row]) - _MARGIN))
            if len(batch):
                room = self._limit[batch.slots] - batch.lengths
                self._safe_rounds = max(0, int(room.min()) // (self.lookahead + 1) - 1)
        self._origin = self._base[batch.slots]
        self._origin += batch.lengths

    def _views(self, slot: int) -> list[NDArray[np.int32]]:
        """Returns writable views of a slot's part of every table, to save and restore it."""
        return [self._true[slot]]

    def _fill(self, slot: int, start: int) -> None:
        self._true[slot] = (self._draw(Purpose.TOKEN, slot, start) * self.vocab).astype(np.int32)
        self._place(slot, start)

    def _place(self, slot: int, start: int) -> None:
        self._base[slot] = slot * self._window - start
        self._limit[slot] = start + self._window - self._reach

    def _draw(self, purpose: Purpose, slot: int, start: int) -> NDArray[np.float64]:
        return uniforms(self._seed, purpose, int(self._request[slot]), start, self._window)


class DraftStream(TokenStream):
    """Tables of synthetic drafted tokens and of candidates for the bonus token.

    A drafted token depends on the sequence, the position, its place 0 … K − 1 in the round, and the
    source that drafted it. The target's token has a randomly drawn rank in a list of candidates.
    """

    def __init__(
        self,
        seed: int,
        vocab: int,
        capacity: int,
        acceptance: Mapping[Source, AcceptanceLaw],
        hit_law: HitLaw,
        widest: int = 1,
    ) -> None:
        """seed: of all draws. vocab: the size of the vocabulary. capacity: the most live sequences.
        acceptance: the acceptance rates, by what drafts. hit_law: the distribution of the bonus
        token's rank among the candidates. widest: the most candidates at one position."""
        lookahead = len(acceptance[Source.JIT].hazards)
        window = min(WINDOW, _CANDIDATES // widest)
        super().__init__(seed, vocab, capacity, lookahead, window)
        self._hit_law = hit_law
        plane = capacity * self._window
        # {acceptance rates: table of drafted tokens, [place in the draft, slot, position]}
        laws = {law.hazards for law in acceptance.values()}
        self._drafts = {
            law: np.zeros((lookahead, capacity, self._window), np.int32) for law in laws
        }
        self._by_source = {source: self._drafts[law.hazards] for source, law in acceptance.items()}
        self._flat_drafts = {source: table.reshape(-1) for source, table in self._by_source.items()}
        step = np.arange(lookahead, dtype=np.int64)
        # element i: the distance in a flat table from [0, slot, p] to [i, slot, p + i]
        self._places: Index = step * (plane + 1)
        # [source, slot, p]: how many of the K tokens drafted from position p on are accepted
        self._run = np.zeros((len(Source), capacity, self._window), np.int32)
        self._flat_run = self._run.reshape(-1)
        self._source_plane = plane
        # Candidates by rank. Plane 0 has only wrong tokens, for any k that is not accepted.
        # Planes 1 (and 2, after K accepted tokens) have the target's token at its drawn rank.
        # Planes from _first_level on, one a tree level, have it at a rank drawn as measured.
        self._levels = acceptance[Source.JIT].levels[:lookahead]
        self._first_level = 1 + len(hit_law.ends)
        planes = self._first_level + len(self._levels)
        self._decoys = np.zeros((planes, capacity, self._window, widest), np.int32)
        self._flat_decoys = self._decoys.reshape(-1)
        self._widest = widest
        # {fan-out: (k, candidate index, offset of the drafted tokens)}, each [ΣF], for a sequence
        self._lanes: dict[tuple[int, ...], tuple[Index, Index, Index]] = {}

    def drafts(self, source: Source, offsets: Index, rows: Index | None = None) -> Ints:
        """Returns the K tokens that `source` drafts from the positions `offsets` […] after the next
        one on, [b, …, K]. rows: the batch rows (None: all)."""
        index = self._index(offsets[..., None] + self._places, rows)
        return self._flat_drafts[source].take(index)

    def grown(
        self, speculation: Speculation, fan_out: tuple[int, ...], rows: Index | None = None
    ) -> tuple[Ints, Ints]:
        # Candidates after any other number of tokens than will be accepted are all wrong.
        # After that number, the candidate at the drawn rank is the target's token.
        chosen = slice(None) if rows is None else rows
        source = speculation.source[chosen]
        num_draft = speculation.num_draft[chosen]
        origin = self._origin[chosen]
        if fan_out not in self._lanes:
            lane_k, place = lanes_of(fan_out)
            wide = lane_k.astype(np.int64)
            self._lanes[fan_out] = wide, wide * self._widest + place, wide + 1
        k, decoy, branch = self._lanes[fan_out]
        run = self._flat_run.take(source * self._source_plane + origin)
        accepted = np.minimum(run, num_draft)
        index = (origin * self._widest)[:, None] + decoy
        plane: Any = 1
        if self._first_level > 2:
            plane = 1 + (accepted == num_draft)[:, None]
        index += (k == accepted[:, None]) * (plane * self._decoys[0].size)
        return self._flat_decoys.take(index), self.drafts(Source.CACHE, branch, rows)

    def restarts(self, source: Source, rows: Index) -> Ints:
        return self.drafts(source, np.zeros((), np.int64), rows)

    def nodes(self, shape: Shape, rows: Index, ahead: Index | int = 0) -> Ints:
        levels = shape.depths[1:] - 1
        planes = self._first_level + levels if self._levels else 1
        return self.ranked(rows, levels, shape.ranks[1:], ahead, planes)

    def ranked(
        self,
        rows: Index,
        depths: Index,
        ranks: Index,
        ahead: Index | int = 0,
        planes: Index | int = 1,
    ) -> Ints:
        # At depth K nothing is drafted, so that even the likeliest token is a bonus candidate.
        origin = (self._origin[rows] + ahead)[:, None]
        is_end = depths == self.lookahead
        level = np.minimum(depths, self.lookahead - 1)
        firsts = self._flat_drafts[Source.JIT].take(origin + self._places[level])
        is_first = firsts == self._table.take(origin + level)
        later = np.where(is_end, ranks, np.maximum(ranks - 1, 0))
        # Chooses the plane: after K accepted tokens, without the target's token, or with it.
        plane = np.where(is_end, self._first_level - 1, np.where(is_first, 0, planes))
        index = (origin + depths) * self._widest + later + plane * self._decoys[0].size
        return np.where(is_end | (ranks > 0), self._flat_decoys.take(index), firsts)

    def _views(self, slot: int) -> list[NDArray[np.int32]]:
        tables = [table[:, slot] for table in self._drafts.values()]
        return [*super()._views(slot), *tables, self._run[:, slot], self._decoys[:, slot]]

    def _fill(self, slot: int, start: int) -> None:
        super()._fill(slot, start)
        true = self._true[slot]
        other = (self._draw(Purpose.WRONG, slot, start) * (self.vocab - 1)).astype(np.int32)
        wrong = other + (other >= true)
        coin = self._draw(Purpose.ACCEPT, slot, start)
        for hazards, table in self._drafts.items():
            for i, rate in enumerate(hazards):
                table[i, slot] = np.where(coin < rate, true, wrong)
        for source, table in self._by_source.items():
            self._run[source, slot] = leading(table[:, slot] == true)
        # Wrong candidates are the ids after the target's, without the wrong drafted token.
        place = np.arange(self._widest)
        gap = (wrong - true - 1) % self.vocab
        shift = place + (place >= gap[:, None])
        decoys = (true[:, None] + 1 + shift) % self.vocab
        self._decoys[0, slot] = decoys
        uniform = self._draw(Purpose.RANK, slot, start)
        for plane, end in enumerate(self._hit_law.ends, 1):
            rank = self._hit_law.ranks(uniform, end)
            self._decoys[plane, slot] = np.where(place == rank[:, None] - 1, true[:, None], decoys)
        for plane, (first, *later) in enumerate(self._levels, self._first_level):
            place_of = np.searchsorted(np.cumsum(later), uniform * (1 - first), side="right")
            place_of[place_of == len(later)] = -1  # a token of no measured rank is no candidate
            self._decoys[plane, slot] = np.where(place == place_of[:, None], true[:, None], decoys)


def leading(matches: NDArray[np.bool_]) -> Ints:
    """Returns, for each position p, how many tokens of a draft that begins there are accepted,
    int32 [W]: the number of i = 0, 1, … in a row with matches[i, p + i]. matches: whether the i-th
    token of a draft equals the target's if it is at position p, bool [K, W]."""
    lookahead, window = matches.shape
    run = np.zeros(window + lookahead, np.int32)
    alive = np.ones(window, np.bool_)
    for place in range(lookahead):
        alive[: window - place] &= matches[place, place:]
        alive[window - place :] = False
        run[:window] += alive
    return run[:window]


class Imposed(Oracle):
    """Base class of oracles that read synthetic or recorded tokens (a Stream), and run no model."""

    chains = True
    _stream: Stream

    def prepare(self, requests: Iterable[Request]) -> None:
        self._stream.prepare(requests)

    def begin_round(self, batch: Batch, started: Sequence[LiveSequence]) -> None:
        self._stream.begin_round(batch, started)


class ImposedTarget(Imposed, TargetOracle):
    """Decides tokens for the target: emits the synthetic or recorded tokens of `stream`, and
    accepts the drafted tokens up to the first that differs from them."""

    def __init__(self, stream: Stream, shape: Shape = CHAIN) -> None:
        super().__init__(shape)
        self._stream = stream
        self._ahead: Index = np.arange(stream.lookahead + 1, dtype=np.int64)

    def truth(self) -> Ints:
        return self._stream.true(self._ahead)

    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """Returns (number of accepted tokens, bonus token) of each sequence, int32 [b]."""
        shape = self.shape
        drafts = speculation.tokens
        if len(batch) == 1:  # without NumPy, which saves 12 to 18 µs
            tokens = self._stream.row(len(self._ahead))
            count = int(speculation.num_draft[0])
            node = shape.walk(drafts[0].tolist(), tokens, shape.levels, count)
            return np.array([node], np.int32), np.array([tokens[shape.levels[node]]], np.int32)
        true = self._stream.true(self._ahead)  # [b, K+1]
        if not shape.is_chain:
            rows = zip(drafts.tolist(), true.tolist(), speculation.num_draft.tolist(), strict=True)
            nodes = np.array([shape.walk(row, best, shape.levels, n) for row, best, n in rows])
            return nodes.astype(np.int32), true[np.arange(len(nodes)), shape.depths[nodes]]
        accepted = count_accepted(speculation.tokens, true, speculation.num_draft)
        row_starts = np.arange(0, true.size, len(self._ahead))
        return accepted, true.reshape(-1).take(row_starts + accepted)


class ImposedDraft(Imposed, DraftOracle):
    """Decides drafted tokens and bonus candidates by tables of synthetic or recorded tokens."""

    copies = ("prompt", LONGEST, None)  # as in SampledDraft

    def __init__(self, stream: Stream, num_tokens: int = 1, shape: Shape = CHAIN) -> None:
        """stream: the tables. num_tokens: how many tokens one draft forward drafts for a sequence
        (1, or K with Medusa heads)."""
        super().__init__(stream.lookahead, shape)
        self._stream = stream
        self._num_tokens = num_tokens
        # {(fan-out, batch size): of each branch (batch row, accepted tokens, candidate's rank)}
        self._outcomes: dict[tuple[tuple[int, ...], int], tuple[Index, Ints, Ints]] = {}

    def branches(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        """Returns a branch, with all its drafted tokens, for each bonus candidate of each sequence
        after each possible number k of accepted tokens."""
        sources = [0] if fan_outs.is_one else sorted(set(speculation.source.tolist()))
        if len(sources) == 1:
            fan_out = fan_outs.after_hit if fan_outs.is_one else fan_outs.behind(sources[0])
            return batch.grown_ahead(*self._grown(speculation, fan_out))
        parts = []
        for source in sources:
            rows = np.flatnonzero(speculation.source == source)
            parts.append(self._grown(speculation, fan_outs.behind(source), rows))
        rows, nodes, ranks, first, tokens = map(np.concatenate, zip(*parts, strict=True))
        return batch.grown_ahead(rows, nodes, ranks, first, tokens)

    def _grown(
        self, speculation: Speculation, fan_out: tuple[int, ...], rows: Index | None = None
    ) -> tuple[Index, Ints, Ints, Ints, Ints]:
        """Returns the arrays (rows, nodes, ranks, first, tokens) of Branches for the branches of
        batch rows `rows` (None: all), grown for the outcomes of verifying `speculation`."""
        shape = self.shape
        chosen = np.arange(len(speculation.rows)) if rows is None else rows
        if not shape.is_chain:
            node, rank = lanes_of(fan_out)
            candidates = self._stream.after(speculation, shape, chosen, node, rank)
            ahead = np.tile(shape.depths[node] + 1, len(chosen))
            tokens = self._stream.nodes(shape, np.repeat(chosen, len(node)), ahead)
        else:
            candidates, tokens = self._stream.grown(speculation, fan_out, rows)
        key = fan_out, len(candidates)
        outcomes = self._outcomes.get(key) if rows is None else None
        if outcomes is None:
            nodes, ranks = (np.tile(column, len(chosen)) for column in lanes_of(fan_out))
            outcomes = np.repeat(chosen, sum(fan_out)), nodes, ranks
            if rows is None:
                self._outcomes[key] = outcomes
        first = candidates.reshape(-1)
        return *outcomes, first, tokens.reshape(len(first), -1)

    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Branches:
        chosen = np.asarray(rows, np.int64)
        stream = self._stream
        if self.shape.is_chain:
            branches = batch.restarted(chosen, stream.restarts(source, chosen))
            branches.trees = stream.trees()
            return branches
        return batch.restarted(chosen, stream.nodes(self.shape, chosen))

    def collect(self, grown: Sequence[Branches], first_row: int) -> None:
        for branches in grown:
            branches.advance(self._num_tokens)


class GemmWorkload(Workload):
    """The workload of synthetic tokens, which are accepted and predicted as often as flags say."""

    is_imposed = True
    drafts_in_parallel = True

    @property
    def vocab(self) -> int:
        return self.job.target.vocab_size

    @property
    def law(self) -> str:
        job = self.job
        if job.config.is_lookup:
            return f"acceptance {self._labels[1]} of looked-up tokens"
        hits = f", hits {job.hit_law.label}" if job.fan_out else ""
        return f"acceptance {self._labels[0]}{hits}"

    @property
    def _labels(self) -> tuple[str, str]:
        """(acceptance rates of tokens that a model drafts, rates of tokens that a lookup copies) as
        text: the values of flags, or the numbers of a --laws file for this many drafted tokens."""
        job = self.job
        if job.config.laws is None:
            return job.config.acceptance_text, job.config.acceptance_fast
        return job.acceptance[Source.CACHE].label, job.acceptance[Source.FAST].label

    def check(self) -> None:
        """Raises ConfigError if the vocabulary has fewer wrong tokens than a fan-out needs."""
        super().check()
        if self.job.fan_out and self.job.widest + 2 > self.vocab:
            raise ConfigError(
                f"fan_out {self.job.config.fan_out}: {self.job.widest} a row: allowed: at most "
                f"vocab_size - 2 = {self.vocab - 2}"
            )

    def target_oracle(self, stepper: Forwards) -> ImposedTarget:
        job = self.job
        stream = TokenStream(job.config.seed, self.vocab, job.config.batch_size, job.lookahead)
        return ImposedTarget(stream, job.shape)

    def draft_oracle(self, stepper: Forwards) -> ImposedDraft:
        job = self.job
        config = job.config
        stream = DraftStream(
            config.seed, self.vocab, config.batch_size, job.acceptance, job.hit_law, job.widest
        )
        return ImposedDraft(stream, job.tokens_a_forward, job.shape)

    def requests(self, first_id: int, count: int) -> list[Request]:
        ids = range(first_id, first_id + count)
        return [Request(n, first_token=n % self.vocab) for n in ids]

    def row_fields(self) -> dict[str, Any]:
        job = self.job
        config = job.config
        if job.draft is None:
            return {}
        return {
            "acceptance": self._labels[0],
            "acceptance_fast": self._labels[1] if config.backup == "fast" else None,
            "hit_law": job.hit_law.label if job.fan_out or config.tree else None,
            "laws": laws_label(config),
        }
