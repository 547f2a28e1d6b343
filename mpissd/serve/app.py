"""The server's HTTP endpoints: an ASGI application, which starts no process and opens no port."""

import asyncio
import base64
import hashlib
import hmac
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Http
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from mpissd.common.rounds import Sampling
from mpissd.engine.text.tokenizer import Tokenizer
from mpissd.serve.config import ServeConfig, is_local
from mpissd.serve.fields import (
    ChatBody,
    CompletionBody,
    Detokenize,
    Problem,
    Tokenize,
    read_fields,
    read_object,
    refused,
)
from mpissd.serve.lead import Lead
from mpissd.serve.protocol import End, PromptTokens, Ready
from mpissd.serve.request import Exchange, encode_chat, made
from mpissd.serve.responses import parse_response

BODY_BYTES = 1 << 20  # largest body of a request; a larger one gets status 413
DRAINED_BYTES = 1 << 25  # bytes read of a too long body: most clients read no reply while they send
BODY_S = 20.0  # time limit for a body to arrive
REQUESTS = 512  # the most requests at once, as a process may usually open only 1,024 files
_DRAFTED = {  # vLLM's counters, which tools and dashboards read
    "vllm:spec_decode_num_drafts": "rounds that verified drafted tokens",
    "vllm:spec_decode_num_draft_tokens": "drafted tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted tokens",
}
_OPEN = ("/", "/health", "/ready")  # paths that need no API key
_PAGE = Path(__file__).with_name("page.html")
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

Result = TypeVar("Result")


class Endpoints:
    """The functions that answer HTTP requests by path, and the counters that /metrics shows."""

    def __init__(
        self,
        lead: Lead,
        tokenizer: Tokenizer,
        config: ServeConfig,
        names: Sequence[str],
        about: Mapping[str, Any],
        replica: str | None = None,
    ) -> None:
        """Prepares the endpoints. lead: the connection to the decoding ranks. names: model names
        that requests may give. about: a description of the server for /v1/models. replica: this
        server's id if it is one of several."""
        self._lead, self._tokenizer, self._config = lead, tokenizer, config
        self._names, self._about, self._replica = names, about, replica
        self._encoder = ThreadPoolExecutor(1, "encode")  # a long prompt must not block HTTP
        self._encoding = 0  # number of prompts whose encoding is not finished
        self._under_way = 0  # requests
        registry = self._registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(name, about, labels, registry=registry)

        def times(name: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            about = f"{name.replace('_', ' ')}, in seconds"
            return Histogram(f"mpissd_{name}_seconds", about, buckets=buckets, registry=registry)

        def gauge(name: str, about: str, value: Callable[[], float]) -> None:
            Gauge(f"mpissd_{name}", about, registry=registry).set_function(value)

        self._responses = counter("mpissd_responses", "responses by status", "endpoint", "status")
        self._tokens = counter("mpissd_tokens", "tokens by kind", "kind")
        about_rounds = "rounds of answers: a batch of N counts N times"
        self._rounds = counter("mpissd_answer_rounds", about_rounds)
        self._hits = counter("mpissd_cache_hits", "of these, whose outcome was in the cache")
        self._drafted = [counter(name, about, "model_name") for name, about in _DRAFTED.items()]
        told = "accepted tokens by their place in the draft", "model_name", "position"
        self._places = counter("vllm:spec_decode_num_accepted_tokens_per_pos", *told)
        self._first_s = times("time_to_first_token")
        self._token_s = times("time_per_output_token", _TOKEN_SECONDS)
        self._request_s = times("request")
        for name, meaning in _STATS.items():
            gauge(name, meaning, partial(lambda name: getattr(lead.stats, name), name))
        gauge("outstanding", "requests that the lead has not ended", lambda: lead.outstanding)
        gauge("draft_present", "is the draft there?", lambda: lead.stats.draft == "present")
        gauge("stats_age_seconds", "since the lead's last report", lambda: lead.stats_age_s)
        gauge("up", "whether the ranks are there", lambda: lead.is_serving)

        makers: dict[str, tuple[Callable[..., Exchange], str]] = {
            "/v1/chat/completions": (partial(made, kind=ChatBody), "messages"),
            "/v1/completions": (partial(made, kind=CompletionBody), "prompt"),
            "/v1/responses": (parse_response, "input"),
        }
        routes = [
            Route(path, partial(self._answer, make, subject), methods=["POST"])
            for path, (make, subject) in makers.items()
        ]
        routes += [
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/tokenizer_info", self._tokenizer_info),
            Route("/v1/models", self._models),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
            Route("/", self._home),
        ]
        self._paths = {route.path for route in routes}
        self._app = Starlette(routes=routes, exception_handlers=dict.fromkeys(_ERRORS, _failed))
        self._app.router.redirect_slashes = False
        self._html = _PAGE.read_text(encoding="utf-8")
        self._html_headers = page_headers(self._html)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request as ASGI servers call it. The headers are checked before the body is
        read: 401 without the API key; 503 while REQUESTS requests are unanswered. A server without
        a key answers 403 if the header `Host` is not this machine: a web page can make a browser
        call 127.0.0.1 by a name of the page's own, but the page cannot change that header."""
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._responses.labels(path, str(message["status"])).inc()
                if self._replica is not None:
                    MutableHeaders(scope=message)["x-replica"] = self._replica
            await send(message)

        problem = self._refused(Headers(scope=scope), scope["path"])
        if problem is not None:
            await refusal(problem)(scope, receive, counted)
            return
        self._under_way += 1
        try:
            await self._app(scope, receive, counted)
        finally:
            self._under_way -= 1

    def _refused(self, headers: Headers, path: str) -> Problem | None:
        if self._under_way >= REQUESTS:
            message = f"{REQUESTS} connections are in use"
            busy = {"retry-after": "5", "connection": "close"}
            return Problem(503, message, code="connections", headers=busy)
        key = self._config.key
        if key is None:
            try:
                host = urlsplit(f"//{headers.get('host', 'localhost')}").hostname
            except ValueError:
                host = None
            return None if is_local(host or "") else Problem(403, "host: is not this one")
        given = headers.get("authorization", "")
        wanted = f"Bearer {key}".encode()
        if path in _OPEN or hmac.compare_digest(given.encode("latin-1"), wanted):
            return None
        wrong = "the API key is wrong" if given else "an API key is needed: Authorization: Bearer …"
        return Problem(401, wrong, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    async def _answer(self, make: Callable[..., Exchange], subject: str, http: Http) -> Response:
        """Answers a request for a chat, completion or response, as a whole or as a stream. make:
        makes an Exchange of a body's fields. subject: the field with the prompt."""
        arrived_s = time.monotonic()
        self._lead.check_room()
        defaults = Sampling(temperature=self._config.run.temperature)
        request = make(read_object(await read_body(http)), defaults=defaults)
        choices = await self._complete(request, subject, http, arrived_s)
        self._lead.submit(choices)
        arriving = self._arriving(choices, arrived_s)

        async def first_part() -> bytes:
            async for choice in arriving:
                if request.asked.stream:
                    return choice.part()
            return json.dumps(request.whole(choices), ensure_ascii=False).encode()

        async def events(first: bytes) -> AsyncIterator[bytes]:
            yield first
            try:
                async for choice in arriving:
                    yield choice.part()
                yield request.ending(choices)
            except Problem as problem:  # the HTTP status was sent before
                yield request.failed(problem)

        try:  # A stream starts with its first text, so that a refusal has an HTTP status.
            first = await unless_gone(http, first_part())
        except BaseException:
            self._lead.cancel(*choices)
            raise
        if not request.asked.stream:
            return Response(first, media_type="application/json")
        return StreamingResponse(
            events(first),
            headers={"cache-control": "no-store"},
            media_type="text/event-stream",
            background=BackgroundTask(self._lead.cancel, *choices),  # also runs if the client left
        )

    async def _complete(
        self, request: Exchange, subject: str, http: Http, arrived_s: float
    ) -> list[Exchange]:
        """Encodes a request's prompts and fills in defaults; returns its choices (answers).
        Raises Problem for a request that this server cannot answer."""
        config, asked = self._config, request.asked
        self._check_model(asked.model)
        sampling = request.sampling
        if sampling.mode is not None and sampling.mode not in config.modes:
            allowed = ", ".join(config.modes)
            raise refused(f"mode={sampling.mode}", allowed)
        most = 0 if config.run.mode == "ar" else config.run.lookahead
        if (sampling.lookahead or 0) > most:
            raise refused(f"speculation.lookahead={sampling.lookahead}", f"0 to {most}")
        if sampling.temperature and not config.sampling:
            raise refused(f"temperature={sampling.temperature}", "0, without sampling")
        if request.form is not None and not (config.sampling and self._tokenizer.stop_ids):
            raise refused(request.form[0], "with sampling, and a model that ends its answers")
        ready = self._lead.check()
        count = asked.n * (len(asked.prompts) if isinstance(asked, CompletionBody) else 1)
        if count > (most := ready.max_running + config.max_queue):
            raise refused(f"{count} answers", f"{most}, which run and wait at once", subject)
        request.prompts = await self._encoded(http, partial(request.encode, self._tokenizer))
        every = [(subject, prompt) for prompt in request.prompts]
        given = ("logit_bias", [*dict(sampling.logit_bias)])
        for name, ids in (*every, given, ("stop_token_ids", asked.stop_token_ids)):
            _check_ids(name, ids, ready)
        longest = max(map(len, request.prompts))
        room = ready.context - longest
        if (wanted := request.max_tokens or asked.min_tokens or 1) > room:
            name = "max_tokens" if request.max_tokens or not asked.min_tokens else "min_tokens"
            message = (
                f"{longest} tokens of prompt and {name}={wanted}: "
                f"allowed: {ready.context} together, the server's --context"
            )
            raise Problem(400, message, name if room > 0 else subject, "context_length_exceeded")
        usual = max(config.run.num_tokens or 512, asked.min_tokens)
        request.max_tokens = request.max_tokens or min(room, usual)
        longest_s = min(asked.deadline_s or config.max_wait_s, config.max_wait_s)
        request.ends_s = arrived_s + longest_s
        return request.begin(self._tokenizer, ready, self._names[0])

    async def _encoded(self, http: Http, work: Callable[[], Result]) -> Result:
        """Returns the result of `work` on texts, done in a thread, as long as the client stays.
        Requests that wait for it count as waiting ones."""
        self._lead.check_room(self._encoding)
        self._encoding += 1
        try:
            loop = asyncio.get_running_loop()
            return await unless_gone(http, loop.run_in_executor(self._encoder, work))
        finally:
            self._encoding -= 1

    def _check_model(self, model: str | None) -> None:
        """Raises Problem if a request names another model."""
        if model not in (None, *self._names):
            message = f"model={model!r}: allowed: {', '.join(self._names)}"
            raise Problem(404, message, "model", code="model_not_found")

    async def _arriving(
        self, choices: Sequence[Exchange], arrived_s: float
    ) -> AsyncIterator[Exchange]:
        """Yields a choice (one of the answers) whenever it has new text, until all have ended.
        Raises Problem if the lead refuses the request or is gone."""
        every, messages = {choice.id: choice for choice in choices}, choices[0].messages
        running, fresh = set(every), dict[int, Exchange]()
        while running:
            message = await messages.get()
            if isinstance(message, Problem):
                raise message
            choice = every[message.id]
            if isinstance(message, PromptTokens):
                choice.add(message)
                continue
            for other in choices:  # The prompt that these share is now in the KV cache.
                if not other.is_sent and other.prompt is choice.prompt:
                    self._lead.send(other)
            fresh[message.id] = choice
            if isinstance(message, End):
                running.remove(message.id)
                choice.close(message)
                self._count(choice, message, arrived_s)
            else:
                if message.tokens and not choice.num_tokens:
                    choice.first_s = time.monotonic()
                    self._first_s.observe(choice.first_s - arrived_s)
                counts = choice.num_tokens, choice.num_hits
                choice.add(message)
                self._rounds.inc()
                self._tokens.labels("completion").inc(choice.num_tokens - counts[0])
                self._hits.inc(choice.num_hits - counts[1])
                if choice.is_stopped:
                    self._lead.cancel(choice)
            if messages.empty() or not running:
                for each in fresh.values():
                    yield each
                fresh = {}

    def _count(self, choice: Exchange, end: End, arrived_s: float) -> None:
        """Adds a finished choice (one of the answers) to the counters of /metrics."""
        kinds = {"prompt": len(choice.prompt), "cached": end.cached}
        kinds |= {"drafted": end.drafted, "accepted": end.accepted, "forced": end.forced}
        for kind, count in kinds.items():
            self._tokens.labels(kind).inc(count)
        self._hits.inc(end.hits - choice.num_hits)
        counts = sum(end.steps), end.drafted, end.accepted
        for counter, count in zip(self._drafted, counts, strict=True):
            counter.labels(self._names[0]).inc(count)
        for place in range(1, len(end.steps)):
            reached = sum(end.steps[place:])
            self._places.labels(self._names[0], str(place - 1)).inc(reached)
        self._request_s.observe(time.monotonic() - arrived_s)
        if choice.num_tokens > 1:
            self._token_s.observe((time.monotonic() - choice.first_s) / (choice.num_tokens - 1))

    async def _models(self, http: Http) -> Response:
        ready = self._lead.check()
        names = ("max_running", "context", "backend", "device_name", "draws")
        known = {name: getattr(ready, name) for name in names}
        model = {"object": "model", "created": 0, "owned_by": "mpissd"}
        chat = self._tokenizer.template is not None
        model["mpissd"] = {**self._about, **known, "chat": chat}
        data = [{"id": name, **model} for name in self._names]
        return JSONResponse({"object": "list", "data": data})

    async def _tokenize(self, http: Http) -> Response:
        """Answers as vLLM's server does."""
        asked = read_fields(read_object(await read_body(http)), Tokenize)
        self._check_model(asked.model)
        words = self._tokenizer
        if (asked.prompt is None) == (not asked.messages):
            raise refused("prompt", "either prompt or messages")

        def work() -> dict[str, Any]:
            if asked.messages:
                tokens = encode_chat(words, asked.messages, begins=asked.add_generation_prompt)
            else:
                tokens = words.encode(asked.prompt or "", specials=asked.add_special_tokens)
            names = [words.piece(token) for token in tokens] if asked.return_token_strs else None
            return {"count": len(tokens), "tokens": tokens, "token_strs": names}

        told = await self._encoded(http, work)
        return JSONResponse({**told, "max_model_len": self._lead.check().context})

    async def _detokenize(self, http: Http) -> Response:
        asked = read_fields(read_object(await read_body(http)), Detokenize)
        self._check_model(asked.model)
        _check_ids("tokens", asked.tokens, self._lead.check())
        decode = partial(self._tokenizer.decode, asked.tokens, specials=True)
        return JSONResponse({"prompt": await self._encoded(http, decode)})

    async def _tokenizer_info(self, http: Http) -> Response:
        words = self._tokenizer
        return JSONResponse({**words.specials, "chat_template": words.template})

    async def _health(self, http: Http) -> Response:
        gone = self._lead.gone
        return JSONResponse({"healthy": not gone, "reason": gone}, 503 if gone else 200)

    async def _ready(self, http: Http) -> Response:
        stats, replica, reason = self._lead.stats, self._replica, None
        try:
            self._lead.check_ready()
        except Problem as problem:
            reason = problem.message
        meant = http.headers.get("x-replica")
        if reason is None and meant not in (None, replica):  # The balancer's list is old.
            reason = f"this is not replica {meant}"
        state = {"mode": stats.mode, "lookahead": stats.lookahead, "draft": stats.draft}
        told = {"ready": reason is None, "reason": reason, **state}
        return JSONResponse(told, 503 if reason else 200)

    async def _metrics(self, http: Http) -> Response:
        page = generate_latest(self._registry)
        return Response(page, headers={"content-type": CONTENT_TYPE_LATEST})

    async def _home(self, http: Http) -> Response:
        return HTMLResponse(self._html, headers=self._html_headers)


def _check_ids(name: str, ids: Sequence[int], ready: Ready) -> None:
    """Raises Problem if a field has a token id that the model does not have."""
    if (largest := max(ids, default=0)) >= ready.vocab:
        raise refused(f"{name}: token {largest}", f"0..{ready.vocab - 1}")


async def read_body(http: Http) -> bytes:
    """Returns a request's JSON body; raises Problem if it has another type, is too long or slow."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a browser does not let pages of other sites send this type
        raise Problem(415, f"content-type={kind!r}: allowed: application/json")

    async def read() -> bytes:
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

    try:
        return await asyncio.wait_for(read(), BODY_S)
    except asyncio.TimeoutError as error:
        message = f"the body did not arrive in {BODY_S:g} s"
        raise Problem(408, message, headers={"connection": "close"}) from error


async def unless_gone(
    http: Http, work: Coroutine[Any, Any, Result] | asyncio.Future[Result]
) -> Result:
    """Returns the result of `work`; cancels it and raises ClientDisconnect if the client leaves
    first. The request's body must have been read."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientDisconnect
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.wait({doing, leaving})


def page_headers(html: str) -> dict[str, str]:
    """Returns a page's response headers, whose content security policy allows only the page's own
    style and script, and requests to its server."""
    allowed = {"default": "'none'", "connect": "'self'", "img": "data:"}
    for kind in ("style", "script"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        allowed[kind] = f"'sha256-{digest}'"
    policy = [f"{kind}-src {source}" for kind, source in allowed.items()]
    policy += [f"{name} 'none'" for name in ("base-uri", "form-action", "frame-ancestors")]
    others = {"referrer-policy": "no-referrer", "x-content-type-options": "nosniff"}
    return {"content-security-policy": "; ".join(policy), "cache-control": "no-cache", **others}


def refusal(problem: Problem) -> Response:
    """Returns the HTTP response that reports a Problem."""
    return JSONResponse(problem.to_dict(), problem.status, problem.headers)


async def _failed(http: Http, error: Exception) -> Response:
    """Returns the response to a request that raised one of the errors in _ERRORS."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # the client is gone
    if isinstance(error, HTTPException):  # no such path, or method
        message = f"{http.method} {http.url.path}: {error.detail}"
        error = Problem(error.status_code, message, headers=dict(error.headers or {}))
    if isinstance(error, Problem):
        return refusal(error)
    return refusal(Problem(400, "a value is nested too deeply"))


_ERRORS = Problem, HTTPException, ClientDisconnect, RecursionError
