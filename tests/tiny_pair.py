"""A pair of tiny random transformers as Hugging Face folders; the draft is a disturbed target."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from mpissd.engine.model.transformer.checkpoint import tensors
from mpissd.engine.model.transformer.sources import open_checkpoint


@dataclass(frozen=True)
class TinyPair:
    """The folders of a target and of its draft."""

    target: Path
    draft: Path


def config(
    layers: int, *, vocab: int, heads: int, kv_heads: int, hidden: int, head_dim: int = 16
) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }


def tiny_pair(
    folder: Path,
    *,
    layers: int = 2,
    vocab: int = 97,
    heads: int = 6,
    kv_heads: int = 3,
    hidden: int = 64,
    head_dim: int = 16,
    noise: float = 0.05,
    scale: float = 1.0,
    seed: int = 0,
    head_ids: Sequence[int] | None = None,
) -> TinyPair:
    """Writes a pair: the draft's matrices are the target's and a share `noise` of other ones.

    scale: of the LM head, which sets how sharp the target's distributions are. head_ids: the
    tokens that the draft knows (None: all).
    """
    told = config(
        layers, vocab=vocab, heads=heads, kv_heads=kv_heads, hidden=hidden, head_dim=head_dim
    )
    folder.mkdir(parents=True, exist_ok=True)
    where = folder / "config.json"
    where.write_text(json.dumps(told))
    target, other = (_weights(str(where), seed + n) for n in range(2))
    for weights in (target, other):
        weights["lm_head.weight"] *= scale
    draft = {name: _mixed(target[name], other[name], noise) for name in target}
    if head_ids is not None:
        ids = np.array(head_ids, np.int32)
        draft["lm_head.weight"] = draft["lm_head.weight"][ids]
        draft["head_ids"] = ids  # type: ignore[assignment]
    for name, weights in (("target", target), ("draft", draft)):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(told))
        save_file(weights, folder / name / "model.safetensors")
    return TinyPair(folder / "target", folder / "draft")


def _weights(where: str, seed: int) -> dict[str, NDArray[np.float32]]:
    checkpoint = open_checkpoint(where, seed)
    return {name: np.array(checkpoint.read(name)) for name, _ in tensors(checkpoint.config)}


def _mixed(
    own: NDArray[np.float32], other: NDArray[np.float32], share: float
) -> NDArray[np.float32]:
    return ((1 - share) * own + share * other).astype(np.float32)
