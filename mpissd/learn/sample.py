"""The target's own conversations: it writes the prompts as well as the answers.

After the chat template's opening of a user's turn, a chat model writes a user's message
(Magpie, 2406.08464). When it ends the message, the template's opening of an answer follows and the
model answers; when it ends the answer, the next user's turn is opened, until the sequence is full.
All sequences are at the same position, so one static cache serves all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from mpissd.learn.llama import Blocks, Llama, Tensor
from mpissd.learn.source import TemplateParts

USER, OPENING, ANSWER, REOPENING = range(4)  # the parts of a conversation, in order


class Samples(NamedTuple):
    """Conversations. tokens: int32 [n, length]. answered: whether the target's answers have a
    token, bool [n, length]. The rest is optional, for each position but the last: hidden, the
    target's normalised last state; total, logsumexp of its logits; best, its likeliest token."""

    tokens: Tensor
    answered: Tensor
    hidden: Tensor = None
    total: Tensor = None
    best: Tensor = None

    def take(self, which: Any) -> Samples:
        """Returns some of the sequences: each tensor at the index `which`."""
        return Samples(*(None if part is None else part[which] for part in self))


def blank(prompts: Sequence[Sequence[int]], length: int, device: Any) -> Tensor:
    """Returns int64 [n, length]: in each row a prompt, then −1 where the target is to write."""
    given = torch.full((len(prompts), length), -1)
    for row, prompt in enumerate(prompts):
        given[row, : len(prompt)] = torch.tensor(prompt[:length], dtype=torch.int64)
    return given.to(device)


class Sampler:
    """Lets a target write many conversations at a time. compiled: whether torch.compile compiles
    the choice of tokens, which pays for many batches of one size."""

    def __init__(
        self, model: Llama, blocks: Blocks, table: tuple[Tensor, Tensor], compiled: bool
    ) -> None:
        self.model = model
        self.blocks = blocks
        self.table = table
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
        """Returns conversations that begin with `given` [n, length]; −1 is a token to be written.

        first: what is written first, USER or ANSWER. warmth: temperatures [n] of the user's
        messages and of the answers. keep: whether to return the target's states and logsumexp, too.
        deadline: time, in seconds of time.monotonic(), at which all conversations are cut to one
        length.
        """
        model = self.model
        blocks = self.blocks
        num, length = given.shape
        turns = _Turns(given, template, first)
        kept = list[Tensor]()
        if keep:
            hidden = given.new_zeros(num, length, model.head.shape[1], dtype=blocks.dtype)
            total = torch.zeros_like(given, dtype=torch.float32)
            kept = [hidden, total, torch.zeros_like(given, dtype=torch.int32)]
        shape = (num, blocks.kv_heads, length, blocks.head_dim)
        done = 1
        with torch.no_grad():
            caches = [
                [torch.empty(shape, dtype=blocks.dtype, device=given.device) for _ in "kv"]
                for _ in model.layers
            ]
            tokens = turns.next(0, None)
            for at in range(length - 1):
                if time.monotonic() > deadline:
                    break
                x = model.embedding[tokens]
                cos, sin = (part[at] for part in self.table)
                for w, (keys, values) in zip(model.layers, caches, strict=True):
                    q, keys[:, :, at], values[:, :, at] = blocks.front(x, w, cos, sin)
                    x = blocks.back(x, attend(q, keys, values, at + 1), w)
                x = blocks.norm(x, model.norm)
                temperature = torch.where(turns.state == ANSWER, warmth[1], warmth[0])
                picked, *scores = self.pick(blocks.product(x, model.head), temperature)
                for part, value in zip(kept, (x, *scores), strict=False):
                    part[:, at] = value
                tokens = turns.next(at + 1, picked)
                done = at + 2
        return Samples(turns.tokens, turns.answered, *kept).take((slice(None), slice(done)))


def only_first(samples: Samples, end: int, limit: int) -> Samples:
    """Returns the samples with only each first answer marked, up to its stop `end` or `limit`."""
    answered = samples.answered
    ends = (answered & (samples.tokens == end)).int()
    is_first = ends.cumsum(-1) - ends == 0
    return Samples(samples.tokens, answered & is_first & (answered.cumsum(-1) <= limit))


def _pick(logits: Tensor, warmth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns for each row of logits the sampled token (by the Gumbel-max trick), the logsumexp,
    and the likeliest token. warmth: each row's temperature; at 0 the likeliest token is taken."""
    logits = logits.float()
    noise = -torch.log(-torch.log(torch.rand_like(logits)))
    token = (logits + warmth[:, None] * noise.clamp(max=1e4)).argmax(-1)
    best = logits.argmax(-1)
    return torch.where(warmth > 0, token, best), logits.logsumexp(-1), best


class _Turns:
    """The tokens so far, and which part of its conversation each sequence is writing."""

    def __init__(self, given: Tensor, template: TemplateParts, first: int) -> None:
        device = given.device
        self.given = given
        self.end = template.end
        self.opening = torch.tensor(template.between, device=device)
        self.reopening = torch.tensor(template.again, device=device)
        self.state = torch.full((len(given),), first, device=device)
        self.count = torch.zeros_like(self.state)  # number of the template's tokens so far
        self.tokens = given.clamp(min=0).int()
        self.answered = torch.zeros_like(given, dtype=torch.bool)

    def next(self, position: int, picked: Tensor | None) -> Tensor:
        """Returns the tokens at a position: given, the template's, or the target's, `picked`."""
        given = self.given[:, position]
        state = self.state
        if picked is None:
            return given
        is_free = given < 0
        in_template = (state == OPENING) | (state == REOPENING)
        opening = self.opening[self.count.clamp(max=len(self.opening) - 1)]
        reopening = self.reopening[self.count.clamp(max=len(self.reopening) - 1)]
        token = torch.where(state == OPENING, opening, reopening)
        token = torch.where(is_free, torch.where(in_template, token, picked), given)
        self.answered[:, position] = is_free & (state == ANSWER)
        self.tokens[:, position] = token
        size = torch.where(state == OPENING, len(self.opening), len(self.reopening))
        written = is_free & in_template
        self.count = torch.where(written, self.count + 1, 0)
        is_over = (written & (self.count == size)) | (is_free & (token == self.end) & ~written)
        self.state = torch.where(is_over, (state + 1) % 4, state)
        self.count = torch.where(is_over, 0, self.count)
        return token


def attend(q: Tensor, keys: Tensor, values: Tensor, seen: int) -> Tensor:
    """Returns [n, heads · d]: attention of q [n, heads, d] over the first `seen` of keys and values
    [n, kv, L, d]. The query heads of a KV head share one product, which reads its cache once."""
    rows = q.unflatten(1, (keys.shape[1], -1))
    return F.scaled_dot_product_attention(rows, keys[:, :, :seen], values[:, :, :seen]).flatten(1)
