"""Opens a model's weights by its name: random ones, a Hugging Face folder, or a .gguf."""

from __future__ import annotations

from pathlib import Path

from mpissd.common import hf_config
from mpissd.common.presets import ModelShape, files_of, resolve_model
from mpissd.engine.model.transformer import families
from mpissd.engine.model.transformer.checkpoint import Checkpoint
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.file_checkpoint import FileCheckpoint
from mpissd.engine.model.transformer.gguf_files import ROPE_FACTORS, GgufFiles
from mpissd.engine.model.transformer.random_weights import RandomCheckpoint
from mpissd.engine.model.transformer.safetensors_files import SafetensorsFiles


def config_of(where: str, target: str | None = None) -> TransformerConfig:
    """Returns the architecture of a model, from its metadata alone.

    where: any name of presets.resolve_model. target: that of the target, for a draft that reads
    the target's embedding or has another vocabulary. Raises ConfigError, one line that names what
    is missing, damaged or not supported.
    """
    return open_checkpoint(where, target=target).config


def open_checkpoint(where: str, seed: int = 0, target: str | None = None) -> Checkpoint:
    """Opens a model's weights; reads no tensor yet. Arguments and errors are config_of's.

    seed: that of random weights.
    """
    path, shape = files_of(where), resolve_model(where)
    if path is None:
        return RandomCheckpoint(families.of_preset(shape), seed)
    if path.suffix == ".gguf":
        return _open_gguf(path, shape)
    if not path.is_dir():
        return RandomCheckpoint(families.of_hugging_face(path, hf_config.load(path), shape), seed)
    return _open_folder(path, shape)


def _open_gguf(path: Path, shape: ModelShape) -> Checkpoint:
    files = GgufFiles(path, shape.head_dim)
    factors = None if files.shape(ROPE_FACTORS) is None else files.read(ROPE_FACTORS)
    return FileCheckpoint(files, families.of_gguf(path, files.file, shape, factors))


def _open_folder(path: Path, shape: ModelShape) -> Checkpoint:
    told = path / "config.json"
    config, files = (
        families.of_hugging_face(told, hf_config.load(told), shape),
        SafetensorsFiles(path),
    )
    return FileCheckpoint(files, config)
