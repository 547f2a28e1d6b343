"""Measures what requests and their socket cost the lead in a round: µs, p50 and p99.

    python results/serving-control/socket_cost.py [--rounds=4000]

A process reads the other end of a socket as the front does. The rounds are those of a loop that
decodes nothing, so that only the server's own work is left:

    between   what stands between two rounds because of the socket: one poll of it, and the messages
              of the round's tokens kept for later
    while     what is done while the target verifies: messages packed and written
    choosing  likewise, with mode=auto: the controller's choice
    schedule  the scheduler's own work between two rounds: who ends, waits or joins
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpissd.common.rounds import Control, Outcome, Request, Source, Speculation
from mpissd.common.trace import LeadPhase, Ledger
from mpissd.engine.decode.goodput import Goodput
from mpissd.engine.decode.scheduler import Room, Scheduler
from mpissd.engine.decode.target import RoundResult
from mpissd.serve.driver import Driver
from mpissd.serve.protocol import Line, Message, Submit, pack

K, TOKENS = 4, 1 << 30


class Timed(Line):
    """A line that adds up what its calls between two rounds take."""

    between_s = 0.0

    def take(self, wait_s: float = 0.0) -> Sequence[Message]:
        start = time.perf_counter()
        found = super().take(wait_s)
        self.between_s += time.perf_counter() - start
        return found

    def put(self, message: Message) -> None:
        start = time.perf_counter()
        super().put(message)
        self.between_s += time.perf_counter() - start


class EmptyLoop:
    """Rounds of K + 1 tokens a sequence that take no time; notes how long each part took."""

    draft_lost_round, most_rows, is_storing, unstored, lacking = None, 512, False, 0, 0

    def __init__(self, rounds: int, line: Timed) -> None:
        self.control, self.ledger = Control(), Ledger(LeadPhase)
        self.meanwhile: Callable[[], None] | None = None
        self.live_ids: list[int] = []
        self.parts: list[tuple[float, float, float]] = []
        self._left, self._line, self._over = rounds, line, 0.0

    def open(self, requests: Sequence[Request]) -> None:
        self.live_ids = [request.request_id for request in requests]

    def finish(self, request_ids: Sequence[int]) -> None:
        self.live_ids = []

    def step(self) -> RoundResult:
        start = time.perf_counter()
        between_s, self._line.between_s = self._line.between_s, 0.0
        schedule_s = start - self._over - between_s
        assert self.meanwhile is not None
        self.meanwhile()
        self.parts.append((between_s, time.perf_counter() - start, schedule_s))
        self._left -= 1
        if not self._left:
            self._line.is_closed = True
        count = len(self.live_ids)
        rows = np.array([(n, 0, 0, K, 7) for n in self.live_ids], np.int32).reshape(count, 5)
        served = Speculation.empty(0, count, K)
        served.rows[:, :3] = Source.CACHE, 1, K
        self._over = time.perf_counter()
        return RoundResult(served, Outcome(0, rows), 1e-3, {}, count * (K + 1), 1e-4)


def measured(batch: int, rounds: int, *, auto: bool) -> dict[str, object]:
    """Returns the parts of a round with `batch` sequences, in µs."""
    front, lead = socket.socketpair()
    child = os.fork()
    if not child:
        lead.close()
        while front.recv(1 << 16):
            pass
        os._exit(0)
    front.sendall(b"".join(pack(Submit(n, [1, 2, 3], TOKENS)) for n in range(batch)))
    front.close()
    line = Timed(lead)
    room = Room(batch, TOKENS, K + 1, 1 << 20, 1 << 20)
    driver, loop = Driver(Scheduler(room), line), EmptyLoop(rounds, line)
    driver.lookahead = K
    if auto:
        driver.goodput = Goodput(K, [None, 1], driver.times)
    driver.wait(1.0)
    assert len(driver.scheduler.running) == batch, "all requests came in one message"
    driver.drive(loop)
    line.close()
    os.waitpid(child, 0)
    parts = 1e6 * np.array(loop.parts[100:])
    names = "between", "choosing" if auto else "while", "schedule"
    spread = {name: _spread(part) for name, part in zip(names, parts.T, strict=True)}
    return {"batch": batch, "auto": auto, "rounds": len(parts), **spread}


def _spread(part: Any) -> dict[str, float]:
    return {f"p{n}": round(float(np.percentile(part, n)), 2) for n in (50, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4000)
    rounds = parser.parse_args().rounds
    for auto in (False, True):
        for batch in (1, 4, 16):
            print(json.dumps(measured(batch, rounds, auto=auto)))


if __name__ == "__main__":
    main()
