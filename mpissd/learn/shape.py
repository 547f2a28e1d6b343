"""The draft's starting point: layers of the target and a head over its most frequent tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Ints
from mpissd.learn.llama import Llama, Tensor, mapped


def frequent_tokens(counts: Ints, num_tokens: int, always: Sequence[int]) -> Ints:
    """Returns the most frequent token ids, rising: int32 [num_tokens].

    counts: [vocab]. always: ids that are kept whatever their count (stop tokens). Equal counts are
    decided for the lower id: byte-pair merges are numbered from the most frequent on.
    """
    weights = np.asarray(counts, np.int64).copy()
    weights[list(always)] = np.iinfo(np.int64).max
    order = np.argsort(-weights, kind="stable")
    return np.sort(order[:num_tokens]).astype(np.int32)


def cut(target: Llama, layers: Sequence[int], head_ids: Ints) -> Llama:
    """Returns a draft of the target's layers that can be trained, in float32.

    Its embedding is the target's own, whole and frozen. Raises ConfigError for a layer that the
    target does not have.
    """
    if beyond := [number for number in layers if number >= len(target.layers)]:
        raise ConfigError(f"layers={beyond[0]}: allowed: 0 to {len(target.layers) - 1}")
    chosen = tuple(target.layers[number] for number in layers)
    rows = torch.from_numpy(head_ids).long().to(target.head.device)
    start = target._replace(layers=chosen, head=target.head[rows])
    return mapped(start, _trained)


def _trained(tensor: Tensor) -> Tensor:
    return tensor.detach().float().clone().requires_grad_(True)
