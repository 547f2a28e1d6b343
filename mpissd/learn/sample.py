"""The target's own conversations: it writes the prompts as well as the answers.

After the chat template's opening of a user's turn, a chat model writes a user's message
(Magpie, 2406.08464). When it ends the message, the template's opening of an answer follows and the
model answers; when it ends the answer, the next user's turn is opened, until the sequence is full.
All sequences are at the same position, so one static cache serves all of them.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from mpissd.learn.llama import Blocks, Layer, Llama, Tensor
from mpissd.learn.source import Exam, TemplateParts

OWN_WARMTH = 0.7  # temperature of the users' messages that the target writes
USER, OPENING, ANSWER, REOPENING = range(4)  # the part that a sequence is writing


class OutOfTime(BaseException):
    """Ends a block of `until`. It is no Exception, because libraries catch those."""


@contextmanager
def until(deadline: float) -> Iterator[None]:
    """Raises OutOfTime inside the block at `deadline`, in seconds of time.monotonic().

    One step on a CPU may take minutes, so that a look at the clock after it would be too late. Only
    a process's main thread can be interrupted, between two operations of PyTorch.
    """

    def interrupt(signum: int, frame: object) -> None:
        raise OutOfTime

    if math.isinf(deadline) or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, min(max(deadline - time.monotonic(), 1e-6), 1e6))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class States:
    """The target's results after each position of sequences [n, length].

    hidden: normalised last hidden rows, [n, length, hidden] in the samples' type. total: logsumexp
    of the logits, float32. best: the likeliest next token, int32. The last position is empty.
    """

    hidden: Tensor
    total: Tensor
    best: Tensor


@dataclass(frozen=True)
class Samples:
    """Sequences of token ids, int32 [n, length], and which of them the target answered, bool.

    states: None if the target's computations were not kept.
    """

    tokens: Tensor
    answered: Tensor
    states: States | None = None

    def take(self, rows: slice | Tensor) -> Samples:
        """Returns some of the sequences."""
        states = self.states
        if states is not None:
            states = States(states.hidden[rows], states.total[rows], states.best[rows])
        return Samples(self.tokens[rows], self.answered[rows], states)


def blank(prompts: Sequence[Sequence[int]], length: int, device: Any) -> Tensor:
    """Returns int64 [n, length]: each prompt, then −1 for the target's tokens."""
    given = torch.full((len(prompts), length), -1)
    for row, prompt in enumerate(prompts):
        given[row, : len(prompt)] = torch.tensor(prompt[:length], dtype=torch.int64)
    return given.to(device)


class Sampler:
    """Writes conversations with a target, many at a time.

    compiled: compiles the choice of a token, which pays for many batches of one size; `blocks` may
    be compiled too.
    """

    def __init__(
        self, model: Llama, blocks: Blocks, table: tuple[Tensor, Tensor], compiled: bool
    ) -> None:
        self.model, self.blocks = model, blocks
        self.cos, self.sin = table
        self.pick: Any = torch.compile(_pick, dynamic=False) if compiled else _pick

    def write(
        self,
        given: Tensor,
        template: TemplateParts,
        first: int,
        warmth: tuple[Tensor, Tensor],
        *,
        keep: bool = False,
        deadline: float = float("inf"),
    ) -> Samples:
        """Returns the conversations that start with `given` [n, length] (−1: to be written).

        first: the part written first, USER or ANSWER. warmth: the temperatures [n] of users' turns
        and of answers. keep: whether the target's states are kept. deadline: of time.monotonic();
        conversations that reach it are cut there, all at one length.
        """
        turns = _Turns(given, template, first)
        states = self._blank(given) if keep else None
        length = 1
        with suppress(OutOfTime), torch.no_grad(), until(deadline):
            for length in self._written(turns, warmth, states):  # noqa: B007  (is used below)
                continue
        if states is not None:
            states = States(
                states.hidden[:, :length], states.total[:, :length], states.best[:, :length]
            )
        return Samples(turns.tokens[:, :length], turns.answered[:, :length], states)

    def _blank(self, given: Tensor) -> States:
        hidden = given.new_zeros(*given.shape, self.model.head.shape[1], dtype=self.blocks.dtype)
        total = torch.zeros_like(given, dtype=torch.float32)
        return States(hidden, total, torch.zeros_like(given, dtype=torch.int32))

    def _written(
        self, turns: _Turns, warmth: tuple[Tensor, Tensor], states: States | None
    ) -> Iterator[int]:
        """Writes every position; yields how many are written."""
        num, length = turns.given.shape
        caches = self._caches(num, length, turns.given.device)
        tokens = turns.next(0, None)
        for position in range(1, length):
            hidden = self._step(tokens, position - 1, caches)
            temperature = torch.where(turns.state == ANSWER, warmth[1], warmth[0])
            logits = self.blocks.product(hidden, self.model.head)
            picked, total, best = self.pick(logits, temperature)
            if states is not None:
                states.hidden[:, position - 1] = hidden
                states.total[:, position - 1] = total
                states.best[:, position - 1] = best
            tokens = turns.next(position, picked)
            yield position + 1

    def _caches(self, num: int, length: int, device: Any) -> list[tuple[Tensor, ...]]:
        shape = (num, self.blocks.kv_heads, length, self.blocks.head_dim)
        return [
            tuple(torch.empty(shape, dtype=self.blocks.dtype, device=device) for _ in "kv")
            for _ in self.model.layers
        ]

    def _step(self, tokens: Tensor, at: int, caches: list[tuple[Tensor, ...]]) -> Tensor:
        """Returns the last hidden rows [n, hidden] after one token of each sequence."""
        x = self.model.embedding[tokens]
        cos, sin = self.cos[at], self.sin[at]
        for w, cache in zip(self.model.layers, caches, strict=True):
            x = self.blocks.back(x, self._attend(x, w, cos, sin, at, cache), w)
        return self.blocks.norm(x, self.model.norm)

    def _attend(
        self, x: Tensor, w: Layer, cos: Tensor, sin: Tensor, at: int, cache: tuple[Tensor, ...]
    ) -> Tensor:
        q, k, v = self.blocks.front(x, w, cos, sin)
        keys, values = cache
        keys[:, :, at], values[:, :, at] = k, v
        return attend(q, keys, values, at + 1)


def _pick(logits: Tensor, warmth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a token of each row, by the Gumbel maximum; logsumexp; and the likeliest token.

    At warmth 0 the likeliest one is the token.
    """
    logits = logits.float()
    noise = -torch.log(-torch.log(torch.rand_like(logits)))
    token = (logits + warmth[:, None] * noise.clamp(max=1e4)).argmax(-1)
    best = logits.argmax(-1)
    return torch.where(warmth > 0, token, best), logits.logsumexp(-1), best


class _Turns:
    """Whose turn each sequence is at, and the tokens so far."""

    def __init__(self, given: Tensor, template: TemplateParts, first: int) -> None:
        device = given.device
        self.given, self.end = given, template.end
        self.opening = torch.tensor(template.between, device=device)
        self.reopening = torch.tensor(template.again, device=device)
        self.state = torch.full((len(given),), first, device=device)
        self.count = torch.zeros_like(self.state)  # of the template's tokens
        self.tokens = given.clamp(min=0).int()
        self.answered = torch.zeros_like(given, dtype=torch.bool)

    def next(self, position: int, picked: Tensor | None) -> Tensor:
        """Returns the token at a position, given the target's pick for it."""
        given, state = self.given[:, position], self.state
        if picked is None:
            return given
        is_free, in_template = given < 0, (state == OPENING) | (state == REOPENING)
        opening = self.opening[self.count.clamp(max=len(self.opening) - 1)]
        reopening = self.reopening[self.count.clamp(max=len(self.reopening) - 1)]
        token = torch.where(state == OPENING, opening, reopening)
        token = torch.where(is_free, torch.where(in_template, token, picked), given)
        self.answered[:, position] = is_free & (state == ANSWER)
        self.tokens[:, position] = token
        self._turn(is_free & (token == self.end), is_free & in_template)
        return token

    def _turn(self, ends: Tensor, in_template: Tensor) -> None:
        state, size = (
            self.state,
            torch.where(self.state == OPENING, len(self.opening), len(self.reopening)),
        )
        self.count = torch.where(in_template, self.count + 1, 0)
        is_over = (in_template & (self.count == size)) | (ends & ~in_template)
        self.state = torch.where(is_over, (state + 1) % 4, state)
        self.count = torch.where(is_over, 0, self.count)


def attend(q: Tensor, keys: Tensor, values: Tensor, seen: int) -> Tensor:
    """Returns [n, heads · d]: q [n, heads, d] over the first `seen` of keys, values [n, kv, L, d].

    On a GPU with Triton the query heads of a KV head read its cache once, in one block of rows.
    """
    is_block = q.shape[-1] in (16, 32, 64, 128) and q.shape[1] <= 16 * keys.shape[1]
    if q.is_cuda and is_block and has_triton():
        from mpissd.learn.triton_attend import attend as fast

        return fast(q, keys, values, seen)
    rows = q.unflatten(1, (keys.shape[1], -1))  # query heads of a KV head, as rows
    return F.scaled_dot_product_attention(rows, keys[:, :, :seen], values[:, :, :seen]).flatten(1)


@functools.cache
def has_triton() -> bool:
    """Whether Triton, which comes with PyTorch for GPUs, is installed."""
    return importlib.util.find_spec("triton") is not None


def answered(
    sampler: Sampler, exam: Exam, template: TemplateParts, limit: int, room: int, deadline: float
) -> Samples:
    """Returns an exam's answers at temperature 0, at most `limit` tokens each.

    room: a sequence's longest length; prompts that leave no room for an answer are left out.
    deadline: of time.monotonic(), at which all answers are cut.
    """
    if exam.answers is None:
        kept = [prompt for prompt in exam.prompts if len(prompt) + limit <= room]
        device = sampler.cos.device
        given = blank(kept, max(map(len, kept)) + limit, device)
        cold = torch.zeros(len(kept), device=device)
        written = sampler.write(given, template, ANSWER, (cold, cold), deadline=deadline)
        return first_answers(written, template.end, limit)
    rows = [
        (len(prompt), [*prompt, *answer[:limit]])
        for prompt, answer in zip(exam.prompts, exam.answers, strict=True)
    ]
    tokens = blank([row for _, row in rows], max(len(row) for _, row in rows), sampler.cos.device)
    mask = tokens >= 0
    for number, (start, _) in enumerate(rows):
        mask[number, :start] = False
    return Samples(tokens.clamp(min=0).int(), mask)


def own(
    sampler: Sampler, num: int, length: int, template: TemplateParts, limit: int, deadline: float
) -> Samples:
    """Returns first answers at temperature 0 to prompts that the target writes at OWN_WARMTH."""
    device = sampler.cos.device
    given = blank([template.before] * num, length, device)
    cold = torch.zeros(num, device=device)
    warm = cold + OWN_WARMTH
    written = sampler.write(given, template, USER, (warm, cold), deadline=deadline)
    return first_answers(written, template.end, limit)


def first_answers(samples: Samples, end: int, limit: int) -> Samples:
    """Returns the samples with only each one's first answer marked, its stop token included."""
    answered: Any = samples.answered
    ends = (answered & (samples.tokens == end)).int()
    is_first = ends.cumsum(-1) - ends == 0
    return Samples(samples.tokens, answered & is_first & (answered.cumsum(-1) <= limit))
