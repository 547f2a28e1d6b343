"""Requests that begin alike share pages: their tokens stay, no page is lost, less is computed."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from mpissd.engine.decode.goodput import ForwardTimes, Goodput, Way
from mpissd.engine.decode.in_process import Loops, in_one_process
from mpissd.engine.decode.scheduler import Task
from mpissd.engine.job import Serving
from mpissd.serve.protocol import Cancel, Submit
from tests.serve.test_driver import K, Script, all_returned, alone, config, pair, run, served
from tests.tiny_pair import TinyPair

__all__ = ["pair"]  # a fixture
SYSTEM = [(7 * n + n * n) % 97 for n in range(140)]  # two pages of 64 tokens, and some


def after(pair: TinyPair, prompt: Sequence[int], count: int) -> list[int]:
    return [*prompt, *alone(pair, [*prompt], count)]


def rows_of(pair: TinyPair, mode: str, *asked: Submit, prefix_cache: bool = True) -> int:
    """Decodes these requests one after the other; returns the rows of the target's forwards."""
    mail, rows = Script(*((400 * n, one) for n, one in enumerate(asked))), list[int]()
    serving = Serving(prefix_cache=prefix_cache)
    with Loops(*in_one_process(config(pair, mode=mode), serving)) as loops:
        upload = loops.target_stepper.upload

        def noted(count: int, *parts: Any, **more: Any) -> None:
            rows.append(count)
            upload(count, *parts, **more)

        loops.target_stepper.upload = noted  # type: ignore[method-assign]
        served(loops, mail)
    assert all_returned(loops)
    wanted = {one.id: alone(pair, [*one.prompt], one.max_tokens) for one in asked}
    assert mail.tokens() == wanted
    return sum(rows)


@pytest.mark.parametrize("mode", ["inline", "ssd"])
def test_a_conversation_is_not_computed_again(pair: TinyPair, mode: str) -> None:
    first = after(pair, SYSTEM, 30)
    second = after(pair, [*first, 5, 6], 40)
    turns = Submit(0, SYSTEM, 30), Submit(1, [*first, 5, 6], 40), Submit(2, [*second, 9], 8)
    saved = rows_of(pair, mode, *turns, prefix_cache=False) - rows_of(pair, mode, *turns)
    pages = (len(first) - 1) // 64 + (len(second) - 1) // 64  # their last ones are not full
    assert saved > 0.8 * 64 * pages


@pytest.mark.parametrize(("mode", "prefix_cache"), [("ssd", False), ("ssd", True), ("ar", True)])
def test_cached_tokens_are_counted(pair: TinyPair, mode: str, prefix_cache: bool) -> None:
    asked = Submit(0, SYSTEM, 4), Submit(1, [*SYSTEM, 5], 4), Submit(2, SYSTEM[:128], 9)
    mail = Script(*((99 * n, one) for n, one in enumerate(asked)), (198, Submit(3, [5], 9)))
    run(pair, mode, mail, Serving(prefix_cache=prefix_cache))
    cached = [mail.ends()[n].cached for n in range(4)]
    assert cached == ([0, 128, 64, 0] if prefix_cache else [0] * 4)


def test_a_prompt_that_ends_with_a_page_is_read_once_more_at_its_end(pair: TinyPair) -> None:
    for length in (127, 128, 129):
        rows_of(pair, "ssd", Submit(0, SYSTEM[:length], 5), Submit(1, SYSTEM[:length], 70))


def test_a_page_is_found_only_after_the_tokens_that_it_followed(pair: TinyPair) -> None:
    second = SYSTEM[64:128]
    rows_of(pair, "ssd", Submit(0, SYSTEM, 9), Submit(1, [*second, *second, 5], 40))


class Wild(Goodput):
    """Takes any way before each round."""

    def __init__(self) -> None:
        super().__init__(K, [None, 1], ForwardTimes())
        self.dice = random.Random(0)

    def choose(self, tasks: Sequence[Task]) -> Way:
        self.way = Way(self.dice.choice([0, 1, K, K]), self.dice.choice([None, 0, 1]))
        return self.way

    @property
    def is_trying(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("mode", "kv_tokens", "is_wild"),
    [
        ("ar", 0, False),
        ("sd", 0, False),
        ("ssd", 0, False),
        ("ssd", 448, False),
        ("ssd", 448, True),
        ("inline", 448, True),
        ("tree", 448, False),
    ],
)
def test_shared_beginnings(pair: TinyPair, mode: str, kv_tokens: int, is_wild: bool) -> None:
    """Requests that come and go with one beginning have the tokens of their own jobs."""
    dice, count = random.Random(kv_tokens), 24 if is_wild else 14
    asked = []
    for n in range(count):
        part = SYSTEM[: dice.choice([140, 140, 130, 64, 20])]
        prompt = [*part, *dice.choices(range(97), k=dice.randint(1, 9))]
        late = 2.0 * n + 30 if n % 13 == 12 else None
        asked.append(Submit(n, prompt, 75 if n % 2 else 95, deadline_s=late))
    mail = Script(
        *((2 * one.id, one) for one in asked), *((2 * n + 7, Cancel(n)) for n in range(3, count, 5))
    )
    goodput = Wild() if is_wild else None
    serving, clock = Serving(kv_tokens=kv_tokens), lambda: float(mail.turn)
    driver = run(pair, mode, mail, serving, goodput=goodput, clock=clock)
    assert bool(driver.scheduler.num_preempted) == bool(kv_tokens)
    assert driver.scheduler.free_pages == driver.scheduler.room.pages
    found, ends = mail.tokens(), mail.ends()
    assert len(ends) == count
    for one in asked:
        own = alone(pair, [*one.prompt], one.max_tokens)
        reason = ends[one.id].reason
        assert found.get(one.id, []) == own[: len(found.get(one.id, []))], one.id
        assert reason != "length" or len(found[one.id]) == one.max_tokens
    assert {end.reason for end in ends.values()} >= {"length", "cancelled"}
    assert sum(end.reason == "length" for end in ends.values()) >= count // 2
    assert (mode, is_wild) != ("ssd", False) or sum(end.hits for end in ends.values()) > 20
