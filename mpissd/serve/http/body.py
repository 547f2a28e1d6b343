"""Reads bodies, and watches whether a client is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from mpissd.serve.http import limits
from mpissd.serve.http.problem import Problem

Result = TypeVar("Result")


async def read_body(request: Request) -> bytes:
    """Returns the body of JSON; raises Problem for one of another type, a long or a slow one."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a web page cannot send this type without asking first
        raise Problem(415, f"content-type={kind!r}: allowed: application/json")
    try:
        return await asyncio.wait_for(_read(request), limits.BODY_S)
    except asyncio.TimeoutError as error:
        told = f"the body did not arrive in {limits.BODY_S:g} s"
        raise Problem(408, told, headers={"connection": "close"}) from error


async def _read(request: Request) -> bytes:
    """Reads a body; what is beyond the limit is read and dropped, since most clients listen only
    when all is sent."""
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size <= limits.BODY_BYTES:
            parts.append(part)
        else:
            parts.clear()
        if size > limits.DRAINED_BYTES:
            break
    if size > limits.BODY_BYTES:
        told = f"a body of more than {limits.BODY_BYTES} bytes"
        raise Problem(413, told, headers={"connection": "close"})
    return b"".join(parts)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Does the work; raises ClientDisconnect if the client leaves before it is done.

    receive: of a request whose body has been read.
    """
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
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
