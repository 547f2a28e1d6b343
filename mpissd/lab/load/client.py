"""Sends requests to an OpenAI-compatible server when they arrive, and takes their times."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpissd.common.errors import ConfigError, FaultError
from mpissd.lab.load.config import DEFAULT_URL, LoadConfig
from mpissd.lab.load.requests import ANSWERED, Arrival, Load, Served

if TYPE_CHECKING:
    import httpx

_FAILED = 599  # a connection that broke, or an answer that did
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError)  # JSON of another form
_KEY_VARIABLE = "MPISSD_API_KEY"


class Client:
    """Asks one server. Use it in an `async with` block."""

    def __init__(self, config: LoadConfig) -> None:
        """Raises ConfigError without httpx, and for a URL that is none."""
        try:
            import httpx
        except ImportError as error:
            raise ConfigError("load needs httpx: pip install 'mpissd[serve]'") from error
        key = config.api_key or os.environ.get(_KEY_VARIABLE)
        self._broken = httpx.HTTPError
        self._config, self.url = config, config.url or DEFAULT_URL
        try:
            base = httpx.URL(self.url.rstrip("/") + "/")
        except httpx.InvalidURL as error:
            raise ConfigError(f"url={self.url}: {error}: allowed: http://HOST:PORT/v1") from error
        self._http = httpx.AsyncClient(
            base_url=base,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=config.deadline_s,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,  # a proxy would be measured as well
        )
        self.model = config.model or ""

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._http.aclose()

    async def about(self) -> Mapping[str, Any]:
        """Asks for the server's model; returns the server's description of itself, if it is mpissd.

        Raises FaultError if no server answers.
        """
        try:
            answer = await self._http.get("models")
            models = answer.raise_for_status().json()["data"]
            self.model = self.model or models[0]["id"]
            of_model = [each.get("mpissd") for each in models if each["id"] == self.model]
        except (self._broken, *_DAMAGED) as error:
            why = str(error).partition("\n")[0]
            raise FaultError(f"url={self.url}: no models there: {why}") from error
        return next((about for about in of_model if about), {})

    async def send_all(self, load: Load) -> list[Served]:
        """Sends each request of a load at its time; returns their results."""
        start = time.monotonic()
        arrivals = enumerate(load.arrivals)
        return await asyncio.gather(*(self._send(start, n, each) for n, each in arrivals))

    async def _send(self, start: float, number: int, arrival: Arrival) -> Served:
        """Sends one request when it is due; each has a seed of its own, or equal ones would draw by
        the same numbers."""
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
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != ANSWERED:
                    return Served(arrival.at_s, response.status_code, late_s=late)
                return await self._read(due, arrival, late, response)
        except (self._broken, *_DAMAGED):
            return Served(arrival.at_s, _FAILED, late_s=late)

    async def _read(
        self, due: float, arrival: Arrival, late: float, response: httpx.Response
    ) -> Served:
        """Reads a stream to its end; a stream that breaks off has failed."""
        first, last, chunks = 0.0, 0.0, 0
        usage: dict[str, Any] = {}
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                return Served(arrival.at_s, _FAILED, late_s=late)
            usage = chunk.get("usage") or usage
            # A chunk that only names the role has no text.
            if any(
                choice.get("text")
                or choice.get("finish_reason")
                or (choice.get("delta") or {}).get("content")
                for choice in chunk.get("choices", ())
            ):
                last = time.monotonic() - due
                first, chunks = first or last, chunks + 1
        return Served(
            at_s=arrival.at_s,
            status=ANSWERED if chunks else _FAILED,
            ttft_s=first,
            latency_s=last,
            num_tokens=usage.get("completion_tokens", chunks),
            prompt_tokens=usage.get("prompt_tokens", 0),
            late_s=late,
            speculation=usage.get("speculation"),
        )
