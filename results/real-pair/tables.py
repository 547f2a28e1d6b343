"""Prints a table of docs/laws.md: python -m results.real-pair.tables laws|warm|lookup."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpissd.common.output import read_rows
from results.pages import PROMPTS, between, head, line, printed

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]
ENDS = ("a rejection", "K accepted")
FAN_OUTS = ("1", "4")  # numbers of candidates F for which recordings and rows have miss rates


def laws() -> Iterator[str]:
    """Yields the table with a line for each recording: acceptance, and the fitted models of the
    probability that the speculation cache misses."""
    names = [name for end in ENDS for name in (f"A after {end}", "r", "floor")]
    yield from head("prompts", "tokens a round", "alpha", *names)
    for row in read_rows(HERE / "laws.jsonl"):
        cells = [between(row["tokens_a_round"], row["tokens_a_round_95"]), f"{row['alpha']:.3f}"]
        for fit in (row["fit_rejected"], row["fit_complete"]):
            cells += [between(fit[key], fit[f"{key}_95"]) for key in ("A", "r")]
            cells.append(f"{fit['floor']:.3f}")
        yield line([prompts(row), *cells])


def warm() -> Iterator[str]:
    """Yields the table with a line for each kind of prompts and temperature: acceptance, and the
    cache's miss rate with F candidates for the bonus token."""
    names = [name for end in ENDS for name in (f"misses after {end}, F = 1", "F = 4")]
    yield from head("prompts", "T", "rounds", "tokens a round", "alpha", *names)
    parts = read_rows(HERE / "parts.jsonl")
    warmed = {row["prompts"] for row in parts if row["temperature"]}
    answers = [row for row in parts if not row["position"] and row["prompts"] in warmed]
    for row in sorted(answers, key=lambda r: (list(PROMPTS).index(r["prompts"]), r["temperature"])):
        cells = [PROMPTS[row["prompts"]], f"{row['temperature']:g}", str(row["rounds"])]
        cells += [between(row[key], row[f"{key}_95"]) for key in ("tokens_a_round", "alpha")]
        misses = (row["misses"][end] for end in ("rejected", "complete"))
        yield line([*cells, *(f"{of[f]:.3f}" for of in misses for f in FAN_OUTS)])


def lookup() -> Iterator[str]:
    """Yields the table with a line for each recording and K: tokens a round by the draft model, and
    by each kind of lookup."""
    names = ("prompts", "of the answer in the prompt", "K")
    yield from head(*names, "draft model", "prompt lookup", "suffix automaton")
    cells: dict[tuple[str, int], dict[str, Row]] = {}
    for row in read_rows(HERE / "lookup.jsonl"):
        cells.setdefault((prompts(row), row["lookahead"]), {})[row["draft"]] = row
    for (name, lookahead), of in cells.items():
        if lookahead in (4, 8):
            kinds = [of[draft] for draft in ("draft model", "prompt", "suffix")]
            rates = [between(row["tokens_a_round"], (row["low"], row["high"])) for row in kinds]
            yield line([name, f"{kinds[0]['repeats_prompt']:.0%}", lookahead, *rates])


def prompts(row: Row) -> str:
    """Returns the kind of prompts, such as "chat", of a row that was made from a recording."""
    return PROMPTS[row["recording"].removeprefix("smollm2-").removesuffix(".npz")]


if __name__ == "__main__":
    sys.exit(printed({"laws": laws, "warm": warm, "lookup": lookup}, __doc__))
