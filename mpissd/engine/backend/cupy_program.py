"""A forward on a GPU: a captured CUDA graph that is replayed, or its operations enqueued each
time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy

from mpissd.common.errors import FaultError
from mpissd.engine.backend.base import Program
from mpissd.engine.backend.cupy_device import reached


class CupyProgram(Program):
    """A captured graph of a body, or the body itself if it cannot be captured.

    It keeps the body, and so the buffers that the graph reads, alive.
    """

    def __init__(
        self, stream: Any, body: Callable[[], None], capture: bool, stop: Any = (0,)
    ) -> None:
        """Takes `stop`: a launch raises FaultError once a kernel has set stop[0], having given up a
        wait."""
        self._stream, self._body, self._stop = stream, body, stop
        self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()
        # The first run loads kernels, connects peers and allocates, which a capture must not do.
        body()
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
            raise FaultError(
                "GPU: a forward waited in vain for another rank, or for its own blocks"
            )
        return True

    def elapsed_s(self) -> float:
        return float(cupy.cuda.get_elapsed_time(self._start, self._end)) / 1e3

    def after_s(self, earlier: Program) -> float:
        assert isinstance(earlier, CupyProgram)
        return float(cupy.cuda.get_elapsed_time(earlier._end, self._start)) / 1e3

    def close(self) -> None:
        """Destroys the graph; a later launch runs the body."""
        self._graph = None


def captured(stream: Any, body: Callable[[], None]) -> Any:
    """Captures what `body` enqueues and returns the graph; the capture ends even if the body
    fails."""
    with stream:
        stream.begin_capture()
        try:
            body()
        finally:  # A capture left open would make the stream unusable.
            graph = stream.end_capture()
    graph.upload(stream)
    return graph
