"""The interface of a model: what its forwards (batched runs of the network) take and return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.common.wait import Waiter

SPAN = 1 << 20  # above the number of lanes of any cache (see Places)
MOST_SPAN = (1 << 31) // SPAN  # lanes that one row may be stored in: Places.lanes is int32


@dataclass(frozen=True)
class Places:
    """Where a forward's n rows (tokens) lie in the KV cache of a model that keeps one.

    A *slot* is one sequence's part of the cache. A *lane* is scratch memory for the K and V of one
    branch: tokens after a sequence that may still be rejected. A *trunk row* (lane −1) stores its K
    and V in its slot and attends the slot's positions up to its own. A *lane row* stores them in
    scratch[lane][position − trunk], and attends the slot's positions below its trunk and the lane's
    up to its own. All rows store their K and V before any of them attends.

    All arrays are int32 [n]. slots: of each row's sequence. positions: of the row in its sequence,
    from 0. lanes: as above; a lane plus n · SPAN is stored in the n lanes after it as well. trunks:
    the tokens that the slot holds before a lane row's branch. reads: whether the candidates or
    logits of some row are read; without, the LM head may be left out (chunks of a prompt).
    """

    slots: Ints
    positions: Ints
    lanes: Ints
    trunks: Ints
    reads: bool = True

    @property
    def columns(self) -> tuple[Ints, Ints, Ints, Ints]:
        """The four arrays, in the order of cache.RowPlaces.rows."""
        return self.slots, self.positions, self.lanes, self.trunks

    def part(self, rows: slice) -> Places:
        """Returns the places of these rows of a prompt, whose candidates are not read."""
        slots, positions, lanes, trunks = (column[rows] for column in self.columns)
        return Places(slots, positions, lanes, trunks, reads=False)


def joined(parts: Sequence[Places], *, reads: bool = True) -> Places:
    """Returns the concatenated places of several groups of rows; reads=False: none is read."""
    if len(parts) == 1 and reads:
        return parts[0]
    columns = zip(*(part.columns for part in parts), strict=True)
    slots, positions, lanes, trunks = map(np.concatenate, columns)
    return Places(slots, positions, lanes, trunks, reads and any(part.reads for part in parts))


@dataclass(frozen=True)
class Results:
    """The k best candidates of each row over the whole vocabulary, best first. ids: int32 [heads,
    n, k]; heads is 1 for a model with one LM head or none. values: the logits of the candidates,
    float32 [heads, n, k]; None without ForwardOptions.values."""

    ids: Ints
    values: NDArray[np.float32] | None = None


class Forwards(Protocol):
    """A model that computes one forward at a time: upload, launch, wait, then read its results."""

    @property
    def most_rows(self) -> int:
        """The most rows that one forward may have."""

    def upload(
        self, rows: int, tokens: Ints, places: Places | None = None, *, lists: bool = False
    ) -> None:
        """Sets the number of rows and the input tokens of the next forward. tokens: int32 [n], of
        the first n rows; the other rows − n rows are padding. places: of these n rows. lists:
        whether ForwardOptions.top_k candidates are read of each row, or one."""

    def launch(self) -> None:
        """Starts the forward that was last uploaded."""

    def wait(self, waiter: Waiter) -> None:
        """Returns when the last launched forward is over."""

    def elapsed_s(self) -> float:
        """Returns the device time of the last finished forward, in seconds."""

    def results(self) -> Results:
        """Returns the last finished forward's candidates; must be called before the next upload.
        Raises NotImplementedError where nothing is computed."""

    def logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Returns this rank's logits of these rows, float32 [len(rows), columns], under the same
        conditions as `results`."""

    def move(self, lane: int, slot: int, start: int, stop: int) -> None:
        """Copies the first stop − start K and V of a lane to positions start … of a slot."""

    def release(self, slots: Sequence[int]) -> None:
        """Frees the cache of these slots, because their sequences have ended."""


def merged(ids: Ints, values: NDArray[np.float32]) -> Results:
    """Merges the candidates of T shards: returns the k best of all, [heads, n, k]. ids, values:
    [heads, T, n, k], each shard's own k best. The lower id wins a tie."""
    heads, shards, count, k = ids.shape
    tokens = ids.swapaxes(1, 2).reshape(heads, count, shards * k)
    scores = values.swapaxes(1, 2).reshape(heads, count, shards * k)
    order = np.lexsort((tokens, -scores), axis=-1)[..., :k]
    return Results(np.take_along_axis(tokens, order, -1), np.take_along_axis(scores, order, -1))


@dataclass(frozen=True)
class Drafting:
    """Asks a draft to sample the next token from the logits of a row of its last forward. u: the
    uniform number in [0, 1) that decides the token. top: of how many of the largest logits
    Saguaro's sampling reduces the weights; 0: none."""

    row: int
    temperature: float
    u: float
    top: int = 0


@dataclass(frozen=True)
class Proposed:
    """A sampled draft token, and the probability q that it had. kept: the distribution on the
    device; numpy.asarray copies it to the host, float32 [columns]."""

    token: int
    q: float
    kept: Any


@dataclass(frozen=True)
class Judging:
    """Asks the target whether a drafted token is accepted, and for a replacement if it is not.

    row: of the target's last forward. coin, u: the uniform numbers in [0, 1) that decide acceptance
    and the replacement. q: the token's probability in the draft; 1: it was certain; 0: nothing was
    drafted, so the target's token is sampled. kept: the draft's distribution (Proposed.kept), read
    only if the token is rejected and q < 1.
    """

    row: int
    temperature: float
    u: float
    token: int = -1
    q: float = 0.0
    coin: float = 0.0
    kept: Any = None


@dataclass(frozen=True)
class Judgement:
    """The answer to a Judging: `token` is the accepted draft, its replacement, or the target's own.
    is_replaced: the draft was rejected. needs_row: it was, but without `kept` no replacement was
    sampled."""

    token: int
    is_replaced: bool = False
    needs_row: bool = False
