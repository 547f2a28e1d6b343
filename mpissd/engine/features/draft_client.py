"""The client by which another project's inference engine (vLLM) asks a draft process for drafts.

The engine passes rows, each of which has all tokens of a sequence. If a row continues a sequence of
the last call by some of its drafted tokens and one more, these tokens are committed. Any other row
is a new sequence, and sequences without a row are released. So rows may be reordered, vanish, and
return. A wrong match only costs acceptance, and the draft keeps the KV cache of released sequences.

`DraftSwitch` decides whether to ask for drafts at all, by the measured seconds per token with and
without drafts, separately for 1, 2–3, 4–7, … rows. The slower of the two choices is tried now and
then, in at most a share EXPLORE of the time.
"""

import errno
import logging
import os
import shlex
import socket
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import NamedTuple

import numpy as np

from mpissd.common.errors import FaultError
from mpissd.common.rounds import Control, Event, Ints, Outcome, Request
from mpissd.common.wait import Overdue
from mpissd.engine.comm.link import LeadEnd
from mpissd.engine.comm.peer import MOST_PROMPTS, Address, Connection

LOG = logging.getLogger("vllm.mpissd")  # a child of vLLM's logger, so that vLLM shows its lines
_START_S = 600.0  # the longest wait, in seconds, for the first message of a draft process
_SILENT_S = 30.0  # the seconds without an answer after which the connection is closed
_RETRY_S = 1.0  # the seconds from the first failure to a new try to connect
_LONGEST_RETRY_S = 60.0
Row = tuple[Ints, int]  # (all tokens of a sequence, how many of them are new since the last call)
EXPLORE = 0.005  # the largest share of time that is spent on trying the slower choice
_TRIAL = 32  # the engine steps of a trial, and the fewest steps between two trials
_SETTLE = 2  # how many first steps of a trial do not count, since the draft still catches up
_MEMORY = 1 / 128  # the share of its sums that a running mean forgets at each step
_FEW = 8.0  # the number of steps after which an outlier is limited to _FAR times the mean
_FAR = 4.0
_MARGIN = 1.01  # the choice changes only if the other one is cheaper by this factor


@dataclass
class _Way:
    """Running sums of time and tokens over an engine's steps, for steps of one kind: with drafts,
    or without. Later steps weigh more."""

    steps: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        if self.steps > _FEW:  # Limits pauses and a compiler's work.
            seconds = min(seconds, _FAR * self.seconds / self.steps)
        self.steps += 1 - _MEMORY * self.steps
        self.seconds += seconds - _MEMORY * self.seconds
        self.tokens += tokens - _MEMORY * self.tokens

    @property
    def cost_s(self) -> float:
        return self.seconds / self.tokens if self.tokens else inf


class _Load:
    """Chooses whether to use drafts for about the same number of sequences; at first not."""

    def __init__(self) -> None:
        self._ways = {False: _Way(), True: _Way()}
        self._best = self.way = False
        self._left = _TRIAL
        self._elapsed_s = 0.0  # the seconds of all engine steps
        self._lost_s = self._loss_s = 0.0  # seconds lost by all trials; by this one

    def add(self, way: bool, seconds: float, tokens: int) -> None:
        """Counts a step of the engine: its seconds, the emitted tokens, and whether (way) it used
        drafts."""
        best = self._ways[self._best]
        trying = self.way != self._best
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
        self._left = _TRIAL
        if self._ways[not self._best].cost_s * _MARGIN < best.cost_s:
            self._best = not self._best
        self.way = self._best
        if trying:
            self._lost_s = max(0.0, self._lost_s + self._loss_s)
        elif self._lost_s <= EXPLORE * self._elapsed_s:
            self.way = not self._best
            self._loss_s = 0.0


class DraftSwitch:
    """Decides before each step of an inference engine whether asking for drafts saves time."""

    def __init__(self) -> None:
        self._loads = defaultdict[int, _Load](_Load)
        self._start_s = 0.0  # the time of the last call
        self._rows = self._length = 0
        self._way = False

    def choose(self, now_s: float, rows: int, length: int, added: int, possible: bool) -> bool:
        """Returns whether to ask for drafts in this step of the engine. now_s: the time. rows: the
        number of sequences. length: their tokens, of which `added` are new. possible: whether there
        is a draft process. The step since the last call is measured only if the same sequences went
        on, so that pauses and prompts do not count."""
        load = rows.bit_length()
        if rows == self._rows and length - added == self._length:
            self._loads[load].add(self._way, now_s - self._start_s, added)
        self._start_s = now_s
        self._rows = rows
        self._length = length
        self._way = possible and self._loads[load].way
        return self._way


class _Sequence(NamedTuple):
    """A sequence as the draft process knows it. drafted: its last drafted tokens."""

    id: int
    tokens: Ints
    drafted: list[int]

    def accepted(self, tokens: Ints, added: int) -> int | None:
        """Returns how many drafted tokens the engine has accepted if `tokens`, of which the last
        `added` are new, continue this sequence; None if they are another sequence."""
        k = added - 1
        before = len(tokens) - added
        if before != len(self.tokens) or tokens[before:-1].tolist() != self.drafted[:k]:
            return None
        return k if tokens[:before].tobytes() == self.tokens.tobytes() else None


class DraftClient:
    """Asks a draft process, which it may start itself, for drafts. counts: the numbers of calls,
    answered rows, new sequences, cache hits, drafted and accepted tokens, late answers, calls in
    which drafts would cost too much ("off"), lost connections, and microseconds of waiting."""

    def __init__(self, where: str, lookahead: int, patience_s: float, batch: int, longest: int):
        """where: a draft process's socket, a path or tcp://HOST:PORT; or, to start a process that
        ends with this one, a command or the flags of `mpissd draft`. lookahead: the number of
        drafted tokens. patience_s: the longest wait of a call. batch, longest: the most sequences,
        and tokens of one, of a started process. Raises ConfigError for another address or key."""
        self._command = shlex.split(where)
        is_address = len(self._command) == 1 and not where.startswith("-")
        self.address = Address.of(where) if is_address else None
        self._lookahead = lookahead
        self._patience_s = patience_s
        self._sizes = {"lookahead": lookahead, "batch_size": batch, "context": longest}
        self.counts = Counter[str]()
        self._switch = DraftSwitch()
        self._always = os.environ.get("MPISSD_ALWAYS") == "1"
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._link: LeadEnd | None = None
        self._since = self._retry_at = 0.0  # the times when a wait began, and when to connect again
        self._retry_s = _RETRY_S

    def drafts(self, rows: Sequence[Row]) -> list[list[int]]:
        """Returns up to K drafted tokens for each row; none if drafts do not pay or come too late.
        Raises nothing, waits at most patience_s, and never for a process to start."""
        answers: list[list[int]] = [[] for _ in rows]
        start = perf_counter()
        added = sum(added for _, added in rows)
        length = sum(len(tokens) for tokens, _ in rows)
        try:
            link = (self._link or self._open()) if rows else None
            pays = self._switch.choose(start, len(rows), length, added, link is not None)
            if link and self._pending:  # drops an earlier call's late answer
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
        except Exception as error:  # noqa: BLE001  (no error may reach the engine that asks)
            LOG.warning("mpissd: no drafts for %.0f s: %s", self._retry_s, error)
            self.counts["lost"] += self._link is not None
            self._retry_at = perf_counter() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
            self._leave()
        self.counts["calls"] += 1
        self.counts["waited_us"] += round(1e6 * (perf_counter() - start))
        return answers

    def _open(self) -> LeadEnd | None:
        """Returns the message channel; None until a connection and its first message are there."""
        if self._connection is None:
            if perf_counter() < self._retry_at:
                return None
            self._connection = Connection(self._socket())
            self._greeting = self._connection.hello(self.address.key if self.address else None)
            self._since = perf_counter()
        try:
            next(self._greeting)
        except StopIteration as end:
            shape, self._vocab = end.value
        else:
            self._check_silence(_START_S)
            return None
        self._waiter = own = self._connection
        self._link = LeadEnd(shape, own, own.outbox, own.inbox)
        self._live = list[_Sequence]()
        self._round = -1
        self._next_id = self._pending = 0
        LOG.info("mpissd: a draft answers: K=%d, %d sequences", shape.lookahead, shape.batch)
        return self._link

    def _socket(self) -> socket.socket:
        if self.address is not None:
            made = self.address.socket()
            made.setblocking(False)
            error = made.connect_ex(self.address.name)
            if error not in (0, errno.EINPROGRESS):  # such as a full queue of a Unix socket
                raise OSError(error, os.strerror(error))
            return made
        if self._process is not None and self._process.poll() is None:
            raise FaultError("the last draft process has not ended")
        ours, theirs = socket.socketpair()
        given = {word.partition("=")[0] for word in self._command}
        program = [sys.executable, "-m", "mpissd", "draft"] * self._command[0].startswith("-")
        sizes = [f"--{name}={n}" for name, n in self._sizes.items() if f"--{name}" not in given]
        with theirs:  # uses Popen, as vLLM's daemonic workers may not use multiprocessing
            self._process = subprocess.Popen(
                [*program, *self._command, *sizes, f"--socket=fd:{theirs.fileno()}"],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        return ours

    def _check_silence(self, seconds: float) -> None:
        if perf_counter() - self._since > seconds:
            raise FaultError(f"silent for {seconds:.0f} s")

    def _answer(self, link: LeadEnd, end: float) -> list[list[int]]:
        """Returns the drafted tokens of each sequence of the last call; raises Overdue at `end`."""
        self._check_silence(_SILENT_S)
        self._waiter.end = end
        speculation = link.speculation(self._round + 1, self._pending)
        self._round += 1
        self._pending = 0
        self._retry_s = _RETRY_S
        counts = speculation.num_draft.tolist()
        tokens = speculation.tokens
        are_valid = ((tokens >= 0) & (tokens < self._vocab)).all()
        if not (are_valid and 0 <= min(counts) <= max(counts) <= self._lookahead):
            raise ValueError(f"drafted tokens {tokens.tolist()}, {counts} of them")
        drafts = [row[:count] for row, count in zip(tokens.tolist(), counts, strict=True)]
        self._live = [s._replace(drafted=d) for s, d in zip(self._live, drafts, strict=True)]
        self.counts["hits"] += int(np.count_nonzero(speculation.hit))
        return [draft.copy() for draft in drafts]  # The engine may change the lists.

    def _ask(self, link: LeadEnd, rows: Sequence[Row], end: float) -> list[tuple[int, list[int]]]:
        """Sends the outcome (accepted tokens, new and ended sequences) that these rows imply, and
        returns (index of the row, its drafted tokens) of each row that gets drafts."""
        shape = link.shape
        left = {n for n, (tokens, _) in enumerate(rows) if 0 < len(tokens) < shape.prompt_tokens}
        outcome = []
        live = dict[int, _Sequence]()  # {index of the row: sequence}
        prompts = {}
        size = 0
        for place, sequence in enumerate(self._live):
            for number in (place, *left):  # `place` first, because rows seldom move
                if number in left and (k := sequence.accepted(*rows[number])) is not None:
                    tokens = rows[number][0]
                    outcome.append((sequence.id, 0, int(Event.COMMIT), k, int(tokens[-1])))
                    live[number] = _Sequence(sequence.id, tokens, [])
                    left.remove(number)
                    self.counts["accepted"] += k
                    break
            else:
                outcome.append((sequence.id, 0, Event.RELEASE, 0, 0))
        for number in sorted(left):
            tokens = rows[number][0]
            name = self._next_id
            size += len(tokens)
            if len(live) == shape.batch or size > MOST_PROMPTS:
                break
            outcome.append((name, 0, Event.ADMIT, 0, tokens[-1]))
            prompts[name, 0] = Request(name, int(tokens[-1]), 0, tuple(tokens.tolist()))
            live[number] = _Sequence(name, tokens, [])
            self._next_id = (name + 1) % (1 << 30)
            self.counts["new"] += 1
        if not live:
            return []
        control = Control(min(self._lookahead, shape.lookahead))
        self._live = list(live.values())
        self._pending = len(live)
        self._since = perf_counter()
        link.send_outcome(Outcome(self._round, np.array(outcome, np.int32), prompts, control))
        return list(zip(live, self._answer(link, end), strict=True))

    def _leave(self) -> None:
        self._link = None
        if self._connection is not None:
            self._connection.socket.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Closes the connection, and ends the process that this client has started."""
        self._leave()
        if self._process is not None:
            self._process.wait()
