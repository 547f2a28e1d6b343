"""Reads a model's shape from the metadata of a .gguf file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.common.gguf_metadata import GgufFile, read_gguf

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_KEYS = {
    "num_layers": "block_count",
    "hidden": "embedding_length",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "ffn": "feed_forward_length",
}


def read_fields(path: Path) -> dict[str, Any]:
    """Returns the fields of a presets.ModelShape by name.

    Raises ConfigError, one line naming the file and the key, if it is unreadable or incomplete, or
    of an architecture that is not supported.
    """
    file = read_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{str(path)!r}: general.architecture={architecture!r} is not supported: allowed: "
            f"{', '.join(ARCHITECTURES)}"
        )
    experts = file.metadata.get(f"{architecture}.expert_count")
    if experts:
        raise ConfigError(
            f"{str(path)!r}: {architecture}.expert_count={experts} says mixture-of-experts, which "
            "is not supported"
        )
    fields = {field: _integer(file, f"{architecture}.{key}") for field, key in _KEYS.items()}
    fields["num_kv_heads"] = fields["num_kv_heads"] or fields["num_heads"]
    if not fields["head_dim"]:
        fields["head_dim"] = (fields["hidden"] or 0) // (fields["num_heads"] or 1)
    vocabulary = {"vocab_size": _vocab_size(file), "gated": True}
    missing = [_KEYS[field] for field, value in fields.items() if not value]
    if missing:
        raise ConfigError(f"{str(path)!r}: {architecture}.{missing[0]} is missing")
    return {"name": path.stem, **fields, **vocabulary}


def _integer(file: GgufFile, key: str) -> int | None:
    value = file.metadata.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(f"{str(file.path)!r}: {key}={value!r}: allowed: whole numbers from 1")
    return value


def _vocab_size(file: GgufFile) -> int:
    """Returns the number of rows of the embedding, whose first dimension here is the hidden one."""
    found = file.tensors.get("token_embd.weight")
    if found is None or len(found.shape) != 2:
        raise ConfigError(f"{str(file.path)!r}: the tensor token_embd.weight is missing")
    return int(found.shape[1])
