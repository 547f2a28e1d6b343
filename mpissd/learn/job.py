"""A distillation: samples the target, then trains one draft or several on the samples."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpissd.common.errors import ConfigError
from mpissd.engine.model.transformer.checkpoint import MASKS, dequantize, quantize
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.sources import known_ids, origin_of
from mpissd.learn import export
from mpissd.learn.config import DistillConfig
from mpissd.learn.draft import (
    Draft,
    ModelDraft,
    StateDraft,
    architectures,
    continued,
    first_masks,
    frequent_tokens,
    fresh_layers,
    fresh_states,
    started,
)
from mpissd.learn.evaluate import LOOKAHEADS, figures
from mpissd.learn.llama import angles, blocks_of, compiled, load, trained
from mpissd.learn.sample import ANSWER, USER, Sampler, Samples, blank, only_first
from mpissd.learn.source import Inputs, Openings, Prompts
from mpissd.learn.train import ProcessGroup, learn

# Sampling temperatures by who writes, used equally often; at 1 small models write odd prompts.
WARMTHS = {"user": (0.5, 0.65, 0.8, 0.9), "answer": (1.0, 0.7, 0.0, 0.0)}
OWN_WARMTH = 0.7  # of the users' messages that the target writes for an evaluation
SAMPLING = 0.4  # largest share of the command's time for samples
EVALUATING = 0.2  # largest share of the command's time for a draft's evaluation
SAVING = 0.05
LOGITS = 1 << 21  # most logits of a sampling step on a CPU, so that a step is short
FEWEST = 1 / 64  # With a smaller share of answer tokens in the samples, training is refused.
Log = Callable[[str], None]


class Distillation:
    """One of the processes that together sample a target and train drafts on the samples."""

    def __init__(
        self, config: DistillConfig, source: Inputs, log: Log, group: ProcessGroup, begun: float
    ) -> None:
        """Loads the target. source: the opened inputs. log: prints a line. group: the processes
        that share the work. begun: when the command began, in seconds of time.monotonic()."""
        self.config = config
        self.source = source
        self.log = log
        self.group = group
        self.deadline = begun + config.seconds
        self.sampled_by = begun + SAMPLING * config.seconds
        self.rate: int | None = None  # tokens a second that all processes together sampled
        self.on_gpu = config.device != "cpu" and torch.cuda.is_available()
        self.device = torch.device("cuda", group.rank) if self.on_gpu else torch.device("cpu")
        if not self.on_gpu and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // group.size))
        torch.manual_seed(config.seed + group.rank)
        torch.set_float32_matmul_precision("high")
        torch._dynamo.config.cache_size_limit = 64
        checkpoint = source.checkpoint
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.target = load(checkpoint, self.device, dtype)
        self.blocks = blocks_of(checkpoint.config, dtype)
        exams = (*source.exams.values(), *source.training.values())
        prompts = max((len(prompt) for exam in exams for prompt in exam), default=0)
        farthest = max(config.length, prompts + config.answer)
        farthest += max(*LOOKAHEADS, config.parallel)
        self.table = angles(checkpoint.config, farthest, self.device)
        self.parts: list[Samples] = []
        log(f"{checkpoint.name} on {self.device}, PyTorch {torch.__version__}")

    def run(self) -> int:
        """Samples, trains, saves and evaluates; only the first process saves and evaluates. Returns
        1 if the disk or the device fails."""
        self._sample()
        code = 0
        for result in self._drafts():
            if self.group.rank:
                continue
            if not result.try_save(result.draft):
                code = 1
                continue
            deadline = min(self.deadline, time.monotonic() + self.config.seconds_evaluating)
            try:
                result.evaluate(self._answers(deadline), deadline)
            except (RuntimeError, OSError) as error:
                self.log(f"evaluation stopped: {error}")
                code = 1
        return code

    def _sample(self) -> None:
        """Collects samples: the target writes conversations for some time, or answers prompts."""
        if self.source.training:
            for prompts in self.source.training.values():
                # A process takes its share of the prompts, or all if processes outnumber them.
                if len(prompts) >= self.group.size:
                    prompts = prompts[self.group.rank :: self.group.size]
                self.parts.append(self._answered(prompts, self.sampled_by))
            self._count()
            return
        config = self.config
        template = self.source.template
        begun = time.monotonic()
        openings = Openings(self.source.tokenizer)
        blocks = compiled(self.blocks) if self.on_gpu else self.blocks
        sampler = Sampler(self.target, blocks, self.table, self.on_gpu)
        shape = self.source.checkpoint.config.shape
        size = self.blocks.dtype.itemsize
        # Bytes of device memory for sampling one conversation: KV cache, kept results, logits.
        cache = 2 * shape.num_layers * shape.kv_width * config.length * size
        item = cache + config.length * (shape.hidden * size + 16) + 8 * shape.vocab_size
        room = 0.7 * self._free() / item if self.on_gpu else LOGITS // shape.vocab_size
        num = max(1, int(min(config.sequences, room)))
        last = 0.0
        written = 0
        for number in range(config.batches):
            elapsed = time.monotonic() - begun
            is_full = self._free() < 1.25 * num * item
            is_late = elapsed + last > config.seconds_sampling
            is_late |= time.monotonic() + last > self.sampled_by
            if self.parts and (is_late or is_full):
                break
            choose = random.Random(f"{config.seed}, {self.group.rank}, {number}")
            starts = [template.before + openings.draw(choose) for _ in range(num)]
            user, answer = (
                torch.tensor(choose.choices(WARMTHS[who], k=num), device=self.device)
                for who in ("user", "answer")
            )
            given = blank(starts, config.length, self.device)
            part = sampler.write(
                given, template, USER, (user, answer), keep=True, deadline=self.sampled_by
            )
            if self.parts and part.tokens.shape[1] < config.length:  # cut at the deadline
                break
            self.parts.append(part)
            tokens = int(part.answered.sum())  # waits for the device
            last = time.monotonic() - begun - elapsed
            new = num * max(0, part.tokens.shape[1] - len(template.before))
            written += new
            self.log(f"batch {number + 1}: {tokens:,} answered, {new / last:.0f} tokens/s")
        seconds = self.group.largest(time.monotonic() - begun, self.device)
        self._count()
        total = self.group.add(torch.tensor(float(written), device=self.device))
        self.rate = round(float(total) / seconds)
        self.log(f"{self.rate} tokens/s together")
        if self.on_gpu:
            self.log(f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB at most")
            torch.cuda.empty_cache()

    def _free(self) -> float:
        """Returns the bytes of device memory that a batch may use."""
        if not self.on_gpu:
            return float("inf")
        torch.cuda.empty_cache()
        return 0.95 * float(torch.cuda.mem_get_info()[0])

    def _count(self) -> None:
        """Counts the conversations of all processes, and the tokens in them that answer a message.
        Raises ConfigError if too few tokens are answers."""
        config = self.config
        vocab = self.source.checkpoint.config.shape.vocab_size
        counts = torch.zeros(vocab, dtype=torch.int64, device=self.device)
        sizes = torch.zeros(3, dtype=torch.int64, device=self.device)
        for part in self.parts:
            answers = part.tokens[part.answered]
            counts += torch.bincount(answers, minlength=vocab)
            sizes += torch.tensor([len(part.tokens), len(answers), part.tokens.numel()]).to(sizes)
        self.counts = self.group.add(counts).cpu()
        self.num_sequences, self.num_answered, num_tokens = self.group.add(sizes).tolist()
        is_own = not self.source.training
        if self.num_answered < (max(config.length, FEWEST * num_tokens) if is_own else 1):
            why = f"{self.num_answered} of {num_tokens} sampled tokens answer a message: allowed: "
            refusal = (
                f"length={config.length}: {why}a greater length, more --sequences, a chat model"
            )
            if self.parts[0].tokens.shape[1] < config.length and is_own:
                within = f"seconds={config.seconds}: in {SAMPLING:.0%} of that time "
                refusal = f"{within}{why}more time, or fewer --sequences"
            raise ConfigError(refusal)
        self.log(f"{self.num_answered:,} answered tokens")

    def _answered(self, prompts: Prompts | None, deadline: float) -> Samples:
        """Returns the target's first answers at temperature 0, cut at the deadline. prompts: None
        for prompts that the target writes itself, at temperature OWN_WARMTH."""
        config = self.config
        template = self.source.template
        starts: Any = prompts
        first = ANSWER
        if prompts is None:
            starts = [template.before] * config.held_out
            first = USER
        length = config.length if prompts is None else max(map(len, prompts)) + config.answer
        sampler = Sampler(self.target, self.blocks, self.table, False)
        given = blank(starts, length, self.table[0].device)
        cold = torch.zeros(len(starts), device=given.device)
        warmth = cold + OWN_WARMTH, cold
        written = sampler.write(given, template, first, warmth, deadline=deadline)
        return only_first(written, template.end, config.answer)

    def _drafts(self) -> Iterator[Result]:
        """Trains the drafts one after another; yields the Result of each once it is trained."""
        config = self.config
        folder = Path(config.out)
        rank = self.group.rank
        stops = sorted(self.source.tokenizer.stop_ids)
        ids = frequent_tokens(self.counts.numpy(), config.vocab, stops)
        wanted = architectures(config, self.source.checkpoint.config, len(ids))
        if (earlier := self.source.draft) is not None:
            known = known_ids(earlier, earlier.config.shape.vocab_size)
            ids = np.arange(earlier.config.head_vocab, dtype=np.int32) if known is None else known
            wanted = {"": replace(earlier.config, masks=config.parallel)}
        for number, (name, architecture) in enumerate(wanted.items()):
            now = time.monotonic()
            evaluating = min(config.seconds_evaluating, EVALUATING * config.seconds)
            spare = self.deadline - evaluating - SAVING * config.seconds - now
            until = now + spare / (len(wanted) - number)
            draft = self._start(architecture, np.asarray(ids, np.int64))
            facts: dict[str, Any] = {"origin": f"the target's layers {config.layers}"}
            if architecture.kind:
                facts = {"origin": f"a fresh {name} draft", "kind": name, "head": "target"}
                facts["steps_ahead"] = config.heads
            else:
                facts = {"origin": "fresh layers"} if config.forms else facts
                facts["head"] = config.head
            if earlier is not None:
                name = Path(str(config.from_draft)).name
                facts = {"origin": f"the layers of the draft {name}", "from": earlier.sha256}
                facts["head"] = "target" if earlier.shares_head else "own"
            facts = {**self._facts(draft), **facts}
            place = folder / name if len(wanted) > 1 else folder
            result = Result(draft, place, facts, self.source, self.log)
            result.draft = learn(
                draft,
                self.parts,
                config,
                (lambda point: None) if rank else result.point,
                save=(lambda draft: None) if rank else result.try_save,
                group=self.group,
                until=until,
            )
            yield result

    def _start(self, architecture: TransformerConfig, ids: Any) -> Draft:
        """Returns an untrained draft whose LM head has the tokens `ids`."""
        config = self.config
        target = self.target
        head_ids = torch.from_numpy(ids).to(self.device)
        shared = target, head_ids, self.blocks, self.table, self.on_gpu
        if architecture.kind:
            first = self.parts[0]
            scale = float(first.hidden[first.total != 0].float().square().mean().sqrt())
            states = fresh_states(architecture, config.seed, scale)
            draft = StateDraft(architecture, states, *shared, ahead=config.heads)
            return draft.mapped(lambda tensor: trained(tensor.to(self.device)))
        earlier = self.source.draft
        shares_head = earlier.shares_head if earlier else config.head == "target"
        if earlier is not None:
            weights = continued(target, earlier)
        else:
            layers = [target.layers[n] for n in config.layer_numbers] if not config.forms else None
            layers = layers or fresh_layers(architecture, self.device, config.seed)
            weights = started(target, layers, head_ids)
        if shares_head:
            weights = weights._replace(head=target.head[head_ids].float())
        masks = None
        if config.parallel:
            kept = earlier.read(MASKS) if earlier and earlier.config.masks else ()
            masks = first_masks(target.embedding, config.parallel, config.seed, kept)
        return ModelDraft(architecture, weights, *shared, masks=masks, anchors=config.anchors)

    def _facts(self, draft: Draft) -> dict[str, Any]:
        """Returns {name: value} of what the report says about a draft's samples and training."""
        ids = draft.head_ids.cpu()
        return {
            "num_layers": draft.config.shape.num_layers,
            "head_vocab": len(ids),
            "coverage": round(float(self.counts[ids].sum() / self.counts.sum()), 5),
            "sequences": self.num_sequences,
            "answered": self.num_answered / 1e6,
            "sampling_tokens_per_s": self.rate,
            "processes": self.group.size,
            "masks": self.config.parallel,
            "optimizer": self.config.optimizer,
            "on": self.config.on,
            "answer": self.config.answer,
            "seed": self.config.seed,
            "device": torch.cuda.get_device_name() if self.on_gpu else "cpu",
        }

    def _answers(self, deadline: float) -> Iterator[tuple[str, Samples]]:
        """Yields (name, samples) of each set of prompts with the target's answers at temperature 0.
        The answers to one set may take half of the time that is left."""
        exams: dict[str, Prompts | None] = {**self.source.exams}
        exams |= {"own": None} if self.config.held_out else {}
        for name, exam in exams.items():
            samples = self._answered(exam, (time.monotonic() + deadline) / 2)
            if bool(samples.answered.any()):
                yield name, samples
            else:
                self.log(f"{name}: no time for an answer")


class Result:
    """A draft, its training curves and report, and the folder to which they are written."""

    def __init__(
        self, draft: Draft, folder: Path, facts: dict[str, Any], source: Inputs, log: Log
    ) -> None:
        self.draft = draft
        self.folder = folder
        self.log = log
        target = source.checkpoint
        self.about = {**origin_of(target), "head": facts["head"]}
        self.report = {"target": target.name, "sha256": target.sha256, **facts}
        self.curves: list[dict[str, Any]] = []

    def point(self, point: dict[str, Any]) -> None:
        """Stores a point of the training curves, {name: value}, and logs every tenth."""
        self.curves.append(point)
        if len(self.curves) % 10 == 1 or "stopped" in point:
            self.log(f"trained {point}")

    def try_save(self, draft: Draft) -> bool:
        """Writes the quantised draft so far, its curves and a report. Returns False if they cannot
        be written; the folder then keeps the earlier files."""
        arrays = {name: tensor.float().cpu().numpy() for name, tensor in draft.named().items()}
        if self.about["head"] == "target":
            arrays.pop("lm_head.weight", None)
        stored = export.quantized(arrays, draft.head_ids.cpu().numpy().astype(np.int32))
        try:
            with export.whole_folder(self.folder) as folder:
                size = export.save(folder, draft.config, stored, self.about)
                lines = [f"{json.dumps(point)}\n" for point in self.curves]
                (folder / "curves.jsonl").write_text("".join(lines))
                self.report |= {
                    "parameters": sum(a.size for a in arrays.values()) / 1e6,
                    "bytes": size,
                    "steps": max([0, *(point.get("step", 0) for point in self.curves)]),
                }
                export.write_report(folder, self.report)
        except OSError as error:
            why = error.strerror or error
            self.log(f"{self.folder}: {why}: not saved; the files of before are kept")
            return False
        self.log(f"wrote {self.folder}: {size / 1e6:.2f} MB of weights")
        return True

    def evaluate(self, answers: Iterator[tuple[str, Samples]], deadline: float) -> None:
        """Judges the draft as it is stored on held-out answers until the deadline, and completes
        the report. answers: pairs of the name of a set of prompts and its samples."""
        stored = self.draft.mapped(rounded)
        if isinstance(stored, ModelDraft) and stored.masks is not None:
            stored = replace(stored, masks=self.draft.named()[MASKS].half().float())
        judged = dict[str, Any]()
        self.report["evaluation"] = judged
        for name, asked in answers:
            judged[name] = figures(stored, asked, deadline)
            with export.whole_folder(self.folder) as folder:
                export.write_report(folder, self.report)
            self.log(f"{name}: {judged[name]}")
            if time.monotonic() > deadline:
                break


def rounded(tensor: Any) -> Any:
    """Returns a matrix as it is after quantisation and dequantisation, and a vector unchanged."""
    if tensor.ndim == 1:
        return tensor
    stored = dequantize(*quantize(tensor.float().cpu().numpy()))
    return torch.from_numpy(stored).to(tensor.device)
