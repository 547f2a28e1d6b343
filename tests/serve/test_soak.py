"""Very many requests on a device that takes no time: every page comes back, every token counts."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence

from mpissd.common.config import parse_flags
from mpissd.engine.decode.goodput import NOTHING, Backlog, ForwardTimes, Goodput, Way
from mpissd.engine.decode.in_process import Loops, in_one_process
from mpissd.engine.decode.scheduler import Scheduler, Task
from mpissd.engine.job import Serving
from mpissd.serve.driver import Driver
from mpissd.serve.protocol import Cancel, End, Message, Submit, Tokens
from tests.loop.test_soak import resident_bytes
from tests.needs import needs_linux
from tests.serve.test_driver import room_of

K, PROMPT, TOKENS, OUTSTANDING = 4, 100, 150, 24
BEGINNINGS = [[n] * 64 for n in range(4)]  # a page of tokens each, that many prompts share
FLAGS = (
    "pair=8b@2L/1b backend=emulated device=null forward=transformer mode=ssd fan_out=uniform:2 "
    f"lookahead={K} batch_size=8 context={PROMPT} num_tokens={TOKENS + PROMPT}"
)
MOST_GROWTH = 8 << 20  # bytes, of all requests after the first tenth


class Crowd:
    """Clients that ask, wait or leave; keeps counts only."""

    def __init__(self, count: int, seed: int) -> None:
        self._dice, self.left, self._next = random.Random(seed), count, 0
        self.is_closed = False
        self.wanted: dict[int, int] = {}  # of those that are outstanding
        self.given: dict[int, int] = {}
        self.reasons = {"length": 0, "cancelled": 0, "deadline": 0}

    def take(self, wait_s: float = 0.0) -> Sequence[Message]:
        dice, found = self._dice, list[Message]()
        while self.left and len(self.wanted) < OUTSTANDING:
            self.left -= 1
            name, self._next = self._next, self._next + 1
            begin = dice.choice([[], *BEGINNINGS])
            prompt = [*begin, *dice.choices(range(1000), k=dice.randint(1, PROMPT - len(begin)))]
            late = dice.random() < 0.02
            self.wanted[name], self.given[name] = dice.randint(1, TOKENS), 0
            deadline = 60.0 if late else None
            found.append(Submit(name, prompt, self.wanted[name], deadline_s=deadline))
        if self.wanted and dice.random() < 0.15:
            found.append(Cancel(dice.choice([*self.wanted])))
        return found

    def put(self, message: Message) -> None:
        if isinstance(message, Tokens):
            self.given[message.id] += len(message.tokens)
            assert self.given[message.id] <= self.wanted[message.id]
        elif isinstance(message, End):
            self.reasons[message.reason] += 1
            wanted, given = self.wanted.pop(message.id), self.given.pop(message.id)
            assert message.reason != "length" or given == wanted

    def flush(self) -> None:
        return None


class Dice(Goodput):
    """Chooses any way, whatever it promises."""

    def choose(self, tasks: Sequence[Task], backlog: Backlog = NOTHING) -> Way:
        self.way = Way(random.choice([0, 1, K, K]), random.choice([None, 0, 1]))
        return self.way


def soak(count: int, *, auto: bool) -> None:
    config = parse_flags(dict(word.split("=") for word in FLAGS.split()))
    crowd = Crowd(count, seed=count)
    ticks = iter(range(10**9))
    with Loops(*in_one_process(config, Serving(kv_tokens=580))) as loops:
        scheduler = Scheduler(room_of(loops))
        goodput = Dice(K, [None, 1], ForwardTimes()) if auto else None
        clock = lambda: float(next(ticks))  # noqa: E731
        driver = Driver(scheduler, crowd, "ssd", K, goodput=goodput, clock=clock)
        held = 0
        while driver.wait(1.0):
            driver.drive(loops.loop)
            if not held and crowd.left < 0.9 * count:
                gc.collect()
                held = resident_bytes()
    gc.collect()
    assert resident_bytes() - held < MOST_GROWTH
    assert sum(crowd.reasons.values()) == count and not crowd.wanted
    assert min(crowd.reasons.values()) > 0 and scheduler.num_preempted > 0
    assert scheduler.is_idle and scheduler.free_pages == scheduler.room.pages
    for stepper in (loops.target_stepper, *loops.draft_steppers):
        pages = stepper.pages
        assert pages is not None and not any(pages.held)
        assert sorted(pages.free) == list(range(pages.sizes.num_pages))


@needs_linux
def test_a_few_hundred_requests() -> None:
    soak(300, auto=True)
