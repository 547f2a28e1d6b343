"""The lessons that a learner receives of a round: when, and with which logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.common.rounds import Ints
from mpissd.engine.comm import learner_messages
from mpissd.engine.comm.learner_messages import Lesson
from mpissd.engine.decode.in_process import Decoder
from mpissd.engine.decode.learning import Teaching
from tests.text_config import text_config
from tests.tiny_pair import tiny_pair


class Recorded:
    """An outlet that keeps the sent lessons, and has room only in some rounds."""

    def __init__(self, has_room: Callable[[int], bool]) -> None:
        self._has_room, self.asked, self.lessons = has_room, 0, list[list[Lesson]]()

    def has_room(self) -> bool:
        self.asked += 1
        return self._has_room(self.asked)

    def send(self, numbers: Ints) -> None:
        self.lessons.append(learner_messages.read_lessons(numbers))


class Read:
    """A target oracle that counts the rows of logits that are read of it."""

    def __init__(self, worker: Any) -> None:
        self._worker, self.rows, self.asked = worker, 0, 0

    def lessons(self, *args: Any, **told: Any) -> list[Lesson]:
        self.asked += 1
        found: list[Lesson] = self._worker.lessons(*args, **told)
        return found

    def logits_of(self, row: int) -> Any:
        self.rows += 1
        return self._worker.logits_of(row)


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("every", [1, 3])
def test_lessons_carry_the_logits_that_decided_each_token(
    tmp_path: Path, mode: str, every: int
) -> None:
    """No later forward has overwritten them; if there is no room, none are read."""
    pair = tiny_pair(tmp_path, noise=0.4, scale=3)
    config = text_config(pair, prompt=(3, 1, 4, 1, 5), num_tokens=60, mode=mode, lookahead=3)
    outlet = Recorded(lambda asked: asked % every == 0)
    with Decoder(config) as decoder:
        read = Read(decoder.worker.oracle)
        teaching = Teaching(read, outlet)  # type: ignore[arg-type]
        decoder.loop.teach = teaching
        while not decoder.is_over:
            decoder.step()
        decoder.loop.tell()
        answer = next(iter(decoder.tokens.values()))
    text = np.array([3, 1, 4, 1, 5, *answer], np.int32)
    assert len(outlet.lessons) == read.asked == teaching.rounds // every > 5
    assert teaching.dropped == teaching.rounds - read.asked
    rows = [row for (one,) in outlet.lessons for row in zip(one.at, one.logits, strict=True)]
    assert len(rows) == read.rows == teaching.rows
    assert all(int(logits.argmax()) == text[at + 1] for at, logits in rows)
    joined = [token for (one,) in outlet.lessons for token in one.tokens.tolist()]
    assert joined == text[: len(joined)].tolist()
