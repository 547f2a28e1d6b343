"""Requests of a load: when each arrives, by a seed or a file, what became of it, and their row."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.load_row import SCHEMA, LoadRow
from mpissd.engine.workload.text.prompts import Entry, read_entries
from mpissd.lab.load.config import LoadConfig

ANSWERED, REFUSED = 200, 429
_COUNTS = ("drafted", "accepted", "hits", "rounds")
_SERVER = (
    "draft mode backend device_name tp num_drafts replicas world_size lookahead max_running "
    "acceptance hit_law"
).split()


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


@dataclass(frozen=True)
class Served:
    """One request's end. Times are in seconds from its arrival; status: 200 answered, 429 refused,
    any other failed. late_s: delay of its sending. speculation: drafted, accepted, hits, rounds, if
    the server reports them."""

    at_s: float
    status: int
    ttft_s: float = np.nan
    latency_s: float = np.nan
    num_tokens: int = 0
    prompt_tokens: int = 0
    late_s: float = 0.0
    speculation: Mapping[str, int] | None = None

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first; NaN for answers of one token."""
        if self.num_tokens < 2:
            return np.nan
        return (self.latency_s - self.ttft_s) / (self.num_tokens - 1)

    def is_good(self, ttft_s: float, tpot_s: float) -> bool:
        """Whether it was answered and kept the objective."""
        kept = self.ttft_s <= ttft_s and not self.tpot_s > tpot_s
        return self.status == ANSWERED and kept


def row_of(
    load: Load,
    served: Sequence[Served],
    objective: tuple[float, float],
    about: Mapping[str, Any],
    named: Mapping[str, Any],
) -> LoadRow:
    """Returns the row of a load. about: the server's own description. named: the other keys."""
    answered = [each for each in served if each.status == ANSWERED]
    good = sum(each.is_good(*objective) for each in served)
    wall = _wall(served)
    tokens = sum(each.num_tokens for each in served)
    refused = sum(each.status == REFUSED for each in served)
    told: dict[str, Any] = {name: about.get(name) for name in _SERVER}
    told |= {name: _sum(answered, name) for name in _COUNTS}
    return LoadRow(
        schema=SCHEMA,
        **told,
        **named,
        arrivals=load.source,
        rate=load.rate if math.isfinite(load.rate) else None,
        duration_s=load.duration_s,
        num_requests=len(served),
        num_answered=len(answered),
        num_refused=refused,
        num_failed=len(served) - len(answered) - refused,
        most_together=_most_together(answered),
        wall_s=wall,
        num_tokens=tokens,
        tok_per_s=tokens / wall if wall else 0.0,
        ttft_s=_times([each.ttft_s for each in answered]),
        tpot_s=_times([each.tpot_s for each in answered]),
        latency_s=_times([each.latency_s for each in answered]),
        objective=dict(zip(("ttft_s", "tpot_s"), objective, strict=True)),
        goodput_per_s=good / wall if wall else 0.0,
        good_share=good / len(served),
        client_late_s=max(each.late_s for each in served),
    )


def arrays(served: Sequence[Served]) -> dict[str, NDArray[Any]]:
    """Returns an array a number for each request, for OUT/loads."""
    times, counts = ("at_s", "ttft_s", "latency_s"), ("num_tokens", "prompt_tokens", "status")
    kinds = [(name, "f4") for name in times] + [(name, "i4") for name in counts]
    return {name: np.array([getattr(each, name) for each in served], kind) for name, kind in kinds}


def _wall(served: Sequence[Served]) -> float:
    """Returns the seconds from the first arrival to the last answer, or arrival without one."""
    if not any(each.status == ANSWERED for each in served):
        return 0.0
    begins = [each.at_s for each in served]
    answered = [each.at_s + each.latency_s for each in served if each.status == ANSWERED]
    return max(*answered, *begins) - min(begins)


def _times(found: Sequence[float]) -> dict[str, float] | None:
    known = np.array([each for each in found if not np.isnan(each)])
    if not len(known):
        return None
    p50, p90, p99 = (float(each) for each in np.percentile(known, (50, 90, 99)))
    return {"mean": float(known.mean()), "p50": p50, "p90": p90, "p99": p99}


def _most_together(answered: Sequence[Served]) -> int:
    """Returns the most requests that were under way at one time."""
    begins = [(each.at_s, 1) for each in answered]
    ends = [(each.at_s + each.latency_s, -1) for each in answered]
    steps = [step for _, step in sorted(begins + ends)]
    return int(np.cumsum(steps).max()) if steps else 0


def _sum(answered: Sequence[Served], name: str) -> int | None:
    known = [each.speculation for each in answered if each.speculation is not None]
    return sum(int(each.get(name, 0)) for each in known) if known else None
