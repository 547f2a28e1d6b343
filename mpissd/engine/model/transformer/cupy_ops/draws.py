"""Draws tokens on a GPU, one block of draw.cu a row; ids and a few numbers cross to the host."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpissd.common.errors import DivergedError
from mpissd.common.rounds import Ints
from mpissd.engine.backend import kernels
from mpissd.engine.law.sampling import Row
from mpissd.engine.model.forwards import Drafting, Judging, Proposed, Verdict

if TYPE_CHECKING:  # it imports CuPy
    from mpissd.engine.backend.cupy_device import Launcher

_THREADS, _SHARED_BYTES = 512, 512
_LISTED = 64  # the most that the backend's top_k lists
_REPLACED, _UNKNOWN, _NOT_FINITE = 1, 2, 3
_DOUBLES = ("temperature", "u", "coin", "q", "q_total")
_INTS = ("row", "token", "top", "unused")
_ASK = np.dtype([*((n, "f8") for n in _DOUBLES), ("kept", "u8"), *((n, "i4") for n in _INTS)])
_TELL = np.dtype([("value", "f8"), ("total", "f8"), ("token", "i4"), ("verdict", "i4")])


class KeptRow:
    """A distribution on the device, float32 [columns], whose sum is `total`."""

    def __init__(self, backend: Any, values: Any, total: float = 0.0) -> None:
        self._backend, self.values, self.total = backend, values, total

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Copies the row to the host."""
        return np.asarray(self._backend.to_host(self.values), dtype)


class CupyDraws:
    """Draws from the logits of a model's last finished forward, which the next one overwrites.

    logits: a buffer, float32 [rows, columns]. most_damped: the largest `top` of a Drafting. Raises
    DivergedError for a row with a logit that is not finite.
    """

    def __init__(self, backend: Any, launcher: Launcher, logits: Any) -> None:
        self._backend, self._launcher, self._logits = backend, launcher, logits
        rows, columns = logits.shape
        self.most_damped = min(_LISTED, columns)
        self._asks = backend.host_ints(rows * _ASK.itemsize // 4).view(_ASK)
        self._tells = backend.host_ints(rows * _TELL.itemsize // 4).view(_TELL)
        self._tops: dict[int, tuple[Any, Any]] = {}  # buffers of top_k, by k
        self._free: dict[int, list[Any]] = {}  # rows that are no longer held, by columns
        self._places: Any = None

    def propose(self, asked: Sequence[Drafting], scale: float) -> list[Proposed]:
        """Draws drafted tokens and keeps their rows; scale: of damped weights, 0 … 1."""
        kept = [self._new(self._logits.shape[1]) for _ in asked]
        most = max((one.top for one in asked), default=0)
        for ask, one, row in zip(self._asks, asked, kept, strict=False):
            ask["temperature"], ask["u"], ask["row"] = one.temperature, one.u, one.row
            ask["kept"], ask["top"] = address(row.values), one.top
        tops = self._listed(max(one.row for one in asked) + 1, most) if most else None
        answers, drawn = self._answers(len(asked), 1, scale, tops, most, None), []
        for answer, row in zip(answers, kept, strict=True):
            row.total = float(answer["total"])
            drawn.append(Proposed(int(answer["token"]), float(answer["value"]) / row.total, row))
        return drawn

    def judge(self, asked: Sequence[Judging], ids: Ints | None = None) -> list[Verdict]:
        """Judges drafted tokens; ids: the token of each entry of kept rows (None: entry t is t)."""
        for ask, one in zip(self._asks, asked, strict=False):
            for name in ("temperature", "u", "coin", "q", "row", "token"):
                ask[name] = getattr(one, name)
            ask["top"], ask["kept"] = 0, 0
            if one.kept is not None:
                ask["kept"], ask["q_total"] = address(one.kept.values), one.kept.total
        answers = self._answers(len(asked), 0, 1.0, None, 0, self._placed(ids))
        return [
            Verdict(token, verdict == _REPLACED, verdict == _UNKNOWN)
            for token, verdict in zip(
                answers["token"].tolist(), answers["verdict"].tolist(), strict=True
            )
        ]

    def keep(self, row: Row, total: float) -> KeptRow:
        """Returns a row of the host, whose sum is `total`, as `Judging.kept` takes it."""
        kept = self._new(len(row))
        self._launcher.upload(row, kept.values)
        kept.total = total
        return kept

    def _answers(
        self, count: int, proposes: int, scale: float, tops: Any, most: int, places: Any
    ) -> Any:
        """Launches the kernel over `count` asks and waits for its answers."""
        width = np.int32(self._logits.shape[1])
        asks, tells = (np.uintp(part.ctypes.data) for part in (self._asks, self._tells))
        options = np.int32(proposes), np.float64(scale), tops, np.int32(most), places
        args = (self._logits, width, asks, tells, *options)
        how = args, _SHARED_BYTES, (("DRAW_THREADS", _THREADS),)
        self._launcher.launch("draw", kernels.DRAW, (count,), (_THREADS,), *how)
        self._backend.synchronize()
        answers = self._tells[:count]
        if (answers["verdict"] == _NOT_FINITE).any():
            raise DivergedError("GPU: a logit is not finite: weights are damaged, or overflow")
        return answers

    def _listed(self, rows: int, most: int) -> Any:
        """Lists the `most` largest logits of the first rows; returns their columns.

        Of a power of two of them, as the backend keeps memory for each size.
        """
        rows = min(1 << (rows - 1).bit_length(), len(self._logits))
        if most not in self._tops:
            self._tops[most] = self._backend.top_buffers(len(self._logits), most)
        ids, values = self._tops[most]
        self._backend.top_k(self._logits[:rows], most, ids[:rows], values[:rows])
        return ids

    def _placed(self, ids: Ints | None) -> Any:
        """Returns the entry of each token in a draft's rows, −1 for one that the draft lacks."""
        if ids is None:
            return None
        if self._places is None:
            places = np.full(self._logits.shape[1], -1, np.int32)
            places[ids] = np.arange(len(ids), dtype=np.int32)
            self._places = self._launcher.uploaded(places, np.int32)
        return self._places

    def _new(self, columns: int) -> KeptRow:
        """Returns room for a row, which is used again when the row is no longer held."""
        free = self._free.setdefault(columns, [])
        values = free.pop() if free else self._launcher.empty((columns,), np.float32)
        row = KeptRow(self._backend, values)
        weakref.finalize(row, free.append, values).atexit = False
        return row


def address(array: Any) -> int:
    """Returns where a device array, or the emulator's NumPy array, begins; 0 for None."""
    if array is None:
        return 0
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)
