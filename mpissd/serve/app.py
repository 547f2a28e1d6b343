"""The server's endpoints, over a `Lead`: an ASGI application that knows no process and no port."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mpissd.common.flags import MODES
from mpissd.engine.workload.text.tokenizer import Tokenizer
from mpissd.serve.answers import DONE, Form, Piece, Written, event, usage
from mpissd.serve.config import is_local
from mpissd.serve.lead import Lead, Problem, Ticket
from mpissd.serve.metrics import Metrics
from mpissd.serve.protocol import End, Ready, Tokens
from mpissd.serve.requests import Ask, parse

BODY_BYTES = 1 << 20  # of a request; larger ones get 413
DRAINED_BYTES = 1 << 25  # of a refused body: most clients send it all before they read the response
BODY_S = 20.0  # in which a body has to arrive
REQUESTS = 512  # under way at once, one a connection; below the usual limit of 1,024 open files
_OPEN = ("/health", "/ready")  # answered without a key

Result = TypeVar("Result")


@dataclass(frozen=True)
class Defaults:
    """Values for requests that leave them out, and limits.

    names: of the model. about: the server's description in /v1/models. replica: its id, if it is
    one of several servers. modes: those that a request may ask for.
    """

    names: tuple[str, ...]
    num_tokens: int = 512
    temperature: float = 0.0
    max_wait_s: float = 600.0
    key: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    replica: str | None = None
    modes: tuple[str, ...] = MODES


class Guard:
    """ASGI middleware: judges a request's headers before its body is read.

    401 without the key. Without keys 403 for a `Host` that is not this machine: a web page can make
    a browser call 127.0.0.1 under a name of the page's own, but cannot change that header. 503
    while REQUESTS requests are under way.
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app, self._key, self._under_way = app, key, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(Headers(scope=scope), scope["path"])
        if problem is not None:
            await refusal(problem)(scope, receive, send)
            return
        self._under_way += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._under_way -= 1

    def _problem(self, headers: Headers, path: str) -> Problem | None:
        if self._under_way >= REQUESTS:
            message = f"{REQUESTS} connections are in use"
            busy = {"retry-after": "5", "connection": "close"}
            return Problem(503, message, code="connections", headers=busy)
        if self._key is None:
            is_here = _is_here(headers.get("host"))
            return None if is_here else Problem(403, "host: is not this one")
        given = headers.get("authorization", "")
        wanted = f"Bearer {self._key}".encode()
        if path in _OPEN or hmac.compare_digest(given.encode("latin-1"), wanted):
            return None
        wrong = "the API key is wrong" if given else "an API key is needed: Authorization: Bearer …"
        return Problem(401, wrong, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _is_here(host: str | None) -> bool:
    try:
        return host is None or is_local(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


class Answering:
    """One request that is being decoded: turns the lead's messages into pieces of text."""

    def __init__(self, lead: Lead, ticket: Ticket, written: Written, prompt: int) -> None:
        self._lead, self._ticket, self.written = lead, ticket, written
        self._prompt, self._began_s, self._first_s = prompt, time.monotonic(), 0.0
        self.usage: dict[str, Any] = {}

    async def pieces(self, metrics: Metrics) -> AsyncIterator[Piece]:
        """Yields text as it becomes known; text that arrived meanwhile is one piece.

        `written.finish` is set once the last piece is yielded.
        """
        piece = Piece()
        while isinstance(message := await self._ticket.take(), Tokens):
            piece += self._take(message, metrics)
            if not self._ticket.has_more:
                yield piece
                piece = Piece()
        yield piece + self._close(message, metrics)

    def _take(self, message: Tokens, metrics: Metrics) -> Piece:
        if not self._first_s and message.tokens:
            self._first_s = time.monotonic()
            metrics.first_token(self._first_s - self._began_s)
        piece = self.written.take(message)
        if self.written.is_stopped:
            self._lead.cancel(self._ticket)
        return piece

    def _close(self, end: End, metrics: Metrics) -> Piece:
        now, written = time.monotonic(), self.written
        piece = written.close(end)
        self.usage = usage(self._prompt, written, end)
        decoding_s = now - (self._first_s or now)
        metrics.ended(self._prompt, written.num_tokens, end, now - self._began_s, decoding_s)
        return piece

    def leave(self) -> None:
        """Gives the request up, unless it has ended."""
        self._lead.leave(self._ticket)


class Endpoints:
    """The functions that answer each path."""

    def __init__(self, lead: Lead, tokenizer: Tokenizer, defaults: Defaults) -> None:
        self._lead, self._tokenizer, self._defaults = lead, tokenizer, defaults
        self._metrics = Metrics(lead)
        self._encoder = ThreadPoolExecutor(1, "encode")  # a long prompt must not block the loop
        self._encoding = 0  # prompts that are being encoded, or wait for it

    def app(self) -> Starlette:
        """Returns the ASGI application."""
        posts = {"/v1/chat/completions": True, "/v1/completions": False}
        gets = {
            "/v1/models": self._models,
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._page,
        }
        routes = [
            Route(path, self._post(path, chat), methods=["POST"]) for path, chat in posts.items()
        ]
        routes += [Route(path, answer, methods=["GET"]) for path, answer in gets.items()]
        app = Starlette(
            routes=routes,
            middleware=[Middleware(Guard, key=self._defaults.key)],
            exception_handlers={HTTPException: _unrouted},
        )
        app.router.redirect_slashes = False
        return app

    def _post(self, path: str, is_chat: bool) -> Callable[[Request], Awaitable[Response]]:
        """Returns the function of an endpoint; it turns a Problem into a response."""

        async def answer(request: Request) -> Response:
            try:
                response = await self._answer(request, is_chat=is_chat)
            except Problem as problem:
                response = refusal(problem)
            except ClientDisconnect:
                response = Response(status_code=499)  # the client is gone
            self._metrics.responses.labels(path, str(response.status_code)).inc()
            return response

        return answer

    async def _answer(self, request: Request, *, is_chat: bool) -> Response:
        arrived_s = time.monotonic()
        self._lead.check_room()
        ask = parse(await read_body(request), is_chat=is_chat)
        self._check(ask)
        prompt = await unless_gone(request, self._encoded(ask))
        ready = self._lead.check()
        ask = self._completed(ask, len(prompt), ready)
        left_s = (ask.deadline_s or 0.0) - (time.monotonic() - arrived_s)
        ask = replace(ask, deadline_s=max(1e-9, left_s))
        written = Written(self._tokenizer, ask, ready.stop_ids)
        answering = Answering(self._lead, self._submit(ask, prompt), written, len(prompt))
        form = Form(is_chat, self._defaults.names[0], self._tokenizer, ask.include_sources)
        try:
            if ask.stream:
                return await self._streamed(request, ask, answering, form)
            return await unless_gone(request, self._whole(answering, form))
        except BaseException:
            answering.leave()
            raise

    async def _encoded(self, ask: Ask) -> list[int]:
        """Returns the tokens of a prompt.

        Prompts that wait for their turn count as waiting requests. If the client leaves before its
        turn, the prompt is not encoded.
        """
        self._lead.check_room(self._encoding)
        self._encoding += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._encoder, ask.encode, self._tokenizer)
        finally:
            self._encoding -= 1

    def _check(self, ask: Ask) -> None:
        """Raises Problem for a model or a mode that this server does not have."""
        names, modes = self._defaults.names, self._defaults.modes
        if ask.model is not None and ask.model not in names:
            message = f"model={ask.model!r}: allowed: {', '.join(names)}"
            raise Problem(404, message, "model", code="model_not_found")
        if ask.mode is not None and ask.mode not in modes:
            raise Problem(400, f"mode={ask.mode}: allowed: {', '.join(modes)}", "mode")

    def _completed(self, ask: Ask, prompt: int, ready: Ready) -> Ask:
        """Returns the request with its defaults; raises Problem if it has no room.

        prompt: the number of its tokens.
        """
        room = ready.context - prompt
        if room < 1 or (ask.max_tokens or 0) > room:
            raise Problem(
                400,
                f"{prompt} tokens of prompt and max_tokens={ask.max_tokens or 1}: allowed: "
                f"{ready.context} together, the model's context",
                "max_tokens" if room > 0 else ("messages" if ask.is_chat else "prompt"),
                code="context_length_exceeded",
            )
        defaults = self._defaults
        temperature = defaults.temperature if ask.temperature is None else ask.temperature
        return replace(
            ask,
            max_tokens=ask.max_tokens or min(room, defaults.num_tokens),
            temperature=temperature,
            top_p=ask.top_p if temperature else 1.0,  # unused at temperature 0
            deadline_s=min(ask.deadline_s or defaults.max_wait_s, defaults.max_wait_s),
        )

    def _submit(self, ask: Ask, prompt: list[int]) -> Ticket:
        names = ("max_tokens", "temperature", "top_p", "seed", "logprobs", "deadline_s", "mode")
        return self._lead.submit(prompt=prompt, **{name: getattr(ask, name) for name in names})

    async def _whole(self, answering: Answering, form: Form) -> Response:
        piece = Piece()
        async for more in answering.pieces(self._metrics):
            piece += more
        return JSONResponse(form.whole(piece, answering.written, answering.usage))

    async def _streamed(
        self, request: Request, ask: Ask, answering: Answering, form: Form
    ) -> Response:
        """Waits for the first piece, so that a refusal has its status, and streams from there."""
        pieces, written = answering.pieces(self._metrics), answering.written
        first: Piece = await unless_gone(request, _next(pieces))

        async def events() -> AsyncIterator[bytes]:
            yield event(form.chunk(first, written, is_first=True))
            try:
                async for piece in pieces:
                    yield event(form.chunk(piece, written))
                if ask.include_usage:
                    yield event(form.last(answering.usage))
            except Problem as problem:  # the status has been sent
                yield event(problem.to_dict())
            yield DONE

        return StreamingResponse(
            events(),
            headers={"cache-control": "no-store"},
            media_type="text/event-stream",
            background=BackgroundTask(answering.leave),  # also if the client is gone
        )

    async def _models(self, request: Request) -> Response:
        names = ("max_running", "context", "backend", "device_name")
        known = {name: getattr(self._lead.ready, name, None) for name in names}
        about = {**self._defaults.about, **known}
        model = {"object": "model", "created": 0, "owned_by": "mpissd", "mpissd": about}
        data = [{"id": name, **model} for name in self._defaults.names]
        return JSONResponse({"object": "list", "data": data})

    async def _health(self, request: Request) -> Response:
        gone = self._lead.gone
        return JSONResponse({"healthy": not gone, "reason": gone}, 503 if gone else 200)

    async def _ready(self, request: Request) -> Response:
        stats, replica, reason = self._lead.stats, self._defaults.replica, None
        try:
            self._lead.check_ready()
        except Problem as problem:
            reason = problem.message
        meant = request.headers.get("x-replica")
        if reason is None and meant not in (None, replica):  # its port is this server's now
            reason = f"this is not replica {meant}"
        state = {"mode": stats.mode, "lookahead": stats.lookahead, "draft": stats.draft}
        return JSONResponse(
            {"ready": reason is None, "reason": reason, **state},
            503 if reason else 200,
            {} if replica is None else {"x-replica": replica},
        )

    async def _page(self, request: Request) -> Response:
        return Response(self._metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})


async def read_body(request: Request) -> bytes:
    """Returns the body of JSON; raises Problem for another type, or one too long or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a web page cannot send this type without asking first
        raise Problem(415, f"content-type={kind!r}: allowed: application/json")
    try:
        return await asyncio.wait_for(_read(request), BODY_S)
    except asyncio.TimeoutError as error:
        message = f"the body did not arrive in {BODY_S:g} s"
        raise Problem(408, message, headers={"connection": "close"}) from error


async def _read(request: Request) -> bytes:
    """Reads a body; drops the bytes beyond the limit, up to DRAINED_BYTES."""
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size <= BODY_BYTES:
            parts.append(part)
        elif size > DRAINED_BYTES:
            break
    if size > BODY_BYTES:
        message = f"a body of more than {BODY_BYTES} bytes"
        raise Problem(413, message, headers={"connection": "close"})
    return b"".join(parts)


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Does the work; raises ClientDisconnect if the client leaves before it is done.

    The body of the request has been read.
    """
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientDisconnect
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.wait({doing, leaving})


async def _next(pieces: AsyncIterator[Piece]) -> Piece:
    return await anext(pieces)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def refusal(problem: Problem) -> Response:
    """Returns the response of a refused request."""
    return JSONResponse(problem.to_dict(), problem.status, problem.headers)


async def _unrouted(request: Request, error: Exception) -> Response:
    """Returns the response for a path or method that does not exist."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return refusal(Problem(error.status_code, message, headers=dict(error.headers or {})))
