"""Judges a request before anything of it is read: its key, or where there is none, its host."""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mpissd.serve.config import is_local
from mpissd.serve.http.problem import Problem

OPEN = ("/health", "/ready")  # answered without a key


class Guard:
    """ASGI middleware: 401 without the key; without keys, 403 for hosts that are not this machine.

    A page on the web can make a browser call 127.0.0.1 by a name of its own, but not with another
    name in `Host`.
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._judge(scope) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            response = JSONResponse(problem.to_dict(), problem.status, problem.headers)
            await response(scope, receive, send)

    def _judge(self, scope: Scope) -> Problem | None:
        headers = Headers(scope=scope)
        if self._key is None:
            return None if _is_here(headers.get("host")) else Problem(403, "host: is not this one")
        given = headers.get("authorization", "")
        wanted = f"Bearer {self._key}"
        if scope["path"] in OPEN or hmac.compare_digest(
            given.encode("latin-1"),  # its bytes, as they came
            wanted.encode(),
        ):
            return None
        wrong = "the API key is wrong" if given else "an API key is needed: Authorization: Bearer …"
        return Problem(401, wrong, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _is_here(host: str | None) -> bool:
    try:
        return host is None or is_local(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
