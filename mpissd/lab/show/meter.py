"""Counts what is shown beside an answer: tokens a round, cache hits and tokens a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter


@dataclass
class Meter:
    """The counts of one answer. lookups: rounds that the speculation cache could serve, which the
    first one is not. first_s: from the start to the first tokens, in seconds."""

    clock: Callable[[], float] = perf_counter
    num_tokens: int = 0
    num_rounds: int = 0
    lookups: int = 0
    hits: int = 0
    first_s: float = 0.0
    seconds: float = 0.0
    _start: float = field(init=False)

    def __post_init__(self) -> None:
        self._start = self.clock()

    def add(self, num_tokens: int, hit: bool | None) -> None:
        """Counts a round. hit: None where no cache is asked (ar, sd)."""
        self.seconds = self.clock() - self._start
        if not self.num_rounds:
            self.first_s = self.seconds
        elif hit is not None:
            self.lookups += 1
            self.hits += hit
        self.num_rounds += 1
        self.num_tokens += num_tokens

    @property
    def tok_per_s(self) -> float | None:
        """Tokens a second behind the first round, which waits for the prompt; None before."""
        first = self.num_tokens / self.num_rounds if self.num_rounds else 0.0
        later = self.seconds - self.first_s
        return (self.num_tokens - first) / later if self.num_rounds > 1 and later > 0 else None

    @property
    def hit_rate(self) -> float | None:
        """Share of the lookups that hit; None without lookups."""
        return self.hits / self.lookups if self.lookups else None

    @property
    def tokens_a_round(self) -> float | None:
        """Mean tokens a round; None before the first."""
        return self.num_tokens / self.num_rounds if self.num_rounds else None

    def short(self) -> str:
        """Returns the numbers in at most 38 characters."""
        rate, speed = self.hit_rate, self.tok_per_s
        parts = [
            f"{self.tokens_a_round or 0:.2f} tok/round",
            "" if rate is None else f"{rate:4.0%} hits",
            "" if speed is None else f"{speed:3.0f} tok/s",
        ]
        return " · ".join(filter(None, parts))

    def long(self) -> str:
        """Returns the numbers as a sentence."""
        rate, speed = self.hit_rate, self.tok_per_s
        parts = [
            f"{self.num_tokens} tokens in {self.num_rounds} rounds",
            f"{self.tokens_a_round or 0:.2f} a round",
            "" if rate is None else f"hit rate {rate:.2f}",
            "" if speed is None else f"{speed:.1f} tok/s",
            f"first token after {self.first_s:.2f} s",
        ]
        return ", ".join(filter(None, parts))
