"""Samples tokens on a GPU by draw.cu, so that only ids and a few numbers cross to the host."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpissd.common.errors import DivergedError
from mpissd.common.rounds import Ints
from mpissd.engine.backend import kernels
from mpissd.engine.law.sampling import Row
from mpissd.engine.model.forwards import Drafting, Judgement, Judging, Proposed

if TYPE_CHECKING:  # it imports CuPy
    from mpissd.engine.backend.cupy_device import Launcher

_THREADS = 512
_SHARED_BYTES = 512
_LISTED = 64  # the largest k that the backend's top_k allows
_REPLACED = 1
_UNKNOWN = 2
_NOT_FINITE = 3
_DOUBLES = ("temperature", "u", "coin", "q", "q_total")
_INTS = ("row", "token", "top", "unused")
_ASK = np.dtype([*((n, "f8") for n in _DOUBLES), ("kept", "u8"), *((n, "i4") for n in _INTS)])
_TELL = np.dtype([("value", "f8"), ("total", "f8"), ("token", "i4"), ("verdict", "i4")])


@dataclass(eq=False)
class KeptRow:
    """A sampled token's distribution on the device, as float32 weights whose sum is `total`."""

    backend: Any
    values: Any
    total: float = 0.0

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Returns a copy of the weights on the host."""
        return np.asarray(self.backend.to_host(self.values), dtype)


class CupyDraws:
    """Samples tokens on the GPU from the logits of a model's last finished forward, a buffer that
    the next forward overwrites. most_damped: the largest allowed Drafting.top. The methods raise
    DivergedError for a row with a logit that is not finite."""

    def __init__(self, backend: Any, launcher: Launcher, logits: Any) -> None:
        self._backend = backend
        self._launcher = launcher
        self._logits = logits
        rows, columns = logits.shape
        self.most_damped = min(_LISTED, columns)
        self._asks = backend.host_ints(rows * _ASK.itemsize // 4).view(_ASK)
        self._tells = backend.host_ints(rows * _TELL.itemsize // 4).view(_TELL)
        self._tops: dict[int, tuple[Any, Any]] = {}  # buffers of top_k, by k
        self._free: dict[int, list[Any]] = {}  # memory of unused distributions, by size
        self._places: Any = None

    def propose(self, asked: Sequence[Drafting], scale: float) -> list[Proposed]:
        """Samples a draft token for each request, and keeps the distributions. scale: the factor, 0
        … 1, on the weights of the Drafting.top likeliest tokens."""
        kept = [self._new(self._logits.shape[1]) for _ in asked]
        for ask, drafting, row in zip(self._asks, asked, kept, strict=False):
            for name in ("temperature", "u", "row", "top"):
                ask[name] = getattr(drafting, name)
            ask["kept"] = address(row.values)
        top = max((drafting.top for drafting in asked), default=0)
        tops = None
        if top:  # rows become a power of two, as the backend keeps memory for each row count
            rows = 1 << max(drafting.row for drafting in asked).bit_length()
            rows = min(rows, len(self._logits))
            if top not in self._tops:
                self._tops[top] = self._backend.top_buffers(len(self._logits), top)
            tops, values = self._tops[top]
            self._backend.top_k(self._logits[:rows], top, tops[:rows], values[:rows])
        answers = self._answers(len(asked), 1, scale, tops, top, None)
        drawn = []
        for answer, row in zip(answers, kept, strict=True):
            row.total = float(answer["total"])
            drawn.append(Proposed(int(answer["token"]), float(answer["value"]) / row.total, row))
        return drawn

    def judge(self, asked: Sequence[Judging], ids: Ints | None = None) -> list[Judgement]:
        """Accepts or rejects drafted tokens, and samples replacements. ids: the token of each entry
        of the draft's distributions (None: entry t is token t)."""
        for ask, judging in zip(self._asks, asked, strict=False):
            for name in ("temperature", "u", "coin", "q", "row", "token"):
                ask[name] = getattr(judging, name)
            ask["top"] = 0
            ask["kept"] = 0
            if judging.kept is not None:
                ask["kept"] = address(judging.kept.values)
                ask["q_total"] = judging.kept.total
        if ids is not None and self._places is None:
            entries = np.full(self._logits.shape[1], -1, np.int32)  # −1: the draft lacks the token
            entries[ids] = np.arange(len(ids), dtype=np.int32)
            self._places = self._launcher.uploaded(entries, np.int32)
        places = None if ids is None else self._places
        answers = self._answers(len(asked), 0, 1.0, None, 0, places)
        decided = zip(answers["token"].tolist(), answers["verdict"].tolist(), strict=True)
        return [Judgement(token, kind == _REPLACED, kind == _UNKNOWN) for token, kind in decided]

    def keep(self, row: Row, total: float) -> KeptRow:
        """Copies a distribution whose sum is `total` to the GPU, to be used as Judging.kept."""
        kept = self._new(len(row))
        self._launcher.upload(row, kept.values)
        kept.total = total
        return kept

    def _answers(
        self, count: int, proposes: int, scale: float, tops: Any, top: int, places: Any
    ) -> Any:
        """Runs the kernel for the first `count` requests, waits, and returns its answers. proposes:
        1 to sample draft tokens, 0 to accept or reject drafted ones. scale, tops, top: the factor
        of Saguaro's sampling, and the ids and number of the tokens to which it applies. places: the
        entry of each token in the draft's distributions (None: entry t is token t)."""
        width = np.int32(self._logits.shape[1])
        asks, tells = (np.uintp(part.ctypes.data) for part in (self._asks, self._tells))
        options = np.int32(proposes), np.float64(scale), tops, np.int32(top), places
        args = (self._logits, width, asks, tells, *options)
        how = args, _SHARED_BYTES, (("DRAW_THREADS", _THREADS),)
        self._launcher.launch("draw", kernels.DRAW, (count,), (_THREADS,), *how)
        self._backend.synchronize()
        answers = self._tells[:count]
        if (answers["verdict"] == _NOT_FINITE).any():
            raise DivergedError("GPU: a logit is not finite: weights are damaged, or overflow")
        return answers

    def _new(self, columns: int) -> KeptRow:
        """Allocates a distribution over so many tokens; reuses its memory once it is garbage."""
        free = self._free.setdefault(columns, [])
        values = free.pop() if free else self._launcher.empty((columns,), np.float32)
        row = KeptRow(self._backend, values)
        weakref.finalize(row, free.append, values).atexit = False
        return row


def address(array: Any) -> int:
    """Returns the address of an array on the device (or of a NumPy array, in tests); 0 for None."""
    if array is None:
        return 0
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)
