"""Masks of grammars: they depend on an answer's tokens only, and allow no control token."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpissd.engine.text.grammar import Grammar, Grammars, make_grammar
from mpissd.engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.needs import module
from tests.text import tiny

module("llguidance", "grammars")
END = tiny.SPECIALS.index("<|e|>")
LIMITED = ["((((a{1,30}){1,30}){1,30}){1,30})", r"([a-z]{1,20} ?){1,30}\.", "[ab](a{1000}){1000}"]
NAMES = [r"[xy]<\|s\|>z", r"(<\|pad\|>|<\|s\|>|x)+<\|e\|>", r"\xff<\|s\|>", "(hello <.e.>)*"]
SCHEMAS: list[Any] = [
    {"enum": ["a<|s|>b", "a<|e|>", "wörld"]},
    {"const": "<|e|>"},
    {"type": "object", "properties": {"<|pad|>": {"const": "hello"}}},
    {"type": "array", "items": {}},
]
ASKED = [("regex", value) for value in LIMITED + NAMES]
ASKED += [("json", json.dumps(schema)) for schema in SCHEMAS]
Asked = tuple[str, str]


class Fresh:
    """The definition of masks: a new matcher reads all tokens, one by one."""

    def __init__(self, words: Tokenizer) -> None:
        self._texts = {asked: make_grammar("x", *asked, words) for asked in ASKED}
        self._grammars = Grammars(words, words.vocab_size + 3, words.stop_ids)
        self._masks = dict[tuple[Asked, tuple[int, ...]], list[int]]()
        self._words = words

    def begin(self, asked: Asked) -> Grammar:
        grammar = self._grammars.begin(self._texts[asked])
        grammar.forces = True
        return grammar

    def allowed(self, asked: Asked, tokens: Sequence[int]) -> list[int]:
        if (key := (asked, tuple(tokens))) not in self._masks:
            self._masks[key] = self._allowed(self._texts[asked], tokens)
        return self._masks[key]

    def _allowed(self, text: str, tokens: Sequence[int]) -> list[int]:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(initial_lexer_fuel=200_000)
        matcher = LLMatcher(self._words.for_grammars, text, log_level=0, limits=limits)
        bits = matcher.compute_bitmask()
        for token in tokens:
            matcher.is_accepting()
            matcher.try_consume_tokens([token])
            bits = matcher.compute_bitmask()
        if matcher.is_error():
            return [END]
        packed = np.frombuffer(bits, np.uint8)
        texts = np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist()
        return sorted({*texts, END} if matcher.is_accepting() else {*texts} - {END})


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    """Of the tiny tokenizer and a token that closes two brackets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "MERGES", (*tiny.MERGES, ("]", "]")))
        return Fresh(load_tokenizer(str(tiny.write(tmp_path_factory.mktemp("brackets")))))


def allowed(grammar: Grammar, tokens: Sequence[int]) -> list[int]:
    mask = grammar.allowed(tokens)
    assert mask is not None
    ids: list[int] = np.flatnonzero(mask).tolist()
    return ids


# How many tokens are dropped, which of the allowed ones is appended, and how often.
MOVES = st.tuples(st.integers(0, 9), st.integers(0, 40), st.sampled_from([1, 2, 9, 20]))


@given(st.sampled_from(ASKED), st.lists(MOVES, max_size=9), st.booleans())
def test_a_mask_depends_on_the_tokens_only(
    fresh: Fresh, asked: Asked, moves: list[tuple[int, int, int]], branches: bool
) -> None:
    grammar, tokens, expected = fresh.begin(asked), list[int](), partial(fresh.allowed, asked)
    for back, pick, count in moves:
        del tokens[max(0, len(tokens) - back) :]
        for _ in range(count):
            texts = [token for token in expected(tokens) if token != END]
            tokens += [texts[pick % len(texts)]] if texts else []
        if branches and asked[1] not in LIMITED:
            grammar.branch(tokens[: len(tokens) - back % 3])
        assert allowed(grammar, tokens) == expected(tokens)
        for token in grammar.forced(tokens):
            assert expected(tokens) == [token]
            tokens += [token] if token != END else []
        assert allowed(grammar, tokens) == expected(tokens)


def test_a_limit_stays_met(fresh: Fresh) -> None:
    """After sixteen a, one token was allowed when first asked, and every token when asked again."""
    grammar, a = fresh.begin(("regex", LIMITED[0])), tiny.of_byte(ord("a"))
    for _ in range(3):
        assert allowed(grammar, [a] * 16) == [END]
        assert allowed(grammar, [a] * 2) == [END, a]
        assert allowed(grammar, [*[a] * 16, 99]) == [END]


def test_a_branch_has_its_own_mask(fresh: Fresh) -> None:
    """llguidance allows "]]" after "[1, 2" if it went back to "[" from "[[[2"."""
    asked = "json", json.dumps(SCHEMAS[-1])
    grammar = fresh.begin(asked)
    grammar.branch([tiny.of_byte(ord("["))])
    for text in ("[[[2", "[1, 2", "[[[2"):
        tokens = [tiny.of_byte(byte) for byte in text.encode()]
        assert allowed(grammar, tokens) == fresh.allowed(asked, tokens)


CALL = '{"name": "rain", "arguments": {"mm": 7}}'
TEXTS = [  # an answer, and what it may begin with
    ("hello <tool_cal", None),
    (f"so <tool_call>{CALL}</tool_call>", None),
    (f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call> a", None),
    ("x<tool_call>y", "x<tool_call>"),
    (f"<tool_call>{CALL.replace('7', 'null')}", f"<tool_call>{CALL[:-3]}"),
    (f"<tool_call>{CALL}</tool>", f"<tool_call>{CALL}</tool"),
]


@pytest.mark.parametrize("has_tokens", [False, True])
def test_calls_hold_to_their_schema_within_any_text(tmp_path: Path, has_tokens: bool) -> None:
    """Whether <tool_call> and its end are tokens or are spelled; other control tokens stay out."""
    folder = tiny.write(tmp_path / "calls")
    first = len(tiny.tokens())
    if has_tokens:
        path = folder / "tokenizer.json"
        whole = json.loads(path.read_text())
        for name in ("<tool_call>", "</tool_call>"):
            token = {"id": first + len(whole["added_tokens"]) - 3, "content": name}
            whole["added_tokens"].append({**whole["added_tokens"][0], "special": False, **token})
        path.write_text(json.dumps(whole))
    words = load_tokenizer(str(folder))
    of = {"arguments": {"properties": {"mm": {"type": "integer"}}}, "name": {"const": "rain"}}
    schema = {"type": "object", "properties": {"name": of["name"], "arguments": of["arguments"]}}
    text = make_grammar("x", "calls", json.dumps({**schema, "additionalProperties": False}), words)
    begin = partial(Grammars(words, words.vocab_size, words.stop_ids).begin, text)
    for said, most in TEXTS:
        tokens, grammar = words.encode(said), begin()
        assert (first in tokens) == (has_tokens and "<tool_call>" in said)
        masks = [allowed(grammar, tokens[:count]) for count in range(len(tokens) + 1)]
        fits = [token in mask for token, mask in zip(tokens, masks, strict=False)]
        count = fits.index(False) if False in fits else len(fits)
        assert words.decode(tokens[:count]) == (said if most is None else most)
        assert (END in masks[count]) == (most is None)
        others = {words.backend.token_to_id(name) for name in tiny.SPECIALS} - {END}
        assert not any(others & {*mask} for mask in masks[: count + 1])
