"""A terminal of one width that knows what mpissd writes to one: text, colours, columns, erasing."""

import re

from mpissd.lab.show import width_of

_PART = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(.)", re.DOTALL)


class Screen:
    """cells[row][column] is (character, colour); "" after a character of two columns."""

    def __init__(self, columns: int) -> None:
        self.columns, self.column, self.colour = columns, 0, "0"
        self.cells: list[list[tuple[str, str]]] = [self._empty()]

    def _empty(self) -> list[tuple[str, str]]:
        return [(" ", "0")] * self.columns

    def write(self, text: str) -> None:
        for number, letter, character in _PART.findall(text):
            if letter:
                self._steer(number, letter)
            elif character == "\n":
                self.cells.append(self._empty())
                self.column = 0
            elif character == "\r":
                self.column = 0
            else:
                self._put(character)

    def _steer(self, number: str, letter: str) -> None:
        if letter == "m":
            self.colour = number or "0"
        elif letter == "G":
            self.column = int(number) - 1
        elif letter == "K":
            erased = [(" ", "0")] * self.columns
            self.cells[-1] = (self.cells[-1][: self.column] + erased)[: self.columns]
        else:
            raise AssertionError(f"what does CSI {number}{letter} do?")

    def _put(self, character: str) -> None:
        assert character.isprintable(), f"{character!r} reached the terminal"
        width = width_of(character)
        if not width:
            return
        assert self.column + width <= self.columns, f"{character!r} beyond the last column"
        self.cells[-1][self.column] = (character, self.colour)
        for after in range(1, width):
            self.cells[-1][self.column + after] = ("", self.colour)
        self.column += width

    @property
    def lines(self) -> list[str]:
        return ["".join(character for character, _ in row).rstrip() for row in self.cells]

    def coloured(self, colour: str) -> str:
        """Everything that is written in a colour, without spaces."""
        return "".join(c for row in self.cells for c, of in row if of == colour and c != " ")
