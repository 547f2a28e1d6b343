"""Reads a model's vocabulary, stop tokens and chat templates from its files.

A Hugging Face folder is read as `PreTrainedTokenizerFast` of transformers reads it, whatever its
tokenizer_class is. A GGUF file is read as llama.cpp reads it, which has defaults for absent keys. A
setting that cannot be followed exactly is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpissd.common.errors import ConfigError
from mpissd.common.files import read_file
from mpissd.common.gguf import read_gguf
from mpissd.engine.model.transformer.sources import library as load_library

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "added_tokens.json",
    "special_tokens_map.json",
)
MORE_TEMPLATES = "additional_chat_templates"  # a folder of further templates, NAME.jinja


@dataclass(frozen=True)
class Vocabulary:
    """The content of a model's tokenizer files. stop_ids: the tokens that end an answer. templates:
    the chat templates by name. specials: the texts of special tokens by their names, such as
    bos_token, which templates use. backend: the tokenizer object of the library `tokenizers`."""

    stop_ids: frozenset[int]
    templates: Mapping[str, str]
    specials: Mapping[str, str]
    backend: tokenizers.Tokenizer = field(repr=False)


_SPECIALS = tuple(f"{name}_token" for name in "bos eos unk sep pad cls mask".split())


def from_folder(folder: Path) -> Vocabulary:
    """Reads the tokenizer of a Hugging Face folder: tokenizer.json and the files that go with it.
    Raises ConfigError if a file is missing, damaged or not supported."""
    library = load_library("tokenizers", "workload=text")
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ConfigError(f"{str(folder)!r}: has no tokenizer.json, which --workload=text needs")
    text = _text(path)
    where = repr(str(folder / "tokenizer_config.json"))
    config = _json(folder / "tokenizer_config.json")
    model = _json(folder / "config.json")
    for key in ("fast_tokenizer_files", "fix_mistral_regex"):
        if config.get(key):
            raise ConfigError(f"{where}: {key} is not supported: allowed: a folder without it")
    file: dict[str, Any] = {} if "added_tokens_decoder" in config else _json(path)
    try:
        backend = library.Tokenizer.from_str(text)
    except Exception as error:  # The library raises just Exception.
        raise ConfigError(f"{str(path)!r}: no tokenizer: {_first_line(error)}") from error
    padding = backend.padding
    backend.no_truncation()  # Truncation and padding were settings of the model's training.
    backend.no_padding()
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    is_bpe = type(backend.model).__name__ == "BPE"
    if is_bpe and backend.model.dropout:
        raise ConfigError(f"{str(path)!r}: model.dropout={backend.model.dropout}: allowed: none")
    if config.get("clean_up_tokenization_spaces") and not is_bpe:
        raise ConfigError(f"{where}: clean_up_tokenization_spaces=true: allowed: false, or BPE")
    decoder, settings = _added(folder, config, file)
    if padding is not None:
        settings.setdefault("pad_token", padding["pad_token"])
    named, others = _special(settings, decoder.values())
    present = {*backend.get_vocab(), *map(str, decoder.values())}
    eos = str(named.get("eos_token"))
    if eos not in present and settings.get("eos_token") is not None:
        raise ConfigError(f"{str(folder)!r}: the tokenizer has no stop token {eos!r}")
    _add(backend, [decoder[number] for number in sorted(decoder)], named, others)
    stops = {backend.token_to_id(eos)} if eos in present and "eos_token" in named else set()
    generation = _json(folder / "generation_config.json") or model
    also = generation.get("eos_token_id")
    stops.update(also if isinstance(also, list) else [] if also is None else [also])
    specials = {name: str(token) for name, token in named.items()}
    return Vocabulary(frozenset(stops), _templates(folder, config), specials, backend)


def _added(
    folder: Path, config: Mapping[str, Any], file: Mapping[str, Any]
) -> tuple[dict[int, tokenizers.AddedToken], dict[str, Any]]:
    """Returns (the added tokens by id, the settings with special tokens). Both come from
    tokenizer_config.json (`config`); if that has no added_tokens_decoder, also from
    special_tokens_map.json, added_tokens.json and tokenizer.json (`file`)."""
    from tokenizers import AddedToken

    settings = dict(config)
    decoder = dict[int, AddedToken]()
    if "additional_special_tokens" in settings and not settings.get("extra_special_tokens"):
        settings["extra_special_tokens"] = settings.pop("additional_special_tokens")
    if "added_tokens_decoder" in config:
        return {int(i): token for i, token in config["added_tokens_decoder"].items()}, settings
    for key, value in _json(folder / "special_tokens_map.json").items():
        if isinstance(value, AddedToken):
            value.special = True
        elif isinstance(value, list) and key == "extra_special_tokens":
            value = [*(settings.get(key) or []), *value]
        settings[key] = value
    if "extra_special_tokens" not in settings:
        settings["extra_special_tokens"] = settings.get("additional_special_tokens")
    # As in AutoTokenizer, `texts` leaves out tokens that tokenizer_config.json gives as objects.
    values = ((settings.get(key), config.get(key)) for key in _SPECIALS)
    texts = {str(value) for value, old in values if isinstance(value, str) or value is not old}
    texts |= set(map(str, settings["extra_special_tokens"] or []))
    for text, number in _json(folder / "added_tokens.json").items():
        is_special = text in texts
        decoder[number] = AddedToken(text, normalized=not is_special, special=is_special)
    decoder |= {token.pop("id"): AddedToken(**token) for token in file["added_tokens"]}
    return decoder, settings


def _special(
    settings: Mapping[str, Any], added: Iterable[tokenizers.AddedToken]
) -> tuple[dict[str, Any], list[Any]]:
    """Returns (the special tokens with a name, such as eos_token, by name; a list of the others),
    each a text or an AddedToken. added: added tokens, which replace equal texts."""
    by_text = {str(token): token for token in added}
    named = {}
    for name in _SPECIALS:
        if (token := settings.get(name)) is not None:
            named[name] = by_text.get(str(token), token)
    for name, token in settings.items():  # Models may name more special tokens (image_token).
        if name.endswith("_token") and name not in _SPECIALS and not isinstance(token, bool | None):
            named[name] = token
    extra = settings.get("extra_special_tokens") or []
    return (named | extra, []) if isinstance(extra, dict) else (named, extra)


def _add(
    backend: tokenizers.Tokenizer, tokens: list[Any], named: Mapping[str, Any], others: list[Any]
) -> None:
    """Adds tokens to `backend` in the order in which AutoTokenizer does, which decides the ids of
    new tokens. named, others: the special tokens with and without a name."""
    from tokenizers import AddedToken

    present = {str(token) for token in [*backend.get_added_tokens_decoder().values(), *tokens]}
    for token in [*named.values(), *others]:
        if str(token) not in present and token not in tokens:  # A str never equals an AddedToken.
            tokens.append(token)
    names = set(map(str, named.values()))
    for n, token in enumerate(tokens):
        if isinstance(token, str):
            tokens[n] = AddedToken(token, special=True)
        elif str(token) in names:
            token.special = True
    backend.add_tokens(tokens)


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the chat templates by name. If the folder has template files, the templates in
    tokenizer_config.json (`config`) are ignored."""
    value = config.get("chat_template")
    paths = {path.stem: path for path in (folder / MORE_TEMPLATES).glob("*.jinja")}
    if (path := folder / "chat_template.jinja").exists():
        paths["default"] = path
    if paths:
        return {name: _text(path) for name, path in paths.items()}
    if isinstance(value, list):
        value = {entry["name"]: entry["template"] for entry in value}
    templates = value if isinstance(value, dict) else {} if value is None else {"default": value}
    if wrong := [name for name, text in templates.items() if not isinstance(text, str)]:
        raise TypeError(f"chat_template {wrong[0]} is no text")
    return templates


def _text(path: Path) -> str:
    try:
        return read_file(path).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is no UTF-8 text"
        raise ConfigError(f"{str(path)!r}: {reason}") from error


def _token(value: dict[str, Any]) -> Any:
    """Returns a JSON object {"content": …} as an AddedToken, and any other object unchanged."""
    from tokenizers import AddedToken

    flags = {"single_word", "lstrip", "rstrip", "normalized", "special"}
    if "content" not in value or not value.keys() <= flags | {"content", "__type"}:
        return value
    return AddedToken(**{key: setting for key, setting in value.items() if key != "__type"})


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(_text(path), object_hook=_token)
    except ValueError as error:
        raise ConfigError(f"{str(path)!r}: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{str(path)!r}: is no JSON object")
    return value


_GGUF_SPECIALS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token"}
_FOLDER = "allowed: the model's Hugging Face folder"
_DEFAULT_ID = 11  # llama.cpp's id for BOS and EOS if a byte-pair vocabulary names none
_CONTROL = 3  # ggml's number for the type of control tokens
_USER_DEFINED = 4
_SPELLED = (2, _CONTROL, _USER_DEFINED)  # ggml's types of tokens that are found by their texts

# By these regular expressions llama.cpp's pre-tokenizers split text before byte pairs are merged.
# The expressions are from llama-vocab.cpp of llama.cpp, and from the models' tokenizer.json.
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SPLITS = {
    "qwen2": (_QWEN,),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "smollm": (r"\p{N}", _WORDS),
    "gpt-2": (_WORDS,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
}
_NFC = ("qwen2",)  # pre-tokenizers that first normalise text to Unicode's NFC
_LLAMA3_NAMES = ("llama-bpe", "llama3")  # pre-tokenizers that add BOS and split no token's text
# llama.cpp recognises control tokens by their texts. The tokens below end an answer.
_ENDS = (
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] "
    "[EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <｜end▁of▁sentence｜> [e~["
)
# A line of _ONE_OF has the texts of one kind of control token; _GROUPS has the kind's GGUF key.
# If a GGUF file has the key of a kind, only the key's token counts; else every text in its line.
# All tokens of the last three lines of _ONE_OF end an answer.
_GROUPS = "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"
_ONE_OF = """
    <|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>
    <|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>
    <|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>
    <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]
    <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>
    <|file_sep|>
    """.strip().splitlines()
# A file with one of these tokens is refused: llama.cpp has special rules for its model family.
_FOREIGN = (
    "<|return|> <|call|> <|calls|> <|flush|> <|tool_response> <|channel|> <|message|> <|start|> "
    "<|constrain|>"
)


def from_gguf(path: Path) -> Vocabulary:
    """Reads the byte-pair vocabulary of a GGUF file. Raises ConfigError for a vocabulary of another
    kind (SentencePiece), for an unknown pre-tokenizer, and if llama.cpp might split a text into
    other tokens than the library `tokenizers` does."""
    library = load_library("tokenizers", "workload=text")
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    where = repr(str(path))
    metadata = read_gguf(path).metadata
    prefix = "tokenizer.ggml."
    keys = {key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}
    if keys.get("model") != "gpt2" or "tokens" not in keys or "merges" not in keys:
        kind = keys.get("model", "none")
        raise ConfigError(f"{where}: its tokenizer is {kind!r}, not gpt2 (byte pairs): {_FOLDER}")
    if "phi3" in (name := str(metadata.get("general.name", "")).lower().replace("-", "")):
        raise ConfigError(f"{where}: general.name={name!r} is not supported: {_FOLDER}")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(keys["tokens"])]
    numbers = {token: i for i, token in enumerate(tokens)}
    if len(numbers) < len(tokens):
        raise ConfigError(f"{where}: tokenizer.ggml.tokens: allowed: each token once")
    for name in (*_GGUF_SPECIALS, "eot", "eom", *_GROUPS):
        number = keys.get(f"{name}_token_id", 0)
        if not 0 <= number < len(tokens):
            raise ConfigError(f"{where}: {name}_token_id: token {number} of {len(tokens)} tokens")
    pre = keys.get("pre") or "default"
    if pre not in _SPLITS:
        raise ConfigError(f"{where}: pre-tokenizer {pre!r}: allowed: {', '.join(sorted(_SPLITS))}")
    merges = [tuple(pair.split(" ", 1)) for pair in dict.fromkeys(keys["merges"])]
    try:
        model = models.BPE(numbers, merges, ignore_merges=pre in _LLAMA3_NAMES)
    except Exception as error:  # The library raises just Exception.
        raise ConfigError(f"{where}: its merges: {_first_line(error)}") from error
    backend: tokenizers.Tokenizer = library.Tokenizer(model)
    splits = [pre_tokenizers.Split(library.Regex(form), "isolated") for form in _SPLITS[pre]]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, letters])
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    default = {"bos": _DEFAULT_ID, "eos": _DEFAULT_ID}
    named = {name: keys.get(f"{name}_token_id", default.get(name, -1)) for name in _GGUF_SPECIALS}
    ids: dict[str, int] = {name: i for name, i in named.items() if 0 <= i < len(tokens)}
    kinds, stops = _kinds(where, numbers, keys, ids.get("eos"))
    spelled = [i for i, kind in enumerate(kinds) if kind in _SPELLED]
    _check_apart(where, [tokens[i] for i in spelled])
    token_of = partial(library.AddedToken, normalized=False)
    added = [token_of(tokens[i], special=kinds[i] != _USER_DEFINED) for i in spelled]
    backend.add_tokens(added)  # One call for all, because each call rebuilds the index.
    begin = ["bos"] * bool(keys.get("add_bos_token", pre in _LLAMA3_NAMES))
    steps = [*begin, "$A", *["eos"] * bool(keys.get("add_eos_token", False))]
    if missing := [name for name in steps if name not in {*ids, "$A"}]:
        raise ConfigError(f"{where}: tokenizer.ggml.{missing[0]}_token_id is missing")
    backend.post_processor = processors.TemplateProcessing(steps, special_tokens=list(ids.items()))
    template = metadata.get("tokenizer.chat_template")
    specials = {_GGUF_SPECIALS[name]: tokens[i] for name, i in ids.items()}
    templates = {} if template is None else {"default": template}
    if (with_tools := metadata.get("tokenizer.chat_template.tool_use")) is not None:
        templates["tool_use"] = with_tools
    return Vocabulary(frozenset(stops), templates, specials, backend)


def _kinds(
    where: str, numbers: Mapping[str, int], keys: Mapping[str, Any], eos: int | None
) -> tuple[list[int], set[int]]:
    """Returns (ggml's type of each token, the tokens that end an answer), as llama.cpp determines
    them. where: names the file in errors. numbers: the id of each token text. keys: the tokenizer's
    metadata in the file. eos: the id of EOS."""
    kinds: list[int] = list(keys.get("token_type") or [1] * len(numbers))
    if len(kinds) != len(numbers):
        raise ConfigError(f"{where}: token_type has {len(kinds)} values for {len(numbers)} tokens")
    if foreign := [text for text in _FOREIGN.split() if text in numbers]:
        raise ConfigError(f"{where}: token {foreign[0]!r} is not supported: {_FOLDER}")
    ends = {numbers[text] for text in _ENDS.split() if text in numbers}
    controls = set(ends)
    for name, texts in zip(_GROUPS, _ONE_OF, strict=True):
        ids = {numbers[text] for text in texts.split() if text in numbers}
        if (number := keys.get(f"{name}_token_id")) is not None:
            ids = {number}
        else:
            controls |= ids
        if name not in _GROUPS[:3]:
            ends |= ids
    stops = keys.get("eot_token_id"), keys.get("eom_token_id"), eos
    named = {number for number in stops if number is not None}
    for i in controls:
        kinds[i] = _CONTROL
    return kinds, ends | named


def _check_apart(where: str, texts: Iterable[str]) -> None:
    """Raises ConfigError if two tokens can overlap in a text: llama.cpp then finds the longest one,
    but the library `tokenizers` the first. Tokens that repeat one character are allowed."""
    texts = [text for text in texts if len(set(text)) > 1]
    beginnings = {text[:size] for text in texts for size in range(1, len(text))}
    for text in texts:
        if tail := next((text[i:] for i in range(1, len(text)) if text[i:] in beginnings), None):
            raise ConfigError(f"{where}: token {text!r} ends as another one begins, with {tail!r}")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
