"""Grammars: which tokens may follow those of an answer, by the library llguidance.

A grammar is a text in llguidance's own form, as `make_grammar` returns it: a JSON schema, a regular
expression or a choice of texts. JSON has ", " and ": " between its parts and no other white space,
as json.dumps writes it, so that a model cannot go on with white space for ever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import MOST_FORCED, MOST_GRAMMAR, Ints
from mpissd.engine.model.transformer.sources import library as load_library
from mpissd.engine.workload.tokenizer import Tokenizer

Logits = NDArray[np.float32]
# Work that llguidance may do for a grammar before its first token: some .2 s of a core, where its
# own limit allows 1.3 s. A choice of 10,000 words needs half of it.
_FUEL = 200_000
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NEVER = np.float32(-np.inf)


def make_grammar(name: str, kind: str, value: Any, tokenizer: Tokenizer | None = None) -> str:
    """Returns the grammar of a value; raises ConfigError if no answer can meet it, or its first
    masks over the tokenizer's vocabulary (None: all bytes) are too costly.

    name: of the field or flag, for errors. kind: "json" (a schema), "regex" (a text), or "choice"
    (a list of texts).
    """
    library = load_library("llguidance", "grammars")
    try:
        if kind == "json":
            text = library.LLMatcher.grammar_from_json_schema(value, overrides=_SEPARATORS)
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
    if matcher.consume_tokens(matcher.compute_ff_tokens()):  # up to the first choice
        matcher.compute_bitmask()
    if reason := matcher.get_error() or ("" if is_met else "no text meets it"):
        reason = reason.partition("<state>")[0].replace("lexer error", "too costly")
        raise ConfigError(f"{name}: {' '.join(reason.split())[:200]}")
    return str(text)


def read_grammar(flag: str, tokenizer: Tokenizer | None = None) -> str:
    """Returns the grammar of --grammar: json, regex:…, choice:A|B|…, or a file with a JSON schema.

    Raises ConfigError for a file that cannot be read, and as `make_grammar`.
    """
    kind, colon, value = flag.partition(":")
    make = partial(make_grammar, "grammar", tokenizer=tokenizer)
    if flag == "json":
        return make("json", {"type": "object"})
    if colon and kind in ("regex", "choice"):
        return make(kind, value if kind == "regex" else value.split("|"))
    try:
        schema = json.loads(Path(flag).expanduser().read_bytes())
    except OSError as error:
        allowed = "allowed: json, regex:…, choice:A|B, or a file with a JSON schema"
        raise ConfigError(f"grammar={flag}: {error.strerror}: {allowed}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"grammar={flag}: is no JSON: {error}") from error
    return make("json", json.dumps(schema))


class Grammar:
    """The state of one answer's grammar, which moves to any tokens: to those of a verified node, or
    of a branch that a draft grows, and back. Tokens beyond an answer's end are not masked. forces:
    whether tokens that it leaves no choice of are committed without a forward."""

    forces = False

    def __init__(self, matcher: Any, vocab: int, stop_ids: Collection[int]) -> None:
        """matcher: llguidance's, at the beginning of an answer. stop_ids: tokens that end it."""
        self._first, self._matcher = matcher, matcher.deep_copy()
        self._vocab, self._ends = vocab, frozenset(stop_ids)
        self._tokens: list[int] = []  # those that the matcher has read

    def allowed(self, tokens: Sequence[int]) -> NDArray[np.bool_] | None:
        """Returns which tokens may follow the answer's first `tokens`, [V]; None after tokens that
        the grammar or the answer's end excludes, which no answer has.

        Tokens that end an answer are allowed where it is complete, and only there. They are also
        all that is allowed where llguidance gives up: a state too large for its limits.
        """
        if not self._moves_to(list(tokens)):
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, count=self._vocab, bitorder="little").view(np.bool_)
        ends, is_lost = list(self._ends), self._matcher.is_error()
        mask[ends] = self._matcher.is_accepting()
        if is_lost or not mask.any():
            mask[:] = False
            mask[ends] = True
        if is_lost:
            self._matcher, self._tokens = self._first.deep_copy(), []
        return mask

    def _moves_to(self, tokens: list[int]) -> bool:
        """Moves to these tokens; returns whether they are allowed, or llguidance gives up."""
        if not self._ends.isdisjoint(tokens):
            return False
        same = min(len(self._tokens), len(tokens))
        while self._tokens[:same] != tokens[:same]:  # they differ only near their ends
            same -= 1
        self._matcher.rollback(len(self._tokens) - same)
        self._tokens = tokens[: same + self._matcher.try_consume_tokens(tokens[same:])]
        return len(self._tokens) == len(tokens) or bool(self._matcher.is_error())

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """Returns the tokens after the answer's first `tokens`, at most MOST_FORCED, of which each
        is the only one that is allowed; the one that ends the answer is among them."""
        tokens = list(tokens)
        if not self.forces or not self._moves_to(tokens):
            return []
        run: list[int] = self._matcher.compute_ff_tokens()[: MOST_FORCED - 1]
        if self._moves_to([*tokens, *run]) and self._matcher.is_accepting():
            allowed = self.allowed([*tokens, *run])
            if allowed is not None and np.count_nonzero(allowed) == 1:
                run.append(int(allowed.argmax()))
        return run

    def decides(self, tokens: Sequence[int], count: int) -> bool:
        """Returns whether these tokens are excluded, or `count` are forced after them, or fewer up
        to the answer's end."""
        if not self._moves_to(list(tokens)):
            return self.forces
        run = self.forced(tokens)
        return len(run) >= count or not self._ends.isdisjoint(run)

    def masked(self, logits: Logits, tokens: Sequence[int], ids: Ints | None = None) -> Logits:
        """Returns the logits after the answer's first `tokens`, −inf where no token is allowed.

        logits: float32 [V], or of the tokens `ids` only. They stay as they are where nothing is
        known, or where the grammar allows none of these tokens.
        """
        allowed = self.allowed(tokens)
        if allowed is not None and ids is not None:
            allowed = allowed[ids]
        if allowed is None or not allowed.any():
            return logits
        return np.where(allowed, logits, _NEVER)


class Grammars:
    """Makes the states of answers' grammars in the vocabulary of a target model."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, stop_ids: Collection[int]) -> None:
        """vocab: V of the model, at least the tokenizer's. stop_ids: tokens that end answers."""
        self._vocab, self._stop_ids = vocab, stop_ids
        self._matcher = partial(_matcher, tokenizer.for_grammars)

    def begin(self, text: str) -> Grammar:
        """Returns the state of a new answer to the grammar `text`, in 1 ms for most schemas.

        Copies of a matcher share a lexer, whose limit one of them can exhaust for all: answers
        therefore share none.
        """
        return Grammar(self._matcher(text), self._vocab, self._stop_ids)


def _matcher(words: Any, text: str) -> Any:
    library = load_library("llguidance", "grammars")
    limits = library.LLParserLimits(initial_lexer_fuel=_FUEL)
    return library.LLMatcher(words, text, log_level=0, limits=limits)
