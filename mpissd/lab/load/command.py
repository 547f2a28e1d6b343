"""The command `load`: sends Poisson arrivals of requests to a server and measures latencies.

It prints a table with a line for each request rate, and writes a row for each to OUT/loads.jsonl.
"""
# ruff: noqa: RUF009 (`key` makes a field)

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import platform
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from mpissd.common.errors import ConfigError, FaultError
from mpissd.common.files import read_file
from mpissd.common.flags import MODES, without
from mpissd.common.output import append_row, check_output, print_json, whole_file
from mpissd.common.row import key
from mpissd.engine.text.prompts import Entry, read_entries
from mpissd.lab.load.config import LoadConfig
from mpissd.lab.sse import DAMAGED, DONE, EventStream, StreamEvent
from mpissd.serve.config import AUTO, KEY_VARIABLE

ANSWERED = 200
REFUSED = 429
Times = Mapping[str, float]
_COUNTS = ("drafted", "accepted", "hits", "rounds")
# Keys of the description that an mpissd server gives of itself, with the types of their values.
_SERVER: dict[str, type] = {
    **dict.fromkeys("draft mode backend device_name draws".split(), str),
    **dict.fromkeys("tp num_drafts replicas world_size lookahead max_running".split(), int),
}
# These members of a streamed chunk's `delta` may hold generated text.
_GENERATED = ("content reasoning_content reasoning refusal tool_calls function_call audio").split()
_FAILED = 599  # status to record if the connection broke, so that there is no HTTP status
_HEAD = (
    "   rate  answered refused    tok/s   TTFT p50   p90   p99 ms   TPOT p50   p90   p99 ms   "
    "goodput/s"
)


@dataclass(frozen=True)
class LoadRow:
    """The result of sending requests to a server at one rate: a line of OUT/loads.jsonl. Times
    count from a request's arrival. OUT/loads/<load_id>.npz has for each request at_s (arrival),
    ttft_s (to the first token), latency_s (to the last), num_tokens, prompt_tokens and status."""

    schema: int = key("version of the set of keys: 1")
    load_id: str = key("id of the measurement, which names its file under OUT/loads")
    server: str = key("URL of the server")
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
        "{mean, p50, p90, p99} of the times per output token after the first, a mean a request", "s"
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


def load(config: LoadConfig) -> int:
    """Runs the command `load`; returns the exit code: 0, or 5 if the server answered nothing. The
    last line on stdout is the result at the last rate, as JSON. Raises ConfigError."""
    check_output(config.out)
    planned = list(loads(config))
    try:
        rows = asyncio.run(_send_all(config, planned))
    except FaultError as fault:
        print(f"mpissd: {fault}", file=sys.stderr)
        return fault.exit_code
    print_json(asdict(rows[-1]))
    return 0


async def _send_all(config: LoadConfig, planned: Sequence[Load]) -> list[LoadRow]:
    rows = []
    async with Client(config) as client:
        about = {**await client.about(), "model": client.model, "server": client.url}
        print(_HEAD, flush=True)
        for load in planned:
            rows.append(_kept(config, load, await client.send_all(load), about))
            if rows[-1].num_failed and not rows[-1].num_answered:
                raise FaultError(f"url={client.url}: none of {len(load.arrivals)} was answered")
    return rows


def _kept(
    config: LoadConfig, load: Load, served: Sequence[Served], about: Mapping[str, Any]
) -> LoadRow:
    """Prints the table's line for one rate, and writes the result row and the numbers of each
    request to OUT; returns the row. load: the requests. served: how each of them ended. about: the
    server's description of itself. Raises ConfigError if a file cannot be written."""
    mode = about.get("mode")
    kind = mode if mode in (AUTO, *MODES) else "server"
    named = {
        "load_id": f"load-{kind}-{secrets.token_hex(6)}",
        "server": about["server"],
        "model": about["model"],
        "provenance": {
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "host": platform.node(),
            "python": platform.python_version(),
            "command": without(sys.argv[1:], "api_key"),
        },
    }
    row = row_of(config, load, served, about, named)
    folder = Path(config.out, "loads")
    kinds = dict.fromkeys(("at_s", "ttft_s", "latency_s"), "f4")
    kinds |= dict.fromkeys(("num_tokens", "prompt_tokens", "status"), "i4")
    numbers: dict[str, Any] = {
        n: np.array([getattr(e, n) for e in served], kind) for n, kind in kinds.items()
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / f"{row.load_id}.npz") as file:
            np.savez_compressed(file, allow_pickle=False, **numbers)
        append_row(Path(config.out, "loads.jsonl"), asdict(row))
    except OSError as error:
        print_json(asdict(row))
        where = f"out={config.out!r}: {error.filename}"
        raise ConfigError(f"{where}: cannot be written: {error.strerror}") from error
    texts = []
    for times in (row.ttft_s, row.tpot_s):
        cells = ["–"] * 3
        if times is not None:
            ms = [1e3 * times[name] for name in ("p50", "p90", "p99")]
            cells = [f"{time:.0f}" if time >= 100 else f"{time:.1f}" for time in ms]
        texts.append(f"{cells[0]:>8}{cells[1]:>6}{cells[2]:>6}")
    rate = "at once" if row.rate is None else f"{row.rate:.3g}"
    print(
        f"{rate:>7} {f'{row.num_answered}/{row.num_requests}':>9} {row.num_refused:7d} "
        f"{row.tok_per_s:8.1f}   {texts[0]}      {texts[1]}      {row.goodput_per_s:6.2f} "
        f"({row.good_share:.0%})",
        flush=True,
    )
    if row.num_failed:
        first = next(end.why for end in served if end.status not in (ANSWERED, REFUSED))
        print(f"mpissd: {row.num_failed} failed; the first: {first[:200]}", file=sys.stderr)
    return row


@dataclass(frozen=True)
class Arrival:
    """One request of a load test. at_s: its arrival in s after the start. entry: its prompt."""

    at_s: float
    entry: Entry
    max_tokens: int


@dataclass(frozen=True)
class Load:
    """The requests that a load test sends at one rate (requests/s), over duration_s seconds."""

    rate: float
    duration_s: float
    arrivals: tuple[Arrival, ...]


def loads(config: LoadConfig) -> Iterator[Load]:
    """Yields the requests to send at each rate of the flag --rate; equal flags yield equal
    requests. Prompts are taken in random order, and each is taken once before any is taken again.
    Raises ConfigError for a wrong max_tokens in the file of prompts."""
    assert config.prompts is not None, "checked"
    entries: list[tuple[Entry, int]] = []
    for where, entry in read_entries(config.prompts):
        max_tokens: Any = entry.get("max_tokens", config.num_tokens)
        if type(max_tokens) is not int or max_tokens < 1:
            raise ConfigError(f"{where}: max_tokens: allowed: a whole number >= 1")
        entries.append((entry, max_tokens))
    for rate in config.rate:
        times = poisson(rate, config.duration, config.requests, config.seed)
        random = np.random.default_rng([config.seed, 1])
        order = list[int]()
        while len(order) < len(times):
            order += random.permutation(len(entries)).tolist()
        chosen = zip(times, order, strict=False)
        arrivals = tuple(Arrival(at, *entries[place]) for at, place in chosen)
        yield Load(rate, times[-1] if config.requests else config.duration, arrivals)


def poisson(rate: float, duration_s: float, count: int | None, seed: int) -> list[float]:
    """Returns the arrival times in s of a Poisson process with `rate` arrivals per second: `count`
    of them if given, else those within duration_s, at least one. With an equal seed, another rate
    only scales the times."""
    random = np.random.default_rng(seed)
    times = list[float]()
    at = 0.0
    while True:
        at += float(random.exponential()) / rate
        is_over = len(times) >= count if count is not None else at > duration_s and times
        if is_over:
            return times
        times.append(at)


@dataclass(frozen=True)
class Served:
    """How one request of a load test ended. at_s: its arrival, from the start of the test; other
    times count from its arrival. status: 200 if answered, 429 if refused, another if it failed.
    late_s: by how much it was sent too late. speculation: the server's counts of drafted and
    accepted tokens, cache hits and rounds (None: not reported). why: the reason of a failure."""

    at_s: float
    status: int
    ttft_s: float = np.nan
    latency_s: float = np.nan
    num_tokens: int = 0
    prompt_tokens: int = 0
    late_s: float = 0.0
    speculation: Mapping[str, int] | None = None
    why: str = ""

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first, in s; NaN for answers of one token."""
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
    """Returns the result row of one rate of a load test. load: the requests. served: how each
    ended. about: the server's description of itself. named: further keys, such as load_id."""
    answered = [e for e in served if e.status == ANSWERED]
    refused = sum(e.status == REFUSED for e in served)
    good = sum(e.ttft_s <= config.ttft and not e.tpot_s > config.tpot for e in answered)
    begins = [e.at_s for e in served]
    ends = [e.at_s + e.latency_s for e in answered]
    wall = max(*ends, *begins) - min(begins) if answered else 0.0
    steps = sorted([(e.at_s, 1) for e in answered] + [(end, -1) for end in ends])
    tokens = sum(e.num_tokens for e in served)
    reports = [e.speculation for e in answered if e.speculation is not None]
    described: dict[str, Any] = {name: about.get(name) for name in _SERVER}
    if reports:
        described |= {n: sum(int(report.get(n, 0)) for report in reports) for n in _COUNTS}

    def times(name: str) -> dict[str, float] | None:
        seconds = np.array([s for e in answered if not np.isnan(s := getattr(e, name))])
        if not len(seconds):
            return None
        p50, p90, p99 = np.percentile(seconds, (50, 90, 99)).tolist()
        return {"mean": float(seconds.mean()), "p50": p50, "p90": p90, "p99": p99}

    path = Path(str(config.prompts)).expanduser()
    return LoadRow(
        schema=1,
        **{**dict.fromkeys(_COUNTS), **described, **named},
        prompts=f"{path.name} {hashlib.sha256(read_file(path)).hexdigest()[:16]}",
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
        client_late_s=max(e.late_s for e in served),
    )


class Client:
    """An HTTP client that sends the requests of a load test to one server; used in `async with`."""

    def __init__(self, config: LoadConfig) -> None:
        """Prepares connections to the server at config.url. Raises ConfigError if httpx is not
        installed, or if the URL is invalid."""
        try:
            import httpx
        except ImportError as error:
            raise ConfigError("load needs httpx: pip install 'mpissd[serve]'") from error
        key = config.api_key or os.environ.get(KEY_VARIABLE)
        self._broken = httpx.HTTPError
        self._config = config
        self.url = config.url
        try:
            base = httpx.URL(self.url.rstrip("/") + "/")
        except httpx.InvalidURL as error:
            raise ConfigError(f"url={self.url}: {error}: allowed: http://HOST:PORT/v1") from error
        self._http = httpx.AsyncClient(
            base_url=base,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=config.deadline_s,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,  # A proxy would add its own latency.
        )
        self.model = config.model or ""

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._http.aclose()

    async def about(self) -> Mapping[str, Any]:
        """Asks the server for its model; returns the server's description of itself if it is an
        mpissd server, else {}. Raises FaultError if no server answers."""
        try:
            answer = await self._http.get("models")
            models = answer.raise_for_status().json()["data"]
            self.model = self.model or models[0]["id"]
            if not isinstance(self.model, str):
                raise ValueError(f"a model's id is {self.model!r}")
            of_model = [model.get("mpissd") for model in models if model["id"] == self.model]
        except (self._broken, *DAMAGED) as error:
            why = str(error).partition("\n")[0]
            raise FaultError(f"url={self.url}: no models there: {why}") from error
        about = next((about for about in of_model if isinstance(about, dict)), {})
        return {n: about[n] for n, kind in _SERVER.items() if type(about.get(n)) is kind}

    async def send_all(self, load: Load) -> list[Served]:
        """Sends each request of a load test at its arrival time; returns how each ended."""
        start = time.monotonic()
        arrivals = enumerate(load.arrivals)
        return await asyncio.gather(*(self._send(start, n, arrival) for n, arrival in arrivals))

    async def _send(self, start: float, number: int, arrival: Arrival) -> Served:
        """Sends one request at its arrival time; returns how it ended. start: beginning of the test
        on the monotonic clock. number: index of the request, which is added to the sampling seed,
        so that requests with equal prompts sample different tokens."""
        due = start + arrival.at_s
        await asyncio.sleep(due - time.monotonic())
        late = time.monotonic() - due
        body: dict[str, Any] = {
            name: arrival.entry[name]
            for name in ("messages", "prompt")
            if arrival.entry.get(name) is not None
        }
        if self._config.chat_template and "messages" not in body:
            body = {"messages": [{"role": "user", "content": arrival.entry.get("prompt")}]}
        path = "chat/completions" if "messages" in body else "completions"
        body |= {"model": self.model, "max_tokens": arrival.max_tokens, "stream": True}
        if self._config.stream_usage:
            body["stream_options"] = {"include_usage": True}
        body |= {"temperature": self._config.temperature, "seed": self._config.seed + number}
        answer = Reply()
        try:
            asked = self._ask(path, body, due, answer)
            status = await asyncio.wait_for(asked, self._config.deadline_s)
            why = "the stream ended before its answer" if status == _FAILED else f"status {status}"
        except (self._broken, asyncio.TimeoutError, *DAMAGED) as error:
            status = ANSWERED if answer.is_done else _FAILED
            why = " ".join(str(error).split()) or type(error).__name__
        if status != ANSWERED:
            return Served(arrival.at_s, status, late_s=late, why=why)
        usage = _counts(answer.usage)
        return Served(
            at_s=arrival.at_s,
            status=status,
            ttft_s=answer.first_s,
            latency_s=answer.last_s,
            num_tokens=usage.get("completion_tokens") or answer.num_chunks,
            prompt_tokens=usage.get("prompt_tokens", 0),
            late_s=late,
            speculation=_counts(answer.usage.get("speculation")) or None,
        )

    async def _ask(self, path: str, body: Mapping[str, Any], due: float, answer: Reply) -> int:
        """Sends a request and adds the chunks of the streamed answer to `answer`; returns the HTTP
        status, or _FAILED if the stream broke off. due: the arrival, from which times count."""
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != ANSWERED:
                return response.status_code
            stream = EventStream()
            async for part in response.aiter_bytes():
                for event in stream.push(part):
                    answer.add(event, time.monotonic() - due)
        return ANSWERED if answer.has_ended else _FAILED  # If not ended, it was cut off.


class Reply:
    """The part of a streamed answer that has arrived so far. first_s, last_s: seconds from the
    request's arrival to the first and to the last chunk with tokens (if there is none, to the chunk
    that ends the answer). num_chunks: number of chunks with tokens. usage: the server's token
    counts. has_ended: whether the answer is complete. is_done: whether the stream has ended."""

    def __init__(self) -> None:
        self.first_s = self.last_s = np.nan
        self.num_chunks = 0
        self.has_ended = self.is_done = False
        self.usage: Mapping[str, Any] = {}

    def add(self, event: StreamEvent, now_s: float) -> None:
        """Adds one event of the stream. now_s: seconds from the request's arrival to the event.
        Raises one of sse.DAMAGED if the event is no chunk of an answer, or reports an error."""
        self.is_done = self.is_done or event.data.startswith(DONE)
        if self.is_done:
            self.has_ended = True
            if np.isnan(self.last_s):
                self.first_s = self.last_s = now_s
            return
        chunk = json.loads(event.data)
        if event.kind == "error" or chunk.get("error"):
            raise ValueError(f"the server reports {event.data[:80]}")
        if isinstance(chunk.get("usage"), dict):
            self.usage = chunk["usage"]
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            logprobs = choice.get("logprobs") or {}
            parts = [choice.get("text"), *logprobs.values(), *map(delta.get, _GENERATED)]
            is_end = bool(choice.get("finish_reason"))
            self.num_chunks += any(parts)
            self.has_ended = self.has_ended or is_end
            if any(parts) or is_end:
                self.first_s = now_s if np.isnan(self.first_s) else self.first_s
                self.last_s = now_s


def _counts(values: Any) -> dict[str, int]:
    """Returns the members of a JSON object that are integers from 0 to 2^31 − 1, as they are stored
    as int32; {} if `values` is no JSON object."""
    members = values.items() if isinstance(values, dict) else ()
    return {name: n for name, n in members if type(n) is int and 0 <= n < 1 << 31}
