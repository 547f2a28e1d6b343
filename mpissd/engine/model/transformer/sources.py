"""Opens a model's weights by its name: random ones, a Hugging Face folder, or a .gguf."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from mpissd.common import hf_config
from mpissd.common.errors import ConfigError
from mpissd.common.model_files import has_files
from mpissd.common.presets import ModelShape, files_of, resolve_model
from mpissd.engine.model.transformer import families
from mpissd.engine.model.transformer.checkpoint import Checkpoint
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.file_checkpoint import FileCheckpoint
from mpissd.engine.model.transformer.gguf_files import ROPE_FACTORS, GgufFiles
from mpissd.engine.model.transformer.random_weights import RandomCheckpoint
from mpissd.engine.model.transformer.safetensors_files import SafetensorsFiles
from mpissd.engine.model.transformer.vocabulary import MappedCheckpoint, mapped_config


def config_of(where: str, target: str | None = None) -> TransformerConfig:
    """Returns the architecture of a model, from its metadata alone.

    where: any name of presets.resolve_model. target: that of the target, for a draft: it may read
    the target's embedding, and it drafts the target's tokens whatever its own vocabulary is.
    Raises ConfigError, one line that names what is missing, damaged or not supported.
    """
    return _config(where, target, _stamp(where), None if target is None else _stamp(target))


Stamp = tuple[tuple[str, int, int], ...]


@lru_cache(maxsize=32)
def _config(where: str, target: str | None, *stamps: Stamp | None) -> TransformerConfig:
    return open_checkpoint(where, target=target).config


def _stamp(where: str) -> Stamp:
    """Returns the names, times and sizes of a model's files, which change when they do."""
    path = files_of(where)
    if path is None or not os.path.exists(path):
        return ()
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    told = [(file, file.stat()) for file in files if file.exists()]  # a link may lead nowhere
    return tuple((str(file), each.st_mtime_ns, each.st_size) for file, each in told)


def open_checkpoint(where: str, seed: int = 0, target: str | None = None) -> Checkpoint:
    """Opens a model's weights; reads no tensor yet. Arguments and errors are config_of's.

    seed: that of random weights.
    """
    path, shape = files_of(where), resolve_model(where)
    beside = None if target is None else open_checkpoint(target)
    vocab_size = shape.vocab_size if beside is None else beside.config.shape.vocab_size
    if path is None or not has_files(path):
        return RandomCheckpoint(mapped_config(_architecture(path, shape), vocab_size), seed)
    opened = (
        _open_gguf(path, shape) if path.suffix == ".gguf" else _open_folder(path, shape, beside)
    )
    return opened if vocab_size == shape.vocab_size else MappedCheckpoint(opened, vocab_size)


def _architecture(path: Path | None, shape: ModelShape) -> TransformerConfig:
    if path is None:
        return families.of_preset(shape)
    return families.of_hugging_face(path, hf_config.load(path), shape)


def _open_gguf(path: Path, shape: ModelShape) -> Checkpoint:
    files = GgufFiles(path, shape.head_dim)
    factors = None if files.shape(ROPE_FACTORS) is None else files.read(ROPE_FACTORS)
    return FileCheckpoint(files, families.of_gguf(path, files.file, shape, factors))


def _open_folder(path: Path, shape: ModelShape, target: Checkpoint | None) -> Checkpoint:
    told = path / "config.json"
    config = hf_config.load(told)
    architecture, files = families.of_hugging_face(told, config, shape), SafetensorsFiles(path)
    ours = config.get("mpissd")
    if not isinstance(ours, dict) or ours.get("embedding") != "target":
        return FileCheckpoint(files, architecture)
    if target is None:
        raise ConfigError(f"{str(path)!r} reads its target's embedding: allowed: as a draft")
    return FileCheckpoint(files, architecture, target, shares_head=ours.get("head") == "target")
