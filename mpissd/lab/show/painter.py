"""Writes an answer to a terminal while it arrives: words wrapped, tokens coloured by their source,
numbers in the right margin.

Only what is new is written, some hundred bytes a round, so that a round hardly waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from unicodedata import category, combining, east_asian_width

Piece = tuple[str, str]  # a text, and the source of the token that it comes from

COLOURS = {"cache": "32", "jit": "33", "fast": "33", "bonus": "0"}  # SGR codes
_LEGEND = (("cache", "speculation cache"), ("jit", "drafted in time"), ("bonus", "target's own"))
MARGIN = 38
_LEAST_COLUMNS = 72  # without a margin below
_TAB = "    "
# Unicode UAX #9: LRE, RLE, PDF, LRO, RLO, and the isolates LRI, RLI, FSI, PDI.
_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def legend(*, colours: bool) -> str:
    """Returns one line that says what the colours mean; "" without colours."""
    if not colours:
        return ""
    return "   ".join(f"\x1b[{COLOURS[source]}m■ {text}\x1b[0m" for source, text in _LEGEND)


def width_of(character: str) -> int:
    """Returns the number of terminal columns of a character: 0, 1 or 2."""
    if combining(character) or category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if east_asian_width(character) in "WF" else 1


def harmless(text: str) -> str:
    """Replaces control characters and overrides of writing direction: an answer must not steer
    the terminal, nor reorder what stands there."""
    text = text.replace("\r\n", "\n").replace("\t", _TAB)
    return "".join("\ufffd" if c != "\n" and _steers(c) else c for c in text)


def _steers(character: str) -> bool:
    """Returns whether it is a control character, or embeds, overrides or isolates a direction."""
    return category(character) == "Cc" or character in _DIRECTIONS


class Painter:
    """One answer on a terminal of so many columns.

    write: takes text for the terminal. colours: whether tokens are coloured, and numbers shown.
    """

    def __init__(self, write: Callable[[str], object], columns: int, *, colours: bool) -> None:
        self._write, self._colours = write, colours
        has_margin = colours and columns >= _LEAST_COLUMNS
        self._width = columns - MARGIN - 3 if has_margin else max(20, columns - 1)
        self._has_margin = has_margin
        self._column = 0
        self._word: list[Piece] = []  # characters of the last word, which may still move
        self._begin = 0  # its first column
        self._margin = ""
        self._out: list[str] = []
        self._colour = "0"

    def add(self, pieces: Iterable[Piece], margin: str = "") -> None:
        """Writes the tokens of one round, and the numbers that now stand beside the line."""
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
        """Begins a new line, with the unfinished word where that is not the whole line."""
        word, self._word = self._word if self._begin else [], []
        if word:
            self._out.append(f"\x1b[{self._begin + 1}G\x1b[K")
        self._end_line()
        for character, source in word:
            self._word.append((character, source))
            self._emit(character, source, width_of(character))

    def _emit(self, character: str, source: str, width: int) -> None:
        colour = COLOURS.get(source, "0") if self._colours else "0"
        if colour != self._colour:
            self._out.append(f"\x1b[{colour}m")
            self._colour = colour
        self._out.append(character)
        self._column += width

    def _plain(self) -> None:
        if self._colour != "0":
            self._out.append("\x1b[0m")
            self._colour = "0"

    def _draw_margin(self) -> None:
        """Writes the numbers into the margin of this line; the cursor stays where it is."""
        if self._has_margin and self._margin and self._column:
            self._plain()
            text = self._margin[:MARGIN].rjust(MARGIN)
            at, back = self._width + 3, self._column + 1
            self._out.append(f"\x1b[{at}G\x1b[2m{text}\x1b[0m\x1b[{back}G")

    def _end_line(self) -> None:
        self._draw_margin()
        self._plain()
        self._out.append("\n")
        self._column = self._begin = 0

    def _flush(self) -> None:
        if self._out:
            self._write("".join(self._out))
            self._out = []
