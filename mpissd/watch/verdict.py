"""Whose fault it is: the line that names the culprit and its phase, from what the warden sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpissd.watch import process
from mpissd.watch.page import Stage
from mpissd.watch.peer import Peer

_MPI_S = 5.0
_ELSEWHERE = "; a rank of another host may be why"


@dataclass(frozen=True)
class Verdict:
    """A line for the user; culprit: the rank that it names, where it names one.

    late: the launcher has begun to end the job, and may forward no more of what ranks say.
    """

    line: str
    culprit: Peer | None = None
    late: bool = False


class Host:
    """The ranks of one host, and what can be concluded about them."""

    def __init__(self) -> None:
        self.peers: dict[int, Peer] = {}
        self.joined_at = 0.0  # the first of them

    @property
    def alive(self) -> list[Peer]:
        """Ranks that have not ended."""
        return [peer for peer in self.peers.values() if not peer.gone]

    @property
    def told(self) -> Mapping[str, Any]:
        """What any rank said of the job."""
        return next(iter(self.peers.values())).told if self.peers else {}

    @property
    def deadline_s(self) -> float:
        """--deadline_s."""
        return float(self.told.get("deadline_s", 120.0))

    @property
    def is_whole_job(self) -> bool:
        """Whether no rank is elsewhere."""
        return self.told.get("local_size") == self.told.get("size")

    @property
    def absent(self) -> list[int]:
        """Ranks that have not joined, where it is known which."""
        if not self.is_whole_job:
            return []
        return sorted(set(range(self.told["size"])) - set(self.peers))

    def phase(self, peer: Peer) -> str:
        """What a rank did last."""
        return peer.phase(self.peers.get(0))

    def dead(self) -> Verdict | None:
        """About ranks that ended: the first whose end nobody ordered; else, that all were ended."""
        gone = sorted((p for p in self.peers.values() if p.gone), key=lambda peer: peer.gone_at)
        if any(p.in_good_order and p.left for p in gone):
            return None  # an agreed exit code: the launcher ends the others
        odd = [peer for peer in gone if not (peer.in_good_order or peer.is_lost)]
        own = [peer for peer in odd if not peer.ordered]
        if own:
            line = f"{own[0]} {own[0].how()} in {self.phase(own[0])}"
            if own[0].status and own[0].signal is None and not self.is_whole_job:
                line += _ELSEWHERE  # MPI ends who loses a connection
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
        return Verdict(line, late=True)

    def can_do_without(self, peer: Peer) -> bool:
        """Whether the job goes on without this rank: the lead measures, and was told to."""
        lead = self.peers.get(0)
        wanted = peer.rank in self.told.get("may_lose", ())
        return wanted and lead is not None and not lead.gone and lead.stage == Stage.ROUNDS

    def stopped(self, now: float) -> Verdict | None:
        """About ranks that stand still while others run. All at once is job control, no fault; on
        one of several hosts it may be either (see `halted`)."""
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
        """On one of several hosts: that all its ranks stand still. If that is no job control, the
        ranks that wait for them end the job, and know no culprit."""
        alive = self.alive
        if not alive or self.is_whole_job:
            return None
        since = [peer.stopped_at for peer in alive]
        late = all(at is not None and self._is_late(now, at) for at in since)
        return self.silent(alive[0], now) if late else None

    def silent(self, peer: Peer, now: float) -> Verdict:
        """A rank that was stopped."""
        since = max(now - (peer.stopped_at or now), self.deadline_s)
        return Verdict(
            f"{peer} stopped in {self.phase(peer)}: no sign of life for {since:.1f} s "
            f"(--deadline_s={self.deadline_s:g})",
            peer,
        )

    def waited(self, detector: Peer, text: str, now: float) -> Verdict:
        """`detector` waited in vain: for a rank that is stopped, or that waits for nobody."""
        busy = [peer for peer in self.alive if not peer.is_waiting and peer is not detector]
        if len(busy) == 1:
            found = Verdict(
                f"{busy[0]} is stuck in {self.phase(busy[0])}: rank {detector.rank} waited: {text}",
                busy[0],
            )
        else:
            line = f"{detector} waited in vain in {self.phase(detector)}: {text}"
            found = Verdict(line if self.is_whole_job else line + _ELSEWHERE, detector)
        return self._unless_stopped(found, now)

    def unborn(self, now: float) -> Verdict | None:
        """About a job whose MPI does not come up, because a rank is missing."""
        starting = self.peers and all(p.stage == Stage.START for p in self.peers.values())
        if not starting or not self._is_very_late(now, self.joined_at):
            return None
        since = f"within {now - self.joined_at:.1f} s (--deadline_s={self.deadline_s:g})"
        found = Verdict(f"MPI did not start {since}")
        if self.absent:
            found = Verdict(f"rank {self.absent[0]} did not come up in start {since}")
        return self._unless_stopped(found, now)

    def undead(self, now: float) -> Verdict | None:
        """About a rank that is done and does not end."""
        for peer in self.alive:
            if peer.left_at is not None and self._is_very_late(now, peer.left_at):
                since = f"within {now - peer.left_at:.1f} s (--deadline_s={self.deadline_s:g})"
                found = Verdict(f"{peer} did not end in teardown {since}", peer)
                return self._unless_stopped(found, now)
        return None

    def _unless_stopped(self, found: Verdict, now: float) -> Verdict:
        """What was found, unless a rank stands still: then that is why."""
        stopped = [peer for peer in self.alive if peer.stopped_at is not None]
        return self.silent(stopped[0], now) if stopped else found

    def _is_late(self, now: float, since: float) -> bool:
        return now - since > self.deadline_s

    def _is_very_late(self, now: float, since: float) -> bool:
        """MPI's own start and end take their time, however short the deadline of a message is."""
        return now - since > max(self.deadline_s, _MPI_S)
