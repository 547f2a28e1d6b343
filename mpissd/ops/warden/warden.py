"""The warden of a host: python -m mpissd.ops.warden.warden LISTENER, started by guard.join.

LISTENER is the descriptor of the socket at which ranks join. The warden sleeps until a rank ends or
sends a message, and checks twice a second for stopped ranks. At the first fault it prints one line
and tells the other ranks to end; it kills those that have not ended 1.5 s later. It exits after its
last rank.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
import sys
from contextlib import suppress
from time import monotonic
from typing import Any

from mpissd.common import process
from mpissd.ops.warden.peer import Peer
from mpissd.ops.warden.verdict import Host, Verdict

_TICK_S = 0.5
_STATUS_S = 0.3  # longest wait for a dead rank's exit status
_ORDERED_S = 0.3  # longest wait for all ranks to end that a launcher has signalled
_OTHERS_S = 3.0  # delay of an uncertain verdict, as another host's warden may know the cause
_ABORT_S = 2.0  # time for a failed rank to abort the job with its own exit code
_END_S = 1.5  # time for a rank to end after the order to end
_LAUNCHER_S = 2.0  # time for ranks to end by themselves when their launcher is gone
_WAKE_S = 0.01  # sleep between two checks while a verdict or a kill is due soon
_LINGER_S = 60.0  # longest wait for the first rank, and for ranks that come after the job is over


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
        self._lingers = self._noted = False
        self._launcher: tuple[int, int | None] | None = None  # its pid and pidfd
        self._stderr: int | None = None  # a copy of the launcher's stderr
        self._is_front = False  # whether the user reads that stderr

    def run(self) -> None:
        """Watches until all ranks have ended and no further one is expected."""
        self._born_at = monotonic()
        while self._is_needed(monotonic()):
            self._hear()
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

    def _hear(self) -> None:
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
            peer.say("end")
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
            peer.say("said")
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
        for verdict in (host.stopped(now), host.unborn(now), host.undead(now)):
            if verdict is not None:
                self._judge(verdict)
        halted = host.halted(now)
        if halted is not None and not self._noted:
            self._noted = True
            self._say(halted)

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
        if verdict.culprit is not None and verdict.culprit.lost_its_launcher:
            self._judge(self._abandoned())
        elif verdict.culprit is not None:
            if host.can_do_without(verdict.culprit):
                self._lose(verdict, verdict.culprit)
            else:
                self._judge(verdict)
        elif not host.alive or now > min(p.gone_at for p in gone) + _ORDERED_S:
            self._judge(verdict)

    def _is_abandoned(self) -> bool:
        return self._launcher is not None and process.is_gone(self._launcher[0])

    def _abandoned(self) -> Verdict:
        assert self._launcher is not None
        return Verdict(f"the launcher (pid {self._launcher[0]}) is gone", late=True)

    def _lose(self, verdict: Verdict, lost: Peer) -> None:
        """Prints that the job goes on without this rank, and informs the other ranks."""
        lost.is_lost = True
        self._say(Verdict(f"{verdict.line}; the targets go on with K=0 (--on_draft_loss=ar)"))
        for peer in self._host.alive:
            peer.say(f"lost {lost.rank}")

    def _judge(self, verdict: Verdict, grace_s: float = 0.0) -> None:
        """Prints the first verdict and has the ranks end `grace_s` later; ignores further ones."""
        if self._verdict is not None:
            return
        self._verdict = verdict
        self._end_at = monotonic() + grace_s
        if not verdict.late or (self._host.is_whole_job or 0 in self._host.peers):
            self._say(verdict)

    def _say(self, verdict: Verdict) -> None:
        """Prints a verdict once, on the launcher's stderr or on that of this process.

        A launcher that ends a job may drop what its ranks print last, so a late verdict goes to the
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
                peer.say("end")
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
