"""Text to token ids and back, with a model's chat template and its stop tokens.

A tokenizer comes from a Hugging Face folder (tokenizer.json, tokenizer_config.json,
generation_config.json, chat_template.jinja) or from the metadata of a GGUF file. The libraries
`tokenizers` and `jinja2` are imported when one is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from mpissd.common.errors import ConfigError
from mpissd.common.presets import files_of
from mpissd.engine.model.transformer.checkpoint import digest
from mpissd.engine.workload.text.template import render
from mpissd.engine.workload.text.vocabulary import Vocabulary, from_folder, from_gguf

if TYPE_CHECKING:
    import tokenizers

Message = Mapping[str, str]
_FILES = "tokenizer.json tokenizer_config.json generation_config.json chat_template.jinja".split()
# What values of another type than the files promise raise where they are read.
_DAMAGED = OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError


@dataclass(frozen=True)
class Tokenizer:
    """A model's vocabulary. stop_ids: the tokens that end an answer. template: the model's chat
    template (jinja2), or None. specials: named special tokens that a template may use."""

    name: str
    stop_ids: frozenset[int]
    template: str | None
    specials: Mapping[str, str]
    _vocabulary: tokenizers.Tokenizer = field(repr=False)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included; ids are below it."""
        return self._vocabulary.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, preceded by those that the model expects at a beginning."""
        return self._vocabulary.encode(text).ids

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Returns the tokens of a conversation, up to where the model's answer begins.

        messages: {"role": …, "content": …} each. Raises ConfigError without a chat template, and
        for messages that the template refuses.
        """
        if self.template is None:
            raise ConfigError(f"{self.name}: has no chat template: allowed: a plain prompt")
        text = render(self.template, messages, self.specials)
        return self._vocabulary.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        """Returns the text of these tokens; special tokens are left out unless `specials`.

        Bytes that are no whole UTF-8 character become U+FFFD.
        """
        return self._vocabulary.decode(list(ids), skip_special_tokens=not specials)


@lru_cache(maxsize=4)
def load_tokenizer(where: str) -> Tokenizer:
    """Returns the tokenizer of a model; raises ConfigError if it has none or it cannot be read.

    where: any name of a model with files (common.presets.files_of).
    """
    path = files_of(where)
    if path is None:
        raise ConfigError(f"{where}: random weights have no tokenizer: allowed: run --prompt_ids=…")
    if path.suffix == ".json":
        path = path.parent
    try:
        found = from_gguf(path) if path.suffix == ".gguf" else from_folder(path)
        return _checked(path, found)
    except _DAMAGED as error:
        told = " ".join(str(error).split())
        raise ConfigError(f"{str(path)!r}: its tokenizer is damaged ({told})") from error


def tokenizer_digest(where: str) -> str | None:
    """Returns the digest of the files beside a folder's weights that decide its tokens; None for
    models without such files."""
    path = files_of(where)
    folder = path.parent if path is not None and path.suffix == ".json" else path
    if folder is None or not folder.is_dir():
        return None
    paths = [folder / name for name in _FILES if (folder / name).exists()]
    return digest(paths)[0] if paths else None


def _checked(path: Path, found: Vocabulary) -> Tokenizer:
    """Returns the tokenizer; raises ConfigError for a stop token that it does not have."""
    made = Tokenizer(path.name, found.stop_ids, found.template, found.specials, found.vocabulary)
    foreign = sorted(token for token in found.stop_ids if not 0 <= token < made.vocab_size)
    if foreign:
        raise ConfigError(
            f"{str(path)!r}: stop token {foreign[0]} is of another tokenizer: this one has "
            f"{made.vocab_size} tokens"
        )
    return made
