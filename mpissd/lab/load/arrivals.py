"""Poisson arrivals from a seed, or a file's; prompts and lengths from a file, shuffled by the
seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpissd.common.errors import ConfigError
from mpissd.engine.workload.text.prompts import Entry, read_entries
from mpissd.lab.load.config import LoadConfig


@dataclass(frozen=True)
class Arrival:
    """A request: its arrival (seconds from the start), its body, and most tokens of its answer."""

    at_s: float
    entry: Entry
    max_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens in the file's line; raises ConfigError without it."""
        found = self.entry.get("prompt_tokens")
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise ConfigError(
                f"prompts: {str(dict(self.entry))[:40]}…: allowed without a server: lines with "
                "prompt_tokens >= 1, since a simulated model has no tokenizer"
            )
        return found


@dataclass(frozen=True)
class Load:
    """The requests of one rate. source: "poisson", or the file of arrivals."""

    rate: float
    duration_s: float
    source: str
    arrivals: tuple[Arrival, ...]


def loads(config: LoadConfig) -> Iterator[Load]:
    """Yields a load for each rate; the same flags give the same ones. Raises ConfigError."""
    assert config.prompts is not None, "checked"
    entries = [
        (entry, _max_tokens(where, entry, config)) for where, entry in read_entries(config.prompts)
    ]
    if config.arrivals is not None:
        times = _read_times(config.arrivals)
        rate = len(times) / times[-1] if times[-1] else float(len(times))
        yield Load(rate, times[-1], config.arrivals, _filled(times, entries, config.seed))
        return
    for rate in config.rate:
        times = poisson(rate, config.duration, config.requests, config.seed)
        span = times[-1] if config.requests else config.duration
        yield Load(rate, span, "poisson", _filled(times, entries, config.seed))


def poisson(rate: float, duration_s: float, count: int | None, seed: int) -> list[float]:
    """Returns the times of Poisson arrivals: `count` of them, or those within the duration, and at
    least one. A seed's gaps are the same at every rate, stretched."""
    random, times = np.random.default_rng(seed), list[float]()
    at = 0.0
    while True:
        at += float(random.exponential()) / rate
        is_over = len(times) >= count if count is not None else at > duration_s and times
        if is_over:
            return times
        times.append(at)


def _filled(
    times: Sequence[float], entries: Sequence[tuple[Entry, int]], seed: int
) -> tuple[Arrival, ...]:
    """Gives each arrival an entry: all of them once in an order of the seed's, then again."""
    random = np.random.default_rng([seed, 1])
    order: list[int] = []
    while len(order) < len(times):
        order += random.permutation(len(entries)).tolist()
    return tuple(Arrival(at, *entries[place]) for at, place in zip(times, order, strict=False))


def _max_tokens(where: str, entry: Entry, config: LoadConfig) -> int:
    found: Any = entry.get("max_tokens", config.num_tokens)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ConfigError(f"{where}: max_tokens: allowed: a whole number >= 1")
    return found


def _read_times(file: str) -> list[float]:
    """Reads a file of arrivals: seconds from the start, a line each, in order."""
    name = f"arrivals={file!r}"
    try:
        lines = Path(file).expanduser().read_text().split()
        times = [float(line) for line in lines]
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{name}: {error}: allowed: a time in seconds a line") from error
    if not times or times != sorted(times) or times[0] < 0 or not np.isfinite(times).all():
        raise ConfigError(f"{name}: allowed: times from 0 on, in order")
    return times


def digest(file: str) -> str:
    """Returns a file's name and the beginning of its SHA-256."""
    path = Path(file).expanduser()
    return f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
