"""The process that trains the draft: `python -m mpissd.online.trainer JSON`, a learner's child.

It reads examples from stdin until that ends, trains a copy of the draft on the target's
distributions, and writes versions of the weights and reports to stdout. If it fails, the job goes
on.

A version is published only if its loss and weights are finite and it agrees with the target more
often than the version in use, by more than two standard errors, on held-out sequences: the latest
ones, which no version was trained on. One in forty versions without a real gain passes by luck
(docs/online.md).
"""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.engine.model.transformer.checkpoint import (
    HEAD,
    INT8_BITS,
    Checkpoint,
    new_version,
    packed,
    quantize,
)
from mpissd.engine.model.transformer.sources import open_checkpoint
from mpissd.learn.draft import Optimizer, distance
from mpissd.learn.llama import (
    Llama,
    Tensor,
    angles,
    blocks_of,
    load,
    load_trunk,
    mapped,
    named,
    parameters,
    trained,
)
from mpissd.online.examples import Example, Memory
from mpissd.online.process import receive, send

CROSS_ENTROPY = 0.3  # weight of the cross-entropy in the loss; next, that of the total variation
VARIATION = 3.0
DITHER = 0  # seed of the random numbers by which weights are rounded
ERRORS = 2.0  # a new version must be better by so many standard errors (docs/online.md)
FALL = 0.02  # a version whose agreement with the target fell by more than this is a bad one
PATIENCE = 3  # bad versions in a row after which training restarts from the last published one
MIN_HELD = 8  # held-out sequences that are needed before a version is published
_JUDGED_AT_ONCE = 8
_IDLE_S = 0.05
_REPORT_S = 0.5  # time between two reports

Counted = NDArray[np.float64]
Arrays = dict[str, NDArray[Any]]


class Student:
    """A draft model that is trained on examples, tested, and exported as arrays."""

    def __init__(
        self, draft: str, target: str, *, seed: int = 0, device: str = "cpu",
        rate: float = 1e-4, longest: int = 1024, exact: bool = False,
    ) -> None:  # fmt: skip
        """Reads the weights of the models named `draft` and `target`.

        seed: of random weights. rate: the learning rate, reached after ten steps. longest: how many
        positions of a sequence are used. exact: whether to export float16 even if the draft's files
        are int8, for a draft whose device computes with float16 (CuPy).
        """
        self.source: Checkpoint = open_checkpoint(draft, seed, target)
        config = self.source.config
        self.device = device
        self.rate = rate
        self.longest = longest
        is_int8 = self.source.by_name["model.layers.0.mlp.down_proj.weight"].bits == INT8_BITS
        self._int8 = is_int8 and not exact
        # With bfloat16 instructions a CPU takes a fifth of the time (AMD EPYC: 121, not 26 GFLOP/s)
        has = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
        self.blocks = blocks_of(
            config, torch.bfloat16 if device != "cpu" or has() else torch.float32
        )
        self.table = angles(config, longest, device)
        self._loaded = load(self.source, device, torch.float32)
        self.shares_head = config.tied or self.source.shares_head
        ids = self.source.head_ids
        ids = np.arange(config.head_vocab, dtype=np.int32) if ids is None else ids
        self.head_ids = torch.from_numpy(np.asarray(ids, np.int64)).to(device)
        self.places = torch.full((config.shape.vocab_size,), -1, device=device)
        self.places[self.head_ids] = torch.arange(len(ids), device=device)
        self.restore(self._loaded)

    def restore(self, weights: Llama) -> None:
        """Continues training from `weights`, with a new optimiser."""
        draft = mapped(weights, trained)._replace(embedding=self._loaded.embedding)
        if self.shares_head:
            draft = draft._replace(head=self._loaded.head)
        self.draft: Llama = draft
        self._steps = 0
        self.optimizer = Optimizer("adamw", parameters(draft))

    def copy(self) -> Llama:
        return mapped(self.draft, lambda tensor: tensor.detach().clone())

    def step(self, examples: Sequence[Example]) -> bool:
        """Takes one training step with a loss of cross-entropy and total variation; returns whether
        the loss was finite. If it was not, the weights stay as they are."""
        logits, ids, logs = self._forward(examples)
        p_logits = torch.full_like(logits, -torch.inf)
        places = self.places[ids]
        in_head = places >= 0
        rows = torch.arange(len(ids), device=self.device)[:, None].expand_as(ids)
        p_logits[rows[in_head], places[in_head]] = logs[in_head]
        zeros = logs.new_zeros(len(logs))  # the target's log-probabilities are normalised
        ones = torch.ones_like(zeros)
        entropy, variation, _ = distance(p_logits, zeros, ids[:, 0], logits, self.head_ids, ones)
        loss = CROSS_ENTROPY * entropy + VARIATION * variation
        if not torch.isfinite(loss):
            return False
        tensors = parameters(self.draft)
        for tensor in tensors:
            tensor.grad = None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tensors, 1.0)
        self._steps += 1
        self.optimizer.step(self.rate * min(1.0, self._steps / 10))
        return True

    def _forward(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the draft's logits [rows, columns of its LM head], and the target's token ids and
        log-probabilities [rows, k]. A row is a position below `longest` in an example's `at`."""
        counts = [int((example.at < self.longest).sum()) for example in examples]
        kept = [(e.at[:n], e.ids[:n], e.logs[:n]) for e, n in zip(examples, counts, strict=True)]
        length = max(int(at[-1]) + 1 if len(at) else 1 for at, _, _ in kept)
        tokens = torch.zeros(len(kept), length, dtype=torch.int64)
        for row, example in enumerate(examples):
            part = torch.from_numpy(example.tokens[:length].astype(np.int64))
            tokens[row, : len(part)] = part
        rows = np.concatenate([row * length + at for row, (at, _, _) in enumerate(kept)])
        table = [part[:length] for part in self.table]
        hidden = self.blocks.hidden(self.draft, tokens.to(self.device), *table)
        chosen = hidden.flatten(0, 1)[torch.from_numpy(rows).long().to(self.device)]
        logits = F.linear(chosen, self.draft.head)  # in float32: bfloat16 would make ties
        ids = torch.from_numpy(np.concatenate([ids for _, ids, _ in kept])).long()
        logs = torch.from_numpy(np.concatenate([logs for _, _, logs in kept])).float()
        return logits, ids.to(self.device), logs.to(self.device)

    def right(self, examples: Sequence[Example]) -> Counted:
        """Returns a row for each example, [n, 2]: the number of positions at which the draft's
        likeliest token is the target's, and the number of positions. A token outside the draft's LM
        head is wrong, as is every token if logits are not finite."""
        counts = []
        for start in range(0, len(examples), _JUDGED_AT_ONCE):
            part = [e for e in examples[start : start + _JUDGED_AT_ONCE] if len(e.at)]
            if not part:
                continue
            with torch.no_grad():
                logits, ids, _ = self._forward(part)
                best = self.places[ids[:, 0]]
                is_right = (logits.argmax(-1) == best) & torch.isfinite(logits).all(-1)
            rows = is_right.tolist()
            for example in part:
                count = int((example.at < self.longest).sum())
                counts.append((sum(rows[:count]), count))
                rows = rows[count:]
        return np.array(counts, float).reshape(-1, 2)

    @contextmanager
    def using(self, weights: Llama) -> Iterator[None]:
        """Makes `right` test `weights` inside the block as a draft rank would compute with them:
        rounded to int8 or float16 by `arrays`. Raises ProtocolError if one is not finite."""
        trained_draft = self.draft
        self.draft = weights
        try:
            version = new_version(self.source, self.arrays())
            self.draft = load_trunk(version, weights, torch.float32)
            if not self.shares_head:
                head = torch.from_numpy(version.read(HEAD))
                self.draft = self.draft._replace(head=head.to(self.device))
            yield
        finally:
            self.draft = trained_draft

    @property
    def is_finite(self) -> bool:
        """Whether all weights are finite, also in the format that `arrays` exports: float16, or
        int8 with a float16 scale for each block, which is the block's largest weight / 127."""
        widest = torch.finfo(torch.float16).max * (127 if self._int8 else 1)
        limits = {1: torch.finfo(torch.float32).max, 2: widest}
        return all(
            bool((tensor.abs() <= limits[tensor.ndim]).all()) for tensor in parameters(self.draft)
        )

    def arrays(self) -> Arrays:
        """Returns the trained tensors by name in the format that a draft rank loads: matrices in
        float16, or in int8 with scales; vectors in float32.

        Training starts at weights that int8 represents exactly, and most weights move by less than
        half a step of int8, which rounding to nearest would undo. So they are rounded at random
        (dithered), with the same random numbers in every version: a weight that did not move keeps
        its value unless the scale of its block moved.
        """
        arrays: Arrays = {}
        draws = np.random.default_rng(DITHER)
        for name, tensor in named(self.draft, self.source.config).items():
            if name == HEAD and self.shares_head:
                continue
            values = np.ascontiguousarray(tensor.detach().float().cpu().numpy())
            if values.ndim == 1:
                arrays[name] = values
            elif self._int8:
                scale = name.removesuffix("weight") + "scale"
                dither = draws.random(values.shape, np.float32)
                arrays[name], arrays[scale] = quantize(values, dither)
            else:
                arrays[name] = values.astype(np.float16)
        return arrays


@dataclass
class Counts:
    """Counts of what a learner has done. tokens: of all sequences, prompts included. positions:
    those with a distribution of the target. published, refused: versions of the weights."""

    sequences: int = 0
    tokens: int = 0
    positions: int = 0
    steps: int = 0
    published: int = 0
    refused: int = 0
    diverged: int = 0


@dataclass
class Learner:
    """Trains a draft on sequences as they arrive, and keeps its last published version. batch: how
    many sequences a training step has. steps: training steps for a new sequence; may be below 1."""

    student: Student
    batch: int = 4
    steps: float = 1.0
    memory: Memory = field(default_factory=lambda: Memory(4096))

    def __post_init__(self) -> None:
        # State "diverged": a loss or weight was not finite; training resumed from the last version.
        # State "refused": on held-out sequences the latest version was not significantly better.
        self.state = "learning"
        self.counts = Counts()
        self.agreement: float | None = None  # with the target; of the last tested version
        self.in_use = self.student.copy()
        self._new = self._bad = 0
        self._due = 0.0

    def add(self, example: Example) -> None:
        """Stores a finished sequence; `steps` more training steps are due if it is trained on."""
        self.counts.sequences += 1
        self.counts.tokens += len(example.tokens)
        self.counts.positions += len(example.at)
        if self.memory.add(example):
            self._new += 1
            self._due += self.steps

    @property
    def is_due(self) -> bool:
        return self._due >= 1 and bool(self.memory.trained)

    def learn(self) -> bool:
        """Takes a training step on sequences that came since the last step, and on earlier ones;
        returns whether the loss was finite."""
        newest = min(max(1, self._new), self.batch)
        self._new = 0
        self._due -= 1
        is_finite = self.student.step(self.memory.batch(self.batch, newest))
        self.counts.steps += 1
        if not is_finite:
            self._diverge()
        return is_finite

    def _diverge(self) -> None:
        """After a loss or weight that is not finite, restarts from the last published version."""
        self.state = "diverged"
        self._due = 0.0
        self.counts.diverged += 1
        self.student.restore(self.in_use)

    def publish(self) -> bool | None:
        """Publishes the weights if they agree with the target significantly more often than those
        in use, on held-out sequences. Returns whether it did, or None while too few are held out.
        After PATIENCE bad versions in a row, training restarts from the last published one."""
        if not self.student.is_finite:
            self._diverge()
            return False
        if len(self.memory.held) < MIN_HELD:
            return None
        mine, before = (self._right(weights) for weights in (self.student.draft, self.in_use))
        self.agreement = float(mine[:, 0].sum() / mine[:, 1].sum())
        gain, error = paired(mine, before)
        if gain > ERRORS * error:
            self.state = "learning"
            self._bad = 0
            self.in_use = self.student.copy()
            self.counts.published += 1
            return True
        self.state = "refused"
        self.counts.refused += 1
        self._bad = self._bad + 1 if gain < -FALL else 0
        if self._bad >= PATIENCE:
            self._bad = 0
            self.student.restore(self.in_use)
        return False

    def _right(self, weights: Llama) -> Counted:
        with self.student.using(weights):
            return self.student.right(self.memory.held)


def paired(mine: Counted, other: Counted) -> tuple[float, float]:
    """Returns by how much the share of right tokens of one version exceeds that of another, and the
    standard error of this difference (ratio estimate with n − 1 degrees of freedom). mine, other:
    the two versions' numbers of right and of all tokens by sequence, n ≥ 2, [n, 2]."""
    total = other[:, 1].sum()
    n = len(other)
    gains = mine[:, 0] - other[:, 0]
    gain = gains.sum() / total
    squares = ((gains - gain * other[:, 1]) ** 2).sum() * n / (n - 1)
    return float(gain), float(np.sqrt(squares) / total)


def device_of(device: str, local_rank: int) -> str:
    """Returns the PyTorch device of a learner: "cpu", or the GPU with the rank's index on its host
    (at most the last GPU). Raises ConfigError for device=cuda without a GPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or not gpus:
        if device == "cuda":
            raise ConfigError("learn=device=cuda: PyTorch finds no GPU: allowed: auto, cpu")
        return "cpu"
    return f"cuda:{min(local_rank, gpus - 1)}"


def main(settings: str) -> int:
    """Trains on the examples from stdin to its end; writes versions and reports; returns 0.

    settings: JSON with publish_s (shortest time between two versions, in seconds), started_at
    (time.time() when this process was started), device, local_rank, threads, batch, steps, and the
    arguments of Student.
    """
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print goes to stderr, not into messages
    given = json.loads(settings)
    torch.set_num_threads(given.pop("threads"))
    torch.set_float32_matmul_precision("high")
    inbox: queue.SimpleQueue[Example | None] = queue.SimpleQueue()

    def read() -> None:
        while (example := receive(sys.stdin.buffer)) is not None:
            inbox.put(example)
        inbox.put(None)

    threading.Thread(target=read, daemon=True).start()
    device = device_of(given.pop("device"), given.pop("local_rank"))
    schedule = given.pop("batch"), given.pop("steps")
    publish_s = given.pop("publish_s")
    started_at = float(given.pop("started_at"))
    student = Student(**given, device=device)
    learner = Learner(student, *schedule)
    counts = learner.counts
    published_at = reported_at = time.monotonic()
    published_steps = 0

    def age() -> float:
        return round(time.time() - started_at, 2)

    def report() -> None:
        nonlocal reported_at
        reported_at = time.monotonic()
        work = {"state": learner.state, **asdict(counts)}
        send(out, {**work, "held_out_agreement": learner.agreement, **since_start})

    gpu = None  # the GPU's id in the form of DeviceInfo.uuid
    if device != "cpu":
        gpu = f"GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', None)}"
    since_start: dict[str, Any] = {"gpu": gpu, "ready_s": age()}
    report()
    while True:
        try:  # waits if no step is due
            example = inbox.get(timeout=_IDLE_S) if not learner.is_due else inbox.get_nowait()
            while example is not None:
                learner.add(example)
                example = inbox.get_nowait()
            break
        except queue.Empty:
            pass
        if learner.is_due:
            learner.learn()
            since_start.setdefault("first_step_s", age())
        now = time.monotonic()
        if counts.steps > published_steps and now - published_at >= publish_s:
            published_at = now
            published_steps = counts.steps
            if learner.publish():
                send(out, (counts.published, packed(student.arrays())))
            report()
        if time.monotonic() - reported_at > _REPORT_S:
            report()
    report()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
