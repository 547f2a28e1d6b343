"""Builds figures for one machine or all, saved under OUT/MACHINE/FIGURE.png, .pdf and .svg."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from analysis.figures import FIGURES, Spec
from analysis.load import Data, Notes, NothingLeft
from analysis.select import by_pair, machines, on_machine
from analysis.style import Poster, save, themed


@dataclass(frozen=True)
class Drawn:
    """A figure that was drawn, with notes on the rows that were left out."""

    machine: str
    name: str
    poster: Poster
    notes: tuple[str, ...] = ()

    @property
    def stem(self) -> Path:
        """The path MACHINE/FIGURE, without a suffix."""
        return Path(slug(self.machine), self.name)


@dataclass(frozen=True)
class Skipped:
    """A figure that was not drawn, and the reason."""

    machine: str
    name: str
    why: str


def slug(machine: str) -> str:
    """Makes a file name: NVIDIA H100 80GB SXM (emulated) → nvidia-h100-80gb-sxm-emulated."""
    return re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")


def draw(data: Data, name: str, device: str | None = None) -> Iterator[Drawn | Skipped]:
    """Draws one figure of one machine; several if the figure is drawn for each pair."""
    spec = FIGURES[name]
    here = on_machine(replace(data, notes=Notes()), device, of=spec.of)
    machine = str(getattr(here, spec.of)["device_name"].iloc[0])
    parts = {"": here}
    if spec.per_pair:
        parts = {f"-{pair}": part for pair, part in by_pair(here).items()} or parts
    for suffix, part in parts.items():
        yield _draw_one(spec, machine, name + suffix, replace(part, notes=here.notes))


def _draw_one(spec: Spec, machine: str, name: str, data: Data) -> Drawn | Skipped:
    try:
        with themed():
            poster = spec.draw(data)
    except NothingLeft as nothing:
        return Skipped(machine, name, str(nothing))
    if poster.table().empty:
        return Skipped(machine, name, "no two rows that it could compare")
    return Drawn(machine, name, poster, data.notes.lines)


def jobs_of(data: Data) -> list[tuple[str, str]]:
    """Returns (machine, figure) of all that may be drawn: figures of runs where a machine has
    runs, those of loads where it has loads, those of pools where it has pools."""
    there = {of: machines(getattr(data, of)) for of in ("rows", "loads", "pools")}
    return [
        (device, name)
        for device in dict.fromkeys(device for each in there.values() for device in each)
        for name, spec in FIGURES.items()
        if device in there[spec.of]
    ]


def build_all(data: Data, out: Path, kinds: Sequence[str], workers: int) -> Iterator[str]:
    """Draws and saves all figures in `workers` processes; yields a line for each figure."""
    jobs = jobs_of(data)
    if not jobs:
        raise NothingLeft("no row of a device is left (the null device measures mpissd itself)")
    with ProcessPoolExecutor(workers, initializer=_share, initargs=(data, out, kinds)) as pool:
        for lines in pool.map(_job, jobs):
            yield from lines


_shared: list[tuple[Data, Path, Sequence[str]]] = []


def _share(data: Data, out: Path, kinds: Sequence[str]) -> None:
    _shared[:] = [(data, out, kinds)]


def _job(job: tuple[str, str]) -> list[str]:
    (data, out, kinds) = _shared[0]
    device, name = job
    return [outcome_line(item, out, kinds) for item in draw(data, name, device)]


def outcome_line(item: Drawn | Skipped, out: Path, kinds: Sequence[str]) -> str:
    """Saves a figure; returns the line that reports it, or the reason why there is none."""
    if isinstance(item, Skipped):
        return f"{slug(item.machine)}/{item.name}: skipped: {item.why}"
    paths = save(item.poster, out / item.stem, kinds)
    names = paths[0].with_suffix("").as_posix() + ".{" + ",".join(kinds) + "}"
    return names if len(kinds) > 1 else str(paths[0])
