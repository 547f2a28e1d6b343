"""Parsers of the fields of a request: each takes a field's name and its JSON value, which is never
null, and raises ConfigError with the value and what is allowed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from mpissd.common.errors import ConfigError, unknown
from mpissd.engine.workload.text.prompts import check_text

Parser = Callable[[str, Any], Any]
MOST_STOPS, LONGEST_STOP = 16, 1024
_ROLES = {role: role for role in ("system", "user", "assistant")} | {"developer": "system"}


def shown(value: Any) -> str:
    """Returns a JSON value as text, cut to a length that fits a message."""
    try:
        text = json.dumps(value)
    except RecursionError:  # as deep as the parser just takes
        text = type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}…"


def _refuse(name: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"{name}={shown(value)}: allowed: {allowed}")


def whole(low: int, high: int | None = None) -> Parser:
    """Parses a whole number in [low, high]."""
    limit = f"a whole number >= {low}" if high is None else f"a whole number in [{low}, {high}]"

    def parse(name: str, value: Any) -> int:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not is_number or value < low or (high is not None and value > high):
            raise _refuse(name, value, limit)
        return int(value)

    return parse


def real(low: float, high: float, *, open_low: bool = False) -> Parser:
    """Parses a number in [low, high], or above low."""
    limit = f"a number {'above' if open_low else '>='} {low:g}, at most {high:g}"

    def parse(name: str, value: Any) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (low <= value <= high) or (open_low and value == low):
            raise _refuse(name, value, limit)
        return float(value)

    return parse


def boolean(name: str, value: Any) -> bool:
    """Parses true and false."""
    if not isinstance(value, bool):
        raise _refuse(name, value, "true, false")
    return value


def text(name: str, value: Any) -> str:
    """Parses a string."""
    if not isinstance(value, str):
        raise _refuse(name, value, "a string")
    return value


def only(*neutral: Any) -> Parser:
    """Parses a field that is not supported, of which some values change nothing."""

    def parse(name: str, value: Any) -> Any:
        if not any(value == each and type(value) is type(each) for each in neutral):
            raise _refuse(name, value, ", ".join(map(json.dumps, neutral)))
        return value

    return parse


def stops(name: str, value: Any) -> tuple[str, ...]:
    """Parses a stop string or a list of them."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(_is_stop(each) for each in found):
        raise _refuse(name, value, f"a string, or up to {MOST_STOPS} strings, none empty")
    if len(found) > MOST_STOPS:
        raise ConfigError(f"{name}: {len(found)} strings: allowed: at most {MOST_STOPS}")
    return tuple(check_text(name, each) if each.strip() else each for each in found)


def _is_stop(found: Any) -> bool:
    return isinstance(found, str) and 0 < len(found) <= LONGEST_STOP


def stream_options(name: str, value: Any) -> bool:
    """Parses {"include_usage": …}; returns whether usage follows a stream."""
    found = members(name, value, {"include_usage": boolean})
    return bool(found.get("include_usage", False))


def members(name: str, value: Any, known: Mapping[str, Parser]) -> dict[str, Any]:
    """Parses an object's fields; those that are null count as absent."""
    if not isinstance(value, dict):
        raise _refuse(name, value, "an object")
    for each in value:
        if each not in known:
            raise unknown("field", shown(each)[1:-1], known)
    return {each: known[each](each, found) for each, found in value.items() if found is not None}


def messages(name: str, value: Any) -> list[dict[str, str]]:
    """Parses a conversation: {"role", "content"} each, of text alone."""
    if not isinstance(value, list) or not value:
        raise _refuse(name, value, "a list of at least one message")
    return [_message(f"{name}[{place}]", each) for place, each in enumerate(value)]


def _message(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _refuse(name, value, '{"role": "…", "content": "…"}')
    said = {each: found for each, found in value.items() if found is not None}
    if extra := said.keys() - {"role", "content"}:
        raise unknown(f"{name} field", min(extra), ("role", "content"))
    role = said.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _refuse(f"{name}.role", role, ", ".join(_ROLES))
    content = _content(f"{name}.content", said.get("content"))
    return {"role": _ROLES[role], "content": content}


def _content(name: str, value: Any) -> str:
    """Parses a text, or a list of {"type": "text", "text": …}."""
    if isinstance(value, list):
        parts = [each.get("text") if _is_text(each) else None for each in value]
        if not parts or not all(isinstance(part, str) for part in parts):
            raise _refuse(name, value, 'text, or parts {"type": "text", "text": "…"}')
        value = "".join(map(str, parts))
    return check_text(name, value)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


def prompt(name: str, value: Any) -> str | list[int]:
    """Parses a text or a list of token ids; one of either in a list is the same."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, list):
        if not value or not all(_is_id(token) for token in value):
            raise _refuse(name, value, "one text, or one list of token ids")
        return value
    return check_text(name, value)


def _is_id(token: Any) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < math.inf
