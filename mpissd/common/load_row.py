"""The row of a load: one server, one rate of arrivals, schema 1. It is a line of OUT/loads.jsonl.

OUT/loads/<load_id>.npz has an array a number for each request, in the order of arrival: at_s,
ttft_s, latency_s (NaN: none), num_tokens, prompt_tokens and status (200: answered). docs/load.md
has the table of these keys.
"""
# ruff: noqa: RUF009 (`key` makes a field)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mpissd.common.row import key

SCHEMA = 1
Times = Mapping[str, float]


@dataclass(frozen=True)
class LoadRow:
    """One rate of arrivals at one server; times count from a request's arrival."""

    schema: int = key("version of the set of keys: 1")
    load_id: str = key("id of the measurement, which names its file under OUT/loads")
    server: str = key("URL of the server, or `in-process`")
    model: str = key("the model that answered")
    draft: str | None = key("the draft; null in AR or if unknown")
    mode: str | None = key("ar, sd, ssd or auto; null if unknown")
    backend: str | None = key("of the server; null if unknown")
    device_name: str | None = key("of the server: the lead's device")
    draws: str | None = key("of the server: where it draws sampled tokens; null: unknown, or never")
    tp: int | None = key("of the server: T")
    num_drafts: int | None = key("of the server: D")
    replicas: int | None = key("of the server: servers that share the requests")
    world_size: int | None = key("of the server: replicas · (T + D)")
    lookahead: int | None = key("of the server: K, at most")
    max_running: int | None = key("of the server: most sequences that decode together")
    acceptance: str | None = key("the imposed acceptance model; null where models decided")
    hit_law: str | None = key("the imposed hit model")
    arrivals: str = key('"poisson", or the file of arrivals')
    prompts: str = key("the file of prompts, and the beginning of its SHA-256")
    seed: int = key("seed of the arrivals")
    rate: float | None = key(
        "requests that arrive in a second, in the mean; null: all at once", "1/s"
    )
    duration_s: float = key("time in which requests arrive", "s")
    num_requests: int = key("requests that arrived")
    num_answered: int = key("those that were answered to their end")
    num_refused: int = key("those that the server refused (429)")
    num_failed: int = key("those that ended otherwise")
    most_together: int = key("most requests that were under way at once")
    wall_s: float = key("from the first arrival to the last token, or a later unanswered one", "s")
    num_tokens: int = key("tokens of all answers", "tokens")
    tok_per_s: float = key("num_tokens / wall_s", "tok/s")
    ttft_s: Times | None = key("{mean, p50, p90, p99} of the times to the first token", "s")
    tpot_s: Times | None = key(
        "{mean, p50, p90, p99} of the times per output token after the first, a mean a request",
        "s",
    )
    latency_s: Times | None = key("{mean, p50, p90, p99} of the times to the last token", "s")
    objective: Times = key("{ttft_s, tpot_s}: what a request has to keep to be good", "s")
    goodput_per_s: float = key("good requests / wall_s", "1/s")
    good_share: float = key("good requests / num_requests")
    drafted: int | None = key("tokens drafted; null if unknown", "tokens")
    accepted: int | None = key("of the server: those of them that were accepted", "tokens")
    hits: int | None = key("of the server: rounds whose outcome was in the speculation cache")
    rounds: int | None = key("of the server: rounds, counted for each sequence")
    client_late_s: float = key("longest time by which a request was sent too late", "s")
    provenance: Mapping[str, Any] = key("versions, host, command line and time")

    def to_dict(self) -> dict[str, Any]:
        """Returns the line as a dict, keys in the order of the fields."""
        return {f.name: getattr(self, f.name) for f in fields(self)}
