"""The client of a draft process: an engine of another project asks it for drafts.

Sequences have no names here; they are known by their tokens. A row that continues a sequence of the
last question by some tokens that were drafted, and one more, commits that sequence. Any other row
is a new one, and sequences without a row are released; the draft keeps the pages of what it has
read, the last used, so one that returns costs what they lack. So rows may move, vanish, return and
grow as they like, and a wrong match costs acceptance only.

`DraftSwitch` chooses whether to ask: the measured seconds a token with and without drafts decide. A
step lasts from one question to the next. By number of rows, in steps of powers of two, the way with
the lower mean cost is used. The other way is tried as long as what all trials have cost is at most
EXPLORE of the time. It is a pure object: its caller has the clock.
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter

import numpy as np

from mpissd.common.errors import FaultError
from mpissd.common.rounds import Control, Event, Ints, Outcome, Request
from mpissd.common.wait import Overdue
from mpissd.engine.comm.link import (
    MOST_PROMPTS,
    LeadEnd,
    SocketWaiter,
    packets,
    received_hello,
    socket_boxes,
)

LOG = logging.getLogger("vllm.mpissd")  # shown with vLLM's own lines where there are any
_START_S, _SILENT_S = 600.0, 30.0  # a draft that is silent for longer is left
_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0
Row = tuple[Ints, int]  # all tokens of a sequence, and how many of them are new
EXPLORE = 0.005  # largest share of time for trials
_TRIAL = 32  # steps of a trial, and at least so many between two
_SETTLE = 2  # its first steps, in which the draft reads what it lacks, are no sample
_MEMORY = 1 / 128  # share of the samples forgotten at each step
_FEW, _FAR = 8.0, 4.0  # samples after which one counts as at most so many mean ones
_MARGIN = 1.01  # a change must promise so much more


@dataclass
class _Way:
    """Sums over steps, the last ones weighing most."""

    steps: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        if self.steps > _FEW:  # a pause of the engine, or a compiler
            seconds = min(seconds, _FAR * self.seconds / self.steps)
        self.steps += 1 - _MEMORY * self.steps
        self.seconds += seconds - _MEMORY * self.seconds
        self.tokens += tokens - _MEMORY * self.tokens

    @property
    def cost_s(self) -> float:
        return self.seconds / self.tokens if self.tokens else inf


class _Load:
    """The two ways of a number of rows: without drafts at first, for the price to beat."""

    def __init__(self) -> None:
        self._ways = {False: _Way(), True: _Way()}
        self._best = self.way = False
        self._left = _TRIAL
        # Of all steps; of all trials, and of this one, beyond the best way's cost.
        self._elapsed_s = self._lost_s = self._loss_s = 0.0

    def add(self, way: bool, seconds: float, tokens: int) -> None:
        """Takes a step that was decoded in this way."""
        best, trying = self._ways[self._best], self.way != self._best
        self._elapsed_s += seconds
        self._left -= way == self.way
        settling = trying and way == self.way and self._left >= _TRIAL - _SETTLE
        if not settling:
            self._ways[way].add(seconds, tokens)
        if trying:
            self._loss_s += seconds - tokens * best.cost_s
            if not settling and self._loss_s > _TRIAL * best.seconds / best.steps:
                self._left = 0
        if self._left:
            return
        self._left, other = _TRIAL, not self._best
        if self._ways[other].cost_s * _MARGIN < self._ways[self._best].cost_s:
            self._best = other
        self.way = self._best
        if trying:
            self._lost_s = max(0.0, self._lost_s + self._loss_s)
        elif self._lost_s <= EXPLORE * self._elapsed_s:
            self.way, self._loss_s = not self._best, 0.0


class DraftSwitch:
    """The choice of one client, by number of rows."""

    def __init__(self) -> None:
        self._loads = defaultdict[int, _Load](_Load)
        self._start_s, self._rows, self._length = 0.0, 0, 0
        self._way = False  # of the step since the last call

    def choose(self, now_s: float, rows: int, length: int, added: int, possible: bool) -> bool:
        """Returns whether to ask for drafts now.

        length: tokens of all rows, of which `added` are new. A step counts only if it decoded the
        rows of the step before and no others, so pauses and prompts do not count. possible: there
        is a draft to ask.
        """
        load = rows.bit_length()
        if rows == self._rows and length - added == self._length:
            self._loads[load].add(self._way, now_s - self._start_s, added)
        self._start_s, self._rows, self._length = now_s, rows, length
        self._way = possible and self._loads[load].way
        return self._way


@dataclass(eq=False)
class _Sequence:
    """A sequence that the draft follows: its committed tokens, and those that were drafted last."""

    id: int
    tokens: Ints
    drafted: list[int] = field(default_factory=list)

    def accepted(self, tokens: Ints, added: int) -> int | None:
        """Returns how many drafted tokens a row accepted; None: it does not continue this one."""
        before, k = len(tokens) - added, added - 1
        if before != len(self.tokens) or tokens[before:-1].tolist() != self.drafted[:k]:
            return None
        return k if tokens[:before].tobytes() == self.tokens.tobytes() else None


class DraftClient:
    """Asks a draft process, and starts it where it is told how.

    counts: calls, answered rows, new sequences, hits, drafted and accepted tokens, late (calls
    whose answer was), off (calls while drafts did not pay), lost (connections), waited_us.
    """

    def __init__(self, where: str, lookahead: int, patience_s: float, batch: int, longest: int):
        """Takes the path of a draft's socket, or the flags of `mpissd draft` or a whole command,
        whose process ends with this one.

        patience_s: the longest wait of a call. batch, longest: sequences, and tokens of one, for
        which a process has room that is started here.
        """
        self._where, self._lookahead, self._patience_s = where, lookahead, patience_s
        self._sizes = {"lookahead": lookahead, "batch_size": batch, "context": longest}
        self.counts, self._switch = Counter[str](), DraftSwitch()
        self._always = os.environ.get("MPISSD_ALWAYS") == "1"
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._link: LeadEnd | None = None
        self._since = self._retry_at = 0.0  # of the awaited message; of the next connection
        self._retry_s = _RETRY_S

    def drafts(self, rows: Sequence[Row]) -> list[list[int]]:
        """Returns up to K drafted tokens for each row; empty lists where none came in time.

        Raises nothing. Waits for at most patience_s; the start of a process is not awaited.
        """
        answers: list[list[int]] = [[] for _ in rows]
        start, added = perf_counter(), sum(added for _, added in rows)
        length = sum(len(tokens) for tokens, _ in rows)
        try:
            link = (self._link or self._open()) if rows else None
            pays = self._switch.choose(start, len(rows), length, added, link is not None)
            if link and self._pending:  # an answer that comes after its call is dropped
                self._answer(link, 0.0)
            if link and not (pays or self._always):
                self.counts["off"] += 1
            elif link:
                for number, drafted in self._ask(link, rows, start + self._patience_s):
                    answers[number] = drafted
                    self.counts["rows"] += 1
                    self.counts["drafted"] += len(drafted)
        except Overdue:
            self.counts["late"] += 1
        except Exception as error:  # noqa: BLE001  (none may reach the engine that asks)
            LOG.warning("mpissd: no drafts for %.0f s: %s", self._retry_s, error)
            self.counts["lost"] += self._link is not None
            self._retry_at = perf_counter() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
            self._leave()
        self.counts["calls"] += 1
        self.counts["waited_us"] += round(1e6 * (perf_counter() - start))
        return answers

    def _open(self) -> LeadEnd | None:
        """Returns the link, or None until HELLO is there."""
        if self._socket is None:
            if perf_counter() < self._retry_at:
                return None
            self._socket, self._since = self._connected(), perf_counter()
            self._socket.setblocking(False)
        if (hello := received_hello(self._socket)) is None:
            self._check_silence(_START_S)
            return None
        shape, self._vocab = hello
        self._waiter = SocketWaiter(self._socket)
        self._link = LeadEnd(shape, self._waiter, *socket_boxes(self._socket))
        self._live, self._round, self._next_id, self._pending = list[_Sequence](), -1, 0, 0
        LOG.info("mpissd: a draft answers: K=%d, %d sequences", shape.lookahead, shape.batch)
        return self._link

    def _connected(self) -> socket.socket:
        command = shlex.split(self._where)
        if len(command) == 1 and not self._where.startswith("-"):
            made = packets()
            made.setblocking(False)  # a full queue refuses instead
            made.connect(self._where)
            return made
        if self._process is not None and self._process.poll() is None:
            raise FaultError("the last draft process has not ended")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = {word.partition("=")[0] for word in command}
        own = [sys.executable, "-m", "mpissd", "draft"] * self._where.startswith("-")
        more = [f"--{name}={n}" for name, n in self._sizes.items() if f"--{name}" not in given]
        with theirs:  # Popen: a worker of vLLM may be a daemon, which multiprocessing refuses
            self._process = subprocess.Popen(
                [*own, *command, *more, f"--socket=fd:{theirs.fileno()}"],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        return ours

    def _check_silence(self, seconds: float) -> None:
        if perf_counter() - self._since > seconds:
            raise FaultError(f"silent for {seconds:.0f} s")

    def _answer(self, link: LeadEnd, end: float) -> list[list[int]]:
        """Returns the answer of the last question, by sequence; raises Overdue without one."""
        self._check_silence(_SILENT_S)
        self._waiter.end = end
        speculation = link.speculation(self._round + 1, self._pending)
        self._round, self._pending, self._retry_s = self._round + 1, 0, _RETRY_S
        counts, tokens = speculation.num_draft.tolist(), speculation.tokens
        known = ((tokens >= 0) & (tokens < self._vocab)).all()
        if not (known and 0 <= min(counts) <= max(counts) <= self._lookahead):
            raise ValueError(f"drafted tokens {tokens.tolist()}, {counts} of them")
        for one, row, count in zip(self._live, tokens.tolist(), counts, strict=True):
            one.drafted = row[:count]
        self.counts["hits"] += int(np.count_nonzero(speculation.hit))
        return [[*one.drafted] for one in self._live]  # copies, which the engine may change

    def _ask(self, link: LeadEnd, rows: Sequence[Row], end: float) -> list[tuple[int, list[int]]]:
        """Sends the outcome that these rows are; returns (row, drafted tokens) of the answer."""
        shape = link.shape
        left = {n for n, (tokens, _) in enumerate(rows) if 0 < len(tokens) < shape.prompt_tokens}
        outcome, live, of, prompts, size = [], list[_Sequence](), list[int](), {}, 0
        for place, one in enumerate(self._live):
            for number in (place, *left):  # rows seldom move
                if number in left and (k := one.accepted(*rows[number])) is not None:
                    tokens = rows[number][0]
                    outcome.append((one.id, 0, int(Event.COMMIT), k, int(tokens[-1])))
                    live.append(_Sequence(one.id, tokens))
                    of.append(number)
                    left.remove(number)
                    self.counts["accepted"] += k
                    break
            else:
                outcome.append((one.id, 0, Event.RELEASE, 0, 0))
        for number in sorted(left):
            tokens, name = rows[number][0], self._next_id
            size += len(tokens)
            if len(live) == shape.batch or size > MOST_PROMPTS:
                break
            outcome.append((name, 0, Event.ADMIT, 0, tokens[-1]))
            prompts[name, 0] = Request(name, int(tokens[-1]), 0, tuple(tokens.tolist()))
            live.append(_Sequence(name, tokens))
            of.append(number)
            self._next_id = (name + 1) % (1 << 30)
            self.counts["new"] += 1
        if not live:
            return []
        control, table = Control(min(self._lookahead, shape.lookahead)), np.array(outcome, np.int32)
        self._live, self._pending, self._since = live, len(live), perf_counter()
        link.send_outcome(Outcome(self._round, table, prompts, control))
        return list(zip(of, self._answer(link, end), strict=True))

    def _leave(self) -> None:
        self._link = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Closes the connection, and ends the process that was started for it."""
        self._leave()
        if self._process is not None:
            self._process.wait()
