"""A draft's newer weights: received, checked and packed between rounds, then swapped in at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from mpissd.common.errors import ProtocolError
from mpissd.engine.comm.learner_messages import Assembly, Complete, VersionInbox
from mpissd.engine.decode.draft import Drafter
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.checkpoint import unpacked

_DONE = object()
_PATIENCE = 3  # diverged versions after which a draft takes no more


@dataclass(frozen=True)
class Swap:
    """One swap: the version, its bytes, and the longest time that it held up a round, in µs."""

    version: int
    num_bytes: int
    longest_us: float


@dataclass
class Report:
    """The versions that a draft took, in order, and why it refused others."""

    swaps: list[Swap] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON takes it."""
        return {"swaps": [asdict(swap) for swap in self.swaps], "refused_versions": self.refused}


class Updates:
    """Takes a draft's newer weights over, in units that each fit between two rounds.

    The new weights are packed into memory of their own while the old ones draft. The last unit
    copies them over the old ones and has the drafter forget the old cache. A version whose logits
    are not finite is left for the weights that were loaded.
    """

    def __init__(self, inbox: VersionInbox, drafter: Drafter) -> None:
        stepper = drafter.worker.stepper
        assert isinstance(stepper, Stepper), "new weights of a model that computes nothing"
        self._inbox, self._drafter, self._stepper = inbox, drafter, stepper
        self._assembly = Assembly()
        self._packing: Iterator[None] | None = None
        self._leaving: Iterator[None] | None = None  # the packing that goes back
        self._num_bytes, self._longest_s = 0, 0.0
        self._newest = self._diverged = 0  # the number of the last version; of how many it was left
        self.report = Report()

    def work(self) -> bool:
        """Does one unit of work between two rounds; returns whether there was any."""
        start, before = perf_counter(), self._drafter.version
        if self._drafter.divergence is not None and not self._is_leaving:
            self._leave(self._drafter.divergence)
        try:
            did = self._pack() if self._packing is not None else self._receive()
        except ProtocolError as error:
            self._packing, did = None, True
            self.report.refused.append(str(error))
        self._longest_s = max(self._longest_s, perf_counter() - start)
        if self._drafter.version not in (0, before):
            swap = Swap(self._drafter.version, self._num_bytes, round(self._longest_s * 1e6, 1))
            self.report.swaps.append(swap)
            self._longest_s = 0.0
        return did

    def _receive(self) -> bool:
        message = self._inbox.take()
        if message is None:
            return False
        if self._diverged >= _PATIENCE:
            return True  # so that its sender may end
        complete = self._assembly.add(message)
        if complete is None:
            return True
        if complete.version <= self._newest:
            raise ProtocolError(f"version {complete.version} after version {self._newest}")
        self._newest = complete.version
        self._num_bytes = complete.data.nbytes
        self._packing = self._packed(complete)
        return True

    @property
    def _is_leaving(self) -> bool:
        return self._packing is not None and self._packing is self._leaving

    def _leave(self, why: str) -> None:
        """Begins to go back to the weights that were loaded; drops packed weights."""
        self.report.refused.append(f"version {self._drafter.version}: {why}")
        self._diverged += 1
        self._packing = self._leaving = self._loaded()

    def _loaded(self) -> Iterator[None]:
        yield from self._stepper.reload(None)
        self._drafter.change(0)

    def _packed(self, complete: Complete) -> Iterator[None]:
        """Packs a version in steps and changes the drafter to it."""
        arrays = unpacked(complete.data)
        yield
        yield from self._stepper.reload(arrays)
        self._drafter.change(complete.version)

    def _pack(self) -> bool:
        assert self._packing is not None
        if next(self._packing, _DONE) is _DONE:
            self._packing = None
        return True
