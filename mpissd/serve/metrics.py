"""The page /metrics: counts and times of requests, and the state of the lead."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mpissd.serve.lead import Lead
from mpissd.serve.protocol import End

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_GAUGES = {
    "running": "sequences that decode",
    "waiting": "requests that wait for the lead",
    "free_pages": "free pages of the KV cache",
    "pages": "pages of the KV cache",
    "lookahead": "K of the last round",
    "preempted": "sequences that were preempted, from the start",
    "rounds": "rounds, from the start",
}


class Metrics(Collector):
    """The counters of one server, in a registry of their own, and the lead's last statistics."""

    def __init__(self, lead: Lead) -> None:
        self._lead, self._registry = lead, CollectorRegistry()
        self.responses = Counter(
            "mpissd_responses",
            "responses by status",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self._tokens = Counter(
            "mpissd_tokens", "tokens by kind", ("kind",), registry=self._registry
        )
        self._hits = Counter(
            "mpissd_cache_hits", "rounds whose outcome was in the cache", registry=self._registry
        )
        self._first = self._histogram("time_to_first_token", _SECONDS)
        self._each = self._histogram("time_per_output_token", _TOKEN_SECONDS)
        self._whole = self._histogram("request", _SECONDS)
        self._registry.register(self)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        about = f"{name.replace('_', ' ')}, in seconds"
        return Histogram(f"mpissd_{name}_seconds", about, buckets=buckets, registry=self._registry)

    def first_token(self, seconds: float) -> None:
        """Counts the time from a request's arrival to its first token."""
        self._first.observe(seconds)

    def ended(self, prompt: int, tokens: int, end: End, seconds: float, decoding_s: float) -> None:
        """Counts a request that ended. prompt, tokens: numbers of tokens. decoding_s: seconds
        after the first token."""
        counts = {"prompt": prompt, "cached": end.cached, "completion": tokens}
        for kind, count in {**counts, "drafted": end.drafted, "accepted": end.accepted}.items():
            self._tokens.labels(kind).inc(count)
        self._hits.inc(end.hits)
        self._whole.observe(seconds)
        if tokens > 1:
            self._each.observe(decoding_s / (tokens - 1))

    def page(self) -> bytes:
        """Returns the text of /metrics."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields a gauge for each number of the lead's state."""
        lead, stats = self._lead, self._lead.stats
        gauges = {name: (about, getattr(stats, name)) for name, about in _GAUGES.items()}
        gauges["outstanding"] = "requests that the lead has not ended", lead.outstanding
        gauges["draft_present"] = "whether the draft is there", int(stats.draft == "present")
        gauges["stats_age_seconds"] = "since the lead's last report", round(lead.stats_age_s, 3)
        gauges["up"] = "whether the ranks are there", int(lead.is_serving)
        for name, (about, value) in gauges.items():
            yield GaugeMetricFamily(f"mpissd_{name}", about, value=value)
