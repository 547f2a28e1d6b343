"""Opens a model's weights by its name: random ones, a Hugging Face folder, or a .gguf.

A draft is mapped to its target's vocabulary if one vocabulary begins with the other. A draft that
distill wrote names its target by two digests in its config.json. The digest of the files holds for
one file only. The digest of the norms' weights holds for the model in each of its formats, because
a .gguf of any quantisation keeps vectors as they are in the Hugging Face folder. A fine-tuned model
that left the norms of its parent as they were (most LoRA) counts as its parent.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mpissd.common import hf_config
from mpissd.common.errors import ConfigError
from mpissd.common.model_files import has_files
from mpissd.common.presets import ModelShape, files_of, resolve_model
from mpissd.common.rounds import Ints
from mpissd.common.token_lists import check_same_tokens
from mpissd.engine.model.transformer import families
from mpissd.engine.model.transformer.checkpoint import (
    ALL,
    EMBEDDING,
    HEAD,
    Checkpoint,
    FileCheckpoint,
    Floats,
    Int8,
    tensors,
)
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.files import ROPE_FACTORS, GgufFiles, SafetensorsFiles
from mpissd.engine.model.transformer.random_weights import RandomCheckpoint


def mapped_config(config: TransformerConfig, vocab_size: int) -> TransformerConfig:
    """Returns a draft's configuration over the ids of a target with `vocab_size` tokens.

    Tokens beyond the draft's vocabulary are never drafted, and those beyond the target's have no
    row in its head. A reduced head's ids are taken to lie in both.
    """
    shape = replace(config.shape, vocab_size=vocab_size)
    return replace(config, shape=shape, head_vocab=min(config.head_vocab, vocab_size))


def check_vocabularies(target: str, draft: str) -> None:
    """Raises ConfigError, one line, if a token that both models know means another text in each.

    Both are names of presets.resolve_model; one without a tokenizer passes.
    """
    here, there = files_of(target), files_of(draft)
    if here is not None and there is not None and here != there:
        check_same_tokens(here, there)


class MappedCheckpoint:
    """A draft's weights over the ids of its target (a Checkpoint)."""

    def __init__(self, draft: Checkpoint, vocab_size: int) -> None:
        """Reads nothing; vocab_size: tokens of the target, other than the draft's."""
        self._draft, self.name = draft, draft.name
        self.config, self._ids = mapped_config(draft.config, vocab_size), draft.head_ids()
        if self._ids is not None:  # ids rise, so those that the target lacks come last
            self._ids = self._ids[self._ids < vocab_size]
            self.config = replace(self.config, head_vocab=len(self._ids))

    @property
    def sha256(self) -> str | None:
        """Digest of the draft's files."""
        return self._draft.sha256

    @property
    def sha256_of(self) -> str | None:
        """What of them the digest covers."""
        return self._draft.sha256_of

    def matrix(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Floats:
        """Returns a part of a matrix; tokens that the draft lacks have an embedding of zeros."""
        if name == HEAD:
            return self._draft.matrix(name, slice(*rows.indices(self.config.head_vocab)), columns)
        if name != EMBEDDING:
            return self._draft.matrix(name, rows, columns)
        start, stop, _ = rows.indices(self.config.shape.vocab_size)
        known = self._draft.config.shape.vocab_size
        found = self._draft.matrix(name, slice(min(start, known), min(stop, known)), columns)
        lacking = np.zeros((stop - start - len(found), found.shape[1]), np.float32)
        return np.concatenate([found, lacking])

    def int8_part(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Int8 | None:
        """Returns a part of a matrix as it is stored, if that is int8; none of the embedding."""
        if name == HEAD:
            rows = slice(*rows.indices(self.config.head_vocab))
        return None if name == EMBEDDING else self._draft.int8_part(name, rows, columns)

    def vector(self, name: str, part: slice = ALL) -> Floats:
        """Returns a part of a norm's weight or of a bias."""
        return self._draft.vector(name, part)

    def random_part(self, name: str, rows: slice = ALL, columns: slice = ALL) -> None:
        """None, because a random draft is made with the target's ids from the start."""
        return None

    def head_ids(self) -> Ints | None:
        """Returns the token of each row of the LM head; None where row i is token i."""
        return self._ids


def known_ids(draft: Checkpoint, vocab: int) -> Ints | None:
    """Returns the tokens that a draft knows, rising; None if it knows all of the target's."""
    ids, known = draft.head_ids(), draft.config.head_vocab
    return np.arange(known, dtype=np.int32) if ids is None and known < vocab else ids


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


@dataclass(frozen=True)
class Origin:
    """The target that a draft was made for: its name, its files' SHA-256, its norms' digest.

    sha256: None if it had random weights. norms: None in drafts of before it was written.
    """

    name: str
    sha256: str | None
    norms: str | None

    def to_dict(self) -> dict[str, str | None]:
        """Returns the keys that config.json has of it under "mpissd"."""
        names = {"target": self.name, "target_sha256": self.sha256}
        return {**names, "target_norms_sha256": self.norms}

    def is_of(self, target: Checkpoint) -> bool | None:
        """Returns whether it is this target; None if that cannot be told."""
        if self.norms is not None:
            return self.norms == norms_digest(target)
        return True if self.sha256 is not None and self.sha256 == target.sha256 else None


def origin_of(target: Checkpoint) -> Origin:
    """Returns what a draft says of the target that it is made for."""
    return Origin(target.name, target.sha256, norms_digest(target))


def norms_digest(model: Checkpoint) -> str:
    """Returns the SHA-256 of the weights of all norms, in the order of `tensors`, as float32."""
    found = hashlib.sha256()
    for name, size in tensors(model.config):
        if len(size) == 1 and name.endswith("norm.weight"):
            found.update(np.ascontiguousarray(model.vector(name), "<f4").tobytes())
    return found.hexdigest()


def recorded_origin(draft: str) -> Origin | None:
    """Returns the target that a draft was made for; None where its files do not say.

    draft: any name of presets.resolve_model. Raises ConfigError for an unreadable config.json.
    """
    path = files_of(draft)
    told = None if path is None or not path.is_dir() else path / "config.json"
    ours = hf_config.load(told).get("mpissd") if told is not None and told.is_file() else None
    if not isinstance(ours, Mapping) or not isinstance(ours.get("target"), str):
        return None
    return Origin(ours["target"], _text(ours, "target_sha256"), _text(ours, "target_norms_sha256"))


def _text(told: Mapping[str, Any], key: str) -> str | None:
    value = told.get(key)
    return value if isinstance(value, str) else None


def made_for(draft: str, target: str) -> bool | None:
    """Returns whether a draft was made for this target; None if that is not known.

    Both are names of presets.resolve_model.
    """
    origin = recorded_origin(draft)
    return None if origin is None else origin.is_of(open_checkpoint(target))


def doubt(draft: str, target: str) -> str:
    """Returns one line of doubt about a draft beside a target; "" where there is none.

    A draft that does not say what it was made for raises no doubt: any pair may be tried.
    """
    origin = recorded_origin(draft)
    if origin is None:
        return ""
    beside = open_checkpoint(target)
    is_of = origin.is_of(beside)
    if is_of:
        return ""
    why = f"not for {beside.name}, whose weights differ: few of its tokens may be accepted"
    if is_of is None:
        files = "no file" if origin.sha256 is None else f"files of sha256 {origin.sha256[:12]}"
        why = f"from {files}: whether {beside.name} is the same model is not known"
    return f"draft={draft} was made for {origin.name}, {why}"
