"""The same arrivals at a server that is simulated in this process, in virtual time.

The server's own scheduler and controller run over modelled rounds: a VirtualLoop takes the place of
the target loop. Its rounds last as the emulated backend's forwards do, with the host costs of the
profile; imposed models or a recording decide acceptance and hits, with the same draws for every
method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpissd.common.config import RunConfig
from mpissd.engine.backend.profile import load_profile, role_profiles
from mpissd.engine.decode.goodput import Goodput, widths_of
from mpissd.engine.decode.scheduler import Room, Scheduler
from mpissd.engine.job import Job, resolve, resolve_unopened
from mpissd.lab.load.config import AUTO, LoadConfig
from mpissd.lab.load.requests import ANSWERED, Load, Served
from mpissd.lab.load.virtual_loop import VirtualLoop, costs_of
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.hosts import host_of
from mpissd.serve.driver import Driver
from mpissd.serve.protocol import End, Message, Submit, Tokens

_PAGE = 64
_TOLD = ("drafted", "accepted", "hits", "rounds")


def about(config: LoadConfig) -> Mapping[str, Any]:
    """Returns a row's description of the simulated server; raises ConfigError for bad flags."""
    run = config.simulated
    job = resolve_unopened(run, config.tp)
    told = job.workload.row_fields()
    return {
        "mode": AUTO if config.auto else run.mode,
        "backend": run.backend,
        "device_name": f"{load_profile(run.device).device_name} (emulated)",
        "model": job.target.name,
        "draft": job.draft.name if job.draft else None,
        "tp": config.tp,
        "num_drafts": run.drafts,
        "world_size": (config.tp + run.drafts) * config.replicas,
        "replicas": config.replicas,
        "acceptance": told.acceptance,
        "hit_law": told.hit_law,
        "lookahead": 0 if run.mode == "ar" else run.lookahead,
        "max_running": config.max_running,
    }


def send_all(config: LoadConfig, load: Load) -> list[Served]:
    """Returns the results of a load's requests, dealt to the replicas in turn."""
    found = [each.prompt_tokens for each in load.arrivals]
    arrivals = [
        Asked(each.at_s, tokens, each.max_tokens)
        for each, tokens in zip(load.arrivals, found, strict=True)
    ]
    served: list[Served | None] = [None] * len(arrivals)
    for first in range(config.replicas):
        served[first :: config.replicas] = _one(config, arrivals[first :: config.replicas])
    return [each for each in served if each is not None]


def _one(config: LoadConfig, arrivals: Sequence[Asked]) -> list[Served]:
    """Returns the results of the requests of one replica."""
    if not arrivals:
        return []
    run = config.simulated
    done = simulate(run, config.tp, arrivals, auto=config.auto, kv_tokens=config.kv_tokens)
    return [_served(each) for each in done.requests]


def _served(found: Answered) -> Served:
    times = found.token_s
    return Served(
        at_s=found.at_s,
        status=ANSWERED,
        ttft_s=times[0] - found.at_s,
        latency_s=times[-1] - found.at_s,
        num_tokens=len(times),
        prompt_tokens=found.prompt_tokens,
        speculation={name: getattr(found, name) for name in _TOLD},
    )


@dataclass(frozen=True)
class Asked:
    """A request: its arrival, tokens of its prompt, and tokens that it asks for."""

    at_s: float
    prompt_tokens: int
    num_tokens: int


@dataclass
class Answered:
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

    requests: list[Answered]
    seconds: float
    rounds_by: dict[str, int]
    preempted: int


def simulate(
    config: RunConfig,
    tp: int,
    arrivals: Sequence[Asked],
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
    times = loop.measured()
    chooses = auto and job.lookahead
    driver = Driver(
        Scheduler(_room(job, arrivals, kv_tokens)),
        mail,
        config.mode,
        job.lookahead,
        times=times,
        goodput=Goodput(job.lookahead, widths_of(job), times) if chooses else None,
        clock=lambda: loop.now,
    )
    while driver.wait(math.inf):
        driver.drive(loop)
    chosen = {} if driver.goodput is None else driver.goodput.rounds_by
    rounds_by = chosen or {config.mode: driver.scheduler.num_rounds}
    return Simulated(mail.served, loop.now, rounds_by, driver.scheduler.num_preempted)


def _room(job: Job, arrivals: Sequence[Asked], kv_tokens: int) -> Room:
    longest = max(a.prompt_tokens + a.num_tokens for a in arrivals) + 1
    ahead = job.lookahead + 1
    each = -(-(longest + ahead) // _PAGE)
    pages = max(each, kv_tokens // _PAGE) if kv_tokens else each * job.config.batch_size
    return Room(job.config.batch_size, longest, ahead, _PAGE, pages)


class _Mail:
    """Delivers arrivals in virtual time, and notes when their tokens are sent."""

    def __init__(self, loop: VirtualLoop, arrivals: Sequence[Asked]) -> None:
        self._loop = loop
        self._left = sorted(enumerate(arrivals), key=lambda pair: pair[1].at_s, reverse=True)
        self.served = [Answered(one.at_s, one.prompt_tokens) for one in arrivals]
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
            answered = self.served[message.id]
            answered.drafted, answered.accepted = message.drafted, message.accepted
            answered.hits, answered.rounds = message.hits, message.rounds

    def flush(self) -> None:
        return None
