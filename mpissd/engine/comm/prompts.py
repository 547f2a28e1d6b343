"""The PROMPT message: tokens and sampling parameters of the new sequences of an outcome.

It follows an OUTCOME or a PLAN that admits or opens sequences where a job's sequences have prompts
(LinkShape.prompt_tokens), so that one rank alone reads and encodes them. A sequence takes _HEAD
int32 and its tokens: their number, temperature and top_p as two float64, the seed as two int32, and
flags.
"""

from __future__ import annotations

import math

import numpy as np

from mpissd.common.errors import ProtocolError
from mpissd.common.rounds import Ints, Outcome, Request
from mpissd.engine.comm.wire import HEADER, Buffer

_HEAD = 8
_SEED, _FLAGS = 5, 7
_LOGPROBS, _SEEDED = 1, 2


def capacity(batch: int, prompt_tokens: int) -> int:
    """Returns the int32 of the largest body: b prompts of prompt_tokens tokens each."""
    return batch * (_HEAD + prompt_tokens)


def follows(outcome: Outcome) -> bool:
    """Returns whether a PROMPT message follows this outcome, in a job with prompts."""
    return len(outcome.fresh) > 0


def write_prompts(buffer: Buffer, outcome: Outcome) -> int:
    """Writes the prompts of an outcome's new sequences, in their order.

    Returns the size of the message in int32, its header included.
    """
    admitted = outcome.fresh.tolist()
    buffer.write_header(outcome.round, len(admitted))
    end = 0
    for row in admitted:
        request = outcome.prompts[row[0], row[1]]
        start, end = end, end + _HEAD + len(request.prompt)
        buffer.body[start] = len(request.prompt)
        sampled = np.array([request.temperature, request.top_p])
        buffer.body[start + 1 : start + _SEED] = sampled.view(np.int32)
        buffer.body[start + _SEED : start + _FLAGS] = np.array([request.seed or 0], np.uint64).view(
            np.int32
        )
        buffer.body[start + _FLAGS] = _flags(request)
        buffer.body[start + _HEAD : end] = request.prompt
    buffer.seal(end)
    return HEADER + end


def _flags(request: Request) -> int:
    return _LOGPROBS * request.logprobs + _SEEDED * (request.seed is not None)


def read_prompts(buffer: Buffer, outcome: Outcome) -> Outcome:
    """Returns the outcome with the prompts of its admissions, which have arrived.

    Raises ProtocolError for a message that is not as expected, as the functions of `wire` do.
    """
    admitted = outcome.fresh.tolist()
    _, count, _ = buffer.read_header(outcome.round)
    if count != len(admitted):
        raise _refused(outcome, f"{count} prompts", f"expected {len(admitted)}")
    parts = _parts(buffer, outcome, count)
    prompts = {
        (row[0], row[1]): _request(buffer, outcome, row, part)
        for row, part in zip(admitted, parts, strict=True)
    }
    return Outcome(outcome.round, outcome.rows, prompts, outcome.control)


def _parts(buffer: Buffer, outcome: Outcome, count: int) -> list[Ints]:
    """Returns a copy of each sequence's part of the body, after a look at the checksum."""
    body, end, parts = buffer.body, 0, []
    for _ in range(count):
        size = int(body[end]) if end < len(body) else 0
        start, end = end, end + _HEAD + size
        if size < 1 or end > len(body):
            told = f"the buffer holds {len(body)} numbers"
            raise _refused(outcome, f"a prompt of {size} tokens at {start}", told)
        parts.append(body[start:end].copy())
    buffer.check_seal(end)
    return parts


def _request(buffer: Buffer, outcome: Outcome, row: list[int], part: Ints) -> Request:
    tokens, most = part[_HEAD:], buffer.most[-1]
    if tokens.min() < 0 or tokens.max() > most:
        raise _refused(
            outcome, f"prompt tokens {tokens.min()}..{tokens.max()}", f"allowed 0..{most}"
        )
    if tokens[-1] != row[4]:
        raise _refused(outcome, f"a prompt that ends in {tokens[-1]}", f"expected {row[4]}")
    temperature, top_p = part[1:_SEED].copy().view(np.float64).tolist()
    if not (0 <= temperature < math.inf and 0 < top_p <= 1):
        told = f"temperature {temperature:g}, top_p {top_p:g}"
        raise _refused(outcome, told, "allowed 0 or more, and above 0 to 1")
    flags = int(part[_FLAGS])
    if not 0 <= flags <= _LOGPROBS + _SEEDED:
        raise _refused(outcome, f"flags {flags}", f"allowed 0..{_LOGPROBS + _SEEDED}")
    seed = int(part[_SEED:_FLAGS].copy().view(np.uint64)[0]) if flags & _SEEDED else None
    sampled = temperature, top_p, seed, bool(flags & _LOGPROBS)
    return Request(row[0], row[4], row[1], tuple(tokens.tolist()), *sampled)


def _refused(outcome: Outcome, found: str, allowed: str) -> ProtocolError:
    return ProtocolError(f"round {outcome.round}: malformed PROMPT: {found}, {allowed}")
