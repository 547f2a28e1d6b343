"""Which entries of a folder live, by one observer's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from mpissd.serve.replicas import entry as entries
from mpissd.serve.replicas.entry import Entry

EXPIRE_S = 60.0  # behind a replica's last beat; NFS may show a file up to as late (acregmax)


class Living:
    """Looks at a folder again and again.

    An entry is dead once its count has not changed for `expire_s` between two looks of this
    observer, by its own clock. So clocks of nodes may differ by hours, and a file's time, which
    some file systems take from the writer's node, is not read. An observer that was just started
    calls nothing dead for that long. A live replica whose file was removed writes it again.
    """

    def __init__(
        self,
        folder: Path,
        expire_s: float = EXPIRE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._expire_s, self._clock = folder, expire_s, clock
        self._seen: dict[str, tuple[int, float]] = {}  # by id: the count, and since when

    def look(self) -> list[Entry]:
        """Returns the entries that live, by id, and removes the dead ones' files.

        Raises OSError where the folder cannot be read, or is gone: that ends no replica.
        """
        now, found = self._clock(), entries.read(self._folder)
        before = self._seen
        self._seen = {
            each.id: before[each.id]
            if before.get(each.id, (None, 0.0))[0] == each.beat
            else (each.beat, now)
            for each in found
        }
        dead = {name for name, (_, since) in self._seen.items() if now - since > self._expire_s}
        for name in dead:
            entries.remove(self._folder, name)
        return [each for each in found if each.id not in dead]
