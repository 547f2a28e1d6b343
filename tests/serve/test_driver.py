"""Requests on real loops in one process: joins, leaves, pages, cancellations. Requests that begin
alike share pages: their tokens stay, no page is lost, less is computed."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpissd.common.config import RunConfig
from mpissd.common.rounds import Logprob, Sampling
from mpissd.engine.features.goodput import ForwardTimes, Goodput, Way
from mpissd.engine.in_process import Loops, in_one_process
from mpissd.engine.job import Serving
from mpissd.engine.round.scheduler import Capacity, Endings, Scheduler, Task
from mpissd.serve.driver import Driver
from mpissd.serve.protocol import Cancel, End, Message, PromptTokens, Submit, Tokens
from mpissd.serve.ranks import warm
from tests.loop.recorded import greedy
from tests.loop.text_rig import TextModel, logits_behind
from tests.text_config import finished, text_config
from tests.tiny_pair import TinyPair, tiny_pair

K, SLOTS = 4, 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_pair(tmp_path_factory.mktemp("pair"), noise=0.02)


class Script:
    """Delivers messages at given rounds, and keeps the messages that the driver sends."""

    def __init__(self, *messages: tuple[int, Message]) -> None:
        self._left = sorted(messages, key=lambda pair: pair[0])
        self.turn = -1
        self.sent: list[Message] = []
        self.is_closed = False
        self.watch: Callable[[], int] = int  # a value to note at each turn
        self.watched: list[int] = []

    def take(self, wait_s: float = 0.0) -> Sequence[Message]:
        self.turn += 1
        self.watched.append(self.watch())
        due = [message for turn, message in self._left if turn <= self.turn]
        self._left = [pair for pair in self._left if pair[0] > self.turn]
        if not due and self._left and wait_s:  # nothing runs: the next one comes at once
            self.turn = self._left[0][0] - 1
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


def config(pair: TinyPair, **flags: object) -> RunConfig:
    """mode: of a run, or a name below; "parallel …" drafts all K tokens in one forward."""
    name = str(flags["mode"])
    flags |= {"mode": name.removeprefix("parallel "), "parallel_drafting": "parallel" in name}
    if flags["mode"] in ("inline", "tree"):
        flags |= {"tree": 7} if flags["mode"] == "tree" else {}
        flags |= {"mode": "sd", "num_drafts": 0}
    if flags["mode"] == "branches of trees":
        flags |= {"mode": "ssd", "tree": 7}
    return text_config(pair, lookahead=K, batch_size=SLOTS, **flags)


def served(
    loops: Loops,
    mail: Script,
    times: ForwardTimes | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    goodput: Goodput | None = None,
) -> Driver:
    job = loops.job
    stop_ids = job.workload.stop_ids  # type: ignore[attr-defined]
    scheduler = Scheduler(room_of(loops), Endings(*stop_ids))
    told: Any = {"times": times, "goodput": goodput, "clock": clock, "shape": job.shape}
    driver = Driver(scheduler, mail, "", job.lookahead, **told)
    while not mail.is_over or scheduler.num_waiting or scheduler.running or scheduler._ended:
        driver.wait(1.0)
        driver.drive(loops.loop)
    return driver


def room_of(loops: Loops) -> Capacity:
    job, pages = loops.job, loops.target_stepper.pages
    sizes, ahead = pages.sizes, job.lookahead + 1
    return Capacity(job.config.batch_size, job.longest, ahead, sizes.page, sizes.num_pages)


def prompts(count: int, seed: int = 0) -> Iterator[list[int]]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield rng.integers(0, 97, int(rng.integers(2, 40))).tolist()


def alone(pair: TinyPair, prompt: list[int], count: int, **told: int) -> list[int]:
    """The tokens of a job of its own."""
    config = text_config(pair, mode="ar", prompt=prompt, num_tokens=count, **told)
    return finished(config).tokens[0][:count]


class ThreeRows(ForwardTimes):
    """Allows three rows of prompts in a round that verifies, and remembers the rows of forwards."""

    def __init__(self, *, always: bool = False) -> None:
        """always: allows three rows in other rounds, too."""
        super().__init__()
        self.seen: list[int] = []
        self.drafts: list[int] = []  # K of the rounds for which an inline draft drafted
        self._always = always

    def add(self, rows: int, seconds: float) -> None:
        self.seen.append(rows)

    def drafted(self, lookahead: int, seconds: float) -> None:
        self.drafts.append(lookahead)

    def prefill_rows(self, rows: int, most: int, lookahead: int = 0) -> int:
        return 3 if rows or self._always else most


def all_returned(loops: Loops) -> bool:
    """Whether all pages of both models are in the pool again, and no slot holds a page."""
    every = [stepper.pages for stepper in (loops.target_stepper, *loops.draft_steppers)]
    return all(
        pages is not None
        and sorted([*pages._blank, *pages._kept]) == list(range(pages.sizes.num_pages))
        and not any(pages.held)
        for pages in every
    )


def run(
    pair: TinyPair, mode: str, mail: Script, serving: Serving | None = None, **more: Any
) -> Driver:
    """Serves the messages of a script; every page of both models is then free again."""
    with Loops(*in_one_process(config(pair, mode=mode), serving or Serving())) as loops:
        driver = served(loops, mail, **more)
    assert all_returned(loops)
    return driver


def test_a_prompt_that_never_joined_leaves_nothing_to_the_next_one(pair: TinyPair) -> None:
    first, other = [*range(40)], [3, *range(90, 60, -1)] * 5
    mail = Script(
        (0, Submit(0, first, 4)),
        (0, Submit(1, other, 4)),
        (0, Submit(2, [*first, 50], 12)),
        (30, Cancel(1)),
    )
    one = text_config(pair, lookahead=K, batch_size=1, mode="ssd")
    with Loops(*in_one_process(one, Serving())) as loops:
        served(loops, mail, times=ThreeRows(always=True))
    assert mail.ends()[1].reason == "cancelled" and 1 not in mail.tokens() and all_returned(loops)
    assert mail.tokens()[2] == alone(pair, [*first, 50], 12)


def test_batches_that_warm_a_server_up_fit_into_its_pages(pair: TinyPair) -> None:
    many = text_config(pair, lookahead=K, batch_size=8, mode="ssd")
    times = ForwardTimes()
    with Loops(*in_one_process(many, Serving(kv_tokens=64))) as loops:
        room = room_of(loops)
        assert room.pages < 8
        goodput = Goodput(K, [None], times)
        warm(loops.loop, loops.job, times, room, goodput)
        mail = Script((0, Submit(0, [5, 6, 7], 12)))
        served(loops, mail, times=times)
    assert times.seconds(K + 1) > 0 and goodput._rest_s(1)[Way(K)] > 0
    assert mail.tokens()[0] == alone(pair, [5, 6, 7], 12)


@pytest.mark.parametrize("mode", ["inline", "ssd", "parallel inline", "parallel ssd"])
def test_a_long_prompt_is_stored_beside_the_rounds_of_the_others(pair: TinyPair, mode: str) -> None:
    long = [n % 97 for n in range(61)]
    mail = Script((0, Submit(0, [5, 6, 7], 150)), (6, Submit(1, long, 12)))
    times, verified = ThreeRows(), K + 1
    run(pair, mode, mail, times=times)
    assert times.seen.count(verified + 3) == 20  # 60 tokens, the last one is verified
    assert max(times.seen) <= max(verified + 3, 2 * verified)
    assert set(times.drafts) == ({K} if "inline" in mode else set())
    order = [message.id for message in mail.sent if isinstance(message, Tokens)]
    assert order[: order.index(1)].count(0) >= 5 + 20, "the other one went on meanwhile"
    assert mail.tokens() == {0: alone(pair, [5, 6, 7], 150), 1: alone(pair, long, 12)}


@pytest.mark.parametrize(
    "mode", ["ssd", "tree", "branches of trees", "parallel ssd", "parallel branches of trees"]
)
def test_a_seed_gives_the_same_tokens_in_any_company(pair: TinyPair, mode: str) -> None:
    mine = [Submit(n, [4, 5, 6], 40, Sampling(0.9, 0.95, seed=7)) for n in (0, 40)]
    told = Sampling(0.9, 0.95)
    others = [Submit(n, prompt, 30, told) for n, prompt in enumerate(prompts(6), 1)]
    plain = Submit(50, [8, 9], 40)
    mail = Script(
        (0, mine[0]), *((n, one) for n, one in enumerate(others)), (9, mine[1]), (9, plain)
    )
    run(pair, mode, mail)
    tokens = mail.tokens()
    assert tokens[0] == tokens[40] and len(tokens[0]) == 40
    assert tokens[50] == alone(pair, [8, 9], 40), "a greedy one among them"
    assert len({tuple(tokens[n]) for n in (0, 1, 2)}) == 3


def check_scores(
    pair: TinyPair, tokens: Sequence[int], first: int, scores: Sequence[Logprob], top: int
) -> None:
    """Log-probabilities of the tokens from a place on are the target's own, and so are the tops."""
    for place, told in enumerate(scores, first):
        logits = logits_behind(str(pair.target), tuple(tokens[:place])).astype(np.float64)
        own = logits - np.log(np.exp(logits).sum())
        assert told.value == pytest.approx(own[tokens[place]], abs=1e-4)
        likeliest = np.argsort(-own, kind="stable")[:top]
        assert [n for n, _ in told.top] == likeliest.tolist()
        assert [value for _, value in told.top] == pytest.approx(own[likeliest], abs=1e-4)


@pytest.mark.parametrize("mode", ["ar", "inline", "ssd", "tree", "parallel ssd"])
def test_logprobs_are_those_of_the_target_s_own_distribution(pair: TinyPair, mode: str) -> None:
    """Of an answer and its prompt: stored in parts, beside others that ask for none, alone, and
    after a request with the same pages."""
    prompt = tuple(n * 7 % 97 for n in range(70))
    told = Sampling(logprobs=3, prompt_logprobs=2)
    mail = Script(
        (0, Submit(0, [5, 6, 7], 60)),
        (2, Submit(1, prompt, 4, told)),
        (200, Submit(2, prompt, 20, told)),
    )
    run(pair, mode, mail, times=ThreeRows())
    said = [m for m in mail.sent if isinstance(m, Tokens)]
    assert all(m.logprobs is None for m in said if m.id == 0)
    for request_id, count in ((1, 4), (2, 20)):
        tokens = mail.tokens()[request_id]
        assert tokens == alone(pair, [*prompt], count)
        parts = [m for m in mail.sent if isinstance(m, PromptTokens) and m.id == request_id]
        assert len(parts) > 1 or request_id == 2
        scores = {m.start + n: one for m in parts for n, one in enumerate(m.logprobs)}
        assert [*scores] == [*range(1, len(prompt))]
        check_scores(pair, prompt, 1, list(scores.values()), top=2)
        answered = [one for m in said if m.id == request_id for one in m.logprobs or ()]
        assert len(answered) == count
        check_scores(pair, [*prompt, *tokens], len(prompt), answered, top=3)
        assert mail.ends()[request_id].cached == 0


def test_stop_ids_replace_the_model_s(pair: TinyPair) -> None:
    """An answer ends at them, and not before its least number of tokens."""
    prompt = [5, 6, 7]
    free = alone(pair, prompt, 30)
    stop = free[4]
    asked = [
        Submit(0, prompt, 30, Sampling(stop_ids=(stop,))),
        Submit(1, prompt, 30, Sampling(stop_ids=(stop,), min_tokens=9)),
        Submit(2, prompt, 30, Sampling(stop_ids=())),
    ]
    for mode in ("ar", "inline", "ssd"):
        mail = Script(*((0, one) for one in asked))
        run(pair, mode, mail)
        tokens = mail.tokens()
        assert tokens[0] == free[: free.index(stop) + 1] and mail.ends()[0].reason == "stop"
        assert stop not in tokens[1][:9] and len(tokens[1]) > 9
        assert tokens[2] == free and mail.ends()[2].reason == "length"


def test_adjusted_logits_give_the_same_tokens_in_every_mode(pair: TinyPair) -> None:
    """Greedy ones among others, some of them sampled; their definition decodes one by one."""
    every = [[5, 6, 7 + n] for n in range(4)]
    penalised = Sampling(presence_penalty=0.8, frequency_penalty=0.5)
    asked = [
        Submit(0, every[0], 25, penalised),
        Submit(1, every[1], 25, Sampling(logit_bias=((7, 3.0), (8, -100.0)), logprobs=1)),
        Submit(2, every[2], 25),
        Submit(3, every[3], 25, replace(penalised, temperature=0.9)),
        Submit(4, every[0], 25, Sampling(repetition_penalty=1.8, top_k=3, min_p=0.1)),
    ]
    want = {2: alone(pair, every[2], 25)}
    for one in (*asked[:2], asked[4]):
        told = one.sampling
        penalties = told.logit_bias, told.presence_penalty, told.frequency_penalty
        rules = (("repetition_penalty", told.repetition_penalty),)
        target = TextModel(str(pair.target), 1.0, 1.0, len(one.prompt), penalties, rules=rules)
        want[one.id] = greedy(target, one.prompt, 25)
        assert want[one.id] != alone(pair, [*one.prompt], 25)
    drafted = "inline", "ssd", "tree", "branches of trees"
    for mode in ("ar", *drafted, *(f"parallel {mode}" for mode in drafted)):
        mail = Script(*((n, one) for n, one in enumerate(asked)))
        run(pair, mode, mail)
        found = mail.tokens()
        assert len(found.pop(3)) == 25 and found == want, mode
        assert mode == "ar" or mail.ends()[0].accepted > 0


def any_sampling(rng: random.Random) -> Sampling:
    """Some of the fields that requests may have, at temperature 0."""
    told: dict[str, Any] = {
        "top_p": rng.uniform(0.1, 1), "top_k": rng.randrange(5), "min_p": rng.random(),
        "repetition_penalty": rng.uniform(0.5, 3), "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2), "logprobs": rng.randrange(3),
        "logit_bias": tuple((token, rng.uniform(-3, 3)) for token in rng.sample(range(97), 3)),
        "stop_ids": tuple(rng.sample(range(97), 4)), "min_tokens": rng.randrange(12),
        "prompt_logprobs": rng.randrange(3), "lookahead": rng.randrange(K + 1),
    }  # fmt: skip
    chosen = rng.sample(sorted(told), rng.randrange(len(told) + 1))
    given = {name: told[name] for name in chosen}
    return Sampling(**given if "stop_ids" in given else {**given, "min_tokens": 0})


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_greedy_answers_are_equal_in_all_modes_with_any_fields(pair: TinyPair, count: int) -> None:
    """And so are the log-probabilities of answers and prompts, in a little room."""
    rng = random.Random(count)
    asked = [
        Submit(n, prompt, rng.randint(1, 25), any_sampling(rng))
        for n, prompt in enumerate(prompts(count, seed=count))
    ]
    found = {}
    for mode in ("ar", "inline", "ssd", "branches of trees", "parallel ssd"):
        mail = Script(*((n // 2, one) for n, one in enumerate(asked)))
        run(pair, mode, mail, serving=Serving(kv_tokens=320))
        scores, said = dict[tuple[int, int], Any](), dict[int, list[Any]]()
        for one in mail.sent:
            if isinstance(one, PromptTokens):
                scores |= {(one.id, n): each for n, each in enumerate(one.logprobs, one.start)}
            elif isinstance(one, Tokens):
                said.setdefault(one.id, []).extend(one.logprobs or ())
        reasons = {n: end.reason for n, end in mail.ends().items()}
        found[mode] = mail.tokens(), reasons, scores, said
    assert all(one == found["ar"] for one in found.values())
    assert {*found["ar"][1].values()} == {"length", "stop"} and len(found["ar"][1]) == count


@pytest.mark.parametrize("mode", ["ssd", "parallel inline"])
def test_an_answer_that_was_preempted_keeps_its_penalties(pair: TinyPair, mode: str) -> None:
    asked = [Submit(n, [4, 5, 6 + n], 80, Sampling(frequency_penalty=0.7)) for n in range(3)]
    want = Script(*((200 * n, one) for n, one in enumerate(asked)))
    run(pair, "ar", want)
    mail = Script(*((0, one) for one in asked))
    driver = run(pair, mode, mail, serving=Serving(kv_tokens=320))
    assert mail.tokens() == want.tokens() and driver.scheduler.num_preempted > 0


@pytest.mark.parametrize(
    "second", [Cancel(0), Submit(1, [5], 9, deadline_s=1e-9)], ids=["cancelled", "late"]
)
def test_a_request_that_is_over_at_once_begins_no_pass(pair: TinyPair, second: Message) -> None:
    first = Submit(0, [5], 9, deadline_s=1e-9 if isinstance(second, Submit) else None)
    mail, ticks = Script((0, first), (0, second)), iter(range(100))
    with Loops(*in_one_process(config(pair, mode="ar"), Serving())) as loops:
        driver = Driver(Scheduler(room_of(loops)), mail, "ar", 0, clock=lambda: float(next(ticks)))
        assert not driver.wait(1.0), "other ranks would take a pass without a round for the end"
    assert {end.reason for end in mail.ends().values()} <= {"cancelled", "deadline"}
    assert len(mail.ends()) == 1 + isinstance(second, Submit)


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_a_request_s_mode_decodes_its_rounds(pair: TinyPair, mode: str) -> None:
    prompt = [5, 6, 7]
    asked = Submit(0, prompt, 60, Sampling(mode=mode)), Submit(1, prompt, 60)
    mail = Script((0, asked[0]), (200, asked[1]))
    goodput = Goodput(K, [None, 1], ForwardTimes())
    run(pair, "ssd", mail, goodput=goodput)
    assert mail.tokens()[0] == mail.tokens()[1] == alone(pair, prompt, 60)
    end = mail.ends()[0]
    assert (end.drafted > 0) == (mode != "ar") and (end.hits > 0) == (mode == "ssd")
    assert goodput.rounds_by[mode] >= end.rounds - 1


LIMITED = ["inline", "ssd", "tree", "auto"]


@pytest.mark.parametrize("mode", [*LIMITED, *(f"parallel {mode}" for mode in LIMITED)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_request_limits_its_drafts(pair: TinyPair, mode: str, temperature: float) -> None:
    """Limits change no token, of no request; drafted tokens keep to them."""
    limits = [0, 1, None, 2, 0]
    asked = [
        Submit(n, prompt, 30, Sampling(temperature, seed=n, lookahead=limit))
        for n, (prompt, limit) in enumerate(zip(prompts(5), limits, strict=True))
    ]
    mail = Script(*((3 * n, one) for n, one in enumerate(asked)))
    is_auto = "auto" in mode
    goodput = Goodput(K, [None], ForwardTimes((), K)) if is_auto else None
    run(pair, mode.replace("auto", "ssd"), mail, goodput=goodput)
    ends = mail.ends()
    for n, one in enumerate(asked):
        limit = limits[n]
        if not temperature:
            assert mail.tokens()[n] == alone(pair, list(one.prompt), 30)
        if limit is not None:  # of a tree: its nodes up to that level
            most = 7 if "tree" in mode and limit else limit
            assert ends[n].drafted <= most * ends[n].rounds
            assert ends[n].accepted <= limit * ends[n].rounds
            assert (ends[n].drafted > 0) == (limit > 0) or is_auto


SYSTEM = [(7 * n + n * n) % 97 for n in range(140)]  # two pages of 64 tokens, and some


def after(pair: TinyPair, prompt: Sequence[int], count: int) -> list[int]:
    return [*prompt, *alone(pair, [*prompt], count)]


def rows_of(
    pair: TinyPair, mode: str, asked: Sequence[Submit], prefix_cache: bool
) -> tuple[int, list[int]]:
    """Decodes these requests one after the other; returns the rows of the target's forwards, and
    by request the tokens that were cached."""
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
    return sum(rows), [mail.ends()[one.id].cached for one in asked]


@pytest.mark.parametrize("mode", ["ar", "inline", "ssd"])
def test_cached_tokens_are_counted_and_not_computed_again(pair: TinyPair, mode: str) -> None:
    """Pages of prompts and of answers: the last one that is full is read once more if the prompt
    ends with it, and one is found only after the tokens that it followed."""
    first, second = after(pair, SYSTEM, 30), SYSTEM[64:128]
    cut = (SYSTEM[:length] for length in (127, 128, 129))
    prompts = (SYSTEM, [*first, 5, 6], *cut, [*second, *second, 5])
    asked = [Submit(n, prompt, 20 + 10 * (n == 0)) for n, prompt in enumerate(prompts)]
    rows, cached = zip(*(rows_of(pair, mode, asked, on) for on in (False, True)), strict=True)
    assert cached == ([0] * 6, [0, 128, 64, 64, 128, 0])
    assert rows[0] - rows[1] > 0.8 * sum(cached[1])


class Wild(Goodput):
    """Takes any way before each round."""

    def __init__(self, lookahead: int = K) -> None:
        super().__init__(lookahead, [None, 1], ForwardTimes())
        self.dice, self.most = random.Random(0), lookahead

    def choose(self, tasks: Sequence[Task]) -> Way:
        lookahead = self.dice.choice([0, 1, self.most, self.most])
        self.way = Way(lookahead, self.dice.choice([None, 0, 1]))
        return self.way

    @property
    def is_trying(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("mode", "kv_tokens", "is_wild"),
    [
        *((mode, 0, False) for mode in ("ar", "sd", "ssd")),
        *((mode, 448, False) for mode in ("ssd", "tree", "parallel branches of trees")),
        *((mode, 448, True) for mode in ("ssd", "inline", "parallel ssd", "parallel inline")),
    ],
)
def test_shared_beginnings(pair: TinyPair, mode: str, kv_tokens: int, is_wild: bool) -> None:
    """Requests that join and leave with one beginning have the tokens of their own jobs."""
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
