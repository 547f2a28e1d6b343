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
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from mpissd.common import hf_config
from mpissd.common.errors import ConfigError
from mpissd.common.model_files import has_files
from mpissd.common.presets import files_of, resolve_model
from mpissd.common.rounds import Ints
from mpissd.common.token_lists import check_same_tokens
from mpissd.engine.model.transformer import config as configs
from mpissd.engine.model.transformer.checkpoint import (
    EMBEDDING,
    HEAD,
    Checkpoint,
    Resized,
    random_checkpoint,
    tensors,
)
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.files import (
    ROPE_FACTORS,
    GgufFiles,
    SafetensorsFiles,
    open_files,
)


def check_vocabularies(target: str, draft: str) -> None:
    """Raises ConfigError, one line, if a token that both models know means another text in each.

    Both are names of presets.resolve_model; one without a tokenizer passes.
    """
    here, there = files_of(target), files_of(draft)
    if here is not None and there is not None and here != there:
        check_same_tokens(here, there)


def known_ids(draft: Checkpoint, vocab: int) -> Ints | None:
    """Returns the tokens that a draft knows, rising; None if it knows all of the target's."""
    ids, known = draft.head_ids, draft.config.head_vocab
    return np.arange(known, dtype=np.int32) if ids is None and known < vocab else ids


def config_of(where: str, target: str | None = None) -> TransformerConfig:
    """Returns the architecture of a model, from its metadata.

    where: any name of presets.resolve_model. target: the target's name, for a draft: it may read
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
    stats = [(file, file.stat()) for file in files if file.exists()]  # a link may lead nowhere
    return tuple((str(file), each.st_mtime_ns, each.st_size) for file, each in stats)


def open_checkpoint(where: str, seed: int = 0, target: str | None = None) -> Checkpoint:
    """Opens a model's weights; reads no tensor yet. Arguments and errors are config_of's.

    seed: of random weights. Tokens beyond a draft's vocabulary are never drafted, and those beyond
    its target's have no row in its head. A reduced head's ids are taken to lie in both.
    """
    path, shape = files_of(where), resolve_model(where)
    other = None if target is None else open_checkpoint(target)
    vocab_size = shape.vocab_size if other is None else other.config.shape.vocab_size

    def mapped(config: TransformerConfig) -> TransformerConfig:
        sized, rows = replace(config.shape, vocab_size=vocab_size), config.head_vocab
        return replace(config, shape=sized, head_vocab=min(rows, vocab_size))

    if path is None or not has_files(path):
        config = configs.of_preset(shape) if path is None else configs.of_folder(path, shape)
        return random_checkpoint(mapped(config), seed)
    if path.suffix == ".gguf":
        gguf = GgufFiles(path, shape.head_dim)
        factors = gguf.get(ROPE_FACTORS)
        read = None if factors is None else factors.part().read()
        opened = open_files(gguf, configs.of_gguf(gguf.file, shape, read))
    else:
        config, files = configs.of_folder(path / "config.json", shape), SafetensorsFiles(path)
        ours = configs.own_keys(hf_config.load(path / "config.json"))
        reads_target = ours.get("embedding") == "target"
        if reads_target and other is None:
            raise ConfigError(f"{str(path)!r} reads its target's embedding: allowed: as a draft")
        shares_head = reads_target and ours.get("head") == "target"
        opened = open_files(files, config, other if reads_target else None, shares_head=shares_head)
    if vocab_size == shape.vocab_size:
        return opened
    config, ids = mapped(opened.config), opened.head_ids
    if ids is not None:  # ids rise, so those that the target lacks come last
        ids = ids[ids < vocab_size]
        config = replace(config, head_vocab=len(ids))
    by_name = dict(opened.by_name)  # tokens that the draft lacks have an embedding of zeros
    for name, rows in ((EMBEDDING, vocab_size), (HEAD, config.head_vocab)):
        by_name[name] = Resized(by_name[name], rows)
    return replace(opened, config=config, by_name=by_name, head_ids=ids)


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
        return dict(zip(_ORIGIN_KEYS, (self.name, self.sha256, self.norms), strict=True))

    def is_of(self, target: Checkpoint) -> bool | None:
        """Returns whether it is this target; None if that is not known."""
        if self.norms is not None:
            return self.norms == origin_of(target).norms
        return True if self.sha256 is not None and self.sha256 == target.sha256 else None


_ORIGIN_KEYS = "target", "target_sha256", "target_norms_sha256"


def origin_of(target: Checkpoint) -> Origin:
    """Returns how a draft that is made for this target names it.

    Its norms' digest is the SHA-256 of all norms' weights, in the order of `tensors`, as float32.
    """
    norms = hashlib.sha256()
    for name, size in tensors(target.config):
        if len(size) == 1 and name.endswith("norm.weight"):
            norms.update(np.ascontiguousarray(target.read(name), "<f4").tobytes())
    return Origin(target.name, target.sha256, norms.hexdigest())


def _recorded_origin(draft: str) -> Origin | None:
    """Returns the target that a draft was made for; None where its files name none.

    draft: any name of presets.resolve_model. Raises ConfigError for an unreadable config.json.
    """
    path = files_of(draft)
    if path is None or not (path / "config.json").is_file():
        return None
    ours = configs.own_keys(hf_config.load(path / "config.json"))
    values = (ours.get(key) for key in _ORIGIN_KEYS)
    name, *digests = (value if isinstance(value, str) else None for value in values)
    return None if name is None else Origin(name, *digests)


def made_for(draft: str, target: str) -> bool | None:
    """Returns whether a draft was made for this target; None if that is not known.

    Both are names of presets.resolve_model.
    """
    origin = _recorded_origin(draft)
    return None if origin is None else origin.is_of(open_checkpoint(target))


def doubt(draft: str, target: str) -> str:
    """Returns one line of doubt about a draft for this target; "" where there is none.

    A draft that does not name its target raises no doubt: any pair may be tried.
    """
    origin = _recorded_origin(draft)
    if origin is None:
        return ""
    other = open_checkpoint(target)
    is_of = origin.is_of(other)
    if is_of:
        return ""
    why = f"not for {other.name}, whose weights differ: few of its tokens may be accepted"
    if is_of is None:
        files = "no file" if origin.sha256 is None else f"files of sha256 {origin.sha256[:12]}"
        why = f"from {files}: whether {other.name} is the same model is not known"
    return f"draft={draft} was made for {origin.name}, {why}"
