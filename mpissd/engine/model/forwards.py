"""The interface between workers and models: a forward's rows, results and draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.common.wait import Waiter

SPAN = 1 << 20  # more lanes than 4,096 sequences may have, at most 255 each
MOST_SPAN = (1 << 31) // SPAN  # lanes that a row may be stored in: their sum is an int32


@dataclass(frozen=True)
class Places:
    """Positions of a forward's n rows in the KV cache, for models that keep one.

    All are int32 [n]. slots: the cache slot of each row's sequence. positions: the row's position
    in its sequence, from 0. lanes: −1 for a *trunk row*, whose K and V are stored in the slot's
    cache, and which attends cache positions 0 … position. A *lane row* stores K and V in
    scratch[lane][position − trunk] and attends cache positions 0 … trunk − 1 and its lane's
    scratch. A lane plus n · SPAN stores K and V in the n lanes after it as well. trunks: the tokens
    in the cache before the lane, read for lane rows only. K and V of all rows of a forward are
    stored before any row attends.
    reads: whether candidates or logits of this forward are read; without, the LM head may be left
    out (chunks of a prompt).
    """

    slots: Ints
    positions: Ints
    lanes: Ints
    trunks: Ints
    reads: bool = True

    def part(self, rows: slice) -> Places:
        """Returns the places of some rows of a prompt, whose candidates are not read."""
        slots, positions = self.slots[rows], self.positions[rows]
        return Places(slots, positions, self.lanes[rows], self.trunks[rows], False)


def joined(parts: Sequence[Places], *, reads: bool = True) -> Places:
    """Returns the concatenated places of several groups of rows.

    reads: whether candidates of the rows are read, if they are of any part.
    """
    if len(parts) == 1 and reads:
        return parts[0]
    names = "slots", "positions", "lanes", "trunks"
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return Places(**columns, reads=reads and any(part.reads for part in parts))


@dataclass(frozen=True)
class Results:
    """The k best candidates of each row over the whole vocabulary, best first.

    ids: int32 [heads, n, k]; heads is 1 for a model with one LM head or none. values: the logits of
    the candidates, float32 [heads, n, k]; None without ForwardOptions.values.
    """

    ids: Ints
    values: NDArray[np.float32] | None = None


class PrefixPages(Protocol):
    """The pages of a KV cache that later sequences may reuse."""

    def adopt(self, slot: int, tokens: Sequence[int]) -> int:
        """Gives an empty slot the pages that store the first of these tokens; returns how many
        tokens."""

    def keep(self, slot: int, tokens: Sequence[int]) -> None:
        """Lets later sequences adopt the pages of a slot, which stores these tokens."""


class Forwards(Protocol):
    """A model as its worker uses it: forwards that are uploaded, launched and awaited."""

    @property
    def most_rows(self) -> int:
        """The rows of the largest forward."""

    def upload(
        self, rows: int, tokens: Ints, places: Places | None = None, *, lists: bool = False
    ) -> None:
        """Sets the size and the input tokens of the next forward.

        tokens: int32 [n], the token that each of the first n rows reads. The other rows − n rows
        are padding. lists: whether each row's ForwardOptions.top_k best candidates are read, or the
        best one.
        """

    def launch(self) -> None:
        """Starts the forward that was last uploaded."""

    def wait(self, waiter: Waiter) -> None:
        """Waits until the last launched forward is over."""

    def elapsed_s(self) -> float:
        """Returns the device time of the last finished forward, in seconds."""

    def results(self) -> Results:
        """Returns the candidates that the last finished forward computed.

        Must be called before the next upload. Raises NotImplementedError where nothing is computed.
        """

    def logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Returns the logits of these rows of the last finished forward.

        float32 [len(rows), columns]: this rank's share of the LM head. Must be called before the
        next upload. Raises NotImplementedError where nothing is computed.
        """

    def move(self, lane: int, slot: int, start: int, stop: int) -> None:
        """Copies the first K and V of a lane to positions start … stop − 1 of a slot."""

    def release(self, slots: Sequence[int]) -> None:
        """Frees the cache of these slots, whose sequences have ended."""


def merged(ids: Ints, values: NDArray[np.float32]) -> Results:
    """Merges the candidates of T shards: returns the k best of all, [heads, n, k].

    ids, values: [heads, T, n, k], each shard's own k best. The lower id wins a tie.
    """
    heads, shards, count, k = ids.shape
    every = ids.swapaxes(1, 2).reshape(heads, count, shards * k)
    scores = values.swapaxes(1, 2).reshape(heads, count, shards * k)
    order = np.lexsort((every, -scores), axis=-1)[..., :k]
    return Results(np.take_along_axis(every, order, -1), np.take_along_axis(scores, order, -1))


@dataclass(frozen=True)
class Drafting:
    """Asks for a draft's next token from a row of logits, with u in [0, 1).

    top: the largest logits whose weights Saguaro's sampling damps; 0: none.
    """

    row: int
    temperature: float
    u: float
    top: int = 0


@dataclass(frozen=True)
class Proposed:
    """A drafted token, its probability q, and the row that both were drawn from.

    kept: the row on the device; numpy.asarray copies it to the host, float32 [columns].
    """

    token: int
    q: float
    kept: Any


@dataclass(frozen=True)
class Judging:
    """Asks whether a drafted token is accepted, and draws its replacement with u in [0, 1) if not.

    q: the probability with which the token was drafted; 1: it was certain; 0: none was drafted, so
    the target's token is drawn. coin: uniform in [0, 1). kept: the row that the token was drafted
    from, read only if the token is rejected and q < 1.
    """

    row: int
    temperature: float
    u: float
    token: int = -1
    q: float = 0.0
    coin: float = 0.0
    kept: Any = None


@dataclass(frozen=True)
class Verdict:
    """A row's decision: `token` replaces a rejected draft, or is drawn if nothing was drafted.

    needs_row: the drafted token is rejected, and `kept` was missing.
    """

    token: int
    is_replaced: bool = False
    needs_row: bool = False
