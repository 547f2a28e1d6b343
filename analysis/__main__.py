"""`python -m analysis FIGURE|all [--results=…] [--out=…]`: draws figures from result rows.

Exit codes: 0 done; 2 a usage error, or no row that a figure could be drawn from; 141 stdout was
closed by its reader.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from pathlib import Path

from analysis.build import build_all, draw
from analysis.figures import FIGURES
from analysis.rows import load
from analysis.select import on_machine
from analysis.style import FORMATS
from mpissd.common.errors import ConfigError, MpissdError, unknown
from mpissd.common.flags import Checked, flag, flags_of, integer, parse_into, words
from mpissd.common.sigpipe import unless_unread

ABOUT = {name: spec.about for name, spec in FIGURES.items()}
ABOUT["all"] = "every figure of every machine for which there are rows"


def formats(name: str, text: str) -> str:
    """Parses a comma-separated list of known formats; raises ConfigError for another."""
    for kind in words(name, text).split(","):
        if kind not in FORMATS:
            raise unknown("format", kind, FORMATS)
    return text


@dataclasses.dataclass(frozen=True)
class Options(Checked):
    """The flags, which are the same for every figure."""

    results: str = flag("results", words, "folders (every runs*.jsonl below) and files, by commas")
    out: str = flag("figures", words, "where the files go")
    device: str | None = flag(
        None,
        words,
        "device_name of the rows (default of a figure: GPUs, emulated ones, CPUs; most rows first)",
    )
    formats: str = flag("png,pdf,svg", formats, f"some of {','.join(FORMATS)}")
    workers: int = flag(2, integer(1, 64), "processes (all)")


def parse(arguments: list[str]) -> tuple[str, Options]:
    """Returns the figure's name, or "all", and the flags.

    Raises ConfigError for an unknown figure or flag, or a bad value.
    """
    what, *rest = arguments
    if what not in ABOUT:
        raise unknown("figure", what, ABOUT)
    flags = {}
    for word in rest:
        name, _, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            raise ConfigError(f"{word!r} is not a flag: write --name=value")
        flags[name] = value
    return what, parse_into(Options, flags)


def usage() -> int:
    """Prints the help: the figures and the flags."""
    lines = ["python -m analysis FIGURE [--name=value …]", ""]
    lines += [f"  {name:14} {about}" for name, about in ABOUT.items()] + [""]
    known = flags_of(Options).items()
    print("\n".join([*lines, *(f"  --{name:12} {of.metadata['help']}" for name, of in known)]))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    wants_help = not given or bool({"-h", "--help"} & set(given))
    try:
        return unless_unread(usage if wants_help else lambda: execute(*parse(given)))
    except MpissdError as error:
        print(f"analysis: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("analysis: ended by a signal; what was drawn stays", file=sys.stderr)
        return 128 + signal.SIGINT


def execute(what: str, options: Options) -> int:
    """Draws a figure or all of them, and returns the exit code.

    Notes go to stderr, the names of written files to stdout.
    """
    data = load([path for path in options.results.split(",") if path])
    for line in data.notes.lines:
        print(f"analysis: {line}", file=sys.stderr)
    out, kinds = Path(options.out), options.formats.split(",")
    if what == "all":
        data = data if options.device is None else on_machine(data, options.device)
        drew = False
        for line in build_all(data, out, kinds, options.workers):
            print(line, flush=True)
            drew |= ": skipped: " not in line
        return 0 if drew else 2
    items = list(draw(data, what, options.device))
    for note in dict.fromkeys(note for item in items for note in item.notes):
        print(f"analysis: {note}", file=sys.stderr)
    for item in items:
        print(item.saved(out, kinds), file=sys.stderr if item.poster is None else sys.stdout)
    return 2 if all(item.poster is None for item in items) else 0


if __name__ == "__main__":
    sys.exit(main())
