"""What a learner's rank hears of its trainer."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from mpissd.online import frames
from mpissd.online.process import TrainerProcess


class Pipe:
    """A trainer's stdout, of which one frame after another is handed out."""

    def __init__(self, parts: list[bytes]) -> None:
        self._data = b"".join(parts)

    def read(self, count: int) -> bytes:
        found, self._data = self._data[:count], self._data[count:]
        return found


def heard(trainer: TrainerProcess, version: int) -> None:
    """Has this version arrive, as the reading thread would take it."""
    parts = list[bytes]()

    class Sink:
        write = staticmethod(lambda data: parts.append(bytes(data)))
        flush = staticmethod(lambda: None)

    frames.write(Sink(), frames.VERSION, frames.of_version(version, b"weights"))  # type: ignore[arg-type]
    trainer._process.stdout = Pipe(parts)  # type: ignore[assignment]
    trainer._read()


def test_a_version_that_arrives_while_another_is_taken_is_not_lost(monkeypatch: Any) -> None:
    """It arrives behind each of the instructions of `take`, one after another."""
    monkeypatch.setenv("MPISSD_LEARNER_PYTHON", "true")  # a command that ends at once
    trainer = TrainerProcess({})
    trainer.stop()
    arrived = 0
    for after in range(40):
        heard(trainer, 1)
        seen = 0

        def trace(frame: FrameType, event: str, _: Any, after: int = after) -> Any:
            nonlocal seen, arrived
            if frame.f_code is not TrainerProcess.take.__code__:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                seen += 1
                if seen == after + 1:
                    arrived += 1
                    heard(trainer, 2)
            return trace

        sys.settrace(trace)
        try:
            first = trainer.take()
        finally:
            sys.settrace(None)
        last = trainer.take() or first
        assert first is not None and last is not None
        assert last[0] == (2 if seen > after else 1), f"behind instruction {after}"
        trainer.take()
    assert arrived > 5
