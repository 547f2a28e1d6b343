"""`python -m analysis FIGURE|all [--results=…] [--out=…]`: draws figures from result rows.

Figures are saved as OUT/MACHINE/FIGURE.png, .pdf and .svg. Exit codes: 0 done; 2 a usage error, or
no row that a figure could be drawn from; 141 stdout was closed by its reader.
"""

from __future__ import annotations

# ruff: noqa: E402
import os

# When it is imported, matplotlib reads these variables and a matplotlibrc in the current folder. A
# notebook's shell names a backend that is not installed, and a file may set a user's locale.
os.environ |= {"MPLBACKEND": "agg", "MATPLOTLIBRC": os.devnull}
_here = os.open(".", os.O_RDONLY)
os.chdir("/")
import matplotlib as _  # noqa: F401

os.fchdir(_here)
os.close(_here)

import inspect
import re
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mpissd.common.errors import MpissdError, unknown
from mpissd.common.flags import Checked, flag, flags_of, integer, parse_into, read, words
from mpissd.common.output import open_streams, unless_unread

from .figures import FIGURES
from .rows import Data, NothingLeft, load, tidy
from .select import by_pair, machines, on_machine
from .style import FORMATS, NO_ROWS, Poster, save, themed

ABOUT = {name: spec.about for name, spec in FIGURES.items()}
ABOUT["all"] = "every figure of every machine for which there are rows"


def formats(name: str, text: str) -> str:
    """Parses `text`, the value of flag `name`: file formats separated by commas. Raises ConfigError
    for an unknown format."""
    for kind in words(name, text).split(","):
        if kind not in FORMATS:
            raise unknown("format", kind, FORMATS)
    return text


@dataclass(frozen=True)
class Options(Checked):
    """The command line's flags, which are the same for every figure."""

    results: str = flag("results", words, "folders (every runs*.jsonl below) and files, by commas")
    out: str = flag("out/figures", words, "folder for MACHINE/FIGURE.png, .pdf and .svg")
    device: str | None = flag(
        None,
        words,
        "device_name of the rows (default of a figure: GPUs, emulated ones, CPUs; most rows first)",
    )
    formats: str = flag("png,pdf,svg", formats, f"some of {','.join(FORMATS)}")
    workers: int = flag(2, integer(1, 64), "processes (all)")


@dataclass(frozen=True)
class Drawn:
    """The result of drawing a figure for one machine. poster: the figure; None if it could not be
    drawn, for the reason in `why`. The notes say which rows were left out."""

    machine: str
    name: str
    poster: Poster | None
    why: str = ""
    notes: tuple[str, ...] = ()

    def saved(self, out: Path, kinds: Sequence[str]) -> str | None:
        """Saves the figure in the formats `kinds` below `out`; returns a line that names the files,
        or None if the figure was not drawn. The folder is named after the machine: "NVIDIA H100
        (emulated)" becomes nvidia-h100-emulated."""
        if self.poster is None:
            return None
        stem = Path(re.sub(r"[^a-z0-9]+", "-", self.machine.lower()).strip("-"), self.name)
        paths = save(self.poster, out / stem, kinds)
        names = paths[0].with_suffix("").as_posix() + ".{" + ",".join(kinds) + "}"
        return names if len(kinds) > 1 else str(paths[0])


def draw(data: Data, name: str, device: str | None = None) -> Iterator[Drawn]:
    """Yields the figure `name` of one machine (None: the one with most rows); some figures are
    drawn once for each model pair."""
    spec = FIGURES[name]
    here = on_machine(replace(data, notes=[]), device)
    machine = str(here.rows["device_name"].iloc[0])
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
            yield Drawn(machine, name + suffix, poster, notes=tuple(here.notes))


_shared: list[Data] = []  # the data that a worker process draws from


def _draw_one(out: Path, kinds: Sequence[str], job: tuple[str, str]) -> tuple[list[str], str]:
    """Draws and saves one figure in a worker process. job: names of the figure and the machine.
    Returns a line for each saved figure, and the reason if there is none ("" otherwise)."""
    device, name = job
    items = list(draw(_shared[0], name, device))
    lines = [line for item in items if (line := item.saved(out, kinds))]
    return lines, "" if lines else items[-1].why


def usage(name: str) -> int:
    """Prints the help: what the figure `name` shows and which rows it needs (for another name: a
    list of all figures), and the flags. Returns the exit code 0."""
    print(f"python -m {__package__} {name if name in FIGURES else 'FIGURE'} [--name=value …]\n")
    if name in FIGURES:
        text = inspect.cleandoc(FIGURES[name].draw.__doc__ or "")
        try:  # Drawn without rows, a figure raises an error that names the rows it needs.
            FIGURES[name].draw(Data(tidy([])))
        except NothingLeft as nothing:
            text += f"\nIt needs {str(nothing).removeprefix(NO_ROWS)}."
        print(textwrap.indent(f"{ABOUT[name]}\n\n{text}\n", "  "))
    else:
        print("\n".join(f"  {name:14} {about}" for name, about in ABOUT.items()) + "\n")
    print("\n".join(f"  --{n:12} {of.metadata['help']}" for n, of in flags_of(Options).items()))
    return 0


def execute(what: str, *flags: str) -> int:
    """Draws the figure `what`, or all figures; returns the exit code. Names of written files are
    printed to stdout, notes on left-out rows to stderr. Raises ConfigError for an unknown figure or
    flag, or a wrong value."""
    if what not in ABOUT:
        raise unknown("figure", what, ABOUT)
    options = parse_into(Options, read(list(flags), flags_of(Options)))
    data = load([path for path in options.results.split(",") if path])
    for line in data.notes:
        print(f"analysis: {line}", file=sys.stderr)
    out = Path(options.out)
    kinds = options.formats.split(",")
    if what == "all":
        data = data if options.device is None else on_machine(data, options.device)
        jobs = [(device, name) for device in machines(data.rows) for name in FIGURES]
        if not jobs:
            raise NothingLeft("no row of a device is left (the null device measures mpissd itself)")
        reasons = dict[str, str]()  # {figure: why it was drawn for no machine, "" if it was drawn}
        with ProcessPoolExecutor(options.workers, None, _shared.append, (data,)) as pool:
            results = pool.map(partial(_draw_one, out, kinds), jobs)
            for (_, name), (lines, why) in zip(jobs, results, strict=True):
                reasons[name] = why and reasons.get(name, why)
                print("".join(f"{line}\n" for line in lines), end="", flush=True)
        if missing := ", ".join(name for name, why in reasons.items() if why):
            text = f"analysis: not drawn, as FIGURE --help says which rows each needs: {missing}"
            print(textwrap.fill(text, 100), file=sys.stderr)
        return 0 if "" in reasons.values() else 2
    items = list(draw(data, what, options.device))
    for note in dict.fromkeys(note for item in items for note in item.notes):
        print(f"analysis: {note}", file=sys.stderr)
    for item in items:
        if item.poster is None:
            print(f"analysis: {item.name}: {item.why}", file=sys.stderr)
        else:
            print(item.saved(out, kinds))
    return 0 if any(item.poster for item in items) else 2


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line `arguments` (None: those of the process); returns the exit code."""
    open_streams()
    given = sys.argv[1:] if arguments is None else arguments
    wants_help = not given or bool({"-h", "--help"} & set(given))
    try:
        if wants_help:
            return unless_unread(partial(usage, next(iter(given), "")))
        return unless_unread(lambda: execute(*given))
    except MpissdError as error:
        print(f"analysis: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("analysis: ended by a signal; what was drawn stays", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
