"""A pair of tiny random transformers as Hugging Face folders; the draft is a disturbed target.

A hidden state is a strong hint of the next tokens only to a draft that was trained, so drafts on
states have their target's LM head and small layers: their drafts are near its likely tokens anyway.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from mpissd.engine.model.transformer.checkpoint import EMBEDDING, HEAD, MASKS, tensors
from mpissd.engine.model.transformer.sources import config_of, open_checkpoint
from tests.weight_files import CONFIG, write_folder


@dataclass(frozen=True)
class TinyPair:
    """The folders of a target and of its draft."""

    target: Path
    draft: Path


def config(
    layers: int = 2, *, vocab: int = 97, heads: int = 6, kv_heads: int = 3, hidden: int = 64,
    head_dim: int = 16,
) -> dict[str, object]:  # fmt: skip
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    told = {"head_dim": head_dim, "vocab_size": vocab, "max_position_embeddings": 1024}
    return {**CONFIG, "architectures": ["LlamaForCausalLM"], **sizes, **attention, **told}


def tiny_pair(
    folder: Path,
    *,
    noise: float = 0.05,
    scale: float = 1.0,
    seed: int = 0,
    head_ids: Sequence[int] | None = None,
    masks: int = 7,
    **sizes: int,
) -> TinyPair:
    """Writes a pair: the draft's matrices are the target's and a share `noise` of other ones.

    scale: of the LM head, which sets how sharp the target's distributions are. head_ids: the
    tokens that the draft knows (None: all). masks: the draft's mask tokens, which are random.
    sizes: of config.
    """
    told = config(**sizes)
    folder.mkdir(parents=True, exist_ok=True)
    where = folder / "config.json"
    where.write_text(json.dumps(told))
    made = (open_checkpoint(str(where), seed + n) for n in range(2))
    target, other = (
        {name: np.array(of.read(name)) for name, _ in tensors(of.config)} for of in made
    )
    for weights in (target, other):
        weights["lm_head.weight"] *= scale
    draft = {
        name: ((1 - noise) * own + noise * other[name]).astype(np.float32)
        for name, own in target.items()
    }
    if head_ids is not None:
        ids = np.array(head_ids, np.int32)
        draft["lm_head.weight"] = draft["lm_head.weight"][ids]
        draft["head_ids"] = ids  # type: ignore[assignment]
    with_masks = told
    if masks:
        draft[MASKS] = np.random.default_rng(seed).normal(size=(masks, told["hidden_size"]))
        draft[MASKS] = draft[MASKS].astype(np.float16)
        with_masks = {**told, "mpissd": {"masks": masks}}
    return TinyPair(
        write_folder(folder / "target", told, target),
        write_folder(folder / "draft", with_masks, draft),
    )


def masked_pair(folder: Path, **sizes: int) -> TinyPair:
    """Writes a pair whose draft's mask tokens are shuffled embeddings of tokens, which draft many
    of the few tokens of its texts rightly, in some rounds all."""
    pair = tiny_pair(folder, vocab=9, scale=3.0, seed=3, **sizes)
    weights = load_file(pair.draft / "model.safetensors")
    shuffled = np.random.default_rng(1).permuted(weights[EMBEDDING][:7], axis=0)
    save_file({**weights, MASKS: shuffled}, pair.draft / "model.safetensors")
    return pair


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
