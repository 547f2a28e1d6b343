"""A forward on a GPU: a captured CUDA graph, replayed; or its operations, enqueued every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy

from mpissd.common.errors import FaultError
from mpissd.engine.backend.base import Program
from mpissd.engine.backend.cupy_device import reached


class CupyProgram(Program):
    """A captured graph of its body, or the body itself where it cannot be captured.

    Holds the body, and so the buffers that the graph reads, for as long as it lives.
    """

    def __init__(
        self, stream: Any, body: Callable[[], None], capture: bool, stop: Any = (0,)
    ) -> None:
        """stop[0]: not 0 once a kernel has given up a wait; a launch then ends in a FaultError."""
        self._stream, self._body, self._stop = stream, body, stop
        self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()
        body()  # loads kernels, connects peers, allocates: what a capture may not do
        stream.synchronize()
        self._graph = captured(stream, body) if capture else None

    @property
    def captured(self) -> bool:
        """Whether launches replay a graph."""
        return self._graph is not None

    def launch(self) -> None:
        self._start.record(self._stream)
        if self._graph is None:
            self._body()
        else:
            self._graph.launch(self._stream)
        self._end.record(self._stream)

    def done(self) -> bool:
        if not reached(self._end):
            return False
        if self._stop[0]:
            raise FaultError("GPU: a forward waited in vain for another rank, or for itself")
        return True

    def elapsed_s(self) -> float:
        return float(cupy.cuda.get_elapsed_time(self._start, self._end)) / 1e3

    def close(self) -> None:
        """Destroys the graph; a later launch runs the body."""
        self._graph = None


def captured(stream: Any, body: Callable[[], None]) -> Any:
    """The graph of what `body` enqueues. The capture ends even where the body fails."""
    with stream:
        stream.begin_capture()
        try:
            body()
        finally:  # else the stream could never be used again
            graph = stream.end_capture()
    graph.upload(stream)
    return graph
