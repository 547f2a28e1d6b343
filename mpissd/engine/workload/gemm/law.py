"""The synthetic laws of the `gemm` workload: which tokens exist, are accepted, are predicted.

Every draw is keyed by (seed, purpose, sequence, absolute position), so AR, SD and SSD with any K,
hit law or timing emit the same tokens for one seed. What follows from the draws is tabulated a
window of positions at a time: the hot path only gathers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rng import Purpose, uniforms
from mpissd.common.rounds import Batch, Ints, Request, Source
from mpissd.engine.spec.acceptance import AcceptanceLaw, HitLaw
from mpissd.engine.spec.fanout import lanes_of
from mpissd.engine.workload.base import Admissions

WINDOW = 4096  # positions a slot's tables hold; a refill costs about a millisecond
_CANDIDATES = 1 << 18  # positions · widest F of a slot at most: a wide fan-out has fewer positions
_MARGIN = 4
Index = NDArray[np.int64]


class TokenStream:
    """Y(s,p) = floor(V·U(token,s,p)), by slot and position: what the target emits.

    Offsets are relative to each sequence's newest committed length n: offset 0 is position n.
    """

    def __init__(
        self, seed: int, vocab: int, capacity: int, lookahead: int, window: int = WINDOW
    ) -> None:
        self._seed, self.vocab, self.lookahead = seed, vocab, lookahead
        self._reach = 2 * lookahead + 4  # positions past n that a round may ask for
        self._window = max(window, 4 * self._reach)
        self._request = np.full(capacity, -1, np.int64)
        self._base = np.zeros(capacity, np.int64)  # slot · window - position of its first column
        self._limit = np.zeros(capacity, np.int64)  # lengths from here on need a refill
        self._true = np.zeros((capacity, self._window), np.int32)
        self._flat_true = self._true.reshape(-1)
        self._prepared: dict[int, list[NDArray[np.int32]]] = {}
        self._safe_rounds = 0  # for so many rounds no sequence can reach its limit
        self._origin: Index = np.zeros(0, np.int64)  # [b] flat index of position n

    def prepare(self, requests: Iterable[Request]) -> None:
        """Draws the first windows of sequences that will come, while no sequence is live: a fill
        takes a millisecond, which belongs to no round."""
        for request in requests:
            self._request[0] = request.request_id
            self._fill(0, 0)
            self._prepared[request.request_id] = [view.copy() for view in self._views(0)]

    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        """Makes every position that this round may ask for available."""
        for slot, request in admissions:
            self._request[slot] = request.request_id
            self._admit(slot, self._prepared.pop(request.request_id, None))
        self._safe_rounds -= 1
        if admissions or self._safe_rounds < 0:
            self._refill(batch)
        self._origin = self._base[batch.slots]
        self._origin += batch.lengths

    def true(self, offsets: Index, rows: Index | None = None) -> Ints:
        """Y at n + offsets, [b, …] (of batch rows `rows` alone, if given)."""
        return self._flat_true.take(self._index(offsets, rows))

    def row(self, count: int) -> list[int]:
        """Y at n … n + count − 1 of a batch of one."""
        first = int(self._origin[0])
        found: list[int] = self._flat_true[first : first + count].tolist()
        return found

    def _index(self, offsets: Index, rows: Index | None = None) -> Index:
        origin = self._origin if rows is None else self._origin[rows]
        return np.asarray(origin.reshape(-1, *(1,) * offsets.ndim) + offsets)

    def _refill(self, batch: Batch) -> None:
        for row in np.flatnonzero(batch.lengths >= self._limit[batch.slots]):
            self._fill(int(batch.slots[row]), max(0, int(batch.lengths[row]) - _MARGIN))
        if len(batch):
            room = self._limit[batch.slots] - batch.lengths
            self._safe_rounds = max(0, int(room.min()) // (self.lookahead + 1) - 1)

    def _admit(self, slot: int, prepared: list[NDArray[np.int32]] | None) -> None:
        if prepared is None:
            self._fill(slot, 0)
            return
        for view, saved in zip(self._views(slot), prepared, strict=True):
            view[...] = saved
        self._place(slot, 0)

    def _views(self, slot: int) -> list[NDArray[np.int32]]:
        """Everything that is tabulated for a slot."""
        return [self._true[slot]]

    def _fill(self, slot: int, start: int) -> None:
        """Tabulates positions start … start + window - 1 of the sequence in `slot`."""
        self._true[slot] = (self._draw(Purpose.TOKEN, slot, start) * self.vocab).astype(np.int32)
        self._place(slot, start)

    def _place(self, slot: int, start: int) -> None:
        self._base[slot] = slot * self._window - start
        self._limit[slot] = start + self._window - self._reach

    def _draw(self, purpose: Purpose, slot: int, start: int) -> NDArray[np.float64]:
        return uniforms(self._seed, purpose, int(self._request[slot]), start, self._window)


@dataclass(frozen=True)
class Offsets:
    """Of a sequence's lanes, each [ΣF]: the k of a candidate, how far its decoy lies from that of
    (p = n, place 0), and how many positions behind n its branch begins."""

    k: Ints
    decoy: Index
    behind: Index


class DraftStream(TokenStream):
    """What the draft proposes and predicts: x(s,p,i,src), and the rank of the true bonus token."""

    def __init__(
        self,
        seed: int,
        vocab: int,
        capacity: int,
        acceptance: Mapping[Source, AcceptanceLaw],
        hit_law: HitLaw,
        widest: int = 1,
    ) -> None:
        """widest: the most candidates that a row will ever keep (max F_k)."""
        lookahead = len(acceptance[Source.JIT].hazards)
        window = min(WINDOW, _CANDIDATES // widest)
        super().__init__(seed, vocab, capacity, lookahead, window)
        self._hit_law = hit_law
        plane = capacity * self._window
        # x of each law and place i of a round; sources with equal laws share a table.
        laws = {law.hazards for law in acceptance.values()}
        self._drafts = {
            law: np.zeros((lookahead, capacity, self._window), np.int32) for law in laws
        }
        self._table = {source: self._drafts[law.hazards] for source, law in acceptance.items()}
        self._flat_table = {source: table.reshape(-1) for source, table in self._table.items()}
        step = np.arange(lookahead, dtype=np.int64)
        self._places: Index = step * (plane + 1)  # flat step from (i = 0, p) to (i, p + i)
        # How many of the K tokens drafted from p on are accepted, by the source that drafted them.
        self._run = np.zeros((len(Source), capacity, self._window), np.int32)
        self._flat_run = self._run.reshape(-1)
        self._source_plane = plane
        # [0] decoys alone; [1] with Y at its rank's place, for the row that is the true outcome;
        # [2] likewise where all served tokens were accepted, if the hit law tells that apart
        planes = 1 + len(hit_law.ends)
        self._decoys = np.zeros((planes, capacity, self._window, widest), np.int32)
        self._flat_decoys = self._decoys.reshape(-1)
        self._widest = widest
        self._offsets: dict[tuple[int, ...], Offsets] = {}

    def offsets(self, fan_out: tuple[int, ...]) -> Offsets:
        """Where a sequence's lanes lie with these F_0 … F_K."""
        if fan_out not in self._offsets:
            k, place = lanes_of(fan_out)
            decoy = k.astype(np.int64) * self._widest + place
            self._offsets[fan_out] = Offsets(k, decoy, k.astype(np.int64) + 1)
        return self._offsets[fan_out]

    def drafts(self, source: Source, offsets: Index, rows: Index | None = None) -> Ints:
        """The K tokens x_1 … x_K drafted from position n + offsets on, [b, …, K]."""
        index = self._index(offsets[..., None] + self._places, rows)
        return self._flat_table[source].take(index)

    def candidates(
        self, source: Ints, num_draft: Ints, offsets: Offsets, rows: Index | None = None
    ) -> Ints:
        """Bonus candidates [n, ΣF] of batch rows `rows` [n] (None: all), behind trunks of
        `num_draft` [n] tokens from `source` [n].

        Distinct a row, and never the proposed token. Decoys, except where row k is the true
        outcome: there Y takes the place that its rank has, if it is within the fan-out.
        """
        origin = self._origin if rows is None else self._origin[rows]
        run = self._flat_run.take(source * self._source_plane + origin)
        accepted = np.minimum(run, num_draft)
        index = (origin * self._widest)[:, None] + offsets.decoy
        plane: Any = 1
        if len(self._decoys) > 2:
            plane = 1 + (accepted == num_draft)[:, None]
        index += (offsets.k == accepted[:, None]) * (plane * self._decoys[0].size)
        return self._flat_decoys.take(index)

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
        for source, table in self._table.items():
            self._run[source, slot] = leading(table[:, slot] == true)
        # Upwards from Y + 1, past the wrong token; the proposed token is one of Y and wrong.
        place = np.arange(self._widest)
        gap = (wrong - true - 1) % self.vocab
        shift = place + (place >= gap[:, None])
        decoys = (true[:, None] + 1 + shift) % self.vocab
        self._decoys[0, slot] = decoys
        uniform = self._draw(Purpose.RANK, slot, start)
        for plane, end in enumerate(self._hit_law.ends, 1):
            rank = self._hit_law.ranks(uniform, end)
            self._decoys[plane, slot] = np.where(place == rank[:, None] - 1, true[:, None], decoys)


def leading(matches: NDArray[np.bool_]) -> Ints:
    """[K, W] → [W]: at each p, the leading i with matches[i, p + i] (what lies beyond is False)."""
    lookahead, window = matches.shape
    run = np.zeros(window + lookahead, np.int32)
    alive = np.ones(window, np.bool_)
    for place in range(lookahead):
        alive[: window - place] &= matches[place, place:]
        alive[window - place :] = False
        run[:window] += alive
    return run[:window]
