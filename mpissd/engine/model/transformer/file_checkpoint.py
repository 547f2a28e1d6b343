"""Weights from files; every tensor's name and shape is checked before the first one is read."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Ints
from mpissd.engine.model.transformer.checkpoint import ALL, Checkpoint, Floats, Int8
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.file_digest import digest
from mpissd.engine.model.transformer.quantize import BLOCK, dequantize, quantize
from mpissd.engine.model.transformer.tensors import EMBEDDING, HEAD, tensors

HEAD_IDS = "head_ids"


class Tensors(Protocol):
    """Tensors of files by their Hugging Face names."""

    paths: list[Path]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns a tensor's shape; None if it is not there."""

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Floats:
        """Returns a part of a tensor of one or two dimensions, float32."""

    def int8(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Int8 | None:
        """Returns a part of a matrix as Checkpoint.int8_part does."""

    def integers(self, name: str) -> Ints | None:
        """Returns a tensor of whole numbers, int32; None if it is not there."""


class FileCheckpoint:
    """Weights of one model in files (a Checkpoint)."""

    def __init__(
        self,
        files: Tensors,
        config: TransformerConfig,
        embedding: Checkpoint | None = None,
        *,
        shares_head: bool = False,
    ) -> None:
        """Judges the tensors; embedding: the model whose input embedding this one reads, if not
        its own. shares_head: its LM head too is that model's, the rows of head_ids.

        Raises ConfigError, one line that names the file and the tensor, if one is missing or has
        another shape than the configuration says.
        """
        self.name, self._files, self._embedding = config.shape.name, files, embedding
        self.shares_head = shares_head
        self._head_ids = files.integers(HEAD_IDS)
        if self._head_ids is not None:
            _check_head_ids(_where(files), self._head_ids, config.shape.vocab_size)
            config = replace(config, head_vocab=len(self._head_ids))
        self.config = replace(config, int8=_is_int8(files, config, shares_head))
        if embedding is not None:
            _check_embedding(_where(files), config, embedding.config)
        elsewhere = {EMBEDDING: embedding is not None, HEAD: shares_head}
        for name, size in tensors(config):
            if not elsewhere.get(name):
                _check_shape(files, name, size)

    @cached_property
    def _digest(self) -> tuple[str, str]:
        return digest(self._files.paths)

    @property
    def sha256(self) -> str | None:
        """Digest of one file, or of the list that sha256sum prints of several."""
        return self._digest[0]

    @property
    def sha256_of(self) -> str | None:
        """What of the files it covers (file_digest)."""
        return self._digest[1]

    def matrix(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Floats:
        """Returns a part of a matrix, float32 [outputs, inputs]."""
        name = EMBEDDING if name == HEAD and self.config.tied else name
        if name == EMBEDDING and self._embedding is not None:
            return self._embedding.matrix(name, rows, columns)
        if name == HEAD and self.shares_head:
            return dequantize(*self._target_rows(rows))[:, columns]
        return self._files.read(name, rows, columns)

    def _target_rows(self, rows: slice) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
        """Returns rows of the target's LM head, quantised as a head of one's own is stored."""
        assert self._embedding is not None
        ids = np.arange(self.config.head_vocab) if self._head_ids is None else self._head_ids
        ids = ids[rows]
        span = slice(int(ids.min(initial=0)), int(ids.max(initial=-1)) + 1)
        return quantize(self._embedding.matrix(HEAD, span)[ids - span.start])

    def int8_part(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Int8 | None:
        """Returns a part of a matrix as it is stored, if that is int8."""
        name = EMBEDDING if name == HEAD and self.config.tied else name
        if name == EMBEDDING and self._embedding is not None:
            return self._embedding.int8_part(name, rows, columns)
        if name == HEAD and self.shares_head:
            return self._int8_head(rows, columns)
        return self._files.int8(name, rows, columns)

    def _int8_head(self, rows: slice, columns: slice) -> Int8 | None:
        start, stop, _ = columns.indices(self.config.shape.hidden)
        if start % BLOCK or stop % BLOCK:
            return None
        weights, scales = self._target_rows(rows)
        part = slice(start // BLOCK, stop // BLOCK)
        return weights[:, columns], scales[:, part].astype(np.float32)

    def vector(self, name: str, part: slice = ALL) -> Floats:
        """Returns a part of a norm's weight or of a bias, float32."""
        return self._files.read(name, part)

    def random_part(self, name: str, rows: slice = ALL, columns: slice = ALL) -> None:
        """None, because the weights are read from files."""
        return None

    def head_ids(self) -> Ints | None:
        """Returns the token of each row of the LM head, int32; None where row i is token i."""
        return self._head_ids


def _is_int8(files: Tensors, config: TransformerConfig, shares_head: bool) -> bool:
    """Returns whether the matrices that a forward reads are int8: stored, or a shared head's."""
    head = EMBEDDING if config.tied else HEAD
    names = ["model.layers.0.mlp.down_proj.weight", *([] if shares_head else [head])]
    return all(files.shape(n) is not None and files.int8(n) is not None for n in names)


def _where(files: Tensors) -> str:
    """Returns the file, or the folder of several, as messages name it."""
    return repr(str(files.paths[0] if len(files.paths) == 1 else files.paths[0].parent))


def _check_shape(files: Tensors, name: str, size: tuple[int, ...]) -> None:
    """Raises ConfigError unless the files have a tensor of this shape."""
    found = files.shape(name)
    if found is None:
        raise ConfigError(f"{_where(files)}: the tensor {name} is missing")
    if found != size:
        raise ConfigError(f"{_where(files)}: {name} is {list(found)}: allowed: {list(size)}")


def _check_head_ids(where: str, ids: Ints, vocab_size: int) -> None:
    """Raises ConfigError unless a reduced head's ids rise and lie in the vocabulary."""
    if ids.ndim != 1 or not len(ids) or np.any(np.diff(ids) <= 0):
        raise ConfigError(f"{where}: {HEAD_IDS}: allowed: one list of rising token ids")
    if ids[0] < 0 or ids[-1] >= vocab_size:
        told = f"{HEAD_IDS} reaches from {ids[0]} to {ids[-1]}"
        raise ConfigError(f"{where}: {told}: allowed: 0..{vocab_size - 1}")


def _check_embedding(where: str, config: TransformerConfig, target: TransformerConfig) -> None:
    """Raises ConfigError unless the target's embedding fits a draft that reads it."""
    wanted, found = ([told.shape.vocab_size, told.shape.hidden] for told in (config, target))
    if wanted != found:
        raise ConfigError(
            f"{where} reads its target's embedding, {wanted}; that of {target.shape.name} is "
            f"{found}: allowed: the target it was made for"
        )
