"""Tables of a recording: the target's tokens, and the draft's proposals and predictions.

They replace the imposed tokens of the `gemm` workload, under the same workers. Sequence n replays
prompt n modulo their number. A sequence that is not ended continues in the next prompt's answer, as
in warm-up and calibration.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpissd.common.rounds import Ints, Source, Speculation
from mpissd.engine.spec.fanout import lanes_of
from mpissd.engine.spec.lookup import make_lookup
from mpissd.engine.workload.gemm import Stream
from mpissd.engine.workload.replay.recording import Ids, Recording
from mpissd.engine.workload.sequence import Batch, Index
from mpissd.engine.workload.sequence import Sequence as Live


class RecordedStream(Stream):
    """The target's recorded tokens of all prompts, in one table.

    Each prompt has end + K entries, K of the recording: entry c follows c generated tokens.
    """

    def __init__(self, recording: Recording, capacity: int, lookahead: int) -> None:
        self.recording, self.lookahead = recording, lookahead
        counts = [len(part.tokens) for part in recording.sequences]
        self._starts = np.cumsum([0, *counts])
        self._size = int(self._starts[-1])
        self._table = self._tabled([part.tokens for part in recording.sequences])
        # By slot: the table entry of the prompt's token 0, minus 1.
        self._base = np.zeros(capacity, np.int64)

    def _tabled(self, parts: Sequence[Ids]) -> Ints:
        """Joins [end or end + K, …] of all prompts to int32 [entries, …]; zeros fill the rest.

        The first entries are repeated after the last: a round reads at most 2·(K + 1) entries.
        """
        table = np.zeros((self._size, *parts[0].shape[1:]), np.int32)
        for start, part in zip(self._starts.tolist(), parts, strict=False):
            table[start : start + len(part)] = part
        again = np.arange(2 * self.lookahead + 2) % self._size
        return np.concatenate([table, table[again]])

    def begin_round(self, batch: Batch, started: Sequence[Live]) -> None:
        for one in started:
            number = one.request.request_id % len(self.recording.sequences)
            self._base[one.slot] = self._starts[number] - 1
        self._origin = (self._base[batch.slots] + batch.lengths) % self._size


class RecordedDraft(RecordedStream):
    """The draft's recorded continuations and likeliest tokens after every true prefix.

    The tables follow the target's own tokens. After a served token that the target will reject, the
    keys are therefore wrong. No outcome equals such a key, so they are never looked up.
    """

    def __init__(
        self,
        recording: Recording,
        capacity: int,
        lookahead: int,
        widest: int,
        lookup: str | None = "prompt",
    ) -> None:
        """Makes the tables; `widest` is the most candidates that a row keeps (max F_k).

        lookup: kind of lookup of a fast backup; None without one.
        """
        super().__init__(recording, capacity, lookahead)
        parts = recording.sequences
        self._rollout = self._tabled([part.rollout[:, :lookahead] for part in parts])
        self._top = self._tabled([part.top[:, : widest + 1] for part in parts])
        self._width = widest + 1
        self._trunk: Index = np.arange(lookahead + 1, dtype=np.int64)
        self._lanes: dict[tuple[int, ...], tuple[Index, Index]] = {}
        self._fast: Ints | None = None
        if lookup is not None:
            each = [copied(recording, n, lookahead, lookup) for n in range(len(parts))]
            self._fast = self._tabled(each)

    def grown(
        self, speculation: Speculation, fan_out: tuple[int, ...], rows: Index | None = None
    ) -> tuple[Ints, Ints]:
        """Returns candidates and their tokens, as Stream.grown.

        The candidates of k are the likeliest tokens after k accepted ones, without the one served
        there. After a hit the bonus token is committed, so that its branch is the draft's
        continuation of the true prefix.
        """
        chosen = slice(None) if rows is None else rows
        origin = self._origin[chosen]
        k, place = self._lanes_of(fan_out)
        column = place + (place >= self._served(speculation, chosen, origin)[:, k])
        first = self._top.take((origin[:, None] + k) * self._width + column)
        return first, self._rollout[origin[:, None] + k + 1]

    def _served(self, speculation: Speculation, rows: Index | slice, origin: Index) -> Index:
        """Returns [n, K+1] the rank from 0 of the served token among the likeliest of its place.

        A rank beyond them if it is none of them, or if no token was served.
        """
        served = np.full((len(origin), self.lookahead + 1), -1, np.int32)
        served[:, :-1] = speculation.tokens[rows]
        served[self._trunk >= speculation.num_draft[rows][:, None]] = -1
        is_same = self._top[origin[:, None] + self._trunk] == served[..., None]
        return np.where(is_same.any(axis=2), is_same.argmax(axis=2), self._width)

    def _lanes_of(self, fan_out: tuple[int, ...]) -> tuple[Index, Index]:
        if fan_out not in self._lanes:
            k, place = lanes_of(fan_out)
            self._lanes[fan_out] = k.astype(np.int64), place.astype(np.int64)
        return self._lanes[fan_out]

    def restarts(self, source: Source, rows: Index) -> Ints:
        origin = self._origin[rows]
        if source != Source.FAST:
            return self._rollout[origin]
        assert self._fast is not None, "a fast backup without its table"
        return self._fast[origin]


def copied(recording: Recording, n: int, count: int, kind: str) -> Ints:
    """Returns the `count` tokens that a fast backup drafts after each token of prompt n's answer,
    int32 [end + K, count]: entry c is after c tokens."""
    part, lookup = recording.sequences[n], make_lookup(kind, recording.longest)
    lookup.follow(part.prompt.tolist())
    drafts = []
    for token in part.tokens.tolist():
        drafts.append(lookup.padded(count, recording.filler))
        lookup.add(token)
    return np.array(drafts, np.int32)
