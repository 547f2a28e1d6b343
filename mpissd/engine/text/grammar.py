"""Grammars restrict which tokens may follow an answer's tokens, by the library llguidance.

A grammar is a text in llguidance's notation, made from a JSON schema, a regular expression or a
choice of texts. JSON answers have ", " and ": " as separators and no other white space, as
json.dumps writes them, so that a model cannot write white space for ever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.files import read_file
from mpissd.common.rounds import MOST_FORCED, MOST_GRAMMAR, Ints
from mpissd.engine.model.transformer.sources import library as load_library
from mpissd.engine.text.tokenizer import Tokenizer

Logits = NDArray[np.float32]
Bits = NDArray[np.uint8]
Ends = frozenset[int]
# llguidance's limit of work before an answer's first token: .2 s of a core (its default: 1.3 s).
# A grammar that is a choice of 10,000 words needs half of this limit.
_FUEL = 200_000
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NEVER = np.float32(-np.inf)
CALL, CALL_END = "<tool_call>", "</tool_call>"  # around a tool call in most models' answers
# Any text, with calls. A lazy terminal ends as soon as it can: no other text follows CALL.
_CALLS = """%llguidance {{}}
start: (begin call)* rest
begin: spelled {begin}
spelled[lazy]: TEXT "<tool_call>"
call: "\\n"? %json {schema} "\\n"? ("</tool_call>" {end})
rest: TEXT
TEXT: /(.|\\n)*/
"""


def make_grammar(name: str, kind: str, value: Any, tokenizer: Tokenizer | None = None) -> str:
    """Returns the llguidance grammar of `value`: a JSON schema (kind "json"), a regular expression
    ("regex"), a list of texts ("choice"), or any text in which tool calls have a JSON schema
    ("calls"). tokenizer: gives the vocabulary that is masked (None: single bytes). Raises
    ConfigError, whose text begins with `name`, if no answer matches, or if the first masks take too
    long."""
    library = load_library("llguidance", "grammars")
    try:
        if kind == "json":
            text = library.LLMatcher.grammar_from_json_schema(value, overrides=_SEPARATORS)
        elif kind == "calls":
            ids = [tokenizer and tokenizer.backend.token_to_id(name) for name in (CALL, CALL_END)]
            begin, end = ("" if token is None else f"<[{token}]>" for token in ids)
            schema = json.dumps({"x-guidance": _SEPARATORS, **json.loads(value)})
            begin, end = f"| TEXT {begin}" if begin else "", f"| {end}" if end else ""
            text = _CALLS.format(begin=begin, schema=schema, end=end)
            text = library.LLMatcher.grammar_from_lark(text)
        else:
            pattern = value if kind == "regex" else "|".join(map(re.escape, value))
            text = library.LLMatcher.grammar_from_regex(pattern)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: {' '.join(str(error).split())[:200]}") from error
    if (size := len(text.encode(errors="replace"))) > MOST_GRAMMAR:
        raise ConfigError(f"{name}: {size} bytes: allowed: at most {MOST_GRAMMAR}")
    words = library.LLTokenizer("byte") if tokenizer is None else tokenizer.for_grammars
    matcher = _matcher(words, text)
    is_met = any(matcher.compute_bitmask()) or matcher.is_accepting()
    if matcher.consume_tokens(matcher.compute_ff_tokens()):  # reads the tokens forced at first
        matcher.compute_bitmask()
    if reason := matcher.get_error() or ("" if is_met else "no text meets it"):
        reason = reason.partition("<state>")[0].replace("lexer error", "too costly")
        raise ConfigError(f"{name}: {' '.join(reason.split())[:200]}")
    return str(text)


def read_grammar(flag: str, tokenizer: Tokenizer | None = None) -> str:
    """Returns the llguidance grammar for a value of --grammar: json, regex:…, choice:A|B|…, or a
    file with a JSON schema. Raises ConfigError if it is unreadable, too costly or unmet."""
    kind, colon, value = flag.partition(":")
    make = partial(make_grammar, "grammar", tokenizer=tokenizer)
    if flag == "json":
        return make("json", {"type": "object"})
    if colon and kind in ("regex", "choice"):
        return make(kind, value if kind == "regex" else value.split("|"))
    try:
        schema = json.loads(read_file(Path(flag).expanduser()))
    except OSError as error:
        allowed = "allowed: json, regex:…, choice:A|B, or a file with a JSON schema"
        raise ConfigError(f"grammar={flag}: {error.strerror}: {allowed}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"grammar={flag}: is no JSON: {error}") from error
    return make("json", json.dumps(schema))


class _MaskReader:
    """Reads an answer's tokens into llguidance's matcher, and after each token computes the mask of
    the tokens that may follow.

    Whether llguidance exceeds one of its limits depends on all that a matcher has computed, and its
    masks can be wrong after a rollback. Therefore tokens are always read one at a time and never
    taken back. A copy, which serves drafts only, computes only the last mask.
    """

    _is_copy = False

    def __init__(self, matcher: Any) -> None:
        """Takes llguidance's matcher at the beginning of an answer."""
        self._matcher = matcher
        self.tokens = list[int]()
        self._look()

    def _look(self) -> None:
        self.bits: bytes = self._matcher.compute_bitmask()
        self.is_accepting: bool = self._matcher.is_accepting()
        self.is_lost: bool = self._matcher.is_error()  # whether llguidance exceeded a limit

    def read(self, tokens: Sequence[int]) -> None:
        """Reads tokens until the grammar excludes one or llguidance exceeds a limit."""
        matcher = self._matcher
        count = len(self.tokens)
        for token in tokens:
            if self.is_lost or not (matcher.try_consume_tokens([token]) or matcher.is_error()):
                break
            self.tokens.append(token)
            if not self._is_copy:
                self._look()
        if self._is_copy and len(self.tokens) > count:
            self._look()

    def begins(self, tokens: list[int]) -> bool:
        """Returns whether the tokens read so far are the first ones of `tokens`."""
        return tokens[: len(self.tokens)] == self.tokens

    def copy(self) -> _MaskReader:
        """Returns a copy, which shares llguidance's lexer: if the copy exceeds a limit of
        llguidance (is_lost), so has this reader, and vice versa."""
        copied = copy(self)
        copied._is_copy = True
        copied._matcher = self._matcher.deep_copy()
        copied.tokens = self.tokens.copy()
        return copied


class Grammar:
    """Says which tokens a grammar allows next in one answer, from nothing but the answer's tokens.
    forces: whether a token that is the only allowed one is committed without a forward."""

    forces = False

    def __init__(self, begin: Callable[[], Any], texts: Bits, vocab: int, ends: Ends) -> None:
        """Begins an answer. begin: a function that returns llguidance's matcher at the beginning of
        an answer. texts: a bit for each of V = vocab tokens, set if the token has a text and does
        not end answers. ends: the tokens that end an answer."""
        self._begin = begin
        self._texts = texts
        self._vocab = vocab
        self._ends = ends
        self._reader = _MaskReader(begin())
        self._root: _MaskReader | None = None  # reader of the tokens that a draft's branches share

    def branch(self, tokens: list[int]) -> None:
        """Prepares masks for several drafts that all continue the answer's first `tokens`. The
        drafts share a lexer, so that near a limit of llguidance the mask of one may depend on the
        others; the target's masks never do."""
        if self._root is None or len(self._root.tokens) != len(tokens):
            self._root = self._read(tokens).copy()

    def _read(self, tokens: list[int]) -> _MaskReader:
        """Returns a reader that has read `tokens`, or only those before one that it cannot read."""
        root = self._root
        if not self._reader.begins(tokens):
            is_branch = root is not None and root.begins(tokens)
            self._reader = root.copy() if root and is_branch else _MaskReader(self._begin())
        self._reader.read(tokens[len(self._reader.tokens) :])
        if self._reader.is_lost:
            self._root = None
        return self._reader

    def allowed(self, tokens: Sequence[int]) -> NDArray[np.bool_] | None:
        """Returns which tokens may follow the answer's first `tokens`, [V]; None after the answer's
        end. Tokens that end an answer are allowed where the grammar is complete. They alone are
        allowed where no text can follow, after an excluded token, and where llguidance exceeds a
        limit. Other control tokens are never allowed."""
        if not self._ends.isdisjoint(tokens):
            return None
        reader = self._read(list(tokens))
        bits = np.frombuffer(reader.bits, np.uint8, len(self._texts)) & self._texts
        if reader.is_lost or len(reader.tokens) < len(tokens):
            bits[:] = 0
        mask = np.unpackbits(bits, count=self._vocab, bitorder="little").view(np.bool_)
        mask[list(self._ends)] = reader.is_accepting or not bits.any()
        return mask

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """Returns the tokens, at most MOST_FORCED, that must follow the answer's first `tokens`
        because each is the only allowed one. The last one may end the answer."""
        run = list[int]()
        while self.forces and len(run) < MOST_FORCED:
            allowed = self.allowed([*tokens, *run])
            if allowed is None or np.count_nonzero(allowed) != 1:
                break
            run.append(int(allowed.argmax()))
        return run

    def decides(self, tokens: Sequence[int], count: int) -> bool:
        """Returns whether the grammar forces the `count` tokens after `tokens`, or all up to the
        answer's end if fewer remain. False without `forces`; otherwise True after the end."""
        if not self.forces or not self._ends.isdisjoint(tokens):
            return self.forces
        run = self.forced(tokens)
        return len(run) >= count or not self._ends.isdisjoint(run)

    def masked(self, logits: Logits, tokens: Sequence[int], ids: Ints | None = None) -> Logits:
        """Returns `logits` with −inf for tokens that may not follow the answer's first `tokens`.
        logits: float32 [V], or [n] for the n tokens `ids` only. The logits are returned unchanged
        after the answer's end, and if none of the tokens `ids` is allowed."""
        allowed = self.allowed(tokens)
        if allowed is not None and ids is not None:
            allowed = allowed[ids]
        if allowed is None or not allowed.any():
            return logits
        return np.where(allowed, logits, _NEVER)


class Grammars:
    """Makes a Grammar for each answer, over the vocabulary of one target model."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, stop_ids: Collection[int]) -> None:
        """Reads the vocabulary. vocab: the number V of the model's tokens, at least the
        tokenizer's. stop_ids: tokens that end an answer."""
        words = tokenizer.for_grammars
        ends = frozenset(stop_ids)
        ids = range(min(vocab, words.vocab_size))
        texts = [token not in ends for token in ids]
        self._matcher = partial(_matcher, words)
        self._shared = np.packbits(texts, bitorder="little"), vocab, ends

    def begin(self, text: str) -> Grammar:
        """Returns the Grammar of a new answer, which takes 1 ms for most schemas. text: the grammar
        in llguidance's notation. Each answer gets a matcher of its own: copies of one matcher share
        a lexer, so that one answer could exhaust the lexer's limit for all."""
        return Grammar(partial(self._matcher, text), *self._shared)


def _matcher(words: Any, text: str) -> Any:
    library = load_library("llguidance", "grammars")
    limits = library.LLParserLimits(initial_lexer_fuel=_FUEL)
    return library.LLMatcher(words, text, log_level=0, limits=limits)
