"""Builds figures for one machine or all, saved under OUT/MACHINE/FIGURE.png, .pdf and .svg."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from analysis.figures import FIGURES
from analysis.rows import Data, Notes, NothingLeft
from analysis.select import by_pair, machines, on_machine
from analysis.style import Poster, save, themed


@dataclass(frozen=True)
class Drawn:
    """A figure of one machine, with notes on the rows that were left out.

    poster: None if it was not drawn; `why` is then the reason.
    """

    machine: str
    name: str
    poster: Poster | None
    why: str = ""
    notes: tuple[str, ...] = ()

    @property
    def stem(self) -> Path:
        """The path MACHINE/FIGURE, without a suffix: NVIDIA H100 (emulated) →
        nvidia-h100-emulated."""
        return Path(re.sub(r"[^a-z0-9]+", "-", self.machine.lower()).strip("-"), self.name)

    def saved(self, out: Path, kinds: Sequence[str]) -> str:
        """Saves a figure; returns the line that reports it, or the reason why there is none."""
        if self.poster is None:
            return f"{self.stem}: skipped: {self.why}"
        paths = save(self.poster, out / self.stem, kinds)
        names = paths[0].with_suffix("").as_posix() + ".{" + ",".join(kinds) + "}"
        return names if len(kinds) > 1 else str(paths[0])


def draw(data: Data, name: str, device: str | None = None) -> Iterator[Drawn]:
    """Draws one figure of one machine; several if the figure is drawn for each pair."""
    spec = FIGURES[name]
    here = on_machine(replace(data, notes=Notes()), device, of=spec.of)
    machine = str(getattr(here, spec.of)["device_name"].iloc[0])
    parts = {"": here}
    if spec.per_pair:
        parts = {f"-{pair}": part for pair, part in by_pair(here).items()} or parts
    for suffix, part in parts.items():
        try:
            with themed():
                poster = spec.draw(replace(part, notes=here.notes))
            if poster.table().empty:
                raise NothingLeft("no two rows that it could compare")
        except NothingLeft as nothing:
            yield Drawn(machine, name + suffix, None, str(nothing))
        else:
            yield Drawn(machine, name + suffix, poster, notes=here.notes.lines)


def build_all(data: Data, out: Path, kinds: Sequence[str], workers: int) -> Iterator[str]:
    """Draws and saves all figures in `workers` processes; yields a line for each figure.

    Figures of runs are drawn of the machines that have runs, those of pools of those with pools.
    """
    have = {of: machines(getattr(data, of)) for of in ("rows", "pools")}
    devices = dict.fromkeys(device for names in have.values() for device in names)
    jobs = [(d, n) for d in devices for n, spec in FIGURES.items() if d in have[spec.of]]
    if not jobs:
        raise NothingLeft("no row of a device is left (the null device measures mpissd itself)")
    with ProcessPoolExecutor(workers, initializer=_share, initargs=(data,)) as pool:
        for lines in pool.map(partial(_build, out, kinds), jobs):
            yield from lines


_shared: list[Data] = []  # of a worker process


def _share(data: Data) -> None:
    _shared.append(data)


def _build(out: Path, kinds: Sequence[str], job: tuple[str, str]) -> list[str]:
    device, name = job
    return [item.saved(out, kinds) for item in draw(_shared[0], name, device)]
