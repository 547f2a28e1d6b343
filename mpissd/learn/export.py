"""Writes a draft as a Hugging Face folder: weights, config.json, model card, NOTICE, curves."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.model.transformer.checkpoint import MASKS, quantize
from mpissd.engine.model.transformer.config import TransformerConfig

Array = NDArray[Any]
WEIGHTS = "model.safetensors"
_CARD = """\
---
library_name: mpissd
license: other
base_model: {target}
---
# Draft of {target}

A draft model for speculative decoding with {target}. It proposes tokens that the target then
checks; it is not meant to be used without it. `python -m mpissd distill` trained it on what the
target wrote: report.json has its shape, training and evaluation, curves.jsonl the losses.

`int8-32`: a matrix `X.weight` is int8 [outputs, inputs] and `X.scale` float16
[outputs, inputs / 32]; a weight is its integer times its block's scale. `head_ids` (int32, rising)
names the token of each row of the LM head. Norms are float32.
"""
_PARALLEL = """
One forward drafts {masks} tokens and one more: `mask_embedding.weight` (float16) has the embeddings
of {masks} mask tokens, which follow the last token. Without them it drafts one token a forward.
Tokens a round at temperature 0, and the greedy agreement by depth; chains and trees of the
mask tokens' distributions take one forward a round:
"""
_NOTICE = """\
Draft of {target}

This model is derived from {target} (sha256 {sha256}).
Changes: kept {origin}; reduced the LM head to {head_vocab} tokens; trained on
texts that {target} wrote; quantised the weights to 8 bits (see README.md).
"""


def quantized(weights: Mapping[str, Array], head_ids: Ints) -> dict[str, Array]:
    """Returns a draft's weights as they are stored: int8 matrices and their scales, float32
    vectors, head_ids (the tokens of the LM head's rows), and float16 mask tokens."""
    stored: dict[str, Array] = {"head_ids": np.asarray(head_ids, np.int32)}
    for name, values in weights.items():
        if values.ndim == 1:
            stored[name] = np.asarray(values, np.float32)
        elif name == MASKS:
            stored[name] = values.astype(np.float16)
        else:
            scale = name.removesuffix("weight") + "scale"
            stored[name], stored[scale] = quantize(values)
    return stored


def save(folder: Path, config: TransformerConfig, stored: Mapping[str, Array], about: Any) -> int:
    """Writes model.safetensors and config.json; returns the bytes of the weights. about: what
    config.json says under "mpissd" about the draft's origin."""
    from safetensors.numpy import save as packed

    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.ascontiguousarray(values) for name, values in stored.items()}
    size = (folder / WEIGHTS).write_bytes(packed(arrays))
    shape = config.shape
    scaling = config.rope_scaling
    family = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    ours = {"quantization": "int8-32", "embedding": "target", "head_vocab": config.head_vocab}
    ours |= {"kind": config.kind} if config.kind else {}
    ours |= {"masks": config.masks} if config.masks else {}
    rope_scaling = scaling and {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
        "original_max_position_embeddings": scaling.original,
    }
    if config.rope_divisor != 1:
        rope_scaling = {"rope_type": "linear", "factor": config.rope_divisor}
    document = {
        "architectures": [f"{family.title()}ForCausalLM"],
        "model_type": family,
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_scaling,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": False,
        "attention_bias": config.qkv_bias,
        "mlp_bias": False,
        "mpissd": {**ours, **about},
    }
    write_json(folder / "config.json", document)
    return size


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder, whose files replace those in `folder` when the block ends. After an
    error, such as a full disk, `folder` keeps its files."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / ".new"
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir()
        yield new
        has_weights = (new / WEIGHTS).exists()
        for path in sorted(new.iterdir()):
            path.replace(folder / path.name)
        for old in folder.glob("model?*.safetensors*") if has_weights else ():
            old.unlink()  # It is a shard of an earlier version, or its index.
    finally:
        shutil.rmtree(new, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _parallel_card(report: Mapping[str, Any]) -> str:
    """Returns the part of the model card about mask tokens; "" for a draft without them."""
    if not report.get("masks"):
        return ""
    columns = {}
    for name, told in report.get("evaluation", {}).items():
        found = told["parallel"]
        single = told["by_lookahead"].items()
        cells = {f"single forwards, K={k}": of["tokens_per_round"] for k, of in single}
        cells |= {f"chain, K={k}": value for k, value in found["chains"].items()}
        cells |= {f"tree of {nodes}": value for nodes, value in found["trees"].items()}
        cells |= {f"agreement {n}": v for n, v in enumerate(found["agreement_by_depth"], 1)}
        columns[name] = cells
    table = [["", *columns], ["---"] * (1 + len(columns))] if columns else []
    for name in next(iter(columns.values()), {}):
        table.append([name, *(str(of.get(name)) for of in columns.values())])
    return _PARALLEL.format(**report) + "\n" + "".join(f"| {' | '.join(r)} |\n" for r in table)


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    write_json(folder / "report.json", report)
    (folder / "README.md").write_text(_CARD.format(**report) + _parallel_card(report))
    (folder / "NOTICE").write_text(_NOTICE.format(**report))
