"""The server's endpoints, over a `Lead`: an ASGI application that knows no process and no port."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mpissd.engine.workload.text.tokenizer import Tokenizer
from mpissd.serve.http.answer import DONE, Form, Piece, Written, event, usage
from mpissd.serve.http.ask import Ask, parse
from mpissd.serve.http.body import read_body, unless_gone
from mpissd.serve.http.guard import Guard
from mpissd.serve.http.lead import Lead, Ticket
from mpissd.serve.http.metrics import Metrics
from mpissd.serve.http.problem import Problem
from mpissd.serve.protocol import End, Ready, Tokens


@dataclass(frozen=True)
class Defaults:
    """What holds for requests that do not say it, and at most. names: of the model. about: what
    the server tells of itself beside each of them. replica: its id among several."""

    names: tuple[str, ...]
    num_tokens: int = 512
    temperature: float = 0.0
    max_wait_s: float = 600.0
    key: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    replica: str | None = None


class Answering:
    """One request that is being decoded: what the lead sends becomes pieces of text."""

    def __init__(self, lead: Lead, ticket: Ticket, written: Written, prompt: int) -> None:
        self._lead, self._ticket, self._written = lead, ticket, written
        self._prompt, self._began, self._first = prompt, time.monotonic(), 0.0
        self.usage: dict[str, Any] = {}

    async def pieces(self, metrics: Metrics) -> AsyncIterator[Piece]:
        """Yields text as it becomes known, what has gathered meanwhile as one piece; the last
        piece is that behind which `written.finish` is set."""
        while (message := await self._ticket.take()) and isinstance(message, Tokens):
            piece = self._take(message, metrics)
            while self._ticket.has_more and isinstance(
                message := await self._ticket.take(), Tokens
            ):
                piece += self._take(message, metrics)
            if isinstance(message, End):
                yield piece + self._close(message, metrics)
                return
            yield piece
        assert isinstance(message, End)
        yield self._close(message, metrics)

    def _take(self, message: Tokens, metrics: Metrics) -> Piece:
        if not self._first and message.tokens:
            self._first = time.monotonic()
            metrics.first_token(self._first - self._began)
        piece = self._written.take(message)
        if self._written.is_stopped:
            self._lead.cancel(self._ticket)
        return piece

    def _close(self, end: End, metrics: Metrics) -> Piece:
        now, written = time.monotonic(), self._written
        piece = written.close(end)
        self.usage = usage(self._prompt, written, end)
        decoding = now - (self._first or now)
        metrics.ended(self._prompt, written.num_tokens, end, now - self._began, decoding)
        return piece

    def leave(self) -> None:
        """Gives the request up, unless it has ended."""
        self._lead.leave(self._ticket)


class Endpoints:
    """What answers each path."""

    def __init__(self, lead: Lead, tokenizer: Tokenizer, defaults: Defaults) -> None:
        self._lead, self._tokenizer, self._defaults = lead, tokenizer, defaults
        self._metrics = Metrics(lead)
        self._encoder = ThreadPoolExecutor(1, "encode")  # a long prompt would hold all others up
        self._encoding = 0  # prompts that are encoded, or wait for it

    def app(self) -> Starlette:
        """Returns the ASGI application."""
        posts = {"/v1/chat/completions": True, "/v1/completions": False}
        gets = {"/v1/models": self._models, "/health": self._health, "/ready": self._ready}
        gets["/metrics"] = self._page
        found = Starlette(
            routes=[
                *(
                    Route(path, self._asked(path, chat), methods=["POST"])
                    for path, chat in posts.items()
                ),
                *(Route(path, answer, methods=["GET"]) for path, answer in gets.items()),
            ],
            middleware=[Middleware(Guard, key=self._defaults.key)],
            exception_handlers={HTTPException: _unrouted},
        )
        found.router.redirect_slashes = False
        return found

    def _asked(self, path: str, is_chat: bool) -> Callable[[Request], Awaitable[Response]]:
        """Returns the function of an endpoint; it turns a Problem into a response."""

        async def answer(request: Request) -> Response:
            try:
                response = await self._answer(request, is_chat=is_chat)
            except Problem as problem:
                response = refusal(problem)
            except ClientDisconnect:
                response = Response(status_code=499)  # nobody reads it
            self._metrics.responses.labels(path, str(response.status_code)).inc()
            return response

        return answer

    async def _answer(self, request: Request, *, is_chat: bool) -> Response:
        arrived = time.monotonic()
        self._lead.check_room()
        ask = parse(await read_body(request), is_chat=is_chat)
        self._check_model(ask)
        prompt = await unless_gone(request.receive, self._encoded(ask))
        ready = self._lead.check()
        ask = self._completed(ask, len(prompt), ready)
        left = (ask.deadline_s or 0.0) - (time.monotonic() - arrived)
        ask = replace(ask, deadline_s=max(1e-9, left))
        written = Written(self._tokenizer, ask, ready.stop_ids)
        answering = Answering(self._lead, self._submit(ask, prompt), written, len(prompt))
        form = Form(is_chat, self._defaults.names[0], self._tokenizer)
        if ask.stream:
            return await self._streamed(request, ask, answering, form, written)
        try:
            return await unless_gone(request.receive, self._whole(answering, form, written))
        finally:
            answering.leave()

    async def _encoded(self, ask: Ask) -> list[int]:
        """Returns the tokens of a prompt. One whose client leaves before its turn is not encoded;
        those that wait for their turn count as waiting requests."""
        self._lead.check_room(self._encoding)
        loop = asyncio.get_running_loop()
        self._encoding += 1
        try:
            return await loop.run_in_executor(self._encoder, ask.encode, self._tokenizer)
        finally:
            self._encoding -= 1

    def _check_model(self, ask: Ask) -> None:
        names = self._defaults.names
        if ask.model is not None and ask.model not in names:
            told = f"model={ask.model!r}: allowed: {', '.join(names)}"
            raise Problem(404, told, "model", code="model_not_found")

    def _completed(self, ask: Ask, prompt: int, ready: Ready) -> Ask:
        """Returns the request with what it leaves open; raises Problem if it has no room."""
        room = ready.context - prompt
        if room < 1 or (ask.max_tokens or 0) > room:
            told = f"{prompt} tokens of prompt and max_tokens={ask.max_tokens or 1}: allowed: "
            raise Problem(
                400,
                f"{told}{ready.context} together, the model's context",
                "max_tokens" if room > 0 else ("messages" if ask.is_chat else "prompt"),
                code="context_length_exceeded",
            )
        defaults = self._defaults
        warm = defaults.temperature if ask.temperature is None else ask.temperature
        return replace(
            ask,
            max_tokens=ask.max_tokens or min(room, defaults.num_tokens),
            temperature=warm,
            top_p=ask.top_p if warm else 1.0,  # a greedy choice reads none
            deadline_s=min(ask.deadline_s or defaults.max_wait_s, defaults.max_wait_s),
        )

    def _submit(self, ask: Ask, prompt: list[int]) -> Ticket:
        names = ("max_tokens", "temperature", "top_p", "seed", "logprobs", "deadline_s")
        return self._lead.submit(prompt=prompt, **{name: getattr(ask, name) for name in names})

    async def _whole(self, answering: Answering, form: Form, written: Written) -> Response:
        piece = Piece()
        async for more in answering.pieces(self._metrics):
            piece += more
        return JSONResponse(form.whole(piece, written, answering.usage))

    async def _streamed(
        self, request: Request, ask: Ask, answering: Answering, form: Form, written: Written
    ) -> Response:
        """Waits for the first piece, so that a refusal has its status, and streams from there."""
        pieces = answering.pieces(self._metrics)
        try:
            first = await unless_gone(request.receive, _next(pieces))
        except BaseException:
            answering.leave()
            raise

        async def events() -> AsyncIterator[bytes]:
            yield event(form.chunk(first, written.finish, is_first=True))
            try:
                async for piece in pieces:
                    yield event(form.chunk(piece, written.finish))
                if ask.include_usage:
                    yield event(form.last(answering.usage))
            except Problem as problem:  # the status has been sent
                yield event(problem.to_dict())
            yield DONE

        return Events(events(), answering.leave)

    async def _models(self, request: Request) -> Response:
        made = {"object": "model", "created": 0, "owned_by": "mpissd", "mpissd": self._about()}
        found = [{"id": name, **made} for name in self._defaults.names]
        return JSONResponse({"object": "list", "data": found})

    def _about(self) -> dict[str, Any]:
        names = ("max_running", "context", "backend", "device_name")
        told = {name: getattr(self._lead.ready, name, None) for name in names}
        return {**self._defaults.about, **told}

    async def _health(self, request: Request) -> Response:
        gone = self._lead.gone
        return JSONResponse({"healthy": not gone, "reason": gone}, 503 if gone else 200)

    async def _ready(self, request: Request) -> Response:
        stats = self._lead.stats
        state = {"mode": stats.mode, "lookahead": stats.lookahead, "draft": stats.draft}
        replica = self._defaults.replica
        headers = {} if replica is None else {"x-replica": replica}
        try:
            self._lead.check_ready()
            if (meant := request.headers.get("x-replica")) not in (None, replica):
                raise Problem(503, f"this is not replica {meant}")  # its port is another's now
        except Problem as problem:
            told = {"ready": False, "reason": problem.message, **state}
            return JSONResponse(told, 503, headers)
        return JSONResponse({"ready": True, "reason": None, **state}, headers=headers)

    async def _page(self, request: Request) -> Response:
        return Response(self._metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})


class Events(Response):
    """A stream of server-sent events; `leave` is called when it is over, or its client is gone."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], leave: Callable[[], object]) -> None:
        super().__init__(headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._events, self._leave = events, leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect):
            try:
                await unless_gone(receive, self._send_all(send))
            finally:
                self._leave()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for each in self._events:
            await send({"type": "http.response.body", "body": each, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _next(pieces: AsyncIterator[Piece]) -> Piece:
    return await anext(pieces)


def refusal(problem: Problem) -> Response:
    """Returns the response of a refused request."""
    return JSONResponse(problem.to_dict(), problem.status, problem.headers)


async def _unrouted(request: Request, error: Exception) -> Response:
    """Returns the response for paths and methods that are none."""
    assert isinstance(error, HTTPException)
    told = f"{request.method} {request.url.path}: {error.detail}"
    return refusal(Problem(error.status_code, told, headers=dict(error.headers or {})))
