"""Requests that come and go on real loops in one process: joins, leaves, pages, cancellations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from mpissd.engine import Decoder
from mpissd.engine.decode.in_process import Loops, in_one_process
from mpissd.engine.decode.scheduler import Room, Scheduler
from mpissd.engine.job import Serving
from mpissd.serve.driver import Driver
from mpissd.serve.protocol import End, Message, Submit, Tokens
from tests.text_config import text_config
from tests.tiny_pair import TinyPair, tiny_pair

K, SLOTS = 4, 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_pair(tmp_path_factory.mktemp("pair"), noise=0.02)


class Script:
    """Mail that delivers messages at given rounds and keeps what is sent."""

    def __init__(self, *messages: tuple[int, Message]) -> None:
        self._left = sorted(messages, key=lambda pair: pair[0])
        self._turn = -1
        self.sent: list[Message] = []
        self.is_closed = False

    def take(self, wait_s: float = 0.0) -> Sequence[Message]:
        self._turn += 1
        due = [message for turn, message in self._left if turn <= self._turn]
        self._left = [pair for pair in self._left if pair[0] > self._turn]
        if not due and self._left and wait_s:  # nothing runs: the next one comes at once
            self._turn = self._left[0][0] - 1
            return self.take(wait_s)
        return due

    def put(self, message: Message) -> None:
        self.sent.append(message)

    def flush(self) -> None:
        return None

    @property
    def is_over(self) -> bool:
        return not self._left

    def tokens(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for message in self.sent:
            if isinstance(message, Tokens):
                found.setdefault(message.id, []).extend(message.tokens)
        return found

    def ends(self) -> dict[int, End]:
        return {message.id: message for message in self.sent if isinstance(message, End)}


def served(loops: Loops, mail: Script, room: Room | None = None) -> Driver:
    driver = Driver(Scheduler(room or room_of(loops)), mail, vocab=97, clock=lambda: 0.0)
    while not mail.is_over or not driver.scheduler.is_idle:
        driver.wait(1.0)
        driver.drive(loops.loop)
    return driver


def room_of(loops: Loops) -> Room:
    job, pages = loops.job, loops.target_stepper.pages
    assert pages is not None
    sizes, ahead = pages.sizes, job.lookahead + 1
    return Room(job.config.batch_size, job.longest, ahead, sizes.page, sizes.num_pages)


def prompts(count: int, seed: int = 0) -> Iterator[list[int]]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield rng.integers(0, 97, int(rng.integers(2, 40))).tolist()


def alone(pair: TinyPair, prompt: list[int], count: int) -> list[int]:
    with Decoder(text_config(pair, mode="ar", prompt=prompt, num_tokens=count)) as decoder:
        while not decoder.is_over:
            decoder.step()
        return decoder.tokens[0][:count]


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_tokens_are_those_of_a_job_of_its_own_whatever_shares_the_batch(
    pair: TinyPair, mode: str
) -> None:
    asked = [(n, prompt, 8 + 7 * (n % 5)) for n, prompt in enumerate(prompts(12))]
    mail = Script(*((2 * n, Submit(n, prompt, count)) for n, prompt, count in asked))
    told = text_config(pair, mode=mode, lookahead=K, batch_size=SLOTS)
    with Loops(*in_one_process(told, Serving(kv_tokens=4096))) as loops:
        driver = served(loops, mail)
        assert loops.loop.batch.capacity == SLOTS
    assert mail.tokens() == {n: alone(pair, prompt, count) for n, prompt, count in asked}
    ends = mail.ends()
    assert all(end.reason == "length" for end in ends.values()) and len(ends) == 12
    if mode == "ssd":
        assert sum(end.hits for end in ends.values()) > 20
    assert driver.scheduler.num_preempted == 0
