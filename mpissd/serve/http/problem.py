"""What a request is refused with: a status, and OpenAI's object of an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Problem(Exception):
    """Ends a request. param: the field at fault; headers: of the response."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def to_dict(self) -> dict[str, Any]:
        """Returns {"error": …} as clients of OpenAI's API expect it."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _KINDS.get(self.status, default)
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": told}
