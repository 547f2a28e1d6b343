"""The parts of a distillation in order; each leaves what the next one needs."""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpissd.common.errors import ConfigError
from mpissd.common.presets import files_of
from mpissd.engine.model.transformer.sources import open_checkpoint
from mpissd.engine.workload.text.tokenizer import load_tokenizer
from mpissd.learn import card, exam, export
from mpissd.learn.config import DistillConfig
from mpissd.learn.evaluate import judge
from mpissd.learn.llama import angles, blocks_of, draft_config, load, mapped, named
from mpissd.learn.mould import OPENINGS, mould_of
from mpissd.learn.quantize import dequantize, quantize
from mpissd.learn.rounds import summary
from mpissd.learn.sample import USER, Sampler, Samples, blank
from mpissd.learn.shape import cut, frequent_tokens
from mpissd.learn.train import Pair, Plan, train

SAVING_S = 10.0  # what writing the files may take
# Temperatures in equal shares. A small model's prompts at 1 are seldom what people ask.
WARMTHS = {"user": (0.5, 0.65, 0.8, 0.9), "answer": (1.0, 0.7, 0.0, 0.0)}


class Distillation:
    """One draft in the making: its target, samples, training and evaluation."""

    def __init__(self, config: DistillConfig, log: Callable[[str], None]) -> None:
        self.config, self.log, self.folder = config, log, Path(config.out)
        self.deadline = time.monotonic() + config.seconds
        self.folder.mkdir(parents=True, exist_ok=True)
        gpu = config.device != "cpu" and torch.cuda.is_available()
        self.device = torch.device("cuda" if gpu else "cpu")
        if not gpu:
            torch.set_num_threads(os.cpu_count() or 1)
        torch.manual_seed(config.seed)
        torch.set_float32_matmul_precision("high")
        self.checkpoint = open_checkpoint(config.target, config.seed)
        self.tokenizer = load_tokenizer(_files(config.target))
        self.mould = mould_of(self.tokenizer)
        self.prompts = exam.read_prompts(config.prompts, self.tokenizer)
        self.dtype = torch.bfloat16 if gpu else torch.float32
        self.target = load(self.checkpoint, self.device, self.dtype)
        self.blocks = blocks_of(self.checkpoint.config, self.dtype)
        self.room = max(config.length, *(len(p) + config.answer for p in self._people()), 1)
        self.table = angles(self.checkpoint.config, self.room, self.device)
        self.curves: list[dict[str, Any]] = []
        log(f"{self.checkpoint.name} on {self.device}, PyTorch {torch.__version__}")

    def _people(self) -> list[list[int]]:
        return [prompt for prompts in self.prompts.values() for prompt in prompts]

    def sample(self) -> None:
        """Has the target write conversations until the time for it is over."""
        config, started, last = self.config, time.monotonic(), 0.0
        sampler = Sampler(self.target, self.blocks, self.table, self.device.type == "cuda")
        parts: list[Samples] = []
        num = self._rows()
        for number in range(config.batches):
            elapsed = time.monotonic() - started
            if parts and elapsed + last > config.seconds_sampling:
                break
            parts.append(self._batch(sampler, number, num))
            last = time.monotonic() - started - elapsed
            told = sum(int(part.answered.sum()) for part in parts)
            self.log(
                f"sampled batch {number + 1}: {told / 1e6:.2f} M answered tokens, {last:.1f} s"
            )
        self.samples = Samples(
            torch.cat([part.tokens for part in parts]), torch.cat([part.answered for part in parts])
        )
        if self.device.type == "cuda":
            self.log(f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB at most")
            torch.cuda.empty_cache()

    def _rows(self) -> int:
        """Returns how many conversations are sampled at a time: fewer where memory is short."""
        config, shape = self.config, self.checkpoint.config.shape
        if self.device.type != "cuda":
            return config.sequences
        cache = 2 * shape.num_layers * shape.kv_width * config.length * self.dtype.itemsize
        free = torch.cuda.mem_get_info()[0]
        return max(1, min(config.sequences, int(0.85 * free / (cache + 8 * shape.vocab_size))))

    def _batch(self, sampler: Sampler, number: int, num: int) -> Samples:
        """Returns a batch of conversations; half of them start with one of the openings."""
        config, choose = self.config, random.Random(f"{self.config.seed}, {number}")
        openings = [(), *(tuple(self.tokenizer.encode(text)) for text in OPENINGS)]
        shares = [len(OPENINGS), *[1] * len(OPENINGS)]
        chosen = choose.choices(openings, shares, k=num)
        given = blank(
            [self.mould.before + opening for opening in chosen], config.length, self.device
        )
        warmth = [
            torch.tensor(choose.choices(WARMTHS[who], k=num), device=self.device)
            for who in ("user", "answer")
        ]
        return sampler.write(given, self.mould, USER, (warmth[0], warmth[1]))

    def train(self) -> None:
        """Cuts the draft out of the target and trains it."""
        config, shape = self.config, self.checkpoint.config.shape
        counts = torch.bincount(self.samples.tokens.flatten(), minlength=shape.vocab_size).cpu()
        ids = frequent_tokens(counts.numpy(), config.vocab, sorted(self.tokenizer.stop_ids))
        self.coverage = float(counts[torch.from_numpy(ids).long()].sum() / counts.sum())
        self.log(f"{len(ids)} tokens cover {self.coverage:.4f} of the samples")
        draft = cut(self.target, config.layer_numbers, ids)
        self.pair = Pair(
            self.target,
            draft,
            torch.from_numpy(ids).long().to(self.device),
            self.blocks,
            self.table,
        )
        plan = Plan(
            config.seconds_training,
            self.deadline - config.seconds_evaluating - SAVING_S,
            config.steps,
            config.batch,
            config.learning_rate,
            config.seed,
            self.device.type == "cuda",
        )
        trained = train(self.pair, self.samples, plan, self._point)
        self.pair = dataclasses.replace(self.pair, draft=trained)

    def _point(self, point: dict[str, Any]) -> None:
        """Keeps a point of the training's curves, and shows some of them."""
        self.curves.append(point)
        if len(self.curves) % 5 == 1 or "stopped" in point:
            self.log(f"trained {point}")

    def save(self) -> None:
        """Writes the quantised draft, its curves and a report without an evaluation."""
        own = self.checkpoint.config
        self.made = draft_config(own, len(self.config.layer_numbers), self.config.vocab)
        weights = named(self.pair.draft, self.made)
        arrays = {name: tensor.float().cpu().numpy() for name, tensor in weights.items()}
        ids = self.pair.head_ids.cpu().numpy().astype(np.int32)
        stored = export.quantized(arrays, ids)
        about = {"target": self.checkpoint.name, "target_sha256": self.checkpoint.sha256}
        size = export.save(self.folder, self.made, stored, about)
        export.write_lines(self.folder / "curves.jsonl", self.curves)
        self.report = self._facts(sum(a.size for a in arrays.values()), size)
        self._write_report()
        self.log(f"wrote {self.folder}: {size / 1e6:.2f} MB of weights")

    def _facts(self, parameters: int, size: int) -> dict[str, Any]:
        answered = int(self.samples.answered.sum())
        return {
            "target": self.checkpoint.name,
            "sha256": self.checkpoint.sha256,
            "layers": self.config.layers,
            "num_layers": len(self.config.layer_numbers),
            "head_vocab": self.config.vocab,
            "coverage": round(self.coverage, 5),
            "parameters": parameters / 1e6,
            "bytes": size,
            "sequences": len(self.samples.tokens),
            "answered": answered / 1e6,
            "steps": max([0, *(point.get("step", 0) for point in self.curves)]),
            "answer": self.config.answer,
            "seed": self.config.seed,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
        }

    def _write_report(self) -> None:
        export.write_json(self.folder / "report.json", self.report)
        card.write(self.folder, self.report, self.config.license)

    def evaluate(self) -> None:
        """Judges the draft as stored, and as trained, on held-out answers; completes the report."""
        config = self.config
        deadline = min(self.deadline, time.monotonic() + config.seconds_evaluating)
        rounded = dataclasses.replace(self.pair, draft=mapped(self.pair.draft, _rounded))
        sampler = Sampler(self.target, self.blocks, self.table, False)
        self.report |= {"evaluation": {}, "before_quantising": {}}
        for name, prompts in [*self.prompts.items(), ("own", [])]:
            if time.monotonic() > deadline:
                break
            if prompts:
                asked = exam.answers(sampler, prompts, self.mould, config.answer, self.room)
            else:
                asked = exam.own(sampler, config.held_out, config.length, self.mould, config.answer)
            self.report["evaluation"][name] = summary(judge(rounded, asked, deadline))
            self.report["before_quantising"][name] = summary(judge(self.pair, asked, deadline))
            self._write_report()
            self.log(f"{name}: {self.report['evaluation'][name]}")


def _files(target: str) -> str:
    """Returns the path of a model's files; raises ConfigError for one that has none."""
    path = files_of(target)
    if path is None:
        raise ConfigError(f"target={target}: allowed: a model with weights and a tokenizer")
    return str(path)


def _rounded(tensor: Any) -> Any:
    """Returns a matrix rounded as quantising rounds it; a vector unchanged."""
    if tensor.ndim == 1:
        return tensor
    stored = dequantize(*quantize(tensor.float().cpu().numpy()))
    return torch.from_numpy(stored).to(tensor.device)
