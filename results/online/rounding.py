#!/usr/bin/env python3
"""Ways of keeping in int8 what a learner's small steps taught, on one stage of a stream.

    results/online/rounding.py TARGET STAGE.npz WAY [--rate=3e-5] [--seed=0] >>rounding.jsonl

STAGE.npz: answers as `mpissd online` keeps them in OUT. WAY: float (weights as trained, then
rounded to nearest and with two dithers), through (training through rounding to nearest, whose
gradient is taken as that of the float weights: 1308.3432), gains (the scale of each 32 inputs and
the norms alone) or lora (float matrices of rank 8 beside those of the file: 2106.09685, and the
norms). One JSON line a version that was judged on the held-out quarter.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from mpissd.learn.llama import Layer, Llama  # noqa: E402
from mpissd.online.answers import _stored  # noqa: E402
from mpissd.online.config import OnlineConfig  # noqa: E402
from mpissd.online.learner import Learner, LearnerPlan  # noqa: E402
from mpissd.online.replay import Part, Replay, parts_of  # noqa: E402
from mpissd.online.student import CROSS_ENTROPY, VARIATION, Step, Student  # noqa: E402

Tensor = Any
RANK = 8


def rounded(matrix: Tensor, dither: Tensor | None = None) -> Tensor:
    """Returns a matrix on int8's grid; dither: as quantize.quantize takes it."""
    blocks = matrix.detach().unflatten(-1, (-1, 32))
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=2**-14).half().float()
    x = blocks / scales
    down = x.floor()
    x = x.round() if dither is None else down + (dither.unflatten(-1, (-1, 32)) < x - down)
    return (x.clamp(-127, 127) * scales).flatten(-2)


class Beside(Student):
    """A student whose forward has matrices that are made of the file's and of trained tensors."""

    def __init__(self, way: str, *told: Any, **flags: Any) -> None:
        self.way = way
        super().__init__(*told, exact=True, **flags)

    def _restored(self, weights: Llama) -> Llama:
        draft = super()._restored(weights)
        self.parts = [[self._part(t) for t in layer] for layer in draft.layers]
        found = [t for layer in self.parts for each in layer for t in each]
        if self.way != "through":
            found += [t for layer in draft.layers for t in layer if t.ndim == 1] + [draft.norm]
            self.tensors = found
            self.adam = torch.optim.AdamW(found, betas=(0.9, 0.95), weight_decay=0)
        return draft

    def _part(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Returns what is trained beside a tensor."""
        if tensor.ndim == 1 or self.way == "through":
            return ()
        outputs, inputs = tensor.shape
        if self.way == "gains":
            return (torch.ones(outputs, inputs // 32, requires_grad=True),)
        up = (torch.randn(RANK, inputs) / RANK**0.5).requires_grad_()
        return torch.zeros(outputs, RANK, requires_grad=True), up

    def _whole(self, tensor: Tensor, part: tuple[Tensor, ...]) -> Tensor:
        """Returns the tensor that the forward computes with."""
        if tensor.ndim == 1:
            return tensor
        if self.way == "through":
            return tensor + (rounded(tensor) - tensor).detach()
        own = tensor.detach()
        if self.way == "lora":
            return own + part[0] @ part[1]
        return (own.unflatten(-1, (-1, 32)) * part[0][..., None]).flatten(-2)

    def _forward(self, examples: Any) -> Any:
        own, layers = self.draft, []
        for layer, parts in zip(own.layers, self.parts, strict=True):
            layers.append(Layer(*map(self._whole, layer, parts)))
        self.draft = own._replace(layers=tuple(layers))
        try:
            return super()._forward(examples)
        finally:
            self.draft = own

    def step(self, examples: Any) -> Step:
        """Takes one step on what is trained."""
        if self.way == "through":
            return super().step(examples)
        self.adam.zero_grad()
        losses = self._losses(examples)
        (CROSS_ENTROPY * losses[0] + VARIATION * losses[1]).backward()
        torch.nn.utils.clip_grad_norm_(self.tensors, 1.0)
        self._steps += 1
        self.adam.param_groups[0]["lr"] = self.rate * min(1.0, self._steps / 10)
        self.adam.step()
        return Step(*(float(each.detach()) for each in losses))


def learned(student: Student, part: Part, seed: int) -> None:
    """Trains as `online` does: one step for each prompt that is seen."""
    learner = Learner(student, LearnerPlan(4, 1, seed=seed))
    for example in part.seen:
        learner.add(example)
        while learner.is_due:
            learner.learn()


def dithered(seed: int) -> Callable[[Tensor], Tensor]:
    """Returns a rounding with uniform numbers of a seed."""
    draws = torch.Generator().manual_seed(seed)
    return lambda matrix: rounded(matrix, torch.rand(matrix.shape, generator=draws))


def versions(student: Student, way: str) -> Sequence[tuple[str, Llama]]:
    """Returns the weights that are judged, by name."""
    found = [("as trained" if way == "float" else way, student.draft)]
    hows = {"nearest": rounded, "dithered": dithered(0), "dithered again": dithered(1)}
    for name, change in hows.items() if way == "float" else ():
        layers = tuple(
            Layer(*(t.detach() if t.ndim == 1 else change(t) for t in layer))
            for layer in student.draft.layers
        )
        found.append((name, student.draft._replace(layers=layers)))
    return found


def main() -> int:
    """Trains one way and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("stage", type=Path)
    parser.add_argument("way", choices=("float", "through", "gains", "lora"))
    parser.add_argument("--rate", type=float, default=3e-5)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)
    (part,) = parts_of({given.stage.stem: _stored(given.stage)}, given.seed)
    told = "smollm2-draft", given.target
    student = (
        Student(*told, rate=given.rate, exact=True)
        if given.way == "float"
        else Beside(given.way, *told, rate=given.rate)
    )
    stream = f"{part.name}={given.stage}"
    config = OnlineConfig(target=given.target, stream=stream, seed=given.seed)
    replay = Replay(student, config)
    about = {"way": given.way, "rate": given.rate, "seed": given.seed}
    print(json.dumps({**about, "weights": "static", **replay._judged(part)}), flush=True)
    learned(student, part, given.seed)
    for name, draft in versions(student, given.way):
        student.draft = draft
        print(json.dumps({**about, "weights": name, **replay._judged(part)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
