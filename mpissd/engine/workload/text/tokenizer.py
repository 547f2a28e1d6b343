"""Text to token ids and back, with a model's chat template and its stop tokens.

A tokenizer comes from a Hugging Face folder (tokenizer.json, tokenizer_config.json,
generation_config.json, chat_template.jinja) or from the metadata of a GGUF file. The libraries
`tokenizers` and `jinja2` are imported when one is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mpissd.common.errors import ConfigError
from mpissd.common.gguf import read_gguf
from mpissd.common.presets import files_of
from mpissd.engine.model.transformer.checkpoint import digest

if TYPE_CHECKING:
    import tokenizers
    from jinja2 import Template

Message = Mapping[str, str]
_FILES = "tokenizer.json tokenizer_config.json generation_config.json chat_template.jinja".split()
# Errors that values of an unexpected type raise when they are read.
_DAMAGED = OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError


@dataclass(frozen=True)
class Tokenizer:
    """A model's tokens. stop_ids: the tokens that end an answer. template: the model's chat
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
        """Returns the tokens of a conversation, up to the beginning of the model's answer.

        messages: {"role": …, "content": …} each. Raises ConfigError without a chat template, and
        for messages that the template refuses.
        """
        if self.template is None:
            raise ConfigError(f"{self.name}: has no chat template: allowed: a plain prompt")
        try:
            compiled, specials = _compiled(self.template), self.specials
            text = compiled.render(messages=messages, add_generation_prompt=True, **specials)
            text.encode("utf-8")
        except Exception as error:  # a program of the model's: it may fail in any way
            raise ConfigError(f"chat template: {' '.join(str(error).split())}") from error
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
        tokenizer = from_gguf(path) if path.suffix == ".gguf" else from_folder(path)
        foreign = [token for token in tokenizer.stop_ids if not 0 <= token < tokenizer.vocab_size]
    except _DAMAGED as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{str(path)!r}: its tokenizer is damaged ({reason})") from error
    if foreign:
        raise ConfigError(
            f"{str(path)!r}: stop token {min(foreign)} is of another tokenizer: this one has "
            f"{tokenizer.vocab_size} tokens"
        )
    return tokenizer


def tokenizer_digest(where: str) -> str | None:
    """Returns the digest of the tokenizer's files in a weights folder; None without such files."""
    path = files_of(where)
    folder = path.parent if path is not None and path.suffix == ".json" else path
    if folder is None or not folder.is_dir():
        return None
    paths = [folder / name for name in _FILES if (folder / name).exists()]
    return digest(paths)[0] if paths else None


@lru_cache(maxsize=4)
def _compiled(template: str) -> Template:
    """Compiles a template with the functions that Hugging Face's templates may use."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(reason: str) -> NoReturn:
        raise TemplateError(reason)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


_SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token")
_GGUF_SPECIALS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token"}
_GGUF_STOPS = ("eos", "eot", "eom")
_CONTROL = 3  # ggml's type of a token that is no text
_USER_DEFINED = 4

# How the models of llama.cpp's names split text before byte pairs are merged. Source: llama.cpp,
# llama-vocab.cpp, and the models' own tokenizer.json.
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


def from_folder(folder: Path) -> Tokenizer:
    """Reads tokenizer.json and its neighbour files; raises ConfigError if that fails."""
    library, path = _library(), folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{str(folder)!r}: has no tokenizer.json, which --workload=text needs")
    try:
        vocabulary = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{str(path)!r}: no tokenizer: {_first_line(error)}") from error
    config = _json(folder / "tokenizer_config.json")
    specials: dict[str, str] = {}
    for name in _SPECIALS:  # a string, or {"content": …}
        token = config.get(name)
        if (text := token.get("content") if isinstance(token, dict) else token) is not None:
            specials[name] = text
    # Stop tokens: eos_token, and generation_config's (or else config's) eos_token_id.
    stops = set[int]()
    if (eos := specials.get("eos_token")) is not None:
        if (token := vocabulary.token_to_id(eos)) is None:
            raise ConfigError(f"{str(folder)!r}: the tokenizer has no stop token {eos!r}")
        stops.add(token)
    known = _json(folder / "generation_config.json") or _json(folder / "config.json")
    also = known.get("eos_token_id")
    stops.update(also if isinstance(also, list) else [] if also is None else [also])
    # The chat template: a file, a text, or the one named "default".
    template, file = config.get("chat_template"), folder / "chat_template.jinja"
    if file.is_file():
        template = file.read_text(encoding="utf-8")
    elif isinstance(template, list):
        named = (each["template"] for each in template if each.get("name") == "default")
        template = next(named, None)
    return Tokenizer(folder.name, frozenset(stops), template, specials, vocabulary)


def _json(path: Path) -> dict[str, Any]:
    """Returns a JSON object, {} without such a file; raises ConfigError if it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r}: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{str(path)!r}: is no JSON object")
    return value


def from_gguf(path: Path) -> Tokenizer:
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
    return Tokenizer(
        path.name,
        frozenset(
            {i for name in _GGUF_STOPS if (i := ids[name]) is not None}
            | {tokens.index(token) for token in _END_OF_TURN if token in tokens}
        ),
        metadata.get("tokenizer.chat_template"),
        {key: tokens[i] for name, key in _GGUF_SPECIALS.items() if (i := ids[name]) is not None},
        _byte_pairs(path, known),
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
    """Returns the pre-tokenizer of llama.cpp's name."""
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
    """Imports `tokenizers`; raises ConfigError if it is not installed."""
    try:
        import tokenizers
    except ModuleNotFoundError as missing:
        raise ConfigError("workload=text needs tokenizers: pip install 'mpissd[text]'") from missing
    return tokenizers


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
