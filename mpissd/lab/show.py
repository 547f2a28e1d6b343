"""Shows the answer to the first prompt while a run decodes it: on a terminal at once, in a pipe
when it is complete."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from mpissd.engine.decode.target import RoundResult
from mpissd.engine.workload.base import Workload
from mpissd.engine.workload.text.answers import sources_of
from mpissd.engine.workload.text.stops import AnswerText
from mpissd.engine.workload.text.workload import TextWorkload
from mpissd.lab.terminal import Meter, Painter, Piece, harmless, legend, open_terminal

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
    ) -> None:
        """Begins to count time.

        write: takes new text and the numbers of the margin. has_cache: whether rounds look up a
        speculation cache (ssd). limit: of the answer, in tokens.
        """
        self._text, self._write, self._left = text, write, limit
        self._tokens = self._rounds = self._hits = 0
        self.is_over = False
        self.meter = Meter(has_cache)

    def take(self, result: RoundResult) -> None:
        """Shows a round's new text of the sequence, if it is still decoded."""
        places = np.flatnonzero(result.outcome.ids == WATCHED)
        if self.is_over or not len(places):
            return
        row, drafted, outcome = int(places[0]), result.speculation, result.outcome
        count = int(outcome.num_accepted[row])
        tokens = [*drafted.tokens[row, :count].tolist(), int(outcome.bonus[row])][: self._left]
        if self._left is not None:
            self._left -= len(tokens)
        pieces = []
        sources = sources_of(count, int(drafted.source[row]))
        for token, source in zip(tokens, sources, strict=False):
            if self._text.ended is not None:
                break
            pieces.append((self._text.push(token), source))
        self._tokens += len(pieces)
        self._hits += bool(drafted.hit[row]) and self._rounds > 0
        self._rounds += 1
        self.meter.count(self._tokens, self._rounds, self._hits)
        self.is_over = self._text.ended is not None or self._left == 0
        self._write([piece for piece in pieces if piece[0]], self.meter.short())

    def end(self) -> None:
        """Shows the text that is still held back."""
        if rest := self._text.flush():
            self._write([(rest, "bonus")], self.meter.short())


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
    kept: list[str] = []
    with open_terminal() as terminal:
        colours = terminal is not None and config.show and "NO_COLOR" not in os.environ
        painter = None
        if terminal is not None:
            painter = Painter(terminal.write, terminal.columns, colours=colours)
            terminal.write(f"\n{legend(colours=True)}\n\n" if colours else "\n")

        def write(pieces: Sequence[Piece], margin: str) -> None:
            if painter is not None:
                painter.add(pieces, margin)
            else:
                kept.extend(piece for piece, _ in pieces)

        show = Show(text, write, has_cache=config.mode == "ssd", limit=config.token_limit)
        yield Audience(show.take, terminal is not None)
        show.end()
        numbers = f"\n{show.meter.long()}\n" if config.show else ""
        if terminal is not None and painter is not None:
            painter.end()
            terminal.write(f"{numbers}\n")
        else:
            sys.stdout.write(f"\n{harmless(''.join(kept))}\n{numbers}\n")
            sys.stdout.flush()
