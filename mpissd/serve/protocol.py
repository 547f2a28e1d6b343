"""The messages between the front and the lead: JSON objects, one a line, over a local socket.

    front → lead    submit, cancel, stop
    lead → front    ready, tokens, end, refused, stats

A closed socket says that the other side is gone. A message is a frozen dataclass; its line is an
object of its fields and `op`. The front decodes text: the lead sees token ids alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from mpissd.common.errors import ProtocolError

SOCKET_VARIABLE = "MPISSD_SERVE_SOCKET"  # names the front's socket to the ranks


@dataclass(frozen=True)
class Submit:
    """A request. id: chosen by the front, never used twice. seed: None leaves it to the lead.
    deadline_s: seconds from now after which it ends as it is, or None."""

    op: ClassVar[str] = "submit"
    id: int
    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: bool = False
    deadline_s: float | None = None


@dataclass(frozen=True)
class Cancel:
    """Ends a request early; an `End` answers, unless one is on its way."""

    op: ClassVar[str] = "cancel"
    id: int


@dataclass(frozen=True)
class Stop:
    """Ends the job, with every request of it."""

    op: ClassVar[str] = "stop"


@dataclass(frozen=True)
class Ready:
    """The lead decodes from now on. model: the target's name. context: tokens of prompt and answer
    together, at most. backend, device_name: the lead's."""

    op: ClassVar[str] = "ready"
    model: str
    context: int
    stop_ids: Sequence[int]
    max_running: int
    mode: str
    backend: str | None = None
    device_name: str | None = None


@dataclass(frozen=True)
class Tokens:
    """New tokens of a request, what drafted each, and the natural logarithms of the target's
    probabilities, if they were asked for. A token that ends an answer is among them."""

    op: ClassVar[str] = "tokens"
    id: int
    tokens: Sequence[int]
    sources: Sequence[str] = ()
    logprobs: Sequence[float] | None = None


@dataclass(frozen=True)
class End:
    """The end of a request: "stop" (a stop token), "length", "cancelled" or "deadline".

    drafted, accepted: tokens over all of its rounds. hits: rounds whose outcome was in the
    speculation cache. cached: tokens of the prompt whose KV cache an earlier request had left.
    """

    op: ClassVar[str] = "end"
    id: int
    reason: str
    drafted: int = 0
    accepted: int = 0
    hits: int = 0
    rounds: int = 0
    cached: int = 0


@dataclass(frozen=True)
class RefusedRequest:
    """A request that does not run. status: 400 (its fault) or 503 (not now)."""

    op: ClassVar[str] = "refused"
    id: int
    status: int
    message: str


@dataclass(frozen=True)
class Stats:
    """The state of the scheduler, some ten times a second. draft: "present" or "lost"; preempted,
    rounds, tokens: counted from the start."""

    op: ClassVar[str] = "stats"
    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    pages: int = 0
    mode: str = ""
    lookahead: int = 0
    draft: str = "present"
    preempted: int = 0
    rounds: int = 0
    tokens: int = 0


Message = Submit | Cancel | Stop | Ready | Tokens | End | RefusedRequest | Stats
_KINDS: dict[str, Any] = {kind.op: kind for kind in Message.__args__}
_NAMES = {kind: frozenset(f.name for f in fields(kind)) for kind in _KINDS.values()}


def pack(message: Message) -> bytes:
    """Returns a message as a line."""
    return json.dumps({"op": message.op, **vars(message)}).encode() + b"\n"


def unpack(line: bytes) -> Message:
    """Returns the message of a line; raises ProtocolError for one that is none.

    Fields that this version does not know are passed over.
    """
    try:
        found = json.loads(line)
        kind = _KINDS[found.pop("op")]
        known = _NAMES[kind]
        message: Message = kind(**{name: found[name] for name in found if name in known})
        return message
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ProtocolError(f"serve: no message: {line[:80]!r} ({error})") from error
