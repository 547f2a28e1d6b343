"""Prints an answer on the terminal while it is decoded: words are wrapped, the colour of a token
shows what drafted it, and rates are shown in the right margin.

`shown` prints the first answer of a run; the command `chat` prints a server's answers. A word is
printed when it is complete, so that no printed text has to move to the next line.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TextIO
from unicodedata import category, combining, east_asian_width

import numpy as np

from mpissd.engine.comm.topology import launcher_size
from mpissd.engine.oracle.logits import TextWorkload
from mpissd.engine.oracle.workload import Workload
from mpissd.engine.round.target import RoundResult
from mpissd.engine.text.answer import AnswerText, sources_of

Piece = tuple[str, str]  # (text of a token, what drafted the token)

VARIABLE = "MPISSD_TERMINAL"
WATCHED = 0  # id of the only request whose text is shown
MARGIN = 38
COLOURS = {"cache": "32", "jit": "33", "fast": "33", "bonus": "0"}  # SGR codes
_LEGEND = (("cache", "speculation cache"), ("jit", "drafted in time"), ("bonus", "target's own"))
_LEAST_COLUMNS = 72  # Terminals with fewer columns have no margin for rates.
_DEFAULT_COLUMNS = 80
# These characters change the writing direction: LRE, RLE, PDF, LRO, RLO and isolates (UAX #9).
_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


@contextmanager
def open_terminal() -> Iterator[TextIO | None]:
    """Yields the user's terminal as a text file, or None if there is none, as in a pipe. Under
    mpirun, stdout is no terminal; so the scripts in launch/ pass the terminal's name in the
    variable MPISSD_TERMINAL (host:/dev/pts/N), and rank 0 opens it if rank 0 runs on that host."""
    if launcher_size() is None and sys.stdout.isatty():  # mpirun may make stdout a pty.
        yield sys.stdout
        return
    host, _, path = os.environ.get(VARIABLE, "").partition(":")
    try:
        is_here = bool(path) and host == os.uname().nodename
        descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY) if is_here else None
    except OSError:
        descriptor = None
    if descriptor is None:
        yield None
        return
    with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
        yield file if file.isatty() else None


def columns_of(terminal: TextIO) -> int:
    try:
        return os.get_terminal_size(terminal.fileno()).columns or _DEFAULT_COLUMNS
    except OSError:
        return _DEFAULT_COLUMNS


class Meter:
    """Counts the tokens, decoding rounds and cache hits of one answer, and computes rates. first_s:
    seconds from the start to the first tokens. has_cache: whether rounds look up the speculation
    cache of SSD; the first round never does."""

    def __init__(self, has_cache: bool = False, clock: Callable[[], float] = perf_counter) -> None:
        self.has_cache = has_cache
        self.clock = clock
        self._start = clock()
        self.num_tokens = self.num_rounds = self.hits = self._first_tokens = 0
        self.seconds = self.first_s = 0.0

    def count(self, num_tokens: int, num_rounds: int, hits: int) -> None:
        self.seconds = self.clock() - self._start
        if not self.num_rounds:
            self.first_s = self.seconds
            self._first_tokens = num_tokens
        self.num_tokens = num_tokens
        self.num_rounds = num_rounds
        self.hits = hits

    @property
    def tok_per_s(self) -> float | None:
        """Tokens per second after the first round, whose time includes storing the prompt; None
        before the second round."""
        later_s = self.seconds - self.first_s
        return (self.num_tokens - self._first_tokens) / later_s if later_s > 0 else None

    @property
    def hit_rate(self) -> float | None:
        """The share of lookups in the speculation cache that hit; None if there was no lookup."""
        return self.hits / (self.num_rounds - 1) if self.has_cache and self.num_rounds > 1 else None

    @property
    def tokens_a_round(self) -> float:
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    def short(self) -> str:
        """Returns tokens per round, hit rate and tokens/s as text of at most MARGIN characters."""
        parts = [f"{self.tokens_a_round:.2f} tok/round"]
        parts += [] if self.hit_rate is None else [f"{self.hit_rate:4.0%} hits"]
        parts += [] if self.tok_per_s is None else [f"{self.tok_per_s:3.0f} tok/s"]
        return " · ".join(parts)

    def long(self) -> str:
        parts = [f"{self.num_tokens} tokens in {self.num_rounds} rounds"]
        parts.append(f"{self.tokens_a_round:.2f} a round")
        parts += [] if self.hit_rate is None else [f"hit rate {self.hit_rate:.2f}"]
        parts += [] if self.tok_per_s is None else [f"{self.tok_per_s:.1f} tok/s"]
        return ", ".join([*parts, f"first token after {self.first_s:.2f} s"])


def legend() -> str:
    return "   ".join(f"\x1b[{COLOURS[source]}m■ {text}\x1b[0m" for source, text in _LEGEND)


def width_of(character: str) -> int:
    """Returns how many terminal columns a character occupies: 0, 1 or 2."""
    if combining(character) or category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if east_asian_width(character) in "WF" else 1


def harmless(text: str) -> str:
    """Returns `text` with U+FFFD in place of control characters and of characters that change the
    writing direction, with which an answer could control the terminal or reorder its text."""
    text = text.replace("\r\n", "\n").replace("\t", " " * 4)
    steers = {c for c in text if c != "\n" and (category(c) == "Cc" or c in _DIRECTIONS)}
    return "".join("\ufffd" if c in steers else c for c in text)


class Painter:
    """Wraps an answer's text into lines and prints it. write: prints a string. columns: the
    terminal's width. colours: whether they show what drafted a token, with numbers at the right."""

    def __init__(self, write: Callable[[str], object], columns: int, *, colours: bool) -> None:
        self._write = write
        self._colours = colours
        self._has_margin = colours and columns >= _LEAST_COLUMNS
        self._width = columns - MARGIN - 3 if self._has_margin else max(20, columns - 1)
        self._column = 0
        self._word: list[Piece] = []  # characters of an unfinished word
        self._margin = ""
        self._colour = "0"

    def add(self, pieces: Iterable[Piece], margin: str = "") -> None:
        """Prints the words that new tokens complete. pieces: (text, what drafted it) of each new
        token. margin: numbers to show at the right of the line."""
        self._margin = margin
        text = "".join(
            self._put(character, source)
            for piece, source in pieces
            for character in harmless(piece)
        )
        self._write(text + self._numbers())

    def end(self) -> None:
        self._write(self._end_of_word() + self._end_of_line())

    def _put(self, character: str, source: str) -> str:
        """Adds one character of the answer; returns the text that can be printed now."""
        if character == "\n":
            return self._end_of_word() + self._end_of_line()
        if character == " ":
            space = self._end_of_word()
            return space + (self._painted(" ", source) if self._column < self._width else "")
        word = ""
        if sum(width_of(c) for c, _ in self._word) + width_of(character) > self._width:
            word = self._end_of_word()  # A word longer than a line is broken.
        self._word.append((character, source))
        return word + (self._end_of_word() if width_of(character) == 2 else "")

    def _end_of_word(self) -> str:
        """Returns the current word as text to print, on a new line if this line has no room."""
        word = self._word
        self._word = []
        room = self._width - self._column
        line = self._end_of_line() if sum(width_of(c) for c, _ in word) > room else ""
        return line + "".join(self._painted(*piece) for piece in word)

    def _painted(self, character: str, source: str) -> str:
        self._column += width_of(character)
        return self._coloured(COLOURS.get(source, "0") if self._colours else "0") + character

    def _coloured(self, colour: str) -> str:
        change = colour != self._colour
        self._colour = colour
        return f"\x1b[{colour}m" if change else ""

    def _numbers(self) -> str:
        """Returns terminal codes that write the margin's numbers and move the cursor back."""
        if not (self._has_margin and self._margin and self._column):
            return ""
        text = self._margin[:MARGIN].rjust(MARGIN)
        back = self._column + 1
        return f"{self._coloured('0')}\x1b[{self._width + 3}G\x1b[2m{text}\x1b[0m\x1b[{back}G"

    def _end_of_line(self) -> str:
        text = f"{self._numbers()}{self._coloured('0')}\n"
        self._column = 0
        return text


class Show:
    """Turns the rounds of one sequence into text, on rank 0, and passes the text to `write`. text:
    decoder of tokens into text. write: function called with (pieces of text, numbers for the
    margin). limit: largest number of tokens in the answer. is_live: whether `write` prints at once.
    has_cache: whether rounds look up the speculation cache of SSD."""

    def __init__(
        self,
        text: AnswerText,
        write: Callable[[Sequence[Piece], str], object],
        limit: int | None = None,
        is_live: bool = False,
        has_cache: bool = False,
    ) -> None:
        self._text = text
        self._write = write
        self._left = limit
        self.is_over = False
        self.is_live = is_live
        self.meter = Meter(has_cache)

    def take(self, result: RoundResult) -> None:
        """Decodes the tokens that a round has added to the sequence, and writes their text."""
        places = np.flatnonzero(result.outcome.ids == WATCHED)
        if self.is_over or not len(places):
            return
        row = int(places[0])
        drafted = result.speculation
        outcome = result.outcome
        count = int(outcome.num_accepted[row])
        tokens = [*drafted.tokens[row, :count].tolist(), int(outcome.bonus[row])][: self._left]
        if self._left is not None:
            self._left -= len(tokens)
        pieces = []
        for token, source in zip(tokens, sources_of(count, int(drafted.source[row])), strict=False):
            if self._text.ended is not None:
                break
            pieces.append((self._text.push(token), source))
        meter = self.meter
        hits = meter.hits + (bool(drafted.hit[row]) and meter.num_rounds > 0)
        meter.count(meter.num_tokens + len(pieces), meter.num_rounds + 1, hits)
        self.is_over = self._text.ended is not None or self._left == 0
        self._write([piece for piece in pieces if piece[0]], meter.short())


@contextmanager
def shown(workload: Workload) -> Iterator[Show | None]:
    """Prints a run's first answer: on a terminal while it is decoded, in a pipe when it is
    complete. Yields an object whose `take` must be called after each round; None without text."""
    if not isinstance(workload, TextWorkload) or workload.tokenizer is None:
        yield None
        return
    config = workload.job.config
    prompt = workload.prompts[WATCHED].tokens
    text = AnswerText(workload.tokenizer, config.stop_strings, workload.stop_ids, prompt)
    kept: list[str] = []
    with open_terminal() as terminal:
        colours = terminal is not None and config.show and "NO_COLOR" not in os.environ
        output = terminal or sys.stdout
        painter = Painter(output.write, columns_of(output), colours=colours)

        def write(pieces: Sequence[Piece], margin: str) -> None:
            if terminal is None:
                kept.extend(piece for piece, _ in pieces)
            else:
                painter.add(pieces, margin)
                terminal.flush()

        if terminal is not None:
            terminal.write(f"\n{legend()}\n\n" if colours else "\n")
        show = Show(text, write, config.token_limit, terminal is not None, config.mode == "ssd")
        yield show
        if rest := text.flush():  # This text was held back, as it may have begun a stop string.
            write([(rest, "bonus")], show.meter.short())
        if terminal is None:
            output.write(f"\n{harmless(''.join(kept))}\n")
        else:
            painter.end()
        output.write(f"\n{show.meter.long()}\n\n" if config.show else "\n")
        output.flush()
