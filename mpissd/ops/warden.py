"""The warden of a host: python -m mpissd.ops.warden LISTENER, started by guard.join.

One small process a host watches every rank there and outlives each of them. It sees a rank that was
killed, stopped, or that is stuck in a library which holds Python's lock. At the first fault it
prints one line about the culprit and orders the other ranks to end; it kills those that have not
ended 1.5 s later. It exits after its last rank.

LISTENER is the descriptor of the socket at which ranks join. The warden sleeps until a rank ends or
sends a message, and checks twice a second for stopped ranks.
"""

from __future__ import annotations

import json
import mmap
import os
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from mpissd.common import process
from mpissd.common.stage import DOING, SIZE, STAGE, WAITING, Stage, words

_TICK_S = 0.5
_WAKE_S = 0.01  # sleep between two checks while a verdict or a kill is due soon
_STATUS_S = 0.3  # longest wait for a dead rank's exit status
_ORDERED_S = 0.3  # longest wait for all ranks to end that a launcher has signalled
_OTHERS_S = 3.0  # delay of an uncertain verdict, as another host's warden may know the cause
_ABORT_S = 2.0  # time for a failed rank to abort the job with its own exit code
_END_S = 1.5  # time for a rank to end after the order to end
_LAUNCHER_S = 2.0  # time for ranks to end by themselves when their launcher is gone
_LINGER_S = 60.0  # longest wait for the first rank, and for ranks that come after the job is over
_MPI_S = 5.0  # time that the start and the end of MPI may take, however short the deadline is
_ELSEWHERE = "; a rank of another host may be why"


class Peer:
    """A rank of this host that has joined the warden: its activity, whether and how it ended."""

    def __init__(
        self, link: socket.socket, pid: int, page: int, signals: int, about: dict[str, Any]
    ) -> None:
        """Takes over a rank's descriptors.

        link: the connection. page: of the rank's page, closed here. signals: of the pipe with the
        numbers of the signals that the rank got. about: the message of guard.join.
        """
        self.link, self.pid, self.about = link, pid, about
        self.rank: int = about["rank"]
        self.pidfd = process.open_pidfd(pid)
        self._page = mmap.mmap(page, SIZE)
        os.close(page)
        self._signals = signals
        self.ordered: int | None = None  # the launcher's or a user's signal that ended the rank
        self.ordered_at = 0.0
        self.left: int | None = None  # the exit code that the rank announced
        self.left_at: float | None = None
        self.gone, self.gone_at = False, 0.0
        self.status: int | None = None  # the wait status as os.waitpid gives it, if known
        self.is_lost = False  # whether the rank is gone and the job goes on without it
        self.is_orphan = False  # whether its launcher ended before the rank
        self.stopped_at: float | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.about['host']}, pid {self.pid})"

    @property
    def stage(self) -> int:
        """The Stage that the rank has reached."""
        return self._page[STAGE]

    @property
    def doing(self) -> int:
        """The rank's last activity in a round, a Doing."""
        return self._page[DOING]

    @property
    def is_waiting(self) -> bool:
        """Whether the rank has waited for another one for more than 5 ms."""
        return bool(self._page[WAITING])

    def look(self) -> bool:
        """Returns whether the rank has ended; notes the signals that it got and its wait status."""
        self.gone = self.gone or process.is_gone(self.pid)
        with suppress(BlockingIOError):
            if numbers := os.read(self._signals, 64):
                self.ordered, self.ordered_at = numbers[0], monotonic()
        if self.gone and self.status is None:
            self.status = process.exit_status(self.pid, self.pidfd)
        return self.gone

    @property
    def signal(self) -> int | None:
        """The signal that killed the rank, or None."""
        status = self.status
        return os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None

    @property
    def in_good_order(self) -> bool:
        """Whether the rank reached the last stage and ended with its announced exit code."""
        if self.left is None or self.stage != Stage.DONE:
            return False
        return self.status is None or os.waitstatus_to_exitcode(self.status) == self.left

    @property
    def is_unclear(self) -> bool:
        """Whether the rank's exit status, which may come late, is needed to judge its end."""
        return self.status is None and not self.in_good_order

    def how(self) -> str:
        """Returns how the rank ended, as the predicate of a sentence about it."""
        if self.status is None:
            return "ended without a word (killed, or by os._exit)"
        if self.signal is None:
            return f"left early with exit code {os.waitstatus_to_exitcode(self.status)}"
        try:
            name = signal.Signals(self.signal).name
        except ValueError:
            name = "a real-time signal"
        return f"was killed by signal {self.signal} ({name})"

    def send(self, text: str) -> None:
        """Sends a message to the rank; does nothing if the rank has closed its end."""
        with suppress(OSError):
            self.link.send(text.encode(), socket.MSG_DONTWAIT)

    def kill(self) -> None:
        """Kills the rank with SIGKILL."""
        if not process.is_gone(self.pid):
            process.send(self.pid, self.pidfd, signal.SIGKILL)


@dataclass(frozen=True)
class Verdict:
    """A line for the user about a fault.

    culprit: the rank that it names, or None. late: the launcher has begun to end the job, and may
    no longer forward the ranks' prints.
    """

    line: str
    culprit: Peer | None = None
    late: bool = False


class Host:
    """The ranks of one host, and the conclusions about them.

    A method that looks for a fault takes `now`, a time of monotonic(); it returns None for none.
    """

    def __init__(self) -> None:
        self.peers: dict[int, Peer] = {}
        self.joined_at = 0.0  # when the first rank joined, by monotonic()

    @property
    def alive(self) -> list[Peer]:
        """The ranks that have joined and not ended."""
        return [peer for peer in self.peers.values() if not peer.gone]

    @property
    def about(self) -> Mapping[str, Any]:
        """The message of guard.join from one rank; its fields on the job are equal on all ranks."""
        return next(iter(self.peers.values())).about if self.peers else {}

    @property
    def deadline_s(self) -> float:
        """The value of --deadline_s, in seconds."""
        return float(self.about.get("deadline_s", 120.0))

    @property
    def is_whole_job(self) -> bool:
        """Whether all ranks of the job are on this host."""
        return self.about.get("local_size") == self.about.get("size")

    @property
    def absent(self) -> list[int]:
        """The ranks that have not joined; none if the job has several hosts."""
        if not self.is_whole_job:
            return []
        return sorted(set(range(self.about["size"])) - set(self.peers))

    def phase(self, peer: Peer) -> str:
        """Returns a rank's last activity, in words. Only the lead records that the job warms up."""
        lead, stage = self.peers.get(0), peer.stage
        if lead is not None and stage == Stage.ROUNDS and lead.stage == Stage.WARM_UP:
            stage = Stage.WARM_UP
        return words(stage, peer.doing)

    def dead(self) -> Verdict | None:
        """Looks for a rank that ended early.

        The verdict names the first rank that ended without a signal from the launcher or a user. If
        all got one, it reports their end and names no culprit.
        """
        gone = sorted((p for p in self.peers.values() if p.gone), key=lambda peer: peer.gone_at)
        if any(p.in_good_order and p.left for p in gone):
            return None  # all ranks agreed on this exit code, and the launcher ends the others
        odd = [peer for peer in gone if not (peer.in_good_order or peer.is_lost)]
        own = [peer for peer in odd if not peer.ordered]
        if own:
            line = f"{own[0]} {own[0].how()} in {self.phase(own[0])}"
            if own[0].status and own[0].signal is None and not self.is_whole_job:
                line += _ELSEWHERE  # MPI ends a rank that loses its connection to another
            return Verdict(line, own[0])
        if not odd:
            return None
        whom, cause = "all ranks", "the launcher"
        if not self.is_whole_job:
            whom, cause = "the ranks of this host", "a fault on another"
        line = (
            f"ended by signal {odd[0].ordered} to {whom} (Ctrl-C, scancel or {cause}) in "
            f"{self.phase(odd[0])}"
        )
        if self.absent:
            line += f"; rank {self.absent[0]} had not come up yet"
        return Verdict(line + self.about.get("hint", ""), late=True)

    def can_do_without(self, peer: Peer) -> bool:
        """Returns whether the job goes on without this rank.

        It does if may_lose names the rank and the lead is in its measured rounds.
        """
        lead = self.peers.get(0)
        wanted = peer.rank in self.about.get("may_lose", ())
        return wanted and lead is not None and not lead.gone and lead.stage == Stage.ROUNDS

    def stopped(self, now: float) -> Verdict | None:
        """Looks for a rank that was stopped for longer than the deadline while others run.

        If all ranks of a host are stopped at once, that is job control and no fault.
        """
        alive = self.alive
        still = [peer for peer in alive if process.is_stopped(peer.pid)]
        for peer in alive:
            if peer not in still or len(still) == len(alive):
                peer.stopped_at = None
            elif peer.stopped_at is None:
                peer.stopped_at = now
        late = [
            p for p in alive if p.stopped_at is not None and now - p.stopped_at > self.deadline_s
        ]
        return self._silent(late[0], now) if late else None

    def _silent(self, peer: Peer, now: float) -> Verdict:
        since = max(now - (peer.stopped_at or now), self.deadline_s)
        return Verdict(
            f"{peer} stopped in {self.phase(peer)}: no sign of life for {since:.1f} s "
            f"(--deadline_s={self.deadline_s:g})",
            peer,
        )

    def waited(self, detector: Peer, text: str, now: float) -> Verdict:
        """Returns the verdict after `detector` waited in vain; text: the awaited event.

        The culprit is a stopped rank, or the only other rank that does not wait. If neither exists,
        the line names the detector.
        """
        busy = [peer for peer in self.alive if not peer.is_waiting and peer is not detector]
        if len(busy) == 1:
            line = (
                f"{busy[0]} is stuck in {self.phase(busy[0])}: rank {detector.rank} waited: {text}"
            )
            return self._unless_stopped(Verdict(line, busy[0]), now)
        line = f"{detector} waited in vain in {self.phase(detector)}: {text}"
        verdict = Verdict(line if self.is_whole_job else line + _ELSEWHERE, detector)
        return self._unless_stopped(verdict, now)

    def overdue(self, now: float) -> Verdict | None:
        """Looks for a job whose MPI does not start, and for a rank that announced its end and runs.

        MPI's start and end may take the deadline, and 5 s at least.
        """
        limit_s = max(self.deadline_s, _MPI_S)
        starting = self.peers and all(p.stage == Stage.START for p in self.peers.values())
        if starting and now - self.joined_at > limit_s:
            since = f"within {now - self.joined_at:.1f} s (--deadline_s={self.deadline_s:g})"
            line = f"MPI did not start {since}"
            if self.absent:
                line = f"rank {self.absent[0]} did not come up in start {since}"
            return self._unless_stopped(Verdict(line), now)
        for peer in self.alive:
            if peer.left_at is not None and now - peer.left_at > limit_s:
                since = f"within {now - peer.left_at:.1f} s (--deadline_s={self.deadline_s:g})"
                verdict = Verdict(f"{peer} did not end in teardown {since}", peer)
                return self._unless_stopped(verdict, now)
        return None

    def _unless_stopped(self, verdict: Verdict, now: float) -> Verdict:
        """Returns the verdict about a stopped rank if there is one, or the given verdict."""
        stopped = [peer for peer in self.alive if peer.stopped_at is not None]
        return self._silent(stopped[0], now) if stopped else verdict


class Warden:
    """Watches the ranks of this host, which join at `listener`, until they have ended."""

    def __init__(self, listener: socket.socket) -> None:
        self._host = Host()
        self._listener = listener
        self._events = selectors.DefaultSelector()
        self._events.register(listener, selectors.EVENT_READ)
        self._verdict: Verdict | None = None
        self._held: tuple[float, Verdict] | None = None  # (when to use it, an uncertain verdict)
        self._end_at = self._kill_at = self._gone_at = float("inf")
        self._born_at = self._looked_at = monotonic()
        self._lingers = False
        self._launcher: tuple[int, int | None] | None = None  # its pid and pidfd
        self._stderr: int | None = None  # a copy of the launcher's stderr
        self._is_front = False  # whether the user reads that stderr

    def run(self) -> None:
        """Watches until all ranks have ended and no further one is expected."""
        self._born_at = monotonic()
        while self._is_needed(monotonic()):
            self._receive()
            now = monotonic()
            self._look(now)
            self._act(now)

    def _is_needed(self, now: float) -> bool:
        """Returns whether a rank lives, has still to be judged, or may still join.

        Ranks that join after the job is over get the order to end.
        """
        host = self._host
        if host.alive:
            return True
        if not host.peers:
            return now < self._born_at + _LINGER_S
        last = max(peer.gone_at for peer in host.peers.values())
        if self._verdict is None and any(peer.is_unclear for peer in host.peers.values()):
            return now < last + 2 * _STATUS_S
        if len(host.peers) == host.about.get("local_size") or self._launcher is None:
            return False
        if not self._lingers:  # the launcher waits until no process holds a dead rank's stderr
            self._lingers = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        return now < last + _LINGER_S and not process.is_gone(self._launcher[0])

    def _receive(self) -> None:
        """Waits for messages, joining ranks and ends of processes, and handles them."""
        urgent = self._held or self._verdict or any(p.gone for p in self._host.peers.values())
        for key, _ in self._events.select(_WAKE_S if urgent else _TICK_S):
            if key.fileobj is self._listener:
                self._admit()
            elif isinstance(key.data, Peer) and key.fileobj is key.data.link:
                self._read(key.data)
            else:
                self._events.unregister(
                    key.fileobj
                )  # the pidfd of an ended process; _look finds whose it was

    def _admit(self) -> None:
        """Lets a rank join; refuses a process of another user."""
        link, _ = self._listener.accept()
        raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, _ = struct.unpack("3i", raw)
        link.settimeout(1.0)  # a rank sends its message before it is accepted
        try:
            text, fds, _, _ = socket.recv_fds(link, 4096, 2)
            if uid != os.getuid() or not pid:  # 0: a process in a container that hides its pids
                raise ValueError(f"process {pid} of user {uid}")
            page, signals = fds
            peer = Peer(link, pid, page, signals, json.loads(text))
        except (OSError, ValueError, LookupError):
            link.close()
            return
        if not self._host.peers:
            self._host.joined_at = monotonic()
            self._watch_launcher(peer.about["launcher"])
        link.setblocking(False)
        self._host.peers[peer.rank] = peer
        self._events.register(link, selectors.EVENT_READ, peer)
        if peer.pidfd is not None:
            self._events.register(peer.pidfd, selectors.EVENT_READ, peer)
        if self._verdict is not None:
            peer.send("end")
            self._kill_at = monotonic() + _END_S

    def _watch_launcher(self, pid: int) -> None:
        """Begins to watch the launcher and copies its stderr.

        If a user ends the launcher, it ends the ranks and forwards their output no longer.
        """
        if pid <= 1:
            return
        pidfd = process.open_pidfd(pid)
        self._launcher = pid, pidfd
        above = process.above_proxy(pid)
        self._stderr = process.borrow_stderr(above, process.open_pidfd(above))
        self._is_front = process.is_front(above)
        if pidfd is not None:
            self._events.register(pidfd, selectors.EVENT_READ)

    def _read(self, peer: Peer) -> bool:
        """Reads one message of a rank; returns whether there may be another."""
        try:
            text = peer.link.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            text = b""
        if not text:
            with suppress(KeyError):  # the rank may be unregistered already
                self._events.unregister(peer.link)
            return False
        try:
            said = json.loads(text)
        except ValueError:  # a message that was cut off
            return True
        self._take(peer, said)
        return True

    def _take(self, peer: Peer, said: dict[str, Any]) -> None:
        """Handles a message of a rank: leave, failed or waited, as guard sends them."""
        if said["kind"] == "leave":
            peer.left, peer.left_at = said["code"], monotonic()
        elif said["kind"] == "failed":
            line = f"{peer} failed in {self._host.phase(peer)}: {said['text']}"
            self._judge(Verdict(line, peer), grace_s=_ABORT_S)
            peer.send("said")
        elif said["kind"] == "waited":
            self._host.stopped(monotonic())
            verdict = self._host.waited(peer, said["text"], monotonic())
            if verdict.culprit is not peer or self._host.is_whole_job:
                self._judge(verdict)
            elif self._held is None:
                self._held = monotonic() + _OTHERS_S, verdict

    def _look(self, now: float) -> None:
        """Looks for ranks that have ended, are stopped, never joined or don't end; judges them."""
        host = self._host
        if now - self._looked_at > 4 * _TICK_S:  # this process was stopped, perhaps with all ranks
            for peer in host.alive:
                peer.stopped_at = None
        ended = [peer for peer in host.alive if peer.look()]
        for peer in ended:
            peer.gone_at, peer.is_orphan = now, self._is_abandoned()
            while self._read(peer):  # its last message may announce its end
                pass
        is_soon = now - self._looked_at < _WAKE_S / 2
        if self._verdict is not None or (is_soon and not ended):
            return
        self._looked_at = now
        self._judge_dead(now)
        for verdict in (host.stopped(now), host.overdue(now)):
            if verdict is not None:
                self._judge(verdict)

    def _judge_dead(self, now: float) -> None:
        """Judges the ranks that ended, as soon as their exit statuses are known or 0.3 s old."""
        host = self._host
        gone = [p for p in host.peers.values() if p.gone and not p.is_lost]
        for peer in gone:
            peer.look()
        if any(p.is_unclear and now < p.gone_at + _STATUS_S for p in gone):
            return
        verdict = host.dead()
        if verdict is None:
            return
        culprit = verdict.culprit
        if culprit is None:
            if not host.alive or now > min(p.gone_at for p in gone) + _ORDERED_S:
                self._judge(verdict)
        elif culprit.is_orphan and culprit.status != 0 and culprit.signal is None:
            self._judge(self._abandoned())  # MPI ended the rank because its launcher was gone
        elif host.can_do_without(culprit):
            culprit.is_lost = True
            self._print(Verdict(f"{verdict.line}; the targets go on with K=0 (--on_draft_loss=ar)"))
            for peer in host.alive:
                peer.send(f"lost {culprit.rank}")
        else:
            self._judge(verdict)

    def _is_abandoned(self) -> bool:
        return self._launcher is not None and process.is_gone(self._launcher[0])

    def _abandoned(self) -> Verdict:
        pid = self._launcher[0] if self._launcher is not None else 0
        return Verdict(f"the launcher (pid {pid}) is gone", late=True)

    def _judge(self, verdict: Verdict, grace_s: float = 0.0) -> None:
        """Prints the first verdict and has the ranks end `grace_s` later; ignores further ones."""
        if self._verdict is not None:
            return
        self._verdict = verdict
        self._end_at = monotonic() + grace_s
        if not verdict.late or (self._host.is_whole_job or 0 in self._host.peers):
            self._print(verdict)

    def _print(self, verdict: Verdict) -> None:
        """Prints a verdict once, on the launcher's stderr or on this process's.

        A launcher that ends a job may drop its ranks' last prints, so a late verdict goes to the
        launcher's own stderr if that is on this host.
        """
        line = f"mpissd: {verdict.line}\n".encode(errors="backslashreplace")
        direct = verdict.late or self._is_front
        for fd in (self._stderr, 2) if direct else (2, self._stderr):
            if fd is None:
                continue
            with suppress(OSError):
                os.write(fd, line)
                return

    def _act(self, now: float) -> None:
        """Prints a held verdict, orders ranks to end, and kills them, each when it is due."""
        if self._held is not None and now > self._held[0]:
            self._judge(self._held[1])
        if self._is_abandoned():
            self._gone_at = min(self._gone_at, now)
            if now > self._gone_at + _LAUNCHER_S:
                self._judge(self._abandoned())
        for peer in self._host.alive:
            if peer.ordered and now > peer.ordered_at + _ORDERED_S:
                peer.kill()  # a library call that never returns keeps the rank from ending
        if self._verdict is None:
            return
        culprit = self._verdict.culprit
        if now >= self._end_at or (culprit is not None and culprit.gone):
            self._end_at = float("inf")
            self._kill_at = min(self._kill_at, now + _END_S)
            for peer in self._host.alive:
                peer.send("end")
        if now >= self._kill_at:
            for peer in self._host.alive:
                peer.kill()


def main() -> None:
    """Runs the warden until the last rank of this host has ended."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the warden ends only when its ranks have ended
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        Warden(listener).run()


if __name__ == "__main__":
    main()
