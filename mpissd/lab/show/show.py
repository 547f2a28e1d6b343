"""Shows the answer to the first prompt while a run decodes it: on the terminal at once, and behind
a pipe when it is complete."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from mpissd.common.config import RunConfig
from mpissd.common.rounds import Speculation
from mpissd.engine.decode.target import RoundResult
from mpissd.engine.workload.base import Workload
from mpissd.engine.workload.text.answers import sources_of
from mpissd.engine.workload.text.stops import AnswerText
from mpissd.engine.workload.text.workload import TextWorkload
from mpissd.lab.show.meter import Meter
from mpissd.lab.show.painter import Painter, Piece, harmless, legend
from mpissd.lab.show.terminal import Terminal, open_terminal

WATCHED = 0  # the request id whose text is shown


class Show:
    """Follows one sequence of a run on the lead; `take` is called between two rounds."""

    def __init__(
        self,
        text: AnswerText,
        write: Callable[[Sequence[Piece], str], object],
        *,
        has_cache: bool,
        limit: int | None = None,
        watched: int = WATCHED,
    ) -> None:
        """Begins to count time. write: takes new text and the numbers that stand beside it.

        has_cache: whether rounds look their speculation up (ssd). limit: of the answer, in tokens.
        watched: the sequence's request id.
        """
        self._text, self._write, self._has_cache = text, write, has_cache
        self._left, self._watched = limit, watched
        self.is_over = False
        self.meter = Meter()

    def take(self, result: RoundResult) -> None:
        """Shows what a round added to the sequence, if it is still decoded."""
        if self.is_over:
            return
        place = np.flatnonzero(result.outcome.ids == self._watched)
        if len(place):
            self._add(result, int(place[0]))

    def _add(self, result: RoundResult, row: int) -> None:
        drafted, outcome = result.speculation, result.outcome
        count = int(outcome.num_accepted[row])
        tokens = [*drafted.tokens[row, :count].tolist(), int(outcome.bonus[row])]
        sources = sources_of(count, int(drafted.source[row]))
        if self._left is not None:
            tokens = tokens[: self._left]
            self._left -= len(tokens)
        kept, pieces = self._pieces(tokens, sources)
        self.meter.add(kept, _hit(drafted, row) if self._has_cache else None)
        self.is_over = self._text.ended is not None or self._left == 0
        self._write(pieces, self.meter.short())

    def _pieces(self, tokens: list[int], sources: list[str]) -> tuple[int, list[Piece]]:
        """Returns how many tokens are the answer's, the one that ends it included, and their
        text."""
        found = []
        for token, source in zip(tokens, sources, strict=False):
            if self._text.ended is not None:
                break
            found.append((self._text.push(token), source))
        return len(found), [piece for piece in found if piece[0]]

    def end(self) -> None:
        """Shows the text that is still held back."""
        if rest := self._text.flush():
            self._write([(rest, "bonus")], self.meter.short())


def _hit(drafted: Speculation, row: int) -> bool:
    return bool(drafted.hit[row])


class Audience(NamedTuple):
    """A function that is called with each round, and whether it writes to a terminal."""

    take: Callable[[RoundResult], object] | None
    is_live: bool


NOBODY = Audience(None, False)


@contextmanager
def shown(workload: Workload) -> Iterator[Audience]:
    """Shows the first answer of a run inside the block, if its tokens are text."""
    if not isinstance(workload, TextWorkload) or workload.tokenizer is None:
        yield NOBODY
        return
    config = workload.job.config
    text = AnswerText(workload.tokenizer, config.stop_strings, workload.stop_ids)
    with open_terminal() as terminal:
        how = _behind(config, text) if terminal is None else _live(config, text, terminal)
        with how as take:
            yield Audience(take, terminal is not None)


@contextmanager
def _live(
    config: RunConfig, text: AnswerText, terminal: Terminal
) -> Iterator[Callable[[RoundResult], object]]:
    """Writes the answer to the terminal while it arrives."""
    colours = config.show and "NO_COLOR" not in os.environ
    painter = Painter(terminal.write, terminal.columns, colours=colours)
    _open(terminal, colours)
    show = Show(text, painter.add, has_cache=config.mode == "ssd", limit=config.token_limit)
    yield show.take
    show.end()
    painter.end()
    terminal.write(f"\n{show.meter.long()}\n\n" if config.show else "\n")


def _open(terminal: Terminal, colours: bool) -> None:
    told = legend(colours=colours)
    terminal.write(f"\n{told}\n\n" if told else "\n")


@contextmanager
def _behind(config: RunConfig, text: AnswerText) -> Iterator[Callable[[RoundResult], object]]:
    """Prints the answer to stdout when it is complete."""
    pieces: list[str] = []

    def keep(new: Sequence[Piece], margin: str) -> None:
        pieces.extend(piece for piece, _ in new)

    show = Show(text, keep, has_cache=config.mode == "ssd", limit=config.token_limit)
    yield show.take
    show.end()
    told = f"\n{show.meter.long()}\n" if config.show else ""
    sys.stdout.write(f"\n{harmless(''.join(pieces))}\n{told}\n")
    sys.stdout.flush()
