"""What the scripts that print tables for the documentation share.

A page holds such a table between <!-- python -m results.drafts.tables shapes --> and <!-- end -->;
docs/tables.py writes it there, and a test prints it again.
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
    """Yields a table's first two lines."""
    yield line(names)
    yield "|---" * len(names) + "|"


def share(value: float, places: int = 3) -> str:
    """Formats a number below one without its zero, halves rounded up as written: .673."""
    text = str(Decimal(str(value)).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP))
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def gain(ratio: float) -> str:
    """Formats a ratio as what it is more or less than one: +14%, −6%, 0%."""
    percent = round(100 * (ratio - 1))
    return f"{percent:+d}%".replace("-", "−") if percent else "0%"


def between(value: float, bounds: Sequence[float], places: int = 2) -> str:
    """Formats a value with its interval: 3.01 (2.93 to 3.09)."""
    low, high = (f"{bound:.{places}f}" for bound in bounds)
    return f"{value:.{places}f} ({low} to {high})"


def best(columns: Sequence[list[str]], by: Mapping[int, Callable[..., float]]) -> None:
    """Makes the best cell of some columns bold, in place; columns: lists of cells.

    by: for a column's place min or max, of the cells read as numbers. Equal cells are all bold.
    """
    for place, choose in by.items():
        values = [float(cell.replace(",", "")) for cell in columns[place]]
        pairs = zip(columns[place], values, strict=True)
        columns[place][:] = [f"**{t}**" if v == choose(values) else t for t, v in pairs]


def printed(tables: Mapping[str, Callable[[], Lines]], usage: str | None) -> int:
    """Prints the table that the command line names; exit status 2 for any other."""
    if len(sys.argv) != 2 or sys.argv[1] not in tables:
        print(f"{usage}\ntables: {', '.join(tables)}", file=sys.stderr)
        return 2
    print("\n".join(tables[sys.argv[1]]()))
    return 0
