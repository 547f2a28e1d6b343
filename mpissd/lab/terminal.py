"""An answer on the terminal while it arrives: words wrapped, tokens coloured by their origin,
numbers in the right margin.

Only new text is written, some hundred bytes a round, so that writing hardly delays a round.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TextIO
from unicodedata import category, combining, east_asian_width

from mpissd.engine.comm.topology import launcher_size

Piece = tuple[str, str]  # a text, and the source of its token

VARIABLE = "MPISSD_TERMINAL"
COLOURS = {"cache": "32", "jit": "33", "fast": "33", "bonus": "0"}  # SGR codes
_LEGEND = (("cache", "speculation cache"), ("jit", "drafted in time"), ("bonus", "target's own"))
MARGIN = 38
_LEAST_COLUMNS = 72  # narrower terminals have no margin
_DEFAULT_COLUMNS = 80
_TAB = "    "
# Unicode UAX #9: LRE, RLE, PDF, LRO, RLO, and the isolates LRI, RLI, FSI, PDI.
_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


@dataclass(frozen=True)
class Terminal:
    """The user's terminal, opened for writing."""

    file: TextIO

    @property
    def columns(self) -> int:
        """The terminal's current width."""
        try:
            return os.get_terminal_size(self.file.fileno()).columns or _DEFAULT_COLUMNS
        except OSError:
            return _DEFAULT_COLUMNS

    def write(self, text: str) -> None:
        """Writes text without buffering."""
        self.file.write(text)
        self.file.flush()


@contextmanager
def open_terminal() -> Iterator[Terminal | None]:
    """Yields the user's terminal, or None, for example for a pipe.

    mpirun holds a rank's output back until a line is complete. Scripts in launch/ therefore name
    the terminal in MPISSD_TERMINAL (host:/dev/pts/N), and a lead on that host opens it.
    """
    if launcher_size() is None and sys.stdout.isatty():  # mpirun gives ranks a pty of its own
        yield Terminal(sys.stdout)
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
        yield Terminal(file) if file.isatty() else None


@dataclass
class Meter:
    """The counts of one answer, and its times in seconds.

    has_cache: whether rounds look up a speculation cache (ssd); the first round cannot hit.
    """

    has_cache: bool = False
    clock: Callable[[], float] = perf_counter
    num_tokens: int = 0
    num_rounds: int = 0
    hits: int = 0
    seconds: float = 0.0
    first_s: float = 0.0  # from the start to the first tokens
    _first_tokens: int = 0
    _start: float = field(init=False)

    def __post_init__(self) -> None:
        self._start = self.clock()

    def count(self, num_tokens: int, num_rounds: int, hits: int) -> None:
        """Takes the counts so far."""
        self.seconds = self.clock() - self._start
        if not self.num_rounds:
            self.first_s, self._first_tokens = self.seconds, num_tokens
        self.num_tokens, self.num_rounds, self.hits = num_tokens, num_rounds, hits

    @property
    def tok_per_s(self) -> float | None:
        """Tokens a second after the first ones, which wait for the prompt; None before."""
        later_s = self.seconds - self.first_s
        return (self.num_tokens - self._first_tokens) / later_s if later_s > 0 else None

    @property
    def hit_rate(self) -> float | None:
        """Share of the lookups that hit; None without lookups."""
        return self.hits / (self.num_rounds - 1) if self.has_cache and self.num_rounds > 1 else None

    @property
    def tokens_a_round(self) -> float:
        """Mean tokens a round; 0 before the first."""
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    def short(self) -> str:
        """Returns the numbers in at most MARGIN characters."""
        rate, speed = self.hit_rate, self.tok_per_s
        parts = [
            f"{self.tokens_a_round:.2f} tok/round",
            "" if rate is None else f"{rate:4.0%} hits",
            "" if speed is None else f"{speed:3.0f} tok/s",
        ]
        return " · ".join(filter(None, parts))

    def long(self) -> str:
        """Returns the numbers as a sentence."""
        rate, speed = self.hit_rate, self.tok_per_s
        parts = [
            f"{self.num_tokens} tokens in {self.num_rounds} rounds",
            f"{self.tokens_a_round:.2f} a round",
            "" if rate is None else f"hit rate {rate:.2f}",
            "" if speed is None else f"{speed:.1f} tok/s",
            f"first token after {self.first_s:.2f} s",
        ]
        return ", ".join(filter(None, parts))


def legend(*, colours: bool) -> str:
    """Returns one line that explains the colours; "" without colours."""
    if not colours:
        return ""
    return "   ".join(f"\x1b[{COLOURS[source]}m■ {text}\x1b[0m" for source, text in _LEGEND)


def width_of(character: str) -> int:
    """Returns the number of terminal columns of a character: 0, 1 or 2."""
    if combining(character) or category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if east_asian_width(character) in "WF" else 1


def harmless(text: str) -> str:
    """Replaces control characters and overrides of the writing direction.

    Otherwise an answer could steer the terminal, or reorder the text on it.
    """
    text = text.replace("\r\n", "\n").replace("\t", _TAB)
    return "".join("\ufffd" if c != "\n" and _steers(c) else c for c in text)


def _steers(character: str) -> bool:
    return category(character) == "Cc" or character in _DIRECTIONS


class Painter:
    """Writes one answer to a terminal of so many columns.

    write: takes text for the terminal. colours: whether tokens are coloured, and numbers shown.
    """

    def __init__(self, write: Callable[[str], object], columns: int, *, colours: bool) -> None:
        self._write, self._colours = write, colours
        self._has_margin = colours and columns >= _LEAST_COLUMNS
        self._width = columns - MARGIN - 3 if self._has_margin else max(20, columns - 1)
        self._column = 0
        self._word: list[Piece] = []  # characters of the last word, which may still move
        self._begin = 0  # its first column
        self._margin = ""
        self._out: list[str] = []
        self._colour = "0"

    def add(self, pieces: Iterable[Piece], margin: str = "") -> None:
        """Writes the tokens of one round, and the numbers of the line's margin."""
        self._margin = margin
        for text, source in pieces:
            for character in harmless(text):
                self._put(character, source)
        self._draw_margin()
        self._flush()

    def end(self) -> None:
        """Ends the answer's last line."""
        self._end_line()
        self._flush()

    def _put(self, character: str, source: str) -> None:
        width = width_of(character)
        if character == "\n":
            self._word = []
            self._end_line()
        elif character == " ":
            self._word = []
            if self._column < self._width:
                self._emit(character, source, 1)
            self._begin = self._column
        else:
            if self._column + width > self._width:
                self._wrap()
            self._word.append((character, source))
            self._emit(character, source, width)

    def _wrap(self) -> None:
        """Begins a new line, with the unfinished word unless it fills the whole line."""
        word, self._word = self._word if self._begin else [], []
        if word:
            self._out.append(f"\x1b[{self._begin + 1}G\x1b[K")
        self._end_line()
        for character, source in word:
            self._word.append((character, source))
            self._emit(character, source, width_of(character))

    def _emit(self, character: str, source: str, width: int) -> None:
        self._set_colour(COLOURS.get(source, "0") if self._colours else "0")
        self._out.append(character)
        self._column += width

    def _set_colour(self, colour: str) -> None:
        if colour != self._colour:
            self._out.append(f"\x1b[{colour}m")
            self._colour = colour

    def _draw_margin(self) -> None:
        """Writes the numbers into the margin of this line; the cursor stays where it is."""
        if self._has_margin and self._margin and self._column:
            self._set_colour("0")
            text = self._margin[:MARGIN].rjust(MARGIN)
            at, back = self._width + 3, self._column + 1
            self._out.append(f"\x1b[{at}G\x1b[2m{text}\x1b[0m\x1b[{back}G")

    def _end_line(self) -> None:
        self._draw_margin()
        self._set_colour("0")
        self._out.append("\n")
        self._column = self._begin = 0

    def _flush(self) -> None:
        if self._out:
            self._write("".join(self._out))
            self._out = []
