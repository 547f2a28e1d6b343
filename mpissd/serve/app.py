"""The server's endpoints, over a `Lead`: an ASGI application that knows no process and no port."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Http
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mpissd.common.flags import MODES
from mpissd.engine.workload.text.tokenizer import Tokenizer
from mpissd.serve.config import is_local
from mpissd.serve.lead import Lead
from mpissd.serve.metrics import Metrics
from mpissd.serve.protocol import Ready, Tokens
from mpissd.serve.request import Piece, Problem, Request, parse

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

    def _post(self, path: str, is_chat: bool) -> Callable[[Http], Awaitable[Response]]:
        """Returns the function of an endpoint; it turns a Problem into a response."""

        async def answer(http: Http) -> Response:
            try:
                response = await self._answer(http, is_chat=is_chat)
            except Problem as problem:
                response = refusal(problem)
            except ClientDisconnect:
                response = Response(status_code=499)  # the client is gone
            self._metrics.responses.labels(path, str(response.status_code)).inc()
            return response

        return answer

    async def _answer(self, http: Http, *, is_chat: bool) -> Response:
        arrived_s = time.monotonic()
        self._lead.check_room()
        request = parse(await read_body(http), is_chat=is_chat)
        request.arrived_s = arrived_s
        self._check(request)
        request.prompt = await unless_gone(http, self._encoded(request))
        ready = self._lead.check()
        self._complete(request, ready)
        request.begin(self._tokenizer, ready.stop_ids, self._defaults.names[0])
        self._lead.submit(request)
        try:
            if request.stream:
                return await self._streamed(http, request)
            return JSONResponse(await unless_gone(http, self._whole(request)))
        except BaseException:
            self._lead.leave(request)
            raise

    def _check(self, request: Request) -> None:
        """Raises Problem for a model or a mode that this server does not have."""
        names, modes = self._defaults.names, self._defaults.modes
        if request.model is not None and request.model not in names:
            message = f"model={request.model!r}: allowed: {', '.join(names)}"
            raise Problem(404, message, "model", code="model_not_found")
        if request.mode is not None and request.mode not in modes:
            raise Problem(400, f"mode={request.mode}: allowed: {', '.join(modes)}", "mode")

    async def _encoded(self, request: Request) -> list[int]:
        """Returns the tokens of a prompt.

        Prompts that wait for their turn count as waiting requests. If the client leaves before its
        turn, the prompt is not encoded.
        """
        self._lead.check_room(self._encoding)
        self._encoding += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._encoder, request.encode, self._tokenizer)
        finally:
            self._encoding -= 1

    def _complete(self, request: Request, ready: Ready) -> None:
        """Adds the defaults that a request leaves out; raises Problem if it has no room."""
        defaults, room = self._defaults, ready.context - len(request.prompt)
        if room < 1 or (request.max_tokens or 0) > room:
            raise Problem(
                400,
                f"{len(request.prompt)} tokens of prompt and max_tokens={request.max_tokens or 1}: "
                f"allowed: {ready.context} together, the model's context",
                "max_tokens" if room > 0 else ("messages" if request.is_chat else "prompt"),
                code="context_length_exceeded",
            )
        request.max_tokens = request.max_tokens or min(room, defaults.num_tokens)
        if request.temperature is None:
            request.temperature = defaults.temperature
        if not request.temperature:
            request.top_p = 1.0  # unused
        longest_s = min(request.deadline_s or defaults.max_wait_s, defaults.max_wait_s)
        passed_s = time.monotonic() - request.arrived_s
        request.deadline_s = max(1e-9, longest_s - passed_s)

    async def _pieces(self, request: Request) -> AsyncIterator[Piece]:
        """Yields an answer's text as it becomes known; text that arrived meanwhile is one piece."""
        piece = Piece()
        while isinstance(message := await request.take(), Tokens):
            if not request.first_s and message.tokens:
                request.first_s = time.monotonic()
                self._metrics.first_token(request.first_s - request.arrived_s)
            piece += request.add(message)
            if request.is_stopped:
                self._lead.cancel(request)
            if not request.has_more:
                yield piece
                piece = Piece()
        piece += request.close(message)
        self._metrics.ended(request, message)
        yield piece

    async def _whole(self, request: Request) -> dict[str, Any]:
        piece = Piece()
        async for more in self._pieces(request):
            piece += more
        return request.whole(piece)

    async def _streamed(self, http: Http, request: Request) -> Response:
        """Waits for the first piece, so that a refusal has its status, and streams from there."""
        pieces = self._pieces(request)

        async def next_piece() -> Piece:
            return await anext(pieces)

        first = await unless_gone(http, next_piece())

        async def events() -> AsyncIterator[bytes]:
            yield event(request.chunk(first, is_first=True))
            try:
                async for piece in pieces:
                    yield event(request.chunk(piece))
                if request.include_usage:
                    yield event(request.last())
            except Problem as problem:  # the status has been sent
                yield event(problem.to_dict())
            yield b"data: [DONE]\n\n"

        return StreamingResponse(
            events(),
            headers={"cache-control": "no-store"},
            media_type="text/event-stream",
            background=BackgroundTask(self._lead.leave, request),  # also if the client is gone
        )

    async def _models(self, http: Http) -> Response:
        names = ("max_running", "context", "backend", "device_name")
        known = {name: getattr(self._lead.ready, name, None) for name in names}
        about = {**self._defaults.about, **known}
        model = {"object": "model", "created": 0, "owned_by": "mpissd", "mpissd": about}
        data = [{"id": name, **model} for name in self._defaults.names]
        return JSONResponse({"object": "list", "data": data})

    async def _health(self, http: Http) -> Response:
        gone = self._lead.gone
        return JSONResponse({"healthy": not gone, "reason": gone}, 503 if gone else 200)

    async def _ready(self, http: Http) -> Response:
        stats, replica, reason = self._lead.stats, self._defaults.replica, None
        try:
            self._lead.check_ready()
        except Problem as problem:
            reason = problem.message
        meant = http.headers.get("x-replica")
        if reason is None and meant not in (None, replica):  # its port is this server's now
            reason = f"this is not replica {meant}"
        state = {"mode": stats.mode, "lookahead": stats.lookahead, "draft": stats.draft}
        return JSONResponse(
            {"ready": reason is None, "reason": reason, **state},
            503 if reason else 200,
            {} if replica is None else {"x-replica": replica},
        )

    async def _page(self, http: Http) -> Response:
        return Response(self._metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})


async def read_body(http: Http) -> bytes:
    """Returns the body of JSON; raises Problem for another type, or one too long or too slow."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a web page cannot send this type without asking first
        raise Problem(415, f"content-type={kind!r}: allowed: application/json")
    try:
        return await asyncio.wait_for(_read(http), BODY_S)
    except asyncio.TimeoutError as error:
        message = f"the body did not arrive in {BODY_S:g} s"
        raise Problem(408, message, headers={"connection": "close"}) from error


async def _read(http: Http) -> bytes:
    """Reads a body; drops the bytes beyond the limit, up to DRAINED_BYTES."""
    parts, size = list[bytes](), 0
    async for part in http.stream():
        size += len(part)
        if size <= BODY_BYTES:
            parts.append(part)
        elif size > DRAINED_BYTES:
            break
    if size > BODY_BYTES:
        message = f"a body of more than {BODY_BYTES} bytes"
        raise Problem(413, message, headers={"connection": "close"})
    return b"".join(parts)


async def unless_gone(http: Http, work: Coroutine[Any, Any, Result]) -> Result:
    """Does the work; raises ClientDisconnect if the client leaves before it is done.

    The body has been read.
    """
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(http.receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientDisconnect
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.wait({doing, leaving})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def refusal(problem: Problem) -> Response:
    """Returns the response of a refused request."""
    return JSONResponse(problem.to_dict(), problem.status, problem.headers)


async def _unrouted(http: Http, error: Exception) -> Response:
    """Returns the response for a path or method that does not exist."""
    assert isinstance(error, HTTPException)
    message = f"{http.method} {http.url.path}: {error.detail}"
    return refusal(Problem(error.status_code, message, headers=dict(error.headers or {})))


def event(data: dict[str, Any]) -> bytes:
    """Returns a server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"
