"""Reads vocabularies: a folder's tokenizer.json, or the tokens and merges in a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpissd.common.errors import ConfigError
from mpissd.common.gguf import read_gguf

if TYPE_CHECKING:
    import tokenizers

_SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token")
_GGUF_SPECIALS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token"}
_GGUF_STOPS = ("eos", "eot", "eom")
_CONTROL = 3  # ggml's type of a token that is no text
_USER_DEFINED = 4

# How the models behind llama.cpp's names split text before byte pairs are merged. Source:
# llama.cpp, llama-vocab.cpp, and the models' own tokenizer.json.
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_SPLITS = {"qwen2": _QWEN, "llama-bpe": _LLAMA3, "llama3": _LLAMA3}
_DIGITS = ("smollm",)  # each digit is split off, then GPT-2's rule holds
_GPT2 = ("gpt-2", "default")
_NFC = ("qwen2",)  # names of vocabularies that normalise text to Unicode's NFC first
_WHOLE = ("llama-bpe", "llama3")  # a word that is a token needs no merges
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>")  # some files name only the end of a document


@dataclass(frozen=True)
class Vocabulary:
    """The contents of a model's token files; text.tokenizer.Tokenizer explains the fields."""

    vocabulary: tokenizers.Tokenizer
    stop_ids: frozenset[int]
    template: str | None
    specials: Mapping[str, str]


def from_folder(folder: Path) -> Vocabulary:
    """Reads tokenizer.json and the files beside it; raises ConfigError if that fails."""
    library, path = _library(), folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{str(folder)!r}: has no tokenizer.json, which --workload=text needs")
    try:
        vocabulary = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{str(path)!r}: no tokenizer: {_first_line(error)}") from error
    config = _json(folder / "tokenizer_config.json")
    specials = {name: _content(config.get(name)) for name in _SPECIALS}
    return Vocabulary(
        vocabulary,
        _stop_ids(folder, vocabulary, specials["eos_token"]),
        _template(folder, config),
        {name: token for name, token in specials.items() if token is not None},
    )


def _stop_ids(
    folder: Path, vocabulary: tokenizers.Tokenizer, eos_token: str | None
) -> frozenset[int]:
    """Returns the ids of eos_token and of generation_config's eos_token_id (one or a list).

    config.json is read where there is no generation_config.json.
    """
    ids = set[int]()
    if eos_token is not None:
        found = vocabulary.token_to_id(eos_token)
        if found is None:
            raise ConfigError(f"{str(folder)!r}: the tokenizer has no stop token {eos_token!r}")
        ids.add(found)
    known = _json(folder / "generation_config.json") or _json(folder / "config.json")
    also = known.get("eos_token_id")
    return frozenset(ids.union(also if isinstance(also, list) else [] if also is None else [also]))


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Returns the chat template: a file of its own, a text, or the one named "default"."""
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        return alone.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        return next((each["template"] for each in found if each.get("name") == "default"), None)
    return found


def _content(token: Any) -> str | None:
    """Returns the text of a special token, which is a string or {"content": …}."""
    return token.get("content") if isinstance(token, dict) else token


def _json(path: Path) -> dict[str, Any]:
    """Returns a JSON object, {} without such a file; raises ConfigError if it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r}: {_first_line(error)}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{str(path)!r}: is no JSON object")
    return found


def from_gguf(path: Path) -> Vocabulary:
    """Builds the byte-pair vocabulary that a GGUF file describes.

    Raises ConfigError for another kind (SentencePiece), and for a pre-tokenizer that is not known
    here, as it would give wrong tokens without any error.
    """
    metadata = read_gguf(path).metadata
    known = {key[len("tokenizer.ggml.") :]: v for key, v in metadata.items() if "ggml." in key}
    if known.get("model") != "gpt2" or "tokens" not in known or "merges" not in known:
        kind = known.get("model", "none")
        raise ConfigError(
            f"{str(path)!r}: its tokenizer is {kind!r}: allowed: gpt2 (byte pairs), or the "
            "model's Hugging Face folder"
        )
    tokens = known["tokens"]
    ids = {name: known.get(f"{name}_token_id") for name in (*_GGUF_SPECIALS, *_GGUF_STOPS)}
    foreign = [i for i in ids.values() if i is not None and not 0 <= i < len(tokens)]
    if foreign:
        raise ConfigError(f"{str(path)!r}: token {foreign[0]} of {len(tokens)} tokens")
    return Vocabulary(
        _byte_pairs(path, known),
        frozenset(
            {i for name in _GGUF_STOPS if (i := ids[name]) is not None}
            | {tokens.index(token) for token in _END_OF_TURN if token in tokens}
        ),
        metadata.get("tokenizer.chat_template"),
        {told: tokens[i] for name, told in _GGUF_SPECIALS.items() if (i := ids[name]) is not None},
    )


def _byte_pairs(path: Path, known: Mapping[str, Any]) -> tokenizers.Tokenizer:
    library = _library()
    from tokenizers import decoders, models, normalizers, processors

    tokens: list[str] = known["tokens"]
    pre = known.get("pre", "default")
    merges = [tuple(pair.split(" ", 1)) for pair in known["merges"]]
    try:
        ids = {token: i for i, token in enumerate(tokens)}
        model = models.BPE(ids, merges, ignore_merges=pre in _WHOLE)
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{str(path)!r}: its merges: {_first_line(error)}") from error
    made: tokenizers.Tokenizer = library.Tokenizer(model)
    made.pre_tokenizer = _split(path, pre, known.get("add_space_prefix"))
    if pre in _NFC:
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    kinds = known.get("token_type") or [1] * len(tokens)
    added = [
        library.AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    made.add_tokens(added)
    if known.get("add_bos_token"):
        bos = tokens[known["bos_token_id"]]
        made.post_processor = processors.TemplateProcessing(
            f"{bos} $A", special_tokens=[(bos, known["bos_token_id"])]
        )
    return made


def _split(path: Path, name: str, prefix: bool | None) -> Any:
    """Returns the pre-tokenizer that llama.cpp's name stands for."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if name in _GPT2:
        return ByteLevel(add_prefix_space=bool(prefix))
    if name in _DIGITS:
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    if name in _SPLITS:
        split = Split(Regex(_SPLITS[name]), "isolated")
        return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    allowed = ", ".join(sorted({*_GPT2, *_DIGITS, *_SPLITS}))
    raise ConfigError(f"{str(path)!r}: pre-tokenizer {name!r}: allowed: {allowed}")


def _library() -> Any:
    """Imports `tokenizers`; raises ConfigError where it is not installed."""
    try:
        import tokenizers
    except ModuleNotFoundError as missing:
        raise ConfigError("workload=text needs tokenizers: pip install 'mpissd[text]'") from missing
    return tokenizers


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
