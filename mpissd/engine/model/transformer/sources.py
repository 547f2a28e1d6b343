"""Opens a model's weights by its name: random ones, a Hugging Face folder, or a .gguf."""

from __future__ import annotations

from mpissd.common import hf_config
from mpissd.common.errors import ConfigError
from mpissd.common.presets import files_of, resolve_model
from mpissd.engine.model.transformer import families
from mpissd.engine.model.transformer.checkpoint import Checkpoint
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.random_weights import RandomCheckpoint


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
    if not (path.is_dir() or path.suffix == ".gguf"):
        config = families.of_hugging_face(path, hf_config.load(path), shape)
        return RandomCheckpoint(config, seed)
    raise ConfigError(f"{where}: weights of files are not read yet")
