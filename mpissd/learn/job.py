"""A distillation: the target's samples, then one draft or several that are trained on them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpissd.common.errors import ConfigError
from mpissd.learn import exam
from mpissd.learn.config import DistillConfig
from mpissd.learn.form import Form
from mpissd.learn.group import Group
from mpissd.learn.llama import angles, blocks_of, compiled, load, mapped
from mpissd.learn.openings import Openings
from mpissd.learn.pair import Pair
from mpissd.learn.result import SAVING_S, Result
from mpissd.learn.rounds import LOOKAHEADS
from mpissd.learn.sample import USER, Sampler, Samples, blank
from mpissd.learn.shape import cut, draft_config, frequent_tokens, fresh, trained
from mpissd.learn.source import Source
from mpissd.learn.state_job import made
from mpissd.learn.train import Plan, Told, train

# Temperatures in equal shares. A small model's prompts at 1 are seldom what people ask.
WARMTHS = {"user": (0.5, 0.65, 0.8, 0.9), "answer": (1.0, 0.7, 0.0, 0.0)}
HELD = 32  # of the first batch, one conversation in so many is held out for the curves
Ids = Any


class Distillation:
    """Drafts in the making, in one of the processes that make them."""

    def __init__(
        self, config: DistillConfig, source: Source, log: Callable[[str], None], group: Group
    ) -> None:
        self.config, self.source, self.log, self.group = config, source, log, group
        self.deadline = time.monotonic() + config.seconds
        self.rate: int | None = None  # tokens a second that all processes sampled
        gpu = config.device != "cpu" and torch.cuda.is_available()
        self.device = torch.device("cuda", group.rank) if gpu else torch.device("cpu")
        if not gpu and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // group.size))
        torch.manual_seed(config.seed + group.rank)
        torch.set_float32_matmul_precision("high")
        torch._dynamo.config.cache_size_limit = 64
        dtype = torch.bfloat16 if gpu else torch.float32
        self.target = load(source.checkpoint, self.device, dtype)
        self.blocks = blocks_of(source.checkpoint.config, dtype)
        self.length = config.length_of(group.rank)
        every = (*source.exams.values(), *source.lessons.values())
        longest = [e.longest(config.answer) for e in every]
        self.room = max(config.length_of(0), self.length, *longest, 1)
        farthest = self.room + max(LOOKAHEADS)
        self.table = angles(source.checkpoint.config, farthest, self.device)
        log(f"{source.checkpoint.name} on {self.device}, PyTorch {torch.__version__}")

    def sample(self) -> None:
        """Has the target write conversations until the time for it is over, or reads lessons."""
        if self.source.lessons:
            self._read_lessons()
            return
        config, is_compiled = self.config, self.device.type == "cuda"
        blocks = compiled(self.blocks) if is_compiled else self.blocks
        sampler = Sampler(self.target, blocks, self.table, is_compiled)
        self.openings = Openings(self.source.tokenizer, config.task)
        self.parts: list[Samples] = []
        started, num, last = time.monotonic(), self._rows(), 0.0
        for number in range(config.batches):
            elapsed = time.monotonic() - started
            is_full = self._free() < 1.25 * self._bytes(num)
            if self.parts and (elapsed + last > config.seconds_sampling or is_full):
                break
            self.parts.append(self._batch(sampler, number, num))
            answered = int(self.parts[-1].answered.sum())  # waits for the device
            last = time.monotonic() - started - elapsed
            rate = num * self._written / last
            self.log(f"batch {number + 1}: {answered / 1e6:.2f} M answered, {rate:.0f} tokens/s")
        written = sum(len(part.tokens) for part in self.parts) * self._written
        seconds = self.group.largest(time.monotonic() - started, self.device)
        self._hold_out()
        self._count()
        tokens = self.group.add(torch.tensor(float(written), device=self.device))
        self.rate = round(float(tokens) / seconds)
        self.log(f"{self.rate} tokens/s together")
        if is_compiled:
            self.log(f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB at most")
            torch.cuda.empty_cache()

    def _read_lessons(self) -> None:
        """Takes people's prompts and the target's answers to them; each process a share of them."""
        sampler = Sampler(self.target, self.blocks, self.table, False)
        config, group = self.config, self.group
        self.parts = []
        for lesson in self.source.lessons.values():
            mine = lesson.part(group.rank, group.size)
            room = self.room
            self.parts.append(exam.answered(sampler, mine, self.source.mould, config.answer, room))
        self._hold_out()
        self._count()

    @property
    def _written(self) -> int:
        """Tokens of a conversation behind what opens each of them."""
        return self.length - len(self.source.mould.before)

    def _hold_out(self) -> None:
        """Takes some of the first batch's conversations for the curves."""
        num = len(self.parts[0].tokens)
        few = -(-num // HELD)
        self.held = self.parts[0].take(slice(0, few))
        self.parts[0] = self.parts[0].take(slice(few, num)) if num > 1 else self.held

    def _count(self) -> None:
        """Adds up what all processes sampled: conversations, answered tokens, their counts."""
        vocab = self.source.checkpoint.config.shape.vocab_size
        counts = torch.zeros(vocab, dtype=torch.int64, device=self.device)
        for part in self.parts:
            counts += torch.bincount(part.tokens[part.answered], minlength=vocab)
        self.counts = self.group.add(counts).cpu()
        told = [[len(part.tokens), int(part.answered.sum())] for part in self.parts]
        self.sampled = self.group.add(torch.tensor(told, device=self.device).sum(0)).tolist()
        if not self.sampled[1]:
            why = f"the target ended no user's message within {self.length} tokens"
            raise ConfigError(f"length={self.config.length}: {why}: allowed: a greater length")
        self.log(f"{self.sampled[1] / 1e6:.1f} M answered tokens")

    def _bytes(self, num: int) -> float:
        """Returns the device memory of a batch while it is sampled."""
        shape, size = self.source.checkpoint.config.shape, self.blocks.dtype.itemsize
        cache = 2 * shape.num_layers * shape.kv_width * self.length * size
        states = self.length * (shape.hidden * size + 16)
        return float(num * (cache + states + 8 * shape.vocab_size))

    def _free(self) -> float:
        """Returns the device memory that a batch may take, in bytes."""
        if self.device.type != "cuda":
            return float("inf")
        torch.cuda.empty_cache()
        return 0.95 * float(torch.cuda.mem_get_info()[0])

    def _rows(self) -> int:
        """Returns how many conversations are sampled at a time: fewer where memory is short."""
        num = self.config.scaled(self.config.sequences, self.group.rank)
        return max(1, int(min(num, 0.7 * self._free() / self._bytes(1))))

    def _batch(self, sampler: Sampler, number: int, num: int) -> Samples:
        """Returns a batch of conversations, most of which start with an opening."""
        choose = random.Random(f"{self.config.seed}, {self.group.rank}, {number}")
        before = self.source.mould.before
        starts = [before + self.openings.draw(choose) for _ in range(num)]
        warmth = [
            torch.tensor(choose.choices(WARMTHS[who], k=num), device=self.device)
            for who in ("user", "answer")
        ]
        given = blank(starts, self.length, self.device)
        return sampler.write(given, self.source.mould, USER, (warmth[0], warmth[1]), keep=True)

    def drafts(self) -> Iterator[Result]:
        """Trains, and yields each draft as it is ready to be saved."""
        folder, kinds = Path(self.config.out), self.config.kind_names
        for kind in kinds:
            yield made(self, kind, folder / kind if len(kinds) > 1 else folder, self._plan())
        forms = () if kinds else self.config.forms or (None,)
        for form in forms:
            yield self._made(folder / form.name if len(forms) > 1 and form else folder, form)

    def _made(self, folder: Path, form: Form | None) -> Result:
        pair, architecture = self._start(form)
        facts = self.facts(pair.head_ids, len(pair.draft.layers), self._origin(form))
        result = Result(self.config, self.source, pair, architecture, folder, facts)
        plan, log = self._plan(), self.log
        if self.group.rank:
            told = Told(lambda point: None)
        else:
            told = Told(lambda p: result.point(p, log), lambda d: result.try_save(d, log))
        draft = train(pair, self.parts, plan, told, held=self.held, group=self.group)
        return result.trained(draft)

    def _plan(self) -> Plan:
        config = self.config
        return Plan(
            config.seconds_training,
            self.deadline - config.seconds_evaluating - SAVING_S,
            config.steps,
            config.scaled(config.batch, self.group.rank),
            config.learning_rate,
            config.seed,
            self.device.type == "cuda",
            config.optimizer,
            config.on_policy,
            config.save_every,
        )

    def _start(self, form: Form | None) -> tuple[Pair, Any]:
        """Returns the pair with an untrained draft, and the draft's architecture."""
        config, source = self.config, self.source
        own = source.checkpoint.config
        if config.start:
            ids, architecture = source.start.head_ids(), source.start.config
            draft = mapped(load(source.start, self.device, torch.float32), trained)
            draft = draft._replace(embedding=self.target.embedding)
        else:
            ids = frequent_tokens(self.counts.numpy(), config.vocab, self.source.stop_ids)
            form_or_layers = form or len(config.layer_numbers)
            architecture = draft_config(own, form_or_layers, len(ids))
            if form is None:
                draft = cut(self.target, config.layer_numbers, ids)
            else:
                draft = fresh(self.target, architecture, ids, config.seed)
        head_ids = torch.from_numpy(np.asarray(ids, np.int64)).to(self.device)
        if config.head == "target":  # an earlier draft may have come with a head of its own
            draft = draft._replace(head=self.target.head[head_ids].float())
        draft_blocks = blocks_of(architecture, self.blocks.dtype)
        pair = Pair(self.target, draft, head_ids, self.blocks, draft_blocks, self.table)
        return pair, architecture

    def _origin(self, form: Form | None) -> str:
        """Returns what the draft started as, in words."""
        if form is not None:
            return "fresh layers"
        return (
            "an earlier draft" if self.config.start else f"the target's layers {self.config.layers}"
        )

    def facts(self, head_ids: Any, num_layers: int, origin: str) -> dict[str, Any]:
        """Returns what a draft's report says of its making."""
        ids, gpu = head_ids.cpu(), self.device.type == "cuda"
        return {
            "origin": origin,
            "head": self.config.head,
            "num_layers": num_layers,
            "head_vocab": len(ids),
            "coverage": round(float(self.counts[ids].sum() / self.counts.sum()), 5),
            "sequences": self.sampled[0],
            "answered": self.sampled[1] / 1e6,
            "sampling_tokens_per_s": self.rate,
            "processes": self.group.size,
            "optimizer": self.config.optimizer,
            "on_policy": self.config.on_policy,
            "task": self.config.task,
            "on": self.config.on,
            "answer": self.config.answer,
            "seed": self.config.seed,
            "device": torch.cuda.get_device_name() if gpu else "cpu",
        }

    def answers(self) -> Iterator[tuple[str, Samples]]:
        """Yields each set of prompts with the target's answers at temperature 0."""
        sampler = Sampler(self.target, self.blocks, self.table, False)
        config, mould = self.config, self.source.mould
        for name, asked in self.source.exams.items():
            yield name, exam.answered(sampler, asked, mould, config.answer, self.room)
        if not config.held_out:
            return
        length = min(config.length_of(0), self.room)
        yield "own", exam.own(sampler, config.held_out, length, mould, config.answer)
