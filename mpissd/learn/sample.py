"""The target's own conversations: it writes the prompts as well as the answers.

After the chat template's opening of a user's turn, a chat model writes a user's message
(Magpie, 2406.08464). When it ends the message, the template's opening of an answer follows and the
model answers; when it ends the answer, the next user's turn is opened, until the sequence is full.
All sequences are at the same position, so one static cache serves all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpissd.learn.attend import attend
from mpissd.learn.llama import Blocks, Layer, Llama, Tensor
from mpissd.learn.template_parts import TemplateParts

CHECK = 8  # positions between two looks at the clock
USER, OPENING, ANSWER, REOPENING = range(4)  # the part that a sequence is writing


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
        with torch.no_grad():
            turns = _Turns(given, template, first)
            states = self._blank(given) if keep else None
            length = self._write(turns, warmth, states, deadline)
            if states is not None:
                states = States(
                    states.hidden[:, :length], states.total[:, :length], states.best[:, :length]
                )
            return Samples(turns.tokens[:, :length], turns.answered[:, :length], states)

    def _blank(self, given: Tensor) -> States:
        hidden = given.new_zeros(*given.shape, self.model.head.shape[1], dtype=self.blocks.dtype)
        total = torch.zeros_like(given, dtype=torch.float32)
        return States(hidden, total, torch.zeros_like(given, dtype=torch.int32))

    def _write(
        self,
        turns: _Turns,
        warmth: tuple[Tensor, Tensor],
        states: States | None,
        deadline: float,
    ) -> int:
        """Writes every position until the deadline; returns how many were written."""
        num, length = turns.given.shape
        caches = self._caches(num, length, turns.given.device)
        tokens = turns.next(0, None)
        for position in range(1, length):
            if position % CHECK == 0 and time.monotonic() > deadline:
                return position
            hidden = self._step(tokens, position - 1, caches)
            temperature = torch.where(turns.state == ANSWER, warmth[1], warmth[0])
            logits = self.blocks.product(hidden, self.model.head)
            picked, total, best = self.pick(logits, temperature)
            if states is not None:
                states.hidden[:, position - 1] = hidden
                states.total[:, position - 1] = total
                states.best[:, position - 1] = best
            tokens = turns.next(position, picked)
        return int(length)

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
