"""Requests of a load: when each arrives, by a seed, what became of it, and their row."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
        count = self.entry.get("prompt_tokens")
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(
                f"prompts: {str(dict(self.entry))[:40]}…: allowed without a server: lines with "
                "prompt_tokens >= 1, since a simulated model has no tokenizer"
            )
        return count


@dataclass(frozen=True)
class Load:
    """The requests of one rate."""

    rate: float
    duration_s: float
    arrivals: tuple[Arrival, ...]


def loads(config: LoadConfig) -> Iterator[Load]:
    """Yields a load for each rate; the same flags give the same ones.

    Each arrival has a line of the prompts: all of them once in an order of the seed's, then again.
    Raises ConfigError.
    """
    assert config.prompts is not None, "checked"
    entries: list[tuple[Entry, int]] = []
    for where, entry in read_entries(config.prompts):
        most: Any = entry.get("max_tokens", config.num_tokens)
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise ConfigError(f"{where}: max_tokens: allowed: a whole number >= 1")
        entries.append((entry, most))
    for rate in config.rate:
        times = poisson(rate, config.duration, config.requests, config.seed)
        random, order = np.random.default_rng([config.seed, 1]), list[int]()
        while len(order) < len(times):
            order += random.permutation(len(entries)).tolist()
        chosen = zip(times, order, strict=False)
        arrivals = tuple(Arrival(at, *entries[place]) for at, place in chosen)
        yield Load(rate, times[-1] if config.requests else config.duration, arrivals)


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


def row_of(
    config: LoadConfig,
    load: Load,
    served: Sequence[Served],
    about: Mapping[str, Any],
    named: Mapping[str, Any],
) -> LoadRow:
    """Returns the row of a load. about: the server's own description. named: the other keys."""
    answered = [each for each in served if each.status == ANSWERED]
    refused = sum(each.status == REFUSED for each in served)
    good = sum(each.ttft_s <= config.ttft and not each.tpot_s > config.tpot for each in answered)
    begins, ends = [e.at_s for e in served], [e.at_s + e.latency_s for e in answered]
    wall = max(*ends, *begins) - min(begins) if answered else 0.0
    steps = sorted([(e.at_s, 1) for e in answered] + [(end, -1) for end in ends])
    tokens = sum(each.num_tokens for each in served)
    reports = [each.speculation for each in answered if each.speculation is not None]
    described: dict[str, Any] = {name: about.get(name) for name in _SERVER}
    if reports:
        described |= {n: sum(int(report.get(n, 0)) for report in reports) for n in _COUNTS}

    def times(name: str) -> dict[str, float] | None:
        known = np.array([s for each in answered if not np.isnan(s := getattr(each, name))])
        if not len(known):
            return None
        p50, p90, p99 = (float(each) for each in np.percentile(known, (50, 90, 99)))
        return {"mean": float(known.mean()), "p50": p50, "p90": p90, "p99": p99}

    path = Path(str(config.prompts)).expanduser()
    return LoadRow(
        schema=SCHEMA,
        **{**dict.fromkeys(_COUNTS), **described, **named},
        arrivals="poisson",
        prompts=f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}",
        seed=config.seed,
        rate=load.rate if math.isfinite(load.rate) else None,
        duration_s=load.duration_s,
        num_requests=len(served),
        num_answered=len(answered),
        num_refused=refused,
        num_failed=len(served) - len(answered) - refused,
        most_together=int(np.cumsum([step for _, step in steps]).max()) if steps else 0,
        wall_s=wall,
        num_tokens=tokens,
        tok_per_s=tokens / wall if wall else 0.0,
        ttft_s=times("ttft_s"),
        tpot_s=times("tpot_s"),
        latency_s=times("latency_s"),
        objective={"ttft_s": config.ttft, "tpot_s": config.tpot},
        goodput_per_s=good / wall if wall else 0.0,
        good_share=good / len(served),
        client_late_s=max(each.late_s for each in served),
    )
