"""The interface of a model: what its forwards (batched runs of the network) take and return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.common.wait import Waiter

# n lanes (scratch KV memory) in a row are encoded as the first one's number + SPAN · (n − 1).
SPAN = 1 << 20
MOST_SPAN = (1 << 31) // SPAN  # the most lanes in a range, so that its code fits an int32


@dataclass(frozen=True)
class Places:
    """Where the n rows (input tokens) of a forward write and read keys and values in the KV cache.

    A *slot* is the part of the cache that belongs to one sequence. A *lane* is scratch memory for
    the keys and values of one speculative branch, that is of tokens that may still be rejected. A
    *trunk row* (lane −1) writes to its slot, and attends the slot's positions up to its own. A
    *lane row* writes to scratch[lane][position − trunk], where `trunk` is the number of tokens
    before the branch; it attends the slot's first `trunk` positions and the lane's up to its own.
    All rows of a forward are written before any row attends.

    slots, positions, lanes, trunks: the slot, the position in the sequence (from 0), the lane and
    the trunk of each row, int32 [n]. A lane plus c · SPAN means that the row is also written to the
    c lanes after that lane. reads: whether candidates or logits of any row are read; if not, as in
    a chunk of a prompt, the LM head may be skipped.
    """

    slots: Ints
    positions: Ints
    lanes: Ints
    trunks: Ints
    reads: bool = True

    @property
    def columns(self) -> tuple[Ints, Ints, Ints, Ints]:
        """The arrays slots, positions, lanes and trunks, in this order."""
        return self.slots, self.positions, self.lanes, self.trunks

    def part(self, rows: slice) -> Places:
        """Returns the places of this range of rows of a prompt, whose outputs are not read."""
        slots, positions, lanes, trunks = (column[rows] for column in self.columns)
        return Places(slots, positions, lanes, trunks, reads=False)


def joined(parts: Sequence[Places], *, reads: bool = True) -> Places:
    """Concatenates the places of several groups of rows. reads: False marks the result as rows
    whose outputs are not read; True keeps what the groups say."""
    if len(parts) == 1 and reads:
        return parts[0]
    columns = zip(*(part.columns for part in parts), strict=True)
    slots, positions, lanes, trunks = map(np.concatenate, columns)
    return Places(slots, positions, lanes, trunks, reads and any(part.reads for part in parts))


@dataclass(frozen=True)
class Results:
    """The k tokens with the largest logits after each of a forward's n rows, over all shards of the
    vocabulary. ids: token ids, the likeliest first, int32 [heads, n, k]; only a model with several
    LM heads has heads > 1. values: their logits, float32 [heads, n, k]; None unless
    ForwardOptions.values is set."""

    ids: Ints
    values: NDArray[np.float32] | None = None


class Forwards(Protocol):
    """Interface of a model that computes one forward at a time. The caller calls upload, launch and
    wait, and then reads the results."""

    @property
    def most_rows(self) -> int:
        """The largest number of rows (tokens) that one forward may have."""

    def upload(
        self, rows: int, tokens: Ints, places: Places | None = None, *, lists: bool = False
    ) -> None:
        """Sets the inputs of the next forward, of `rows` rows. tokens: the input tokens of the
        first n rows, int32 [n]; further rows are padding. places: where these n rows lie in the KV
        cache. lists: whether the top_k likeliest next tokens of each row (ForwardOptions.top_k)
        will be read, instead of the likeliest one."""

    def launch(self) -> None:
        """Starts the forward whose inputs were uploaded last."""

    def wait(self, waiter: Waiter) -> None:
        """Waits until the last launched forward has finished."""

    def elapsed_s(self) -> float:
        """Returns the device time of the last finished forward, in seconds."""

    def results(self) -> Results:
        """Returns the likeliest tokens after each row of the last finished forward. Must be called
        before the next upload. Raises NotImplementedError on a backend that computes nothing."""

    def logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Returns this rank's share of the logits of some rows of the last finished forward,
        float32 [len(rows), columns]. Must be called before the next upload. Raises
        NotImplementedError on a backend that computes nothing."""

    def move(self, lane: int, slot: int, start: int, stop: int) -> None:
        """Copies an accepted branch into its sequence: the first stop − start keys and values of a
        lane (a branch's scratch memory) become positions start … stop − 1 of a slot."""

    def release(self, slots: Sequence[int]) -> None:
        """Frees the KV cache's parts (slots) of these sequences, which have ended."""


def merged(ids: Ints, values: NDArray[np.float32]) -> Results:
    """Merges the k best candidates of each of T vocabulary shards into the k best of all, [heads,
    n, k]. ids, values: the candidates' token ids and logits for n rows, [heads, T, n, k]. Among
    equal logits the lower token id comes first."""
    heads, shards, count, k = ids.shape
    tokens = ids.swapaxes(1, 2).reshape(heads, count, shards * k)
    scores = values.swapaxes(1, 2).reshape(heads, count, shards * k)
    order = np.lexsort((tokens, -scores), axis=-1)[..., :k]
    return Results(np.take_along_axis(tokens, order, -1), np.take_along_axis(scores, order, -1))


@dataclass(frozen=True)
class Drafting:
    """A request to a draft: sample the next token from the logits of one row of its last forward.
    u: the uniform number in [0, 1) that decides the token. top: how many of the likeliest tokens
    Saguaro's sampling makes less likely (0: none)."""

    row: int
    temperature: float
    u: float
    top: int = 0


@dataclass(frozen=True)
class Proposed:
    """A token that a draft sampled, and its probability q. kept: the whole distribution, which
    stays on the device for the target; numpy.asarray copies it to the host, float32 [columns]."""

    token: int
    q: float
    kept: Any


@dataclass(frozen=True)
class Judging:
    """A request to the target: accept or reject a drafted token, and sample another one if it is
    rejected. row: the row of the target's last forward whose logits judge the token. coin, u:
    uniform numbers in [0, 1); `coin` decides the acceptance, and `u` the replacement. q: the
    token's probability in the draft (1: it was drafted without sampling; 0: nothing was drafted, so
    the target's own token is sampled). kept: the draft's distribution (Proposed.kept), read only if
    the token is rejected and q < 1."""

    row: int
    temperature: float
    u: float
    token: int = -1
    q: float = 0.0
    coin: float = 0.0
    kept: Any = None


@dataclass(frozen=True)
class Judgement:
    """The target's verdict on a drafted token. token: the accepted token, its replacement, or the
    target's own sample if nothing was drafted. is_replaced: whether `token` replaces a rejected
    token. needs_row: whether the token was rejected but not replaced, because the draft's
    distribution (Judging.kept) was missing."""

    token: int
    is_replaced: bool = False
    needs_row: bool = False
