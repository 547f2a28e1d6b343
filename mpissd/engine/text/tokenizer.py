"""Encodes text to token ids, decodes it, and writes conversations in a model's chat template.

The libraries `tokenizers` and `jinja2` are imported only when a tokenizer is loaded.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from io import StringIO
from itertools import compress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import uuid4

from mpissd.common.errors import ConfigError
from mpissd.common.gguf import is_gguf
from mpissd.common.presets import files_of
from mpissd.engine.model.transformer.checkpoint import digest
from mpissd.engine.model.transformer.sources import library as load_library
from mpissd.engine.text.vocabulary import (
    MORE_TEMPLATES,
    TOKENIZER_FILES,
    Vocabulary,
    from_folder,
    from_gguf,
)

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser


Message = Mapping[str, Any]
_CUT = "\ue000cut\ue000 "  # marks where an answer continues a message; templates may trim the space
_REASONING = ("reasoning_content", "thinking", "reasoning")  # a message's keys for reasoning
# The errors that a damaged tokenizer file, or a value of a wrong type in it, raises when read.
_DAMAGED = OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # the single-byte tokens of a byte-fallback vocabulary
MOST_STEPS = 5_000_000  # the most lines that a chat template may execute
MOST_TEXT = 1 << 26  # the most characters that a chat template may write


@dataclass(frozen=True)
class Tokenizer(Vocabulary):
    """The vocabulary of the model `name`, with methods to encode texts and to decode tokens."""

    name: str

    @property
    def template(self) -> str | None:
        """The model's default chat template in jinja2's language, or None."""
        return self.templates.get("default")

    @cached_property
    def vocab_size(self) -> int:
        """The largest token id, plus 1; ids below it may be missing."""
        return 1 + max(self.backend.get_vocab().values(), default=-1)

    @cached_property
    def for_grammars(self) -> Any:
        """The vocabulary as llguidance's LLTokenizer, which takes .5 s to make. It encodes the name
        of a control token as ordinary text, so that a grammar can force such a text."""
        library = load_library("llguidance", "grammars")
        vocabulary = _for_llguidance(self.backend.to_str(), self.vocab_size)
        return library.LLTokenizer(vocabulary, None, sorted(self.stop_ids))

    def encode(self, text: str, *, context: int | None = None, specials: bool = True) -> list[int]:
        """Returns the tokens of a text; with `specials`, with those that the model expects around
        it, such as BOS. Raises ConfigError if it has more bytes than `context` tokens can."""
        self._check_length(text, context)
        return self.backend.encode(text, add_special_tokens=specials).ids

    def reads(self, name: str, tools: Sequence[Any] = ()) -> bool:
        """Returns whether the chat template for these tools reads a variable of this name."""
        return name in _variables(self.template_for(tools) or "")

    def template_for(self, tools: Sequence[Any]) -> str | None:
        """Returns the chat template of conversations with these tools, if there is one."""
        return (tools and self.templates.get("tool_use")) or self.template

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        *,
        begins: bool = True,
        continues: bool = False,
        context: int | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Returns the tokens of a conversation, up to the beginning of the model's answer.

        messages: each one {"role": …, "content": …}. tools: descriptions of tools, for the
        template. begins: whether the template writes the beginning of an answer. continues: whether
        the answer continues the last message. context: the most tokens of a sequence. variables:
        further variables of the template. Raises ConfigError if there is no chat template, if it
        ignores the tools or refuses the messages, and if its text has more bytes than `context`
        tokens can have.
        """
        template = self.template_for(tools)
        if template is None:
            raise ConfigError(f"{self.name}: has no chat template: allowed: a plain prompt")
        if tools and not self.reads("tools", tools):
            raise ConfigError(f"tools: {self.name}'s chat template ignores them: allowed: none")
        messages = [_plain(message) for message in messages]
        if continues:
            if not isinstance(last := messages[-1].get("content"), str):
                raise ConfigError("the last message has no text to continue")
            messages[-1] = {**messages[-1], "content": last + _CUT}
        asked = {"tools": tools or None, "add_generation_prompt": begins and not continues}
        told = {**self.specials, **variables, "messages": messages, "documents": None, **asked}
        try:
            text = _render(template, told)
            if continues:
                end = text.rindex(_CUT.strip())
                text = text[:end] if text.startswith(_CUT, end) else text[:end].rstrip()
            text.encode("utf-8")
        except Exception as error:  # The template is a program, which may fail in any way.
            raise ConfigError(f"chat template: {' '.join(str(error).split())}") from error
        self._check_length(text, context)
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        """Returns the text of the tokens `ids`, special tokens only if `specials` is set. Bytes
        that form no complete UTF-8 character become U+FFFD. Decoders of some models drop the space
        before the first token; `piece` and AnswerText keep it."""
        return self.backend.decode(list(ids), skip_special_tokens=not specials)

    def piece(self, token: int) -> str:
        """Returns the text that a token, which may be special, adds to the text before it."""
        first = self.decode([token], specials=True)
        return self.decode([token, token], specials=True)[len(first) :]

    def bytes_of(self, token: int) -> bytes:
        """Returns the bytes that a token adds to a text; b"" for a special or missing token."""
        text = self.backend.id_to_token(token)
        if text is None or token in self._special_ids:
            return b""
        if self.is_byte(token):
            return bytes.fromhex(text[3:5])
        letters = _byte_letters() if b'"ByteLevel"' in self._decoder else {}
        is_bytes = letters.keys() >= set(text)
        return bytes(letters[letter] for letter in text) if is_bytes else text.encode()

    def is_byte(self, token: int) -> bool:
        """Returns whether a token is a byte-fallback vocabulary's single byte, such as <0x0A>."""
        text = self.backend.id_to_token(token) or ""
        return b'"ByteFallback"' in self._decoder and _BYTE.fullmatch(text) is not None

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        # Special tokens that are decoded to text, since a normalizer changed them, are left out.
        added = self.backend.get_added_tokens_decoder().items()
        special = (number for number, token in added if token.special)
        return frozenset(number for number in special if not self.decode([number]))

    @cached_property
    def _decoder(self) -> bytes:
        decoder: Any = self.backend.decoder
        return b"" if decoder is None else bytes(decoder.__getstate__())

    @cached_property
    def _longest(self) -> int:
        return max(len(token.encode()) for token in self.backend.get_vocab())

    def _check_length(self, text: str, context: int | None) -> None:
        if context is None or len(text) <= context:
            return
        if (size := len(text.encode())) > (limit := context * self._longest):
            raise ConfigError(
                f"{size} bytes: allowed: at most {limit}, the model's context of {context} of its "
                "longest tokens"
            )


def _for_llguidance(text: str, size: int) -> str:
    """Returns the tokenizer.json `text` as llguidance needs it. Control tokens get random names,
    which no text contains: llguidance takes added tokens named "<…>" for control tokens, and would
    use them to encode text that a grammar forces, which its parser then refuses. Ids below `size`
    without a token become control tokens, because llguidance needs a token for each id."""
    tokenizer = json.loads(text)
    model = tokenizer["model"]
    added = tokenizer["added_tokens"]
    if isinstance(model["vocab"], dict):
        present = {*model["vocab"].values(), *(token["id"] for token in added)}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number in set(range(size)) - present:
            name = f"<gap {number}>"
            model["vocab"][name] = number
            added.append({"id": number, "content": name, "special": True, **flags})
    is_control = [token["special"] or re.fullmatch("(?s)<.*>", token["content"]) for token in added]
    names = {token["content"]: f"<{uuid4().hex}>" for token in compress(added, is_control)}
    for token in added:
        token["content"] = names.get(token["content"], token["content"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(name, name): n for name, n in model["vocab"].items()}
    else:  # A Unigram model's vocabulary is a list of [name, score].
        model["vocab"] = [[names.get(name, name), score] for name, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in names]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    tokenizer["post_processor"] = None  # It refers to control tokens by their old names.
    return json.dumps(tokenizer)


@lru_cache(maxsize=4)
def load_tokenizer(where: str) -> Tokenizer:
    """Loads the tokenizer of a model; raises ConfigError if the model has none or it cannot be
    read. where: the name of a preset, a Hugging Face folder, or a .gguf file."""
    path = files_of(where)
    if path is None:
        raise ConfigError(f"{where}: random weights have no tokenizer: allowed: run --prompt_ids=…")
    if path.suffix == ".json" and not is_gguf(path):
        allowed = f"allowed: {str(path.parent)!r}, whose weights are read, or run --prompt_ids=…"
        raise ConfigError(f"{str(path)!r} names a shape, with random weights: {allowed}")
    try:
        vocabulary = from_gguf(path) if is_gguf(path) else from_folder(path)
        tokenizer = Tokenizer(**vars(vocabulary), name=path.name)
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
    """Returns a digest of the tokenizer's files in the model folder that `where` names; None if the
    folder has no such files."""
    path = files_of(where)
    folder = path.parent if path is not None and path.suffix == ".json" else path
    if folder is None or not folder.is_dir():
        return None
    paths = [folder / name for name in TOKENIZER_FILES if (folder / name).exists()]
    paths += sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    return digest(paths)[0] if paths else None


@lru_cache(maxsize=1)
def _byte_letters() -> dict[str, int]:
    """Returns the byte that each letter in a byte-level vocabulary's tokens means (GPT-2's)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), 0xAD), *range(ord("®"), 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): b for n, b in enumerate(others)}


def _plain(message: Message) -> dict[str, Any]:
    """Returns a message as transformers passes it to chat templates: without nulls, and with the
    model's reasoning under both names that templates read."""
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


@lru_cache(maxsize=4)
def _variables(template: str) -> Collection[str]:
    """Returns the names of the variables that a chat template reads; none if it is no template."""
    from jinja2 import TemplateError, meta

    try:
        environment = _compiled(template).environment
        return meta.find_undeclared_variables(environment.parse(template))
    except TemplateError:
        return ()


def _render(template: str, variables: Mapping[str, Any]) -> str:
    """Returns the text that a chat template writes; raises TemplateError if the template executes
    more than MOST_STEPS lines."""
    from jinja2 import TemplateError

    compiled = _compiled(template)
    steps = 0

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal steps
        if frame.f_code.co_filename != "<template>":
            return None
        steps += 1
        if steps > MOST_STEPS:
            raise TemplateError(f"runs more than {MOST_STEPS} lines")
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        return compiled.render(**variables)
    finally:
        sys.settrace(before)


@lru_cache(maxsize=4)
def _compiled(template: str) -> Template:
    """Compiles a chat template in the same jinja2 environment as transformers, with a limit on the
    length of what the template writes."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(reason: str) -> NoReturn:
        raise TemplateError(reason)

    def check(size: int) -> None:
        if size > MOST_TEXT:
            refuse(f"writes more than {MOST_TEXT} characters")

    def joined(parts: Iterable[Any]) -> str:
        text = StringIO()
        for part in parts:
            text.write(str(part))
            check(text.tell())
        return text.getvalue()

    class Generation(Extension):
        """Ignores the tags {% generation %} and {% endgeneration %} around what the model wrote."""

        tags = {"generation"}  # noqa: RUF012  (the library's interface)

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> str:
            return str(caller())

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("+", "*", "**"))
        concat = staticmethod(joined)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(side) if hasattr(side, "__len__") else side for side in (left, right)]
            if operator == "**" or sizes != [left, right]:
                check(sizes[0] + sizes[1] if operator == "+" else sizes[0] * sizes[1])
            return super().call_binop(context, operator, left, right)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    compiled = environment.from_string(template)
    compiled.root_render_func.__globals__["str_join"] = joined  # the template operator ~
    return compiled
