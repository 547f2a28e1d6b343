"""Maps a draft to its target's vocabulary, where one of the two begins with the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mpissd.common.presets import files_of
from mpissd.common.rounds import Ints
from mpissd.common.token_lists import check_same_tokens
from mpissd.engine.model.transformer.checkpoint import ALL, Checkpoint, Floats, Int8
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.tensors import EMBEDDING, HEAD


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
