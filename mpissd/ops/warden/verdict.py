"""Decides which rank is at fault, from what the warden sees, and writes the line about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpissd.common import process
from mpissd.common.stage import Stage
from mpissd.ops.warden.peer import Peer

_MPI_S = 5.0  # seconds that the start and the end of MPI may take, however short the deadline is
_ELSEWHERE = "; a rank of another host may be why"


@dataclass(frozen=True)
class Verdict:
    """A line for the user about a fault.

    culprit: the rank that it names, or None. late: the launcher has begun to end the job, and may
    no longer forward what ranks print.
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
        """The ranks that have not joined; none where the job has several hosts."""
        if not self.is_whole_job:
            return []
        return sorted(set(range(self.about["size"])) - set(self.peers))

    def phase(self, peer: Peer) -> str:
        """Returns what a rank did last, in words."""
        return peer.phase(self.peers.get(0))

    def dead(self) -> Verdict | None:
        """Looks for a rank that ended early.

        The verdict names the first rank that ended without a signal from the launcher or a user. If
        all got one, it says that they were ended and names no culprit.
        """
        gone = sorted((p for p in self.peers.values() if p.gone), key=lambda peer: peer.gone_at)
        if any(p.in_good_order and p.left for p in gone):
            return None  # all ranks agreed on this exit code, and the launcher ends the others
        odd = [peer for peer in gone if not (peer.in_good_order or peer.is_lost)]
        own = [peer for peer in odd if not peer.ordered]
        if own:
            line = f"{own[0]} {own[0].how()} in {self.phase(own[0])}"
            if own[0].status and own[0].signal is None and not self.is_whole_job:
                line += _ELSEWHERE  # MPI ends a rank that loses its connection to another.
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
        line += self.about.get("hint", "")
        return Verdict(line, late=True)

    def can_do_without(self, peer: Peer) -> bool:
        """Returns whether the job goes on without this rank.

        It does if may_lose names the rank and the lead is in its measured rounds.
        """
        lead = self.peers.get(0)
        wanted = peer.rank in self.about.get("may_lose", ())
        return wanted and lead is not None and not lead.gone and lead.stage == Stage.ROUNDS

    def stopped(self, now: float) -> Verdict | None:
        """Looks for a rank that was stopped for longer than the deadline while others run.

        If all ranks of a job are stopped at once, that is job control and no fault. Where they are
        all ranks of one of several hosts, `halted` decides.
        """
        alive = self.alive
        still = [peer for peer in alive if process.is_stopped(peer.pid)]
        is_all = len(still) == len(alive)
        for peer in alive:
            if peer not in still or (is_all and self.is_whole_job):
                peer.stopped_at = None
            elif peer.stopped_at is None:
                peer.stopped_at = now
        if is_all:
            return None
        late = [p for p in still if p.stopped_at is not None and self._is_late(now, p.stopped_at)]
        return self.silent(late[0], now) if late else None

    def halted(self, now: float) -> Verdict | None:
        """Looks, on one of several hosts, for the case that all its ranks are stopped.

        It may be job control. Otherwise the ranks of other hosts wait in vain and end the job
        without knowing why, so the verdict is printed as a note.
        """
        alive = self.alive
        if not alive or self.is_whole_job:
            return None
        since = [peer.stopped_at for peer in alive]
        late = all(at is not None and self._is_late(now, at) for at in since)
        return self.silent(alive[0], now) if late else None

    def silent(self, peer: Peer, now: float) -> Verdict:
        """Returns the verdict about a rank that was stopped."""
        since = max(now - (peer.stopped_at or now), self.deadline_s)
        return Verdict(
            f"{peer} stopped in {self.phase(peer)}: no sign of life for {since:.1f} s "
            f"(--deadline_s={self.deadline_s:g})",
            peer,
        )

    def waited(self, detector: Peer, text: str, now: float) -> Verdict:
        """Returns the verdict after `detector` waited in vain; text: what it waited for.

        The culprit is a stopped rank, else the only other rank that does not wait, else unknown:
        then the line names the detector.
        """
        busy = [peer for peer in self.alive if not peer.is_waiting and peer is not detector]
        if len(busy) == 1:
            verdict = Verdict(
                f"{busy[0]} is stuck in {self.phase(busy[0])}: rank {detector.rank} waited: {text}",
                busy[0],
            )
        else:
            line = f"{detector} waited in vain in {self.phase(detector)}: {text}"
            verdict = Verdict(line if self.is_whole_job else line + _ELSEWHERE, detector)
        return self._unless_stopped(verdict, now)

    def unborn(self, now: float) -> Verdict | None:
        """Looks for a job whose MPI does not start, and for the rank that it lacks."""
        starting = self.peers and all(p.stage == Stage.START for p in self.peers.values())
        if not starting or not self._is_very_late(now, self.joined_at):
            return None
        since = f"within {now - self.joined_at:.1f} s (--deadline_s={self.deadline_s:g})"
        verdict = Verdict(f"MPI did not start {since}")
        if self.absent:
            verdict = Verdict(f"rank {self.absent[0]} did not come up in start {since}")
        return self._unless_stopped(verdict, now)

    def undead(self, now: float) -> Verdict | None:
        """Looks for a rank that announced its end and still runs."""
        for peer in self.alive:
            if peer.left_at is not None and self._is_very_late(now, peer.left_at):
                since = f"within {now - peer.left_at:.1f} s (--deadline_s={self.deadline_s:g})"
                verdict = Verdict(f"{peer} did not end in teardown {since}", peer)
                return self._unless_stopped(verdict, now)
        return None

    def _unless_stopped(self, verdict: Verdict, now: float) -> Verdict:
        """Returns the verdict about a stopped rank if there is one, else the given verdict."""
        stopped = [peer for peer in self.alive if peer.stopped_at is not None]
        return self.silent(stopped[0], now) if stopped else verdict

    def _is_late(self, now: float, since: float) -> bool:
        return now - since > self.deadline_s

    def _is_very_late(self, now: float, since: float) -> bool:
        """Returns whether the deadline of MPI's start or end has passed; it is at least 5 s."""
        return now - since > max(self.deadline_s, _MPI_S)
