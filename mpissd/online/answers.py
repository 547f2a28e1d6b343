"""The target's answers to a stage's prompts at temperature 0, with its distributions.

At temperature 0 what the target says does not depend on the draft. So its answers and
distributions are computed once, and any learning schedule is replayed over them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpissd.common.errors import ConfigError
from mpissd.common.presets import files_of
from mpissd.engine.model.transformer.sources import open_checkpoint
from mpissd.engine.workload.text.tokenizer import load_tokenizer
from mpissd.learn import exam
from mpissd.learn.asked import Exam, read_exams
from mpissd.learn.llama import angles, blocks_of, compiled, load
from mpissd.learn.mould import mould_of
from mpissd.learn.sample import Sampler, Samples
from mpissd.online.config import OnlineConfig
from mpissd.online.examples import KEPT, Example
from mpissd.online.own import OwnPrompts

AT_ONCE = {"cpu": 4, "cuda": 32}  # sequences in a forward
Log = Callable[[str], None]


class Answers:
    """The target, and what it answers."""

    def __init__(self, config: OnlineConfig, device: str, log: Log) -> None:
        self.config, self.device, self.log = config, device, log
        where = files_of(config.target)
        if where is None:
            raise ConfigError(f"target={config.target}: allowed: a model with weights")
        self.checkpoint = open_checkpoint(config.target)
        self.tokenizer = load_tokenizer(str(where))
        self.mould = mould_of(self.tokenizer)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model = load(self.checkpoint, device, dtype)
        self.blocks = blocks_of(self.checkpoint.config, dtype)
        self.room = 1024
        self.table = angles(self.checkpoint.config, self.room, device)

    def stage(self, name: str, source: str) -> list[Example]:
        """Returns the examples of a stage, from ANSWERS/NAME.npz where they were stored before."""
        config = self.config
        file = Path(config.answers or config.out) / f"{name}.npz"
        if not file.exists():
            samples = self._samples(source)
            self.log(f"{name}: {len(samples.tokens)} answers, {int(samples.answered.sum())} tokens")
            _store(file, self._examples(samples))
        return _stored(file)[: config.prompts]

    def _samples(self, source: str) -> Samples:
        config = self.config
        blocks = compiled(self.blocks) if self.device == "cuda" else self.blocks
        sampler = Sampler(self.model, blocks, self.table, self.device == "cuda")
        if source.startswith("own:"):
            own = OwnPrompts(sampler, self.tokenizer, self.mould, config.seed)
            count, kind = min(config.own, config.prompts), source.removeprefix("own:")
            return own.answered(kind, count, config.answer, self.room)
        vocab = self.checkpoint.config.shape.vocab_size
        (asked,) = read_exams(source, self.tokenizer, vocab).values()
        answers = None if asked.answers is None else asked.answers[: config.prompts]
        asked = Exam(asked.prompts[: config.prompts], answers)
        return exam.answered(sampler, asked, self.mould, config.answer, self.room)

    def _examples(self, samples: Samples) -> list[Example]:
        found: list[Example] = []
        size = AT_ONCE[self.device]
        for start in range(0, len(samples.tokens), size):
            part = slice(start, start + size)
            found += self._read(samples.tokens[part], samples.answered[part])
            if start % (16 * size) == 0:
                self.log(f"   {start} of {len(samples.tokens)}")
        return found

    def _read(self, tokens: Any, answered: Any) -> list[Example]:
        """Returns examples of sequences [n, length] and their answered positions, bool."""
        before = answered[:, 1:]
        table = [part[: tokens.shape[1]] for part in self.table]
        with torch.no_grad():
            hidden = self.blocks.hidden(self.model, tokens.long(), *table)[:, :-1][before]
            logits = self.blocks.product(hidden, self.model.head).float()
            best = logits.log_softmax(-1).topk(KEPT)
        sizes = before.sum(-1).tolist()
        ids = best.indices.int().cpu().split(sizes)
        logs = best.values.half().cpu().split(sizes)
        found = []
        for row, each in enumerate(before):
            at = each.nonzero()[:, 0].int().cpu().numpy()
            if len(at):
                own = tokens[row, : at[-1] + 2].int().cpu().numpy()
                found.append(Example(own, at, ids[row].numpy(), logs[row].numpy()))
        return found


def _store(file: Path, examples: list[Example]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    parts = {name: [getattr(one, name) for one in examples] for name in _FIELDS}
    arrays: dict[str, Any] = {name: np.concatenate(values) for name, values in parts.items()}
    sizes = np.array([[len(one.tokens), len(one.at)] for one in examples])
    np.savez(file, sizes=sizes, **arrays)


def _stored(file: Path) -> list[Example]:
    with np.load(file) as found:
        arrays, sizes = {name: found[name] for name in _FIELDS}, found["sizes"]
    tokens, rows = (np.cumsum(sizes[:, column])[:-1] for column in range(2))
    parts = [np.split(arrays[n], tokens if n == "tokens" else rows) for n in _FIELDS]
    return [Example(*each) for each in zip(*parts, strict=True)]


_FIELDS = ("tokens", "at", "ids", "logs")
