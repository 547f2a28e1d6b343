"""Arrivals in virtual time: the server's own scheduler and controller over modelled rounds.

A `VirtualLoop` takes the place of the target loop. Its rounds last as the emulated backend's
forwards do, with the host costs of the profile and the draft's steps as in `lab.predict`; imposed
models or a recording decide acceptance and hits (`outcomes`), with the same draws for every method.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mpissd.common.config import RunConfig
from mpissd.engine.backend.profile import role_profiles
from mpissd.engine.decode.goodput import Goodput, widths_of
from mpissd.engine.decode.scheduler import Room, Scheduler
from mpissd.engine.job import Job, resolve
from mpissd.lab.load.virtual.loop import VirtualLoop, costs_of
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.hosts import host_of
from mpissd.serve.driver import Driver
from mpissd.serve.protocol import End, Message, Submit, Tokens

_PAGE = 64


@dataclass(frozen=True)
class Arrival:
    """A request: its arrival, tokens of its prompt, and tokens that it asks for."""

    at_s: float
    prompt_tokens: int
    num_tokens: int


@dataclass
class Served:
    """The result of an arrival. token_s: the time of each of its tokens."""

    at_s: float
    prompt_tokens: int
    token_s: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    hits: int = 0
    rounds: int = 0


@dataclass(frozen=True)
class Simulated:
    """A simulated load. seconds: until the last token. rounds_by: rounds of "ar", "sd", "ssd"."""

    requests: list[Served]
    seconds: float
    rounds_by: dict[str, int]
    preempted: int


def simulate(
    config: RunConfig,
    tp: int,
    arrivals: Sequence[Arrival],
    *,
    auto: bool = False,
    kv_tokens: int = 0,
    costs: tuple[DeviceCosts, HostCosts] | None = None,
) -> Simulated:
    """Serves these arrivals in virtual time, at most batch_size at once; raises ConfigError.

    config: of an emulated device; its imposed models or its recording decide outcomes. auto: lets
    the controller choose the mode and K. kv_tokens: of the cache (0: each may be as long as it
    needs). costs: measured costs that replace the device profile's.
    """
    profile, drafts = role_profiles(config.device, config.draft_device)
    memory = profile.memory_bytes, drafts.memory_bytes
    job = resolve(
        config, tp, backend="emulated", memory_bytes=memory[0], draft_memory_bytes=memory[1]
    )
    modelled = costs_of(job, profile, drafts), host_of(profile, job)
    loop = VirtualLoop(job, *(costs or modelled), pads=costs is None)
    mail = _Mail(loop, arrivals)
    driver = Driver(Scheduler(_room(job, arrivals, kv_tokens)), mail, clock=lambda: loop.now)
    driver.mode, driver.lookahead = config.mode, job.lookahead
    driver.times = loop.measured()
    if auto and job.lookahead:
        driver.goodput = Goodput(job.lookahead, widths_of(job), driver.times)
    while driver.wait(math.inf):
        driver.drive(loop)
    chosen = {} if driver.goodput is None else driver.goodput.rounds_by
    rounds_by = chosen or {config.mode: driver.scheduler.num_rounds}
    return Simulated(mail.served, loop.now, rounds_by, driver.scheduler.num_preempted)


def _room(job: Job, arrivals: Sequence[Arrival], kv_tokens: int) -> Room:
    longest = max(a.prompt_tokens + a.num_tokens for a in arrivals) + 1
    ahead = job.lookahead + 1
    each = -(-(longest + ahead) // _PAGE)
    pages = max(each, kv_tokens // _PAGE) if kv_tokens else each * job.config.batch_size
    return Room(job.config.batch_size, longest, ahead, _PAGE, pages)


class _Mail:
    """Delivers arrivals in virtual time, and notes when their tokens are sent."""

    def __init__(self, loop: VirtualLoop, arrivals: Sequence[Arrival]) -> None:
        self._loop = loop
        self._left = sorted(enumerate(arrivals), key=lambda pair: pair[1].at_s, reverse=True)
        self.served = [Served(one.at_s, one.prompt_tokens) for one in arrivals]
        self.is_closed = False

    def take(self, wait_s: float = 0.0) -> Sequence[Message]:
        if self._left and wait_s:
            self._loop.now = max(self._loop.now, self._left[-1][1].at_s)
        found = []
        while self._left and self._left[-1][1].at_s <= self._loop.now:
            number, one = self._left.pop()
            found.append(Submit(number, range(one.prompt_tokens), one.num_tokens))
        return found

    def put(self, message: Message) -> None:
        if isinstance(message, Tokens):
            self.served[message.id].token_s += [self._loop.now] * len(message.tokens)
        elif isinstance(message, End):
            served = self.served[message.id]
            served.drafted, served.accepted = message.drafted, message.accepted
            served.hits, served.rounds = message.hits, message.rounds

    def flush(self) -> None:
        return None
