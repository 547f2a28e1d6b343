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
from mpissd.learn import exams
from mpissd.learn.config import DistillConfig, Form
from mpissd.learn.evaluate import LOOKAHEADS, chain_summary
from mpissd.learn.llama import angles, blocks_of, compiled, load, mapped
from mpissd.learn.openings import Openings
from mpissd.learn.pair import Pair
from mpissd.learn.result import Result, rounded
from mpissd.learn.sample import USER, Sampler, Samples, blank
from mpissd.learn.shape import cut, draft_config, frequent_tokens, fresh, state_config, trained
from mpissd.learn.source import Source
from mpissd.learn.states import StateDraft, StateLosses
from mpissd.learn.states import fresh as fresh_states
from mpissd.learn.train import Group, Observer, Plan, learn, train

# Temperatures in equal shares. A small model's prompts at 1 are seldom what people ask.
WARMTHS = {"user": (0.5, 0.65, 0.8, 0.9), "answer": (1.0, 0.7, 0.0, 0.0)}
SAMPLING, EVALUATING, SAVING = 0.4, 0.2, 0.05  # largest shares of the whole command's time
HELD = 32  # of the first batch, one conversation in so many is held out for the curves
Ids = Any


class Distillation:
    """Drafts in the making, in one of the processes that make them."""

    def __init__(
        self,
        config: DistillConfig,
        source: Source,
        log: Callable[[str], None],
        group: Group,
        started: float | None = None,
    ) -> None:
        """Loads the target. started: of the command, in seconds of time.monotonic()."""
        self.config, self.source, self.log, self.group = config, source, log, group
        self.started = time.monotonic() if started is None else started
        self.deadline = self.started + config.seconds
        self.sampled_by = self.started + SAMPLING * config.seconds
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
        self.openings = Openings(self.source.tokenizer)
        self.parts: list[Samples] = []
        started, num, last = time.monotonic(), self._rows(), 0.0
        for number in range(config.batches):
            elapsed = time.monotonic() - started
            is_full = self._free() < 1.25 * self._bytes(num)
            is_late = elapsed + last > config.seconds_sampling
            is_late |= time.monotonic() + last > self.sampled_by
            if self.parts and (is_late or is_full):
                break
            part = self._batch(sampler, number, num)
            if self.parts and part.tokens.shape[1] < self.length:  # cut at the deadline
                break
            self.parts.append(part)
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
            self.parts.append(
                exams.answered(
                    sampler, mine, self.source.template, config.answer, room, self.sampled_by
                )
            )
        self._hold_out()
        self._count()

    @property
    def _written(self) -> int:
        """Tokens of a conversation after its opening."""
        return int(self.parts[0].tokens.shape[1]) - len(self.source.template.before)

    def _hold_out(self) -> None:
        """Takes some of the first batch's conversations for the curves."""
        num = len(self.parts[0].tokens)
        few = -(-num // HELD)
        self.held = self.parts[0].take(slice(0, few))
        self.parts[0] = self.parts[0].take(slice(few, num)) if num > 1 else self.held

    def _count(self) -> None:
        """Adds up the samples of all processes: conversations, answered tokens, their counts."""
        vocab = self.source.checkpoint.config.shape.vocab_size
        counts = torch.zeros(vocab, dtype=torch.int64, device=self.device)
        for part in self.parts:
            counts += torch.bincount(part.tokens[part.answered], minlength=vocab)
        self.counts = self.group.add(counts).cpu()
        sizes = [[len(part.tokens), int(part.answered.sum())] for part in self.parts]
        self.sampled = self.group.add(torch.tensor(sizes, device=self.device).sum(0)).tolist()
        if not self.sampled[1]:
            if self.parts[0].tokens.shape[1] < self.length and not self.source.lessons:
                raise ConfigError(
                    f"seconds={self.config.seconds}: no answer was sampled in {SAMPLING:.0%} of "
                    "that time: allowed: more time, or fewer --sequences"
                )
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
        """Returns how many conversations are sampled at a time: fewer if memory is short."""
        num = self.config.scaled(self.config.sequences, self.group.rank)
        return max(1, int(min(num, 0.7 * self._free() / self._bytes(1))))

    def _batch(self, sampler: Sampler, number: int, num: int) -> Samples:
        """Returns a batch of conversations, most of which start with an opening."""
        choose = random.Random(f"{self.config.seed}, {self.group.rank}, {number}")
        before = self.source.template.before
        starts = [before + self.openings.draw(choose) for _ in range(num)]
        warmth = [
            torch.tensor(choose.choices(WARMTHS[who], k=num), device=self.device)
            for who in ("user", "answer")
        ]
        given = blank(starts, self.length, self.device)
        return sampler.write(
            given,
            self.source.template,
            USER,
            (warmth[0], warmth[1]),
            keep=True,
            deadline=self.sampled_by,
        )

    def drafts(self) -> Iterator[Result]:
        """Trains, and yields each draft as it is ready to be saved."""
        folder, kinds = Path(self.config.out), self.config.kind_names
        for number, kind in enumerate(kinds):
            place = folder / kind if len(kinds) > 1 else folder
            yield self._state_draft(kind, place, self._plan(len(kinds) - number))
        forms = () if kinds else self.config.forms or (None,)
        for number, form in enumerate(forms):
            place = folder / form.name if len(forms) > 1 and form else folder
            yield self._token_draft(form, place, self._plan(len(forms) - number))

    def _token_draft(self, form: Form | None, folder: Path, plan: Plan) -> Result:
        pair, architecture = self._start(form)
        origin = (
            "an earlier draft" if self.config.start else f"the target's layers {self.config.layers}"
        )
        facts = self.facts(
            pair.head_ids, len(pair.draft.layers), "fresh layers" if form else origin
        )
        result = Result(self.config, self.source, pair, architecture, folder, facts)
        observer = self._observer(result)
        draft = train(pair, self.parts, plan, observer, held=self.held, group=self.group)
        return result.trained(draft)

    def _state_draft(self, kind: str, folder: Path, plan: Plan) -> Result:
        """Trains one of heads.STATE_KINDS; all processes do so together."""
        draft = self._start_states(kind)
        facts = self.facts(draft.head_ids, draft.config.shape.num_layers, f"a fresh {kind} draft")
        facts |= {"kind": kind, "head": "target", "steps_ahead": self.config.heads}
        result = StateResult(self.config, self.source, draft, draft.config, folder, facts)
        losses = StateLosses(draft, self.config.heads, self.device.type == "cuda")
        observer = self._observer(result)
        return result.trained(
            learn(losses, self.parts, plan, observer, held=self.held, group=self.group)
        )

    def _observer(self, result: Result) -> Observer:
        """Returns the observer that records a training on rank 0, and ignores it elsewhere."""
        if self.group.rank:
            return Observer(lambda point: None)
        log = self.log
        return Observer(lambda p: result.point(p, log), lambda draft: result.try_save(draft, log))

    def _plan(self, left: int) -> Plan:
        """Returns the plan of one of `left` trainings that share the rest of the time."""
        config, now = self.config, time.monotonic()
        evaluating = min(config.seconds_evaluating, EVALUATING * config.seconds)
        spare = self.deadline - evaluating - SAVING * config.seconds - now
        return Plan(
            config.seconds_training,
            now + spare / left,
            config.steps,
            config.scaled(config.batch, self.group.rank),
            config.learning_rate,
            config.seed,
            self.device.type == "cuda",
            config.optimizer,
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
        if config.head == "target":  # an earlier draft may have its own head
            draft = draft._replace(head=self.target.head[head_ids].float())
        draft_blocks = blocks_of(architecture, self.blocks.dtype)
        pair = Pair(self.target, draft, head_ids, self.blocks, draft_blocks, self.table)
        return pair, architecture

    def _start_states(self, kind: str) -> StateDraft:
        """Returns an untrained draft over the most frequent tokens, whose head is the target's."""
        config, source = self.config, self.source
        ids = frequent_tokens(self.counts.numpy(), config.vocab, source.stop_ids)
        architecture = state_config(source.checkpoint.config, kind, config.heads, len(ids))
        head_ids = torch.from_numpy(np.asarray(ids, np.int64)).to(self.device)
        states = self.parts[0].states
        assert states is not None, "samples without states"
        scale = float(states.hidden[states.total != 0].float().square().mean().sqrt())
        draft = StateDraft(
            architecture,
            fresh_states(architecture, config.seed, scale),
            self.target,
            self.target.head[head_ids],
            head_ids,
            self.blocks,
            self.table,
        )
        return draft.mapped(lambda tensor: trained(tensor.to(self.device)))

    def facts(self, head_ids: Any, num_layers: int, origin: str) -> dict[str, Any]:
        """Returns the facts of a draft's training for its report."""
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
            "on": self.config.on,
            "answer": self.config.answer,
            "seed": self.config.seed,
            "device": torch.cuda.get_device_name() if gpu else "cpu",
        }

    def answers(self, deadline: float) -> Iterator[tuple[str, Samples]]:
        """Yields each set of prompts with the target's answers at temperature 0.

        Writing the answers of a set takes half of the time that is left at most.
        """
        sampler = Sampler(self.target, self.blocks, self.table, False)
        config, template = self.config, self.source.template

        def half() -> float:
            return (time.monotonic() + deadline) / 2

        def sets() -> Iterator[tuple[str, Samples]]:
            for name, asked in self.source.exams.items():
                found = exams.answered(sampler, asked, template, config.answer, self.room, half())
                yield name, found
            if config.held_out:
                length = min(config.length_of(0), self.room)
                yield (
                    "own",
                    exams.own(sampler, config.held_out, length, template, config.answer, half()),
                )

        for name, samples in sets():
            if bool(samples.answered.any()):
                yield name, samples
            else:
                self.log(f"{name}: no time for an answer")


class StateResult(Result):
    """A draft that reads hidden states, its curves and its folder."""

    @property
    def draft(self) -> StateDraft:
        """The draft as it was trained."""
        draft: StateDraft = self.pair
        return draft

    def arrays(self, draft: StateDraft) -> dict[str, Any]:
        return {name: w.float().cpu().numpy() for name, w in draft.weights.items()}

    def trained(self, draft: StateDraft) -> StateResult:
        self.pair = draft
        return self

    def rounded(self) -> StateDraft:
        return self.draft.mapped(rounded)

    def figures(self, pair: Any, asked: Samples, deadline: float) -> dict[str, Any]:
        config = self.architecture
        steps = config.shape.num_layers if config.kind == "medusa" else max(LOOKAHEADS)
        return chain_summary(pair, asked, steps, deadline)
