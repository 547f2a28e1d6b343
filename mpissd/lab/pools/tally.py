"""Sums of a simulated pool, and its means."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpissd.lab.pools.durations import Pool


@dataclass
class Tally:
    """Sums over the counted rounds of all targets; times in seconds.

    waits: of the leads for their speculations. forward_s, rows, seats: of the draft's forwards.
    """

    start: float = 0.0
    tokens: int = 0
    hits: int = 0
    waits: list[float] = field(default_factory=list)
    forwards: int = 0
    forward_s: float = 0.0
    rows: int = 0
    seats: int = 0

    def note(self, tokens: int, hits: int, wait_s: float) -> None:
        """Adds a round of a target."""
        self.tokens += tokens
        self.hits += hits
        self.waits.append(wait_s)

    def note_forward(self, seconds: float, rows: int, seats: int) -> None:
        """Adds a forward of the draft."""
        self.forwards += 1
        self.forward_s += seconds
        self.rows += rows
        self.seats += seats


@dataclass(frozen=True)
class Simulated:
    """A simulated pool: means of its stationary rounds, all G targets together.

    wait_s, wait_p90_s: a lead's wait for its speculation. busy: share of time in the draft's
    forwards. rows, seats: mean rows and groups of a forward.
    """

    tok_per_s: float
    round_s: float
    hit_rate: float
    wait_s: float
    wait_p90_s: float
    busy: float
    rows: float
    seats: float

    @classmethod
    def of(cls, tally: Tally, end: float, pool: Pool) -> Simulated:
        """Makes the means of a tally that ends at a time."""
        wall, waits = end - tally.start, sorted(tally.waits)
        forwards = max(1, tally.forwards)
        return cls(
            tok_per_s=tally.tokens / wall,
            round_s=wall * pool.targets / len(waits),
            hit_rate=tally.hits / (len(waits) * pool.batch),
            wait_s=sum(waits) / len(waits),
            wait_p90_s=waits[int(0.9 * len(waits))],
            busy=tally.forward_s / wall,
            rows=tally.rows / forwards,
            seats=tally.seats / forwards,
        )
