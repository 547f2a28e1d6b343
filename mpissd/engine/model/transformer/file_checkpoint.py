"""Weights from files: every tensor is judged by its name and shape before one is read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Ints
from mpissd.engine.model.transformer.checkpoint import ALL, Floats
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.tensors import EMBEDDING, HEAD, tensors

HEAD_IDS = "head_ids"
_PIECE = 1 << 24  # bytes read at once


class Tensors(Protocol):
    """Tensors of files by their Hugging Face names."""

    paths: list[Path]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns a tensor's shape; None if it is not there."""

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Floats:
        """Returns a part of a tensor of one or two dimensions, float32."""

    def integers(self, name: str) -> Ints | None:
        """Returns a tensor of whole numbers, int32; None if it is not there."""


class FileCheckpoint:
    """Weights of one model in files (a Checkpoint)."""

    def __init__(
        self, files: Tensors, config: TransformerConfig, embedding: Tensors | None = None
    ) -> None:
        """Judges the tensors; embedding: the files of the input embedding, if not its own.

        Raises ConfigError, one line that names the file and the tensor, if one is missing or has
        another shape than the configuration says.
        """
        self.config, self.name, self._files = config, config.shape.name, files
        self._embedding = embedding or files
        for name, size in tensors(config):
            check_shape(self._of(name), name, size)
        self._head_ids = files.integers(HEAD_IDS)

    @cached_property
    def sha256(self) -> str | None:
        """Digest of one file, or of the list that sha256sum prints of several."""
        return digest(self._files.paths)

    def _of(self, name: str) -> Tensors:
        return self._embedding if name == EMBEDDING else self._files

    def matrix(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Floats:
        """Returns a part of a matrix, float32 [outputs, inputs]."""
        name = EMBEDDING if name == HEAD and self.config.tied else name
        return self._of(name).read(name, rows, columns)

    def vector(self, name: str, part: slice = ALL) -> Floats:
        """Returns a part of a norm's weight or of a bias, float32."""
        return self._files.read(name, part)

    def random_part(self, name: str, rows: slice = ALL, columns: slice = ALL) -> None:
        """None: the weights are read."""
        return None

    def head_ids(self) -> Ints | None:
        """Returns the token of each row of a reduced LM head, int32, rising; None without one."""
        return self._head_ids


def check_shape(files: Tensors, name: str, size: tuple[int, ...]) -> None:
    """Raises ConfigError unless the files have a tensor of this shape."""
    found = files.shape(name)
    if found == size:
        return
    where = files.paths[0] if len(files.paths) == 1 else files.paths[0].parent
    if found is None:
        raise ConfigError(f"{str(where)!r}: the tensor {name} is missing")
    raise ConfigError(f"{str(where)!r}: {name} is {list(found)}: allowed: {list(size)}")


def check_head_ids(where: Path, ids: Ints, vocab_size: int) -> None:
    """Raises ConfigError unless a reduced head's ids rise and lie in the vocabulary."""
    if ids.ndim != 1 or not len(ids) or np.any(np.diff(ids) <= 0):
        raise ConfigError(f"{str(where)!r}: {HEAD_IDS}: allowed: one list of rising token ids")
    if ids[0] < 0 or ids[-1] >= vocab_size:
        raise ConfigError(
            f"{str(where)!r}: {HEAD_IDS} reaches from {ids[0]} to {ids[-1]}: allowed: "
            f"0..{vocab_size - 1}"
        )


def digest(paths: Sequence[Path]) -> str:
    """Returns the SHA-256 of one file, or of the lines "digest  name" of several."""
    digests = [(_digest_of(path), path.name) for path in paths]
    if len(digests) == 1:
        return digests[0][0]
    lines = "".join(f"{each}  {name}\n" for each, name in digests)
    return hashlib.sha256(lines.encode()).hexdigest()


def _digest_of(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            found.update(piece)
    return found.hexdigest()
