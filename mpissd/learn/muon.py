"""The optimisers: AdamW, or Muon for the layers' matrices and AdamW for the rest.

Muon (Jordan 2024) replaces the gradient's running mean by the nearest matrix with equal singular
values, computed by five Newton-Schulz steps, and scaled so that one learning rate serves both
(2502.16982).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpissd.learn.llama import Llama, Tensor

MOMENTUM, DECAY = 0.95, 0.01
STEPS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
RMS = 0.2  # of an update, relative to the learning rate, as AdamW's


def optimizer_for(name: str, tensors: Sequence[Tensor], heads: Sequence[Tensor] = ()) -> Any:
    """Returns the optimiser of these tensors; name: "adamw" or "muon".

    Muon is for matrices, grouped by shape; AdamW trains vectors and `heads`.
    """
    shapes: dict[Any, list[Tensor]] = {}
    rest = []
    for tensor in tensors:
        if name == "adamw" or tensor.ndim == 1 or any(tensor is head for head in heads):
            rest.append(tensor)
        else:
            shapes.setdefault(tensor.shape, []).append(tensor)
    fused = rest[0].is_cuda or None
    adam = torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=DECAY, fused=fused)
    return _Both([_Muon(matrices) for matrices in shapes.values()], adam)


def parameters(draft: Llama) -> list[Tensor]:
    """Returns the tensors of a draft that are trained."""
    every = [draft.norm, draft.head, *(t for w in draft.layers for t in w)]
    return [tensor for tensor in every if tensor is not None and tensor.requires_grad]


class _Both:
    """Optimisers that step together at one learning rate."""

    def __init__(self, muons: Sequence[_Muon], adam: Any) -> None:
        self.muons, self.adam = muons, adam

    def step(self, rate: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        for muon in self.muons:
            muon.step(rate)


class _Muon:
    """Muon for matrices of one shape, all at once."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self.matrices = list(matrices)
        self.momentum = torch.zeros_like(torch.stack([m.detach() for m in matrices]))
        self.scale = RMS * max(matrices[0].shape) ** 0.5

    def step(self, rate: float) -> None:
        gradient = torch.stack([m.grad for m in self.matrices])
        self.momentum.lerp_(gradient, 1 - MOMENTUM)
        update = orthogonal(gradient.lerp(self.momentum, MOMENTUM)).float()
        with torch.no_grad():
            torch._foreach_mul_(self.matrices, 1 - rate * DECAY)
            torch._foreach_add_(self.matrices, list(update.unbind()), alpha=-rate * self.scale)


def orthogonal(matrices: Tensor) -> Tensor:
    """Returns matrices [n, a, b] with singular values near 1, bfloat16 (Newton-Schulz)."""
    x = matrices.bfloat16()
    if is_tall := x.shape[1] > x.shape[2]:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    first, third, fifth = COEFFICIENTS
    for _ in range(STEPS):
        square = x @ x.mT
        x = first * x + (third * square + fifth * square @ square) @ x
    return x.mT if is_tall else x
