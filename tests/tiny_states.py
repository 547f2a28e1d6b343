"""Tiny drafts that read their target's hidden states, as folders; their weights are random.

A hidden state is a strong hint of the next tokens only to a draft that was trained, so each has its
target's LM head and small layers: its drafts are near the target's likely tokens anyway.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from mpissd.engine.model.transformer.checkpoint import EMBEDDING, HEAD, tensors
from mpissd.engine.model.transformer.sources import config_of

KINDS = ("medusa", "mlp", "eagle")


def state_draft(
    target: Path, kind: str, folder: Path, *, layers: int = 1, ids: Any = None, scale: float = 0.3
) -> Path:
    """Writes a draft of this kind; layers: Medusa's heads. ids: the tokens that it knows."""
    told = json.loads((target / "config.json").read_text())
    about = {"kind": kind, "embedding": "target", "head": "target"}
    told |= {"num_hidden_layers": layers, "mpissd": about}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(told))
    config = config_of(str(folder / "config.json"))
    random = np.random.default_rng(len(kind))
    weights: dict[str, NDArray[Any]] = {}
    for name, size in tensors(config):
        if name not in (EMBEDDING, HEAD):
            spread = scale / size[-1] ** 0.5
            values = random.normal(0, spread, size) if len(size) == 2 else np.ones(size)
            weights[name] = values.astype(np.float32)
    if ids is not None:
        weights["head_ids"] = np.array(ids, np.int32)
    save_file(weights, folder / "model.safetensors")
    return folder
