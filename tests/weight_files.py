"""Writes tiny models in the formats of the public, from random weights of any architecture."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mpissd.common.errors import ConfigError
from mpissd.engine.model.transformer.checkpoint import Checkpoint, tensors
from mpissd.engine.model.transformer.sources import config_of, gguf_name, open_checkpoint

CONFIG: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 128,
}  # fmt: skip


def refused(where: Path, message: str = "") -> str:
    """Returns the line with which a model is refused; it contains the message."""
    with pytest.raises(ConfigError) as error:
        config_of(str(where))
    text = str(error.value)
    assert "\n" not in text and message in text, text
    return text


def parsed(*texts: str) -> dict[str, Any]:
    """Returns the keys that texts like 'rope_theta=500.0' give a JSON value."""
    pairs = (text.partition("=") for text in texts)
    return {name.replace("\\n", "\n"): json.loads(value) for name, _, value in pairs}


def values_of(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint, float32."""
    return {
        name: np.ascontiguousarray(checkpoint.read(name)) for name, _ in tensors(checkpoint.config)
    }


def random_folder(
    folder: Path, seed: int = 0, shards: int = 1, **changes: Any
) -> tuple[Path, dict[str, np.ndarray]]:
    """Writes a folder of random weights, and returns it with its values; changes: of CONFIG."""
    config = {**CONFIG, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    values = values_of(open_checkpoint(str(folder / "config.json"), seed))
    return write_folder(folder, config, values, shards), values


def write_folder(
    folder: Path, config: dict[str, Any], values: dict[str, np.ndarray], shards: int = 1
) -> Path:
    """Writes config.json, *.safetensors and, with several shards, their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    if shards == 1:
        save_file(values, folder / "model.safetensors")
        return folder
    names: dict[str, str] = {}
    for number in range(shards):
        part = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        own = dict(list(values.items())[number::shards])
        save_file(own, folder / part)
        names.update(dict.fromkeys(own, part))
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    return folder


def write_gguf(
    path: Path, values: dict[str, np.ndarray], kind: str = "F32", shards: int = 0, **changes: Any
) -> Path:
    """Writes a .gguf as llama.cpp's converter does: q and k reordered, matrices of type `kind`.

    shards: tensors of each shard of a split file; 0: one file. changes: architecture, metadata.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    architecture = changes.get("architecture", "llama")
    writer = GGUFWriter(path, architecture, split_max_tensors=shards)
    told = {
        "block_count": CONFIG["num_hidden_layers"],
        "embedding_length": CONFIG["hidden_size"],
        "feed_forward_length": CONFIG["intermediate_size"],
        "attention.head_count": CONFIG["num_attention_heads"],
        "attention.head_count_kv": CONFIG["num_key_value_heads"],
        "context_length": CONFIG["max_position_embeddings"],
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    for key, value in {**told, **changes.get("metadata", {})}.items():
        kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        kinds |= {bool: writer.add_bool, list: writer.add_array}
        if value is not None:
            name = key if key.startswith(("general.", "tokenizer.")) else f"{architecture}.{key}"
            kinds[type(value)](name, value)
    for name, value in values.items():
        stored, own = value, GGMLQuantizationType.F32
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = len(value) // 16
            stored = value.reshape(heads, 2, 8, -1).swapaxes(1, 2).reshape(value.shape)
        if value.ndim == 2:
            own = GGMLQuantizationType[kind]
        writer.add_tensor(gguf_name(name), quantize(stored, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(path.parent.glob(f"{path.stem}-00001-of-*")) if shards else path
