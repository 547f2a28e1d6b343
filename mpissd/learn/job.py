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
from mpissd.engine.model.transformer.checkpoint import dequantize, quantize
from mpissd.engine.model.transformer.sources import origin_of
from mpissd.learn import export, states
from mpissd.learn.config import DistillConfig, Form
from mpissd.learn.evaluate import LOOKAHEADS, figures
from mpissd.learn.llama import angles, blocks_of, compiled, load
from mpissd.learn.pair import Losses, Pair
from mpissd.learn.sample import USER, Sampler, Samples, answered, blank, own
from mpissd.learn.shape import cut, draft_config, frequent_tokens, fresh, state_config, trained
from mpissd.learn.source import Openings, Source
from mpissd.learn.train import Group, Observer, Plan, learn

# Temperatures in equal shares. A small model's prompts at 1 are seldom what people ask.
WARMTHS = {"user": (0.5, 0.65, 0.8, 0.9), "answer": (1.0, 0.7, 0.0, 0.0)}
SAMPLING, EVALUATING, SAVING = 0.4, 0.2, 0.05  # largest shares of the whole command's time
HELD = 32  # of the first batch, one conversation in so many is held out for the curves
FEWEST = 1 / 256  # answered tokens of the sampled ones, below which a target does not end its turns
Log = Callable[[str], None]
Draft = Pair | states.StateDraft


class Distillation:
    """Drafts in the making, in one of the processes that make them."""

    def __init__(
        self,
        config: DistillConfig,
        source: Source,
        log: Log,
        group: Group,
        started: float | None = None,
    ) -> None:
        """Loads the target. started: of the command, in seconds of time.monotonic()."""
        self.config, self.source, self.log, self.group = config, source, log, group
        started = time.monotonic() if started is None else started
        self.deadline = started + config.seconds
        self.sampled_by = started + SAMPLING * config.seconds
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
        exams = (*source.exams.values(), *source.lessons.values())
        self.room = max(config.length, *(exam.longest(config.answer) for exam in exams), 1)
        farthest = self.room + max(LOOKAHEADS)
        self.table = angles(source.checkpoint.config, farthest, self.device)
        self.parts: list[Samples] = []
        log(f"{source.checkpoint.name} on {self.device}, PyTorch {torch.__version__}")

    def sample(self) -> None:
        """Has the target write conversations until the time for it is over, or answer lessons.

        Raises ConfigError if (nearly) nothing was answered.
        """
        if self.source.lessons:
            for lesson in self.source.lessons.values():
                mine = lesson.part(self.group.rank, self.group.size)
                self.parts.append(self._answered(self._sampler(), mine, self.sampled_by))
            self._count()
            return
        is_compiled = self.device.type == "cuda"
        blocks = compiled(self.blocks) if is_compiled else self.blocks
        sampler = Sampler(self.target, blocks, self.table, is_compiled)
        started = time.monotonic()
        written = self._sample(sampler, started)
        seconds = self.group.largest(time.monotonic() - started, self.device)
        self._count()
        tokens = self.group.add(torch.tensor(float(written), device=self.device))
        self.rate = round(float(tokens) / seconds)
        self.log(f"{self.rate} tokens/s together")
        if is_compiled:
            self.log(f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB at most")
            torch.cuda.empty_cache()

    def _sampler(self) -> Sampler:
        return Sampler(self.target, self.blocks, self.table, False)

    def _answered(self, sampler: Sampler, exam: Any, deadline: float) -> Samples:
        template, limit = self.source.template, self.config.answer
        return answered(sampler, exam, template, limit, self.room, deadline)

    def _sample(self, sampler: Sampler, started: float) -> int:
        """Samples batches; returns the tokens that the target wrote."""
        config, openings = self.config, Openings(self.source.tokenizer)
        num, last, written = self._rows(), 0.0, 0
        for number in range(config.batches):
            elapsed = time.monotonic() - started
            is_full = self._free() < 1.25 * self._bytes(num)
            is_late = elapsed + last > config.seconds_sampling
            is_late |= time.monotonic() + last > self.sampled_by
            if self.parts and (is_late or is_full):
                break
            part = self._batch(sampler, openings, number, num)
            if self.parts and part.tokens.shape[1] < config.length:  # cut at the deadline
                break
            self.parts.append(part)
            tokens = int(part.answered.sum())  # waits for the device
            last = time.monotonic() - started - elapsed
            each = max(0, part.tokens.shape[1] - len(self.source.template.before))
            written += num * each
            rate = num * each / last
            self.log(f"batch {number + 1}: {tokens / 1e6:.2f} M answered, {rate:.0f} tokens/s")
        return written

    def _count(self) -> None:
        """Holds some conversations out; adds up the samples of all processes: conversations,
        answered tokens, their counts."""
        num = len(self.parts[0].tokens)
        few = -(-num // HELD)
        self.held = self.parts[0].take(slice(0, few))
        self.parts[0] = self.parts[0].take(slice(few, num)) if num > 1 else self.held
        vocab = self.source.checkpoint.config.shape.vocab_size
        counts = torch.zeros(vocab, dtype=torch.int64, device=self.device)
        for part in self.parts:
            counts += torch.bincount(part.tokens[part.answered], minlength=vocab)
        self.counts = self.group.add(counts).cpu()
        sizes = [
            [len(part.tokens), int(part.answered.sum()), part.tokens.numel()] for part in self.parts
        ]
        sizes = self.group.add(torch.tensor(sizes, device=self.device).sum(0)).tolist()
        *self.sampled, tokens = sizes
        config, num_answered = self.config, self.sampled[1]
        if not num_answered or (not self.source.lessons and num_answered < FEWEST * tokens):
            if self.parts[0].tokens.shape[1] < config.length and not self.source.lessons:
                raise ConfigError(
                    f"seconds={config.seconds}: no answer was sampled in {SAMPLING:.0%} of that "
                    "time: allowed: more time, or fewer --sequences"
                )
            why = f"the target ended no user's message within {config.length} tokens"
            if num_answered:
                why = f"{num_answered} of {tokens} sampled tokens answer a message"
            raise ConfigError(
                f"length={config.length}: {why}: allowed: a greater length, or a chat model"
            )
        self.log(f"{num_answered / 1e6:.1f} M answered tokens")

    def _bytes(self, num: int) -> float:
        """Returns the device memory of a batch while it is sampled."""
        shape, size = self.source.checkpoint.config.shape, self.blocks.dtype.itemsize
        cache = 2 * shape.num_layers * shape.kv_width * self.config.length * size
        kept = self.config.length * (shape.hidden * size + 16)
        return float(num * (cache + kept + 8 * shape.vocab_size))

    def _free(self) -> float:
        """Returns the device memory that a batch may take, in bytes."""
        if self.device.type != "cuda":
            return float("inf")
        torch.cuda.empty_cache()
        return 0.95 * float(torch.cuda.mem_get_info()[0])

    def _rows(self) -> int:
        """Returns how many conversations are sampled at a time: fewer if memory is short."""
        return max(1, int(min(self.config.sequences, 0.7 * self._free() / self._bytes(1))))

    def _batch(self, sampler: Sampler, openings: Openings, number: int, num: int) -> Samples:
        """Returns a batch of conversations, most of which start with an opening."""
        choose = random.Random(f"{self.config.seed}, {self.group.rank}, {number}")
        template = self.source.template
        starts = [template.before + openings.draw(choose) for _ in range(num)]
        user, answer = (
            torch.tensor(choose.choices(WARMTHS[who], k=num), device=self.device)
            for who in ("user", "answer")
        )
        given = blank(starts, self.config.length, self.device)
        return sampler.write(
            given, template, USER, (user, answer), keep=True, deadline=self.sampled_by
        )

    def drafts(self) -> Iterator[Result]:
        """Trains, and yields each draft as it is ready to be saved."""
        config, folder = self.config, Path(self.config.out)
        wanted: list[tuple[str, Form | None]] = [(kind, None) for kind in config.kind_names]
        wanted = wanted or [("", form) for form in config.forms] or [("", None)]
        for number, (kind, form) in enumerate(wanted):
            name = kind or (form.name if form else "")
            plan = self._plan(len(wanted) - number)
            is_compiled = self.device.type == "cuda"
            learner: Losses | states.StateLosses
            if kind:
                learner = states.StateLosses(self.start_states(kind), config.heads, is_compiled)
                draft: Draft = learner.draft
                facts: dict[str, Any] = {"origin": f"a fresh {kind} draft", "kind": kind}
                facts |= {"head": "target", "steps_ahead": config.heads}
            else:
                draft = self.start(form)
                learner = Losses(draft, is_compiled)
                origin = "fresh layers" if form else f"the target's layers {config.layers}"
                facts = {"origin": origin, "head": config.head}
            place = folder / name if len(wanted) > 1 else folder
            result = Result(draft, place, {**self.facts(draft), **facts}, self.source, self.log)
            observer = Observer(result.point, result.try_save)
            if self.group.rank:
                observer = Observer(lambda point: None)
            made = learn(learner, self.parts, plan, observer, held=self.held, group=self.group)
            result.draft = made
            yield result

    def _plan(self, left: int) -> Plan:
        """Returns the plan of one of `left` trainings that share the rest of the time."""
        config, now = self.config, time.monotonic()
        evaluating = min(config.seconds_evaluating, EVALUATING * config.seconds)
        saving = SAVING * config.seconds
        until = now + (self.deadline - evaluating - saving - now) / left
        return Plan(
            config.seconds_training,
            until,
            config.steps,
            config.batch,
            config.learning_rate,
            config.seed,
            self.device.type == "cuda",
            config.optimizer,
            config.save_every,
            until + saving / (2 * left),
        )

    def _frequent(self) -> tuple[Any, Any]:
        """Returns the head's token ids, for NumPy and on the device."""
        ids = frequent_tokens(self.counts.numpy(), self.config.vocab, self.source.stop_ids)
        return ids, torch.from_numpy(np.asarray(ids, np.int64)).to(self.device)

    def start(self, form: Form | None) -> Pair:
        """Returns the pair with an untrained draft."""
        config, whole = self.config, self.source.checkpoint.config
        ids, head_ids = self._frequent()
        architecture = draft_config(whole, form or len(config.layer_numbers), len(ids))
        if form is None:
            draft = cut(self.target, config.layer_numbers, ids)
        else:
            draft = fresh(self.target, architecture, ids, config.seed)
        if config.head == "target":
            draft = draft._replace(head=self.target.head[head_ids].float())
        return Pair(self.target, draft, head_ids, self.blocks, architecture, self.table)

    def start_states(self, kind: str) -> states.StateDraft:
        """Returns an untrained draft over the most frequent tokens, whose head is the target's."""
        ids, head_ids = self._frequent()
        whole = self.source.checkpoint.config
        architecture = state_config(whole, kind, self.config.heads, len(ids))
        found = self.parts[0].states
        assert found is not None, "samples without states"
        scale = float(found.hidden[found.total != 0].float().square().mean().sqrt())
        draft = states.StateDraft(
            architecture,
            states.fresh(architecture, self.config.seed, scale),
            self.target,
            self.target.head[head_ids],
            head_ids,
            self.blocks,
            self.table,
        )
        return draft.mapped(lambda tensor: trained(tensor.to(self.device)))

    def facts(self, draft: Draft) -> dict[str, Any]:
        """Returns the facts of a draft's training for its report."""
        ids, gpu = draft.head_ids.cpu(), self.device.type == "cuda"
        return {
            "num_layers": draft.config.shape.num_layers,
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
        sampler, config, template = self._sampler(), self.config, self.source.template
        sets: list[Any] = [*self.source.exams.items()]
        for name, exam in [*sets, *([("own", None)] if config.held_out else [])]:
            half = (time.monotonic() + deadline) / 2
            if exam is not None:
                samples = self._answered(sampler, exam, half)
            else:
                length = min(config.length, self.room)
                samples = own(sampler, config.held_out, length, template, config.answer, half)
            if bool(samples.answered.any()):
                yield name, samples
            else:
                self.log(f"{name}: no time for an answer")


class Result:
    """One draft, its training's curves, its report, and the folder that they are written to."""

    def __init__(
        self, draft: Draft, folder: Path, facts: dict[str, Any], source: Source, log: Log
    ) -> None:
        self.draft, self.folder, self.log = draft, folder, log
        own = source.checkpoint
        self.about = {**origin_of(own).to_dict(), "head": facts["head"]}
        self.report = {"target": own.name, "sha256": own.sha256, **facts}
        self.curves: list[dict[str, Any]] = []

    def point(self, point: dict[str, Any]) -> None:
        """Keeps a point of the training's curves, and shows some of them."""
        self.curves.append(point)
        if len(self.curves) % 10 == 1 or "stopped" in point:
            self.log(f"trained {point}")

    def try_save(self, draft: Draft) -> bool:
        """Saves the draft so far; logs one line if the files cannot be written."""
        try:
            self.log(self.save(draft))
        except OSError as error:
            why = error.strerror or error
            self.log(f"{self.folder}: {why}: not saved; the files of before are kept")
            return False
        return True

    def save(self, draft: Draft) -> str:
        """Writes the quantised draft, its curves and a report; returns a summary line.

        An OSError leaves the folder's files as they were.
        """
        arrays = {name: tensor.float().cpu().numpy() for name, tensor in draft.named().items()}
        if self.about["head"] == "target":
            arrays.pop("lm_head.weight", None)
        ids = draft.head_ids.cpu().numpy().astype(np.int32)
        with export.whole_folder(self.folder) as folder:
            size = export.save(folder, draft.config, export.quantized(arrays, ids), self.about)
            export.write_lines(folder / "curves.jsonl", self.curves)
            self.report |= {
                "parameters": sum(a.size for a in arrays.values()) / 1e6,
                "bytes": size,
                "steps": max([0, *(point.get("step", 0) for point in self.curves)]),
            }
            self._write_report(folder)
        return f"wrote {self.folder}: {size / 1e6:.2f} MB of weights"

    def _write_report(self, folder: Path) -> None:
        export.write_json(folder / "report.json", self.report)
        export.write_card(folder, self.report)

    def evaluate(self, answers: Iterator[tuple[str, Samples]], deadline: float) -> None:
        """Judges the draft as it is stored on held-out answers; completes the report.

        answers: (name, samples) each; those that are reached before the deadline.
        """
        stored, found = self.draft.mapped(rounded), dict[str, Any]()
        self.report["evaluation"] = found
        for name, asked in answers:
            found[name] = figures(stored, asked, deadline)
            with export.whole_folder(self.folder) as folder:
                self._write_report(folder)
            self.log(f"{name}: {found[name]}")
            if time.monotonic() > deadline:
                break


def rounded(tensor: Any) -> Any:
    """Returns a matrix rounded as quantising rounds it; a vector unchanged."""
    if tensor.ndim == 1:
        return tensor
    stored = dequantize(*quantize(tensor.float().cpu().numpy()))
    return torch.from_numpy(stored).to(tensor.device)
