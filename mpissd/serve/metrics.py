"""The page /metrics: counts and times of requests, and the state of the lead."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mpissd.serve.lead import Lead
from mpissd.serve.protocol import End
from mpissd.serve.request import Request

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_STATS = {
    "running": "sequences that decode",
    "waiting": "requests that wait for the lead",
    "free_pages": "free pages of the KV cache",
    "pages": "pages of the KV cache",
    "lookahead": "K of the last round",
    "preempted": "sequences that were preempted, from the start",
    "rounds": "rounds, from the start",
}


class Metrics:
    """The counters of one server, in a registry of their own, and the lead's last statistics."""

    def __init__(self, lead: Lead) -> None:
        registry = self._registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"mpissd_{name}", about, labels, registry=registry)

        def times(name: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            about = f"{name.replace('_', ' ')}, in seconds"
            return Histogram(f"mpissd_{name}_seconds", about, buckets=buckets, registry=registry)

        def gauge(name: str, about: str, value: Callable[[], float]) -> None:
            Gauge(f"mpissd_{name}", about, registry=registry).set_function(value)

        self.responses = counter("responses", "responses by status", "endpoint", "status")
        self._tokens = counter("tokens", "tokens by kind", "kind")
        self._hits = counter("cache_hits", "rounds whose outcome was in the cache")
        self._first = times("time_to_first_token")
        self._each = times("time_per_output_token", _TOKEN_SECONDS)
        self._whole = times("request")
        for name, about in _STATS.items():
            gauge(name, about, partial(lambda name: getattr(lead.stats, name), name))
        gauge("outstanding", "requests that the lead has not ended", lambda: lead.outstanding)
        gauge("draft_present", "is the draft there?", lambda: lead.stats.draft == "present")
        gauge("stats_age_seconds", "since the lead's last report", lambda: lead.stats_age_s)
        gauge("up", "whether the ranks are there", lambda: lead.is_serving)

    def first_token(self, seconds: float) -> None:
        """Counts the time from a request's arrival to its first token."""
        self._first.observe(seconds)

    def ended(self, request: Request, end: End) -> None:
        """Counts a request that ended now."""
        now, prompt, tokens = time.monotonic(), len(request.prompt), request.num_tokens
        counts = {"prompt": prompt, "cached": end.cached, "completion": tokens}
        for kind, count in {**counts, "drafted": end.drafted, "accepted": end.accepted}.items():
            self._tokens.labels(kind).inc(count)
        self._hits.inc(end.hits)
        self._whole.observe(now - request.arrived_s)
        if tokens > 1:
            self._each.observe((now - request.first_s) / (tokens - 1))

    def page(self) -> bytes:
        """Returns the text of /metrics."""
        return generate_latest(self._registry)
