"""Functions that the scripts which print the documentation's tables share.

A page holds a table between <!-- python -m results.drafts.tables shapes --> and <!-- end -->;
docs/tables.py writes the table there, and a test checks that it is up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal

Lines = Iterator[str]
PROMPTS = {
    "chat": "chat",
    "humaneval": "HumanEval",
    "edit": "editing code",
    "summarise": "summarising",
}


def line(cells: Iterable[object]) -> str:
    """Returns one line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def head(*names: str) -> Lines:
    """Yields the first two lines of a Markdown table: the columns' names and the rule."""
    yield line(names)
    yield "|---" * len(names) + "|"


def share(value: float, places: int = 3) -> str:
    """Formats a number below one without its leading zero, such as .673; decimal halves are rounded
    up."""
    text = str(Decimal(str(value)).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP))
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def gain(ratio: float) -> str:
    """Formats a ratio as a percentage above or below one: +14%, −6%, 0%."""
    percent = round(100 * (ratio - 1))
    return f"{percent:+d}%".replace("-", "−") if percent else "0%"


def between(value: float, bounds: Sequence[float], places: int = 2) -> str:
    """Formats a value with its interval `bounds`, such as "3.01 (2.93 to 3.09)"."""
    low, high = (f"{bound:.{places}f}" for bound in bounds)
    return f"{value:.{places}f} ({low} to {high})"


def best(columns: Sequence[list[str]], by: Mapping[int, Callable[..., float]]) -> None:
    """Makes the best cells of some columns of a table bold, in place. columns: the cells of each
    column. by: {index of a column: min or max, which finds the best number}. If several cells are
    equally good, all are bold."""
    for place, choose in by.items():
        values = [float(cell.replace(",", "")) for cell in columns[place]]
        pairs = zip(columns[place], values, strict=True)
        columns[place][:] = [f"**{t}**" if v == choose(values) else t for t, v in pairs]


def printed(tables: Mapping[str, Callable[[], Lines]], usage: str | None) -> int:
    """Prints the table that the command line names; returns the exit code, 2 for another name.
    tables: {name: function that yields its lines}. usage: text to print for a wrong name."""
    if len(sys.argv) != 2 or sys.argv[1] not in tables:
        print(f"{usage}\ntables: {', '.join(tables)}", file=sys.stderr)
        return 2
    print("\n".join(tables[sys.argv[1]]()))
    return 0
