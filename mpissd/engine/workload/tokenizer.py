"""Text to token ids and back: tokenizers, prompts, and the text of an answer while it arrives.

A tokenizer comes from a Hugging Face folder (tokenizer.json, tokenizer_config.json,
generation_config.json, chat_template.jinja) or from the metadata of a GGUF file. The libraries
`tokenizers` and `jinja2` are imported when one is loaded.

The flags give one prompt, or a file of lines {"prompt": …} or {"messages": […]}. A prompt is one
user message in the model's chat template if it has one and --chat_template allows it. If not, it is
the text that the model continues.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, lru_cache, partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import uuid4

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.gguf import read_gguf
from mpissd.common.presets import files_of
from mpissd.common.rounds import Source
from mpissd.engine.model.transformer.checkpoint import digest
from mpissd.engine.model.transformer.sources import library as load_library

if TYPE_CHECKING:
    import tokenizers
    from jinja2 import Template


Message = Mapping[str, Any]
_CUT = "\ue000cut\ue000"  # the end of a message that an answer continues
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

    @cached_property
    def for_grammars(self) -> Any:
        """The vocabulary as llguidance's LLTokenizer, which takes .5 s to make. It reads the name
        of a control token as ordinary text."""
        library = load_library("llguidance", "grammars")
        vocabulary = _without_names(self._vocabulary.to_str())
        return library.LLTokenizer(vocabulary, None, sorted(self.stop_ids))

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, preceded by those that the model expects at a beginning."""
        return self._vocabulary.encode(text).ids

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        *,
        begins: bool = True,
        continues: bool = False,
    ) -> list[int]:
        """Returns the tokens of a conversation, up to the beginning of the model's answer.

        messages: {"role": …, "content": …} each. tools: for the template to describe. begins:
        whether the template begins the answer. continues: the answer continues the last message.
        Raises ConfigError without a chat template, for tools that it ignores, and for messages that
        it refuses.
        """
        if self.template is None:
            raise ConfigError(f"{self.name}: has no chat template: allowed: a plain prompt")
        if tools and not re.search(r"\btools\b", self.template):
            raise ConfigError(f"tools: {self.name}'s chat template ignores them: allowed: none")
        if continues:
            last = {**messages[-1], "content": messages[-1]["content"] + _CUT}
            messages = [*messages[:-1], last]
        asked = {"tools": tools or None, "add_generation_prompt": begins and not continues}
        try:
            compiled, specials = _compiled(self.template), self.specials
            text = compiled.render(messages=messages, **asked, **specials)
            text = text[: text.rindex(_CUT)] if continues else text
            text.encode("utf-8")
        except Exception as error:  # a program of the model's: it may fail in any way
            raise ConfigError(f"chat template: {' '.join(str(error).split())}") from error
        return self._vocabulary.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        """Returns the text of these tokens; special tokens are left out unless `specials`.

        Bytes that are no whole UTF-8 character become U+FFFD.
        """
        return self._vocabulary.decode(list(ids), skip_special_tokens=not specials)


def _without_names(text: str) -> str:
    """Returns a tokenizer.json with random names for its control tokens, which no text contains.

    llguidance takes every added token "<…>" for a control token. Its forced text would otherwise
    be encoded with control tokens, which its own parser then refuses.
    """
    whole = json.loads(text)
    model, added = whole["model"], whole["added_tokens"]
    is_control = [token["special"] or re.fullmatch("(?s)<.*>", token["content"]) for token in added]
    names = {token["content"]: f"<{uuid4().hex}>" for token in compress(added, is_control)}
    for token in added:
        token["content"] = names.get(token["content"], token["content"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(name, name): n for name, n in model["vocab"].items()}
    else:  # of Unigram: [name, score] each
        model["vocab"] = [[names.get(name, name), score] for name, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in names]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    whole["post_processor"] = None  # it names control tokens
    return json.dumps(whole)


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
    library = load_library("tokenizers", "workload=text")
    path = folder / "tokenizer.json"
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
    # Stop tokens: eos_token, and eos_token_id of generation_config (or of config).
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
    library = load_library("tokenizers", "workload=text")
    from tokenizers import decoders, models, normalizers, processors

    metadata = read_gguf(path).metadata
    known = {key[len("tokenizer.ggml.") :]: v for key, v in metadata.items() if "ggml." in key}
    if known.get("model") != "gpt2" or "tokens" not in known or "merges" not in known:
        kind = known.get("model", "none")
        raise ConfigError(
            f"{str(path)!r}: its tokenizer is {kind!r}: allowed: gpt2 (byte pairs), or the "
            "model's Hugging Face folder"
        )
    tokens: list[str] = known["tokens"]
    ids = {name: known.get(f"{name}_token_id") for name in (*_GGUF_SPECIALS, *_GGUF_STOPS)}
    foreign = [i for i in ids.values() if i is not None and not 0 <= i < len(tokens)]
    if foreign:
        raise ConfigError(f"{str(path)!r}: token {foreign[0]} of {len(tokens)} tokens")
    pre = known.get("pre", "default")
    merges = [tuple(pair.split(" ", 1)) for pair in known["merges"]]
    try:
        numbers = {token: i for i, token in enumerate(tokens)}
        model = models.BPE(numbers, merges, ignore_merges=pre in _WHOLE)
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
    return Tokenizer(
        path.name,
        frozenset(
            {i for name in _GGUF_STOPS if (i := ids[name]) is not None}
            | {tokens.index(token) for token in _END_OF_TURN if token in tokens}
        ),
        metadata.get("tokenizer.chat_template"),
        {key: tokens[i] for name, key in _GGUF_SPECIALS.items() if (i := ids[name]) is not None},
        made,
    )


def _split(path: Path, name: str, prefix: bool | None) -> Any:
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


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


_ID = re.compile(r"[0-9]{1,18}")

Entry = Mapping[str, Any]  # {"prompt": text} or {"messages": [{"role": …, "content": …}, …]}


@dataclass(frozen=True)
class Prompt:
    """One prompt as it was given ({} for --prompt_ids), and its tokens."""

    entry: Entry
    tokens: tuple[int, ...]


def digest_of(prompts: Sequence[Prompt]) -> str:
    """Returns the SHA-256 of the prompts' tokens: a line each, in decimal, a space between."""
    lines = (" ".join(map(str, prompt.tokens)) + "\n" for prompt in prompts)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_prompts(
    config: RunConfig,
    tokenizer: Tokenizer | None,
    *,
    context: int | None = None,
    vocab: int | None = None,
) -> list[Prompt]:
    """Returns the prompts of a run, encoded.

    tokenizer: may be None with --prompt_ids. context: the longest sequence in tokens (None:
    unknown). vocab: ids are below it (None: unknown). Raises ConfigError, which names the line of
    the file: no prompt, an empty one, invalid UTF-8 or JSON, or a prompt that leaves no room for an
    answer.
    """
    named: list[tuple[str, Prompt]] = []
    if config.prompt_ids is not None:  # 1,2,3;4,5: two prompts
        for number, part in enumerate(config.prompt_ids.split(";"), 1):
            where, ids = f"prompt_ids: prompt {number}", part.split(",")
            if not all(_ID.fullmatch(token.strip()) for token in ids):
                raise ConfigError(f"{where}: {part!r}: allowed: whole numbers, a comma between")
            named.append((where, Prompt({}, tuple(int(token) for token in ids))))
    else:
        assert tokenizer is not None, "text without a tokenizer"
        entries = [] if config.prompts is None else read_entries(config.prompts)
        if not entries and config.prompt is None:
            needed = "prompt: needed with workload=text (or prompts=FILE.jsonl, prompt_ids)"
            raise ConfigError(needed)
        for where, entry in entries or [("prompt", {"prompt": config.prompt})]:
            tokens = encoded(where, entry, tokenizer, chat=config.chat_template)
            named.append((where, Prompt(entry, tokens)))
    for where, prompt in named:
        count, largest = len(prompt.tokens), max(prompt.tokens, default=0)
        if not count:
            raise ConfigError(f"{where}: has no tokens")
        if vocab is not None and largest >= vocab:
            raise ConfigError(f"{where}: token {largest}: allowed: 0..{vocab - 1}")
        if context is not None and count >= context:
            raise ConfigError(
                f"{where}: {count} tokens: allowed: at most {context - 1}, since the model's "
                f"context has {context}"
            )
    return [prompt for _, prompt in named]


def read_entries(file: str, flag: str = "prompts") -> list[tuple[str, Entry]]:
    """Returns the entries of a flag's JSONL file, each with its name for error messages; blank
    lines are skipped. Raises ConfigError."""
    path = Path(file).expanduser()
    name = f"{flag}={str(path)!r}"
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from error
    entries: list[tuple[str, Entry]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}: line {number}"
        try:
            entry = json.loads(line.decode("utf-8-sig"))  # some editors begin a file with a mark
        except UnicodeDecodeError as error:
            raise ConfigError(f"{where}: is no UTF-8 text (byte {error.start + 1})") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: is no JSON: {error}") from error
        if not isinstance(entry, dict) or len({"prompt", "messages"} & entry.keys()) != 1:
            raise ConfigError(f'{where}: allowed: {{"prompt": "…"}} or {{"messages": […]}}')
        _check_unicode(where, json.dumps(entry, ensure_ascii=False))  # the answers repeat it all
        entries.append((where, entry))
    if not entries:
        raise ConfigError(f"{name}: holds no prompt")
    return entries


def encoded(where: str, entry: Entry, tokenizer: Tokenizer, *, chat: bool) -> tuple[int, ...]:
    """Returns the tokens of an entry; raises ConfigError for an empty one.

    chat: whether a prompt is a message in the model's chat template, if it has one.
    """
    if "messages" in entry:
        messages = entry["messages"]
        if not isinstance(messages, list) or not messages:
            raise ConfigError(f"{where}: messages: allowed: a list of at least one message")
        for number, message in enumerate(messages, 1):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                allowed = 'allowed: {"role": "…", "content": "…"}'
                raise ConfigError(f"{where}: message {number}: {allowed}")
            check_text(f"{where}: message {number}", message.get("content"))
    else:
        text = check_text(where, entry["prompt"])
        if not chat or tokenizer.template is None:
            return tuple(tokenizer.encode(text))
        messages = [{"role": "user", "content": text}]
    try:
        return tuple(tokenizer.chat(messages))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def check_text(where: str, text: Any) -> str:
    """Returns the text of a prompt; raises ConfigError if it is empty or is no Unicode text."""
    if not isinstance(text, str):
        raise ConfigError(f"{where}: {json.dumps(text)} is no text")
    if not text.strip():
        raise ConfigError(f"{where}: is empty")
    _check_unicode(where, text)
    return text


def _check_unicode(where: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # arguments carry invalid bytes as lone surrogates
        raise ConfigError(f"{where}: is no UTF-8 text (character {error.start + 1})") from error


BONUS = "bonus"
# The origin of a token, as answers name it; NONE: the target's own.
SOURCES = {int(source): source.name.lower() for source in Source} | {int(Source.NONE): BONUS}
_PARTIAL = "\ufffd"  # the character to which incomplete UTF-8 bytes are decoded


def sources_of(num_accepted: int, source: int) -> list[str]:
    """Returns the source of each token of one round: the accepted ones, then the target's."""
    return [SOURCES[int(source)]] * num_accepted + [BONUS]


class AnswerText:
    """The text of one answer while its tokens arrive, up to its end.

    The pieces that `push` and `flush` return add up to the answer's text. Bytes of a part of a
    character wait for the tokens that complete it, and text that may be the beginning of a stop
    string is held back until that is decided. `ended` is the finish reason: "stop_token", "stop" (a
    stop string), or None so far. The token that ends an answer belongs to its tokens, but no stop
    belongs to its text.
    """

    def __init__(
        self, tokenizer: Tokenizer, strings: Sequence[str], stop_ids: Collection[int]
    ) -> None:
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._stops = [stop for stop in strings if stop]
        # Decoders may treat the first token differently, so a piece is a difference of two texts
        # that start at the same token.
        self._context: list[int] = []
        self._waiting: list[int] = []
        self._held = ""
        self.ended: str | None = None

    def push(self, token: int) -> str:
        """Takes one token; returns the text that can be shown now."""
        if self.ended is not None:
            return ""
        if token in self._stop_ids:
            text = self.flush()
            self.ended = "stop_token"
            return text
        self._waiting.append(token)
        new = self._new_text()
        if new.endswith(_PARTIAL):
            return ""
        if new:
            self._context, self._waiting = self._waiting, []
        text, is_cut = self._cut(self._held + new)
        if is_cut:
            self.ended = "stop"
            return text
        sizes = (
            size
            for stop in self._stops
            for size in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:size])
        )
        shown = len(text) - max(sizes, default=0)  # the rest may begin a stop string
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Returns the text that still waits, of an answer that ends without a stop; the bytes of a
        character that was never completed are U+FFFD."""
        if self.ended is not None:
            return ""
        text, _ = self._cut(self._held + self._new_text())
        self._held, self._context, self._waiting = "", self._waiting, []
        return text

    def _new_text(self) -> str:
        known = self._tokenizer.decode(self._context)
        return self._tokenizer.decode([*self._context, *self._waiting])[len(known) :]

    def _cut(self, text: str) -> tuple[str, bool]:
        """Returns the text in front of its first stop string, and whether there is one."""
        places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        return text[: min(places, default=None)], bool(places)
