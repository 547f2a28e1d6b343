"""Random decisions as points where paths fork.

A uniform is an interval that shrinks with every comparison that uses it. If a comparison can go
either way, both ways are paths, each with its exact probability. So any code is enumerated as it
is, whatever it compares in whatever order; a uniform that is used again keeps its interval.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rng import Purpose, uniforms

T = TypeVar("T")
Name = tuple[Hashable, ...]
Path = tuple[bool, ...]


class Uniform:
    """A uniform that is known to lie in [low, high)."""

    __slots__ = ("choices", "high", "low")

    def __init__(self, choices: Choices) -> None:
        self.choices, self.low, self.high = choices, 0.0, 1.0

    def below(self, bound: float) -> bool:
        """Whether it is less than `bound`: if that is open, one path for each result."""
        if bound <= self.low or bound >= self.high:
            return bound >= self.high
        if self.choices.choose((bound - self.low) / (self.high - self.low)):
            self.high = bound
            return True
        self.low = bound
        return False

    def __mul__(self, scale: float) -> Scaled:
        return Scaled(self, float(scale))


class Scaled:
    """A uniform times a number: a comparison is decided by the uniform."""

    __slots__ = ("scale", "uniform")

    def __init__(self, uniform: Uniform, scale: float) -> None:
        self.uniform, self.scale = uniform, scale

    def __lt__(self, other: float) -> bool:
        if other is self:  # the first step of a NumPy search
            return False
        return self.uniform.below(float(other) / self.scale)

    def __gt__(self, other: float) -> bool:
        return not self < other


class Choices:
    """One path: it follows the given decisions, then takes the first way of every choice."""

    def __init__(self, given: Path, start: int, draws: Any) -> None:
        """start: choices from there on count in `weight`. draws: has the sequences whose draws are
        enumerated (watched), which uniform replaces a named one (rename), and whether a uniform
        may be used in a single round only (fresh)."""
        self._given, self._start, self._draws = given, start, draws
        self.path: list[bool] = []
        self.others: list[Path] = []  # the paths that fork from this one
        self.weight = 1.0
        self.round = 0
        self._known: dict[Name, Uniform] = {}
        self._used_in: dict[Name, int] = {}

    def choose(self, chance: float) -> bool:
        """True with probability `chance`."""
        at = len(self.path)
        taken = self._given[at] if at < len(self._given) else True
        if at >= len(self._given):
            self.others.append((*self.path, False))
        if at >= self._start:
            self.weight *= chance if taken else 1 - chance
        self.path.append(taken)
        return taken

    def among(self, count: int) -> int:
        """0 … count−1, each with the same probability."""
        return next(n for n in range(count) if n == count - 1 or self.choose(1 / (count - n)))

    def fork(self, run: Callable[[], T]) -> list[tuple[float, Path, T]]:
        """Every way that `run` goes from here: (probability, whole path, result)."""
        path, weight, others, known = self.path, self.weight, self.others, self.intervals()
        found, stack = list[tuple[float, Path, T]](), [tuple(path)]
        while stack:
            self._given, self.path, self.others = stack.pop(), list(path), stack
            self.weight = 1.0
            self._known = {name: self._known[name] for name in known}
            for name, (low, high) in known.items():
                self._known[name].low, self._known[name].high = low, high
            result = run()
            found.append((weight * self.weight, tuple(self.path), result))
        self.others = others
        return found

    def intervals(self) -> dict[Name, tuple[float, float]]:
        """The known interval of every uniform."""
        return {name: (u.low, u.high) for name, u in self._known.items()}

    def uniforms(
        self, seed: int, purpose: Purpose, sequence: int, start: int, count: int
    ) -> NDArray[Any]:
        """In the place of rng.uniforms."""
        if sequence not in self._draws.watched or purpose == Purpose.PROMPT:
            return uniforms(seed, purpose, sequence, start, count)
        found = np.empty(count, object)
        for n in range(count):
            name = self._draws.rename((purpose, sequence, start + n))
            if self._draws.fresh:
                used_in = self._used_in.setdefault(name, self.round)
                assert used_in == self.round, f"{name} is used in rounds {used_in}, {self.round}"
            found[n] = self._known.setdefault(name, Uniform(self))
        return found
