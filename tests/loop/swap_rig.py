"""Decoders whose draft gets newer weights while it drafts, and the test of their sampled text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from mpissd.common.config import RunConfig
from mpissd.engine.comm.learner_messages import Bytes
from mpissd.engine.decode.draft import Drafter
from mpissd.engine.decode.in_process import Decoder
from mpissd.engine.decode.learning import Updates
from mpissd.engine.model.transformer.checkpoint import EMBEDDING, Arrays, tensors
from mpissd.engine.model.transformer.sources import open_checkpoint
from tests.loop.text_rig import TextPair
from tests.tiny_pair import TinyPair

LENGTH, PROMPT = 3, (1, 0, 2)  # enumerated tokens of a text, and the prompt before them


def between(pair: TinyPair, share: float, dtype: Any = np.float32) -> Arrays:
    """The draft's tensors, moved by a share of the way to the target's."""
    target = open_checkpoint(str(pair.target))
    draft = open_checkpoint(str(pair.draft), target=str(pair.target))
    found = {}
    for name, _ in tensors(draft.config):
        if name != EMBEDDING:
            own, other = draft.read(name), target.read(name)
            found[name] = (own + share * (other - own)).astype(dtype)
    return found


def share_embedding(pair: TinyPair) -> None:
    """Gives the draft the target's embedding, which no version replaces."""
    files = [folder / "model.safetensors" for folder in (pair.target, pair.draft)]
    target, draft = (load_file(file) for file in files)
    save_file({**draft, EMBEDDING: target[EMBEDDING]}, files[1])


class Feed:
    """Brings these messages to a draft, one every few rounds, and then nothing."""

    def __init__(self, messages: Iterator[Bytes], every: int) -> None:
        self.messages, self.every, self.asked = messages, every, 0

    def take(self) -> Bytes | None:
        self.asked += 1
        return next(self.messages, None) if self.asked % self.every == 0 else None


class Learning(Decoder):
    """A decoder whose draft gets newer weights."""

    feed: Callable[[], Feed]
    updates: Updates

    def _updates(self, drafter: Drafter) -> Updates:
        self.updates = Updates(type(self).feed(), drafter)
        return self.updates


def decoded(config: RunConfig, messages: Callable[[], Iterator[Bytes]], every: int = 3) -> Learning:
    class Fed(Learning):
        feed = staticmethod(lambda: Feed(messages(), every))

    with Fed(config) as decoder:
        while not decoder.is_over:
            decoder.step()
        return decoder


def drawing(made: TinyPair, count: int, **flags: Any) -> tuple[TextPair, RunConfig]:
    """A pair of V = 4 whose texts of LENGTH tokens can be enumerated, and a job of `count`."""
    told = {"target_where": str(made.target), "draft_where": str(made.draft)}
    base = TextPair("ssd", vocab=4, lookahead=2, fan_out=(1, 1, 1), top_p=0.9, **told)
    config = RunConfig(
        workload="text", temperature=1.0, top_p=0.9, backend="numpy", num_tokens=LENGTH,
        lookahead=2, prompt_ids=";".join([",".join(map(str, PROMPT))] * count), batch_size=40,
        seed=3, target=base.target_where, draft=base.draft_where, **flags,
    )  # fmt: skip
    return base, config
