"""The watchdog process of a host ("warden"): python -m mpissd.ops.warden LISTENER.

common/guard.py starts one on each host. It watches all ranks there and outlives them, so it notices
a rank that was killed, was stopped, or is stuck in a library that holds Python's GIL. At the first
fault it prints one line about the rank at fault and orders the other ranks to end; it kills those
that have not ended 1.5 s later. It exits after its last rank.

LISTENER is the file descriptor of the socket to which ranks connect. The watchdog sleeps until a
rank ends or sends a message, and looks for stopped ranks twice a second.
"""

import json
import mmap
import os
import selectors
import signal
import socket
import stat
import struct
import sys
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

from mpissd.common import process
from mpissd.common.stage import DOING, SIZE, STAGE, WAITING, Stage, words

_TICK_S = 0.5
_WAKE_S = 0.01  # seconds between two checks while a fault still has to be judged or ranks killed
_STATUS_S = 0.3  # longest wait, in s, for the exit status of a rank that has ended
_ORDERED_S = 0.3  # longest time, in s, in which all ranks end after a signal from the launcher
# seconds after a rank's end in which a killed launcher is gone; one that kills ranks lives longer
_SWEEP_S = 0.2
_OTHERS_S = 3.0  # seconds by which a doubtful report is delayed: another host may report the cause
_ABORT_S = 2.0  # seconds for a failed rank to abort the job with its own exit code
_END_S = 1.5  # seconds for a rank to end after the watchdog's order to end
_LINGER_S = 60.0  # longest wait for the first rank, or for further ranks after the job's end
_MPI_S = 5.0  # seconds that MPI may take to start or to end, even if the deadline is shorter
_ELSEWHERE = "; a rank of another host may be why"


class Peer:
    """What the watchdog knows about a rank of this host: its connection, work, and end."""

    def __init__(self, link: socket.socket, pid: int, page: int, about: dict[str, Any]) -> None:
        """Takes over a rank's connection, and the descriptor `page` of its shared memory page,
        which is closed. about: the first message of the rank, sent by guard.join."""
        self.link = link
        self.pid = pid
        self.about = about
        self.rank: int = about["rank"]
        self.page = mmap.mmap(page, SIZE)  # bytes: the rank's stage, its activity, is it waiting
        os.close(page)
        self._pidfd = process.open_pidfd(pid)
        self.is_closed = False  # whether the rank has closed the connection
        self.ordered: int | None = None  # the signal that launcher or user sent to the rank
        self.ordered_at = 0.0
        self.left: int | None = None  # the exit code that the rank announced
        self.left_at = float("inf")
        self.gone = False
        self.gone_at = 0.0
        self.status: int | None = None  # the rank's wait status in os.waitpid's encoding
        self.hang: str | None = None  # the message about a hung rank that was killed
        self.is_lost = False  # whether the rank is gone and the job goes on without it
        self.stopped_at: float | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.about['host']}, pid {self.pid})"

    def look(self) -> bool:
        """Returns whether the rank has ended. If it has, stores its wait status."""
        self.gone = self.gone or process.is_gone(self.pid)
        if self.gone and self.status is None:
            self.status = process.exit_status(self.pid, self._pidfd)
        return self.gone

    @property
    def in_good_order(self) -> bool:
        """Whether the rank finished MPI and ended with the exit code that it had announced."""
        if self.left is None or self.page[STAGE] != Stage.DONE:
            return False
        return self.status is None or os.waitstatus_to_exitcode(self.status) == self.left

    @property
    def is_unclear(self) -> bool:
        """Whether it is too early to judge the rank's end: its exit status may still come or, if
        MPI had not started, the news that the launcher had ended before."""
        is_sudden = self.page[STAGE] == Stage.START and not self.ordered
        return (self.status is None or is_sudden) and not self.in_good_order

    def how(self) -> str:
        """Returns how the rank ended, as the words that follow its name in a message."""
        if self.status is None:
            return "ended without a word (killed, or by os._exit)"
        code = os.waitstatus_to_exitcode(self.status)
        if code >= 0:
            return f"left early with exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "a real-time signal"
        return f"was killed by signal {-code} ({name})"

    def send(self, text: str) -> None:
        """Sends the rank a message; does nothing if the rank has closed the connection."""
        with suppress(OSError):
            self.link.send(text.encode(), socket.MSG_DONTWAIT)

    def kill(self) -> None:
        """Kills the rank with SIGKILL, but never a later process that has the same pid."""
        with suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            elif not process.is_gone(self.pid):
                os.kill(self.pid, signal.SIGKILL)


class Fault(NamedTuple):
    """A fault to report. line: the text for the user. culprit: the rank that caused it, or None.
    late: whether the launcher is ending the job already, and may drop what the ranks print."""

    line: str
    culprit: Peer | None = None
    late: bool = False


class Warden:
    """Watches the ranks of this host until they have ended. Methods that look for a fault return a
    Fault or None; their argument `now` is a time of time.monotonic()."""

    def __init__(self) -> None:
        self.peers: dict[int, Peer] = {}  # by rank
        self._events = selectors.DefaultSelector()
        self._verdict: Fault | None = None
        self._held: tuple[float, Fault] | None = None  # (time at which to report it, fault)
        self._end_at = self._kill_at = float("inf")
        self._born_at = self._looked_at = self._joined_at = monotonic()  # joined: first rank
        self._lingers = False
        self._launcher = 0  # the launcher's pid; 0 if there is none to watch
        self._parent = os.getpid()  # pid of the ranks' launcher; until known, this process's
        # time at which the launcher, the parent of the ranks, was first seen to be gone
        self._swept_at = float("inf")
        self._stderr: int | None = None  # a descriptor of the launcher's own stderr
        self._is_file = False  # whether the launcher's stderr is a regular file
        self._is_front = False  # whether the launcher is mpirun itself, not one of its daemons

    @property
    def alive(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if not peer.gone]

    @property
    def _about(self) -> dict[str, Any]:
        """The first message of any rank; its fields about the job are equal for all ranks."""
        return next(iter(self.peers.values())).about if self.peers else {}

    @property
    def _is_whole_job(self) -> bool:
        return self._about.get("local_size") == self._about.get("size")

    @property
    def _absent(self) -> list[int]:
        """The ranks that have not joined; empty if the job runs on several hosts."""
        return sorted(set(range(self._about["size"] * self._is_whole_job)) - set(self.peers))

    def run(self, listener: socket.socket) -> None:
        """Watches the ranks that connect to `listener` until all have ended and none can join."""
        self._events.register(listener, selectors.EVENT_READ)
        while self._is_needed(monotonic()):
            is_urgent = any(peer.gone or peer.is_closed for peer in self.peers.values())
            is_urgent = is_urgent or self._held is not None or self._verdict is not None
            for key, _ in self._events.select(_WAKE_S if is_urgent else _TICK_S):
                if key.data is None:
                    self._admit(listener)
                else:
                    self._read(key.data)
            self._look(monotonic())
            self._act(monotonic())

    def _is_needed(self, now: float) -> bool:
        """Returns whether this process is still needed, because a rank runs, may yet join, or has
        ended and is not judged yet. A rank that joins after the job has ended is ordered to end."""
        if self.alive:
            return True
        if not self.peers:
            return now < self._born_at + _LINGER_S
        last = max(peer.gone_at for peer in self.peers.values())
        if self._verdict is None and any(peer.is_unclear for peer in self.peers.values()):
            return now < last + 2 * _STATUS_S
        if len(self.peers) == self._about.get("local_size") or not self._launcher:
            return False
        if not self._lingers:  # closes the ranks' stderr, for whose end the launcher waits
            self._lingers = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        return now < last + _LINGER_S and not process.is_gone(self._launcher)

    def _admit(self, listener: socket.socket) -> None:
        """Accepts the connection of a rank; refuses a process of another user."""
        link, _ = listener.accept()
        raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, _ = struct.unpack("3i", raw)
        link.settimeout(1.0)  # a rank sends its message before it is accepted
        try:
            text, (page,), _, _ = socket.recv_fds(link, 4096, 1)
            if uid != os.getuid() or not pid:  # pid 0: hidden by a container
                raise ValueError(f"process {pid} of user {uid}")
            peer = Peer(link, pid, page, json.loads(text))
        except (OSError, ValueError, LookupError):
            link.close()
            return
        if not self.peers:
            self._joined_at = monotonic()
            if (launcher := peer.about["launcher"]) > 1:
                self._launcher = above = launcher
                fields = process.stat(launcher)
                if fields is not None and process.name(launcher).startswith("hydra_"):
                    above = fields[1]  # MPICH's launcher starts ranks by a proxy, its child
                # A launcher that the user ends forwards nothing, so faults go to its own stderr.
                with suppress(OSError):
                    mode = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY
                    self._stderr = os.open(f"/proc/{above}/fd/2", mode)
                    self._is_file = stat.S_ISREG(os.fstat(self._stderr).st_mode)
                self._is_front = process.is_front(above)
                self._parent = launcher if process.is_front(launcher) else self._parent
        link.setblocking(False)
        self.peers[peer.rank] = peer
        self._events.register(link, selectors.EVENT_READ, peer)
        if self._verdict is not None:
            peer.send("end")
            self._kill_at = monotonic() + _END_S

    def _read(self, peer: Peer) -> None:
        """Reads all messages of a rank: JSON of the kinds that `_take` handles, or one byte with
        the number of a signal that the rank got."""
        while not peer.is_closed:
            try:
                text = peer.link.recv(1 << 16)
            except BlockingIOError:
                return
            except ConnectionResetError:  # raised if the rank ended with messages unread; read on
                continue
            except OSError:
                text = b""
            if not text:
                peer.is_closed = True
                self._events.unregister(peer.link)
                return
            if len(text) == 1:  # the number of a signal
                peer.ordered = text[0]
                peer.ordered_at = monotonic()
                continue
            with suppress(ValueError):  # a message that was cut off
                self._take(peer, json.loads(text))

    def _take(self, peer: Peer, message: dict[str, Any]) -> None:
        if message["kind"] == "leave":
            peer.left = message["code"]
            peer.left_at = monotonic()
        elif message["kind"] == "failed":
            line = f"{peer} failed in {self._phase(peer)}: {message['text']}"
            self._judge(Fault(line, peer), grace_s=_ABORT_S)
            peer.send("said")
        elif message["kind"] == "waited":
            self.stopped(monotonic())
            verdict = self.waited(peer, message["text"], monotonic())
            if verdict.culprit is not peer or self._is_whole_job:
                self._judge(verdict)
            elif self._held is None:
                self._held = monotonic() + _OTHERS_S, verdict
        elif message["kind"] == "hangs" and message["rank"] in self.peers:
            other = self.peers[message["rank"]]
            line = f"{other} hangs in {self._phase(other)}: rank {peer.rank} waits for "
            line += f"{message['text']} (--deadline_s={self._deadline_s:g})"
            self._end_hung(self._unless_stopped(Fault(line, other), monotonic()))

    def _phase(self, peer: Peer) -> str:
        """Returns in words what a rank did last. Whether that was in warm-up rounds is read from
        rank 0, because only rank 0 stores it."""
        lead = self.peers.get(0)
        stage = peer.page[STAGE]
        if lead is not None and stage == Stage.ROUNDS and lead.page[STAGE] == Stage.WARM_UP:
            stage = Stage.WARM_UP
        return words(stage, peer.page[DOING])

    def _look(self, now: float) -> None:
        """Reports ranks that ended early, are stopped, did not start or do not end."""
        if now - self._looked_at > 4 * _TICK_S:  # this process was stopped, perhaps like its ranks
            for peer in self.alive:
                peer.stopped_at = None
        self._looked_at = now
        if process.is_gone(self._parent):
            self._swept_at = min(self._swept_at, now)
        for peer in [peer for peer in self.alive if peer.look()]:
            peer.gone_at = now
            self._read(peer)  # The rank's last message may announce its end.
        if self._verdict is not None:
            return
        gone = [peer for peer in self.peers.values() if peer.gone and not peer.is_lost]
        for peer in gone:
            peer.look()
        # Waits up to 0.3 s for exit statuses.
        is_late = self._swept_at <= now  # the launcher is gone, so no more exit statuses come
        if is_late or not any(p.is_unclear and now < p.gone_at + _STATUS_S for p in gone):
            self._judge_dead(now)
        for verdict in (self.stopped(now), self.overdue(now)):
            if verdict is not None and not self._end_hung(verdict):
                self._judge(verdict)

    def _end_hung(self, verdict: Fault) -> bool:
        """Returns whether the job can go on without the rank at fault. If so, kills this rank,
        since nobody would receive its messages."""
        culprit = verdict.culprit
        if culprit is None or not self.can_do_without(culprit):
            return False
        if culprit.hang is None:
            culprit.hang = verdict.line
            culprit.kill()
        return True

    def _judge_dead(self, now: float) -> None:
        verdict = self.dead()
        if verdict is None:
            return
        culprit = verdict.culprit
        if culprit is None:
            ended_at = min(peer.gone_at for peer in self.peers.values() if peer.gone)
            if not self.alive or now > ended_at + _ORDERED_S:
                self._judge(verdict)
        elif self.can_do_without(culprit):
            culprit.is_lost = True
            self._print(Fault(f"{verdict.line}; the targets go on with K=0 (--on_draft_loss=ar)"))
            for peer in self.alive:
                peer.send(f"lost {culprit.rank}")
        else:
            self._judge(verdict)

    def dead(self) -> Fault | None:
        """Returns the fault of the first rank that ended early without a signal from the launcher
        or a user. If all ranks that ended early got a signal, the fault says so and has no culprit.
        Returns None if no rank ended early, or if one ended with the code that it announced."""
        gone = sorted((p for p in self.peers.values() if p.gone), key=lambda peer: peer.gone_at)
        if any(p.in_good_order and p.left for p in gone):
            return None  # A rank ended with the error code that all ranks agreed on.
        odd = [peer for peer in gone if not (peer.in_good_order or peer.is_lost)]
        for peer in (p for p in odd if not (p.ordered or self._was_swept(p))):
            line = peer.hang or f"{peer} {peer.how()} in {self._phase(peer)}"
            if peer.status and os.WIFEXITED(peer.status) and not self._is_whole_job:
                line += _ELSEWHERE  # MPI ends a rank when its connection to another rank breaks
            return Fault(line, peer)
        if not odd:
            return None
        whom = "all ranks"
        cause = "the launcher"
        if not self._is_whole_job:
            whom = "the ranks of this host"
            cause = "a fault on another"
        line = (
            f"ended by signal {odd[0].ordered or 9} to {whom} (Ctrl-C, scancel or {cause}) in "
            f"{self._phase(odd[0])}"
        )
        if self._absent:
            line += f"; rank {self._absent[0]} had not come up yet"
        return Fault(line + self._about.get("hint", ""), late=True)

    def _was_swept(self, peer: Peer) -> bool:
        """Returns whether the launcher, while it ended, killed the rank before MPI had started.
        Open MPI's launcher then sends SIGTERM and SIGKILL, of which the rank may see one."""
        is_killed = peer.status in (None, signal.SIGKILL, signal.SIGTERM)
        is_starting = peer.page[STAGE] == Stage.START
        return is_killed and is_starting and self._swept_at <= peer.gone_at + _SWEEP_S

    def can_do_without(self, peer: Peer) -> bool:
        """Returns whether the job can go on without this rank: the job allows its loss (`may_lose`
        of guard.join), and rank 0 runs measured rounds."""
        lead = self.peers.get(0)
        wanted = peer.rank in self._about.get("may_lose", ())
        return wanted and lead is not None and not lead.gone and lead.page[STAGE] == Stage.ROUNDS

    def stopped(self, now: float) -> Fault | None:
        """Returns the fault of a rank that was stopped (SIGSTOP) for longer than its limit while
        other ranks ran. All ranks of the host stopped at once are job control, and no fault."""
        alive = self.alive
        still = [peer for peer in alive if process.is_stopped(peer.pid)]
        for peer in alive:
            if peer not in still or len(still) == len(alive):
                peer.stopped_at = None
            elif peer.stopped_at is None:
                peer.stopped_at = now
        for peer in still:
            if peer.stopped_at is not None and now - peer.stopped_at > self._limit_s(peer):
                return self._stopped_verdict(peer, peer.stopped_at, now)
        return None

    def _limit_s(self, peer: Peer) -> float:
        """Returns how many seconds the rank may be stopped. The limit is shorter if the job can go
        on without the rank, so that ranks that wait for it do not reach their deadline first."""
        return self._deadline_s / (2 if self.can_do_without(peer) else 1)

    @property
    def _deadline_s(self) -> float:
        return float(self._about.get("deadline_s", 120.0))

    def _stopped_verdict(self, peer: Peer, stopped_at: float, now: float) -> Fault:
        since = max(now - stopped_at, self._limit_s(peer))
        line = f"{peer} stopped in {self._phase(peer)}: no sign of life for {since:.1f} s"
        return Fault(f"{line} (--deadline_s={self._deadline_s:g})", peer)

    def _unless_stopped(self, verdict: Fault, now: float) -> Fault:
        """Returns the fault of a stopped (SIGSTOP) rank if there is one, because it may have caused
        `verdict`; otherwise returns `verdict`. now: a time of time.monotonic()."""
        for peer in self.alive:
            if peer.stopped_at is not None:
                return self._stopped_verdict(peer, peer.stopped_at, now)
        return verdict

    def waited(self, detector: Peer, text: str, now: float) -> Fault:
        """Returns the fault after rank `detector` waited in vain for the event `text`. The culprit
        is a stopped rank, else the only rank that is not waiting, else the detector."""
        busy = [peer for peer in self.alive if not (peer.page[WAITING] or peer is detector)]
        if len(busy) == 1:
            line = f"{busy[0]} is stuck in {self._phase(busy[0])}: rank {detector.rank} waited"
            return self._unless_stopped(Fault(f"{line}: {text}", busy[0]), now)
        line = f"{detector} waited in vain in {self._phase(detector)}: {text}"
        line += "" if self._is_whole_job else _ELSEWHERE
        return self._unless_stopped(Fault(line, detector), now)

    def overdue(self, now: float) -> Fault | None:
        """Returns a fault if MPI does not start, or if a rank announced its end and still runs. The
        limit of both is the deadline, but at least 5 s."""
        limit_s = max(self._deadline_s, _MPI_S)
        is_starting = all(peer.page[STAGE] == Stage.START for peer in self.peers.values())
        leaving = [peer for peer in self.alive if now - peer.left_at > limit_s]
        if self.peers and is_starting and now - self._joined_at > limit_s:
            line = "MPI did not start"
            culprit = None
            since = self._joined_at
            if self._absent:
                line = f"rank {self._absent[0]} did not come up in start"
        elif leaving:
            culprit = leaving[0]
            since = leaving[0].left_at
            line = f"{culprit} did not end in teardown"
        else:
            return None
        line += f" within {now - since:.1f} s (--deadline_s={self._deadline_s:g})"
        return self._unless_stopped(Fault(line, culprit), now)

    def _judge(self, verdict: Fault, grace_s: float = 0.0) -> None:
        """Prints the first fault, orders ranks to end `grace_s` seconds later, ignores others."""
        if self._verdict is None:
            self._verdict = verdict
            self._end_at = monotonic() + grace_s
            if not verdict.late or self._is_whole_job or 0 in self.peers:
                self._print(verdict)

    def _print(self, verdict: Fault) -> None:
        """Prints a fault on this process's stderr, which the launcher forwards, or, if that fails,
        on the launcher's own. The order is reversed for a late fault, since a launcher that is
        ending a job may drop what it should forward, and for the user's mpirun unless its stderr is
        a file, which it may overwrite."""
        line = f"mpissd: {verdict.line}\n".encode(errors="backslashreplace")
        is_direct = verdict.late or (self._is_front and not self._is_file)
        for fd in (self._stderr, 2) if is_direct else (2, self._stderr):
            with suppress(OSError):
                if fd is not None:
                    os.write(fd, line)
                    return

    def _act(self, now: float) -> None:
        """Does what is due: reports an uncertain fault, orders ranks to end, kills ranks."""
        if self._held is not None and now > self._held[0]:
            self._judge(self._held[1])
        for peer in self.alive:
            if peer.ordered and now > peer.ordered_at + _ORDERED_S:
                peer.kill()  # a library call that never returns keeps the rank alive
        if self._verdict is None:
            return
        culprit = self._verdict.culprit
        if now >= self._end_at or (culprit is not None and culprit.gone):
            self._end_at = float("inf")
            self._kill_at = min(self._kill_at, now + _END_S)
            for peer in self.alive:
                peer.send("end")
        if now >= self._kill_at:
            for peer in self.alive:
                peer.kill()


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the watchdog ends only after its ranks
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        Warden().run(listener)


if __name__ == "__main__":
    main()
