"""Text to tokens and back, from a Hugging Face folder and from a GGUF file; text while it arrives:
only whole characters, and nothing after a stop; prompts from flags and files."""

import codecs
import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from mpissd.common.config import RunConfig, parse_flags
from mpissd.common.errors import ConfigError
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.model.transformer.checkpoint import HEAD
from mpissd.engine.oracle.logits import TextEndings
from mpissd.engine.text.answer import AnswerText
from mpissd.engine.text.grammar import Grammars, make_grammar, read_grammar
from mpissd.engine.text.prompts import read_entries, read_prompts
from mpissd.engine.text.tokenizer import Tokenizer, load_tokenizer
from mpissd.lab.tables.load import load_rows
from mpissd.serve.fields import CompletionBody
from mpissd.serve.protocol import Ready, Tokens
from mpissd.serve.request import made
from tests import weight_files
from tests.text import layouts, tiny

CHAT = [{"role": "user", "content": "hello"}]


def write_gguf(path: Path, **changed: Any) -> Path:
    metadata = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tiny.tokens(),
        "token_type": [3] * len(tiny.SPECIALS) + [1] * (256 + len(tiny.MERGES)),
        "merges": [" ".join(pair) for pair in tiny.MERGES],
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changed,
    }
    keys = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    keys["tokenizer.chat_template"] = tiny.TEMPLATE
    return weight_files.write_gguf(path, {HEAD: np.zeros((4, 8), np.float32)}, metadata=keys)


def test_a_folder_and_a_gguf_file_of_one_vocabulary_agree(words: Tokenizer, tmp_path: Path) -> None:
    same = load_tokenizer(str(write_gguf(tmp_path / "tiny.gguf")))
    assert same.vocab_size == words.vocab_size == 3 + 256 + 5
    assert same.stop_ids == words.stop_ids == {1}
    assert same.chat(CHAT) == words.chat(CHAT)
    for text in ("hello world", "Grüße 👋", "\n\n", "a  b"):
        assert same.encode(text) == words.encode(text)


def test_merges_apply_and_a_chat_ends_where_the_answer_begins(words: Tokenizer) -> None:
    assert words.encode("hello") == [tiny.tokens().index("hello")]
    tokens = words.chat(CHAT)
    assert tokens[0] == 0 and tokens.count(1) == 1
    said = words.decode(tokens, specials=True)
    assert said == "<|s|>user\nhello<|e|><|s|>assistant\n"
    assert words.decode(tokens) == "user\nhelloassistant\n"


def test_every_file_that_names_a_stop_token_or_a_template_counts(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, chat_template=None)
    assert load_tokenizer(str(folder)).template is None
    load_tokenizer.cache_clear()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    (folder / "chat_template.jinja").write_text("hello")
    found = load_tokenizer(str(folder))
    assert found.stop_ids == {1, 2} and found.chat(CHAT) == found.encode("hello")


# Templates that fail, and why.
TEMPLATES = [
    ("{% if %}", "chat template"),
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ messages.__class__.__mro__ }}", "chat template"),
    ("{% for n in range(10 ** 9) %}{% endfor %}", "chat template: Range too big"),
    ("{{ '\ud800' }}", "chat template"),
    ("{% for n in 'ab' * 9999 %}{% for m in range(9999) %}{% endfor %}{% endfor %}", "lines"),
    ("{% for n in range(9999) %}{{ 'ab' * 99999 }}{% endfor %}", "characters"),
    ("{{ 'ab' * 10 ** 9 }}", "characters"),
    ("{% set n = namespace(x='a') %}{% for m in range(99) %}{% set n.x = n.x ~ n.x %}"
     "{% endfor %}", "characters"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "config", "message"),
    [
        ({}, {"eos_token": "</s>"}, "has no stop token '</s>'"),
        ({"generation_config.json": '{"eos_token_id": 128001}'}, {}, "stop token 128001"),
        ({"generation_config.json": "{"}, {}, "generation_config.json"),
        ({"tokenizer_config.json": "[]"}, {}, "is no JSON object"),
        ({"tokenizer.json": '{"model": '}, {}, "tokenizer.json"),
        ({"tokenizer_config.json": "[" * 99_999}, {}, "its tokenizer is damaged"),
        ({}, {"chat_template": [{"name": "default"}]}, "its tokenizer is damaged"),
        ({}, {"fix_mistral_regex": True}, "fix_mistral_regex is not supported"),
        *(({}, {"chat_template": template}, message) for template, message in TEMPLATES),
    ],
)
def test_a_damaged_or_foreign_folder_is_one_line(
    tmp_path: Path, files: dict[str, str], config: dict[str, Any], message: str
) -> None:
    tiny.write(tmp_path, **config)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(str(tmp_path)).chat(CHAT)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="allowed: run --prompt_ids=…"):
        load_tokenizer("llama-3.2-1b")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "llama"}, "its tokenizer is 'llama'"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken'"),
        ({"eos_token_id": 999}, "token 999 of 264 tokens"),
        ({"merges": ["no such"]}, "its merges"),
        ({"token_type": [3]}, "token_type has 1 values for 264 tokens"),
    ],
)
def test_a_wrong_gguf_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(str(write_gguf(tmp_path / "x.gguf", **changed)))


END = 1  # <|e|>


def pieces(tokenizer: Tokenizer, tokens: Sequence[int], *stops: Collection[Any]) -> list[str]:
    """The text that each token completes, and the rest at the end. stops: strings, then tokens."""
    text = AnswerText(tokenizer, *stops or ((), ()), ())
    return [*(text.push(token) for token in tokens), text.flush()]


def of_bytes(text: str) -> list[int]:
    return [tiny.of_byte(byte) for byte in text.encode()]


@given(st.lists(st.integers(0, 263), max_size=30))
def test_pieces_are_the_text(words: Tokenizer, tokens: list[int]) -> None:
    assert "".join(pieces(words, tokens)) == words.decode(tokens)


@given(st.data(), st.lists(st.text("helo", min_size=1, max_size=4), max_size=3))
def test_a_text_ends_before_its_first_stop(
    words: Tokenizer, data: st.DataObject, stops: list[str]
) -> None:
    """The tiny vocabulary has tokens of one letter and of several."""
    letters = st.sampled_from([*of_bytes("helo"), *range(259, 264)])
    tokens = data.draw(st.lists(letters, max_size=12))
    text, shown, all_of_it = AnswerText(words, stops, {END}, ()), "", ""
    for n, token in enumerate(tokens, 1):
        shown += text.push(token)
        all_of_it = words.decode(tokens[:n])
        ends = [at for stop in stops if (at := all_of_it.find(stop)) >= 0]
        assert (text.ended == "stop") == bool(ends)
        assert len(shown) <= min(ends, default=len(all_of_it))
        if ends:
            assert shown == all_of_it[: min(ends)] and text.flush() == ""
            return
    assert shown + text.flush() == all_of_it


def test_a_stop_token_ends_the_text_and_gives_what_was_held(words: Tokenizer) -> None:
    found = pieces(words, [*of_bytes("a"), END, *of_bytes("b")], ["ab"], {END})
    assert found == ["", "a", "", ""]


def test_endings_count_the_tokens_up_to_the_one_that_ends(words: Tokenizer) -> None:
    room = {7: 99, 8: 99, 9: 5}
    endings = TextEndings(words, ["lo\n"], {END}, room, {key: [0] for key in room})
    assert endings.kept(7, 0, of_bytes("hel")) is None
    assert endings.kept(8, 0, [5, END, 9]) == 2
    assert endings.kept(7, 3, of_bytes("lo\nxx")) == 3
    assert endings.kept(7, 0, of_bytes("\n")) is None  # an id that is used again starts afresh
    assert [endings.kept(9, 0, [3, 4]), endings.kept(9, 2, [3, 4, 5, END])] == [None, 3]


def test_without_stop_strings_no_tokenizer_is_needed() -> None:
    endings = TextEndings(None, [], {END}, {0: 99}, {})
    assert [endings.kept(0, 0, [3, 4]), endings.kept(0, 2, [END])] == [None, 1]
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        TextEndings(None, ["x"], {END}, {}, {})


def test_decoders_that_drop_a_first_space_keep_the_spaces_between(tmp_path: Path) -> None:
    """A SentencePiece vocabulary marks words by ▁, and its decoder strips the first."""
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁a": 0, "▁b": 1, "c": 2}, "c"))
    raw.decoder = tokenizers.decoders.Metaspace()
    raw.save(str(tmp_path / "tokenizer.json"))
    assert "".join(pieces(load_tokenizer(str(tmp_path)), [0, 1, 2, 1])) == "a bc b"


def asked(**flags: str) -> RunConfig:
    return parse_flags({"workload": "text", **flags})


def lines(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_a_prompt_is_a_users_message_of_a_template(words: Tokenizer, tmp_path: Path) -> None:
    (found,) = read_prompts(asked(prompt="hello"), words)
    assert found.tokens == tuple(words.chat([{"role": "user", "content": "hello"}]))
    assert found.entry == {"prompt": "hello"}
    plain = load_tokenizer(str(tiny.write(tmp_path, chat_template=None)))
    (found,) = read_prompts(asked(prompt="hello"), plain)
    assert found.tokens == tuple(plain.encode("hello"))


def test_a_file_holds_prompts_and_conversations(words: Tokenizer, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    path = lines(tmp_path / "p.jsonl", {"prompt": "hello"}, {"messages": messages})
    text = path.read_text().replace("\n", "\r\n\n")  # blank lines count for nothing
    path.write_text(f"\ufeff{text}", "utf-8", newline="")
    one, two = read_prompts(asked(prompts=str(path)), words)
    assert one.tokens == tuple(words.chat(messages[1:]))
    assert two.tokens == tuple(words.chat(messages))


def test_token_ids_need_no_tokenizer() -> None:
    found = read_prompts(asked(prompt_ids="1,2,3; 4,5"), None, context=4, vocab=6)
    assert [prompt.tokens for prompt in found] == [(1, 2, 3), (4, 5)]
    for ids, message in (
        ("1;", "prompt 2: ''"),
        ("1,-2", "prompt 1"),
        ("1;5,6", "prompt 2: token 6: allowed: 0..5"),
        ("1,2,3,4", "prompt 1: 4 tokens: allowed: at most 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_prompts(asked(prompt_ids=ids), None, context=4, vocab=6)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2: is no JSON"),
        (b'{"prompt": "\xff"}', "line 2: is no UTF-8 text .byte 13"),
        (b'{"prompt": "a", "messages": []}', "line 2: allowed:"),
        (b'{"prompt": null}', "line 2: null is no text"),
        (b'{"prompt": "\\ud800"}', "line 2: is no UTF-8 text"),
        (b'{"messages": []}', "line 2: messages: allowed"),
        (b'{"messages": [{"role": "user"}]}', "line 2: message 1: null is no text"),
        (b'{"prompt": "' + b"x" * 90 + b'"}', "line 2: 1.. tokens: allowed: at most 99"),
        (b"[" * 100_000, "line 2: is no JSON"),
    ],
)
def test_a_bad_line_is_named(words: Tokenizer, tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "hello"}\n' + line + b"\n")
    with pytest.raises(ConfigError, match=message):
        read_prompts(asked(prompts=str(path)), words, context=100)


def test_no_prompt_and_no_file_are_refused(words: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prompt: needed with workload=text"):
        read_prompts(asked(), words)
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(asked(prompts=str(tmp_path / "none.jsonl")), words)
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(asked(prompts=str(lines(tmp_path / "none.jsonl"))), words)


def test_stop_strings_are_one_or_a_json_list() -> None:
    assert asked().stop_strings == ()
    assert asked(stop="a,b").stop_strings == ("a,b",)
    assert asked(stop="[x]").stop_strings == ("[x]",)
    assert asked(stop='["\\n\\n", "#"]').stop_strings == ("\n\n", "#")


@pytest.mark.parametrize(("config", "files", "tokens"), layouts.LAYOUTS)
def test_every_file_of_a_folder_counts_as_in_transformers(
    tmp_path: Path, config: dict[str, Any], files: dict[str, Any], tokens: list[int]
) -> None:
    found = load_tokenizer(str(layouts.write(tmp_path, config, files)))
    assert found.encode(layouts.TEXT) == tokens


def test_tokenizer_json_says_how_a_text_is_split(tmp_path: Path) -> None:
    folder = layouts.write_sentences(tmp_path, tokenizer_class="LlamaTokenizer", legacy=True)
    assert load_tokenizer(str(folder)).encode("a</s>a") == [1, 261, 2, 260]


def test_ids_with_a_gap_are_bounded_by_the_largest(tmp_path: Path) -> None:
    whole = json.loads((tiny.write(tmp_path) / "tokenizer.json").read_text())
    whole["model"]["vocab"]["hello"] = 300
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    found = load_tokenizer(str(tmp_path))
    assert (found.vocab_size, found.encode("hello")) == (301, [300])
    text = make_grammar("r", "regex", "hello", found)
    allowed = Grammars(found, 320, found.stop_ids).begin(text).allowed([])
    assert allowed is not None and np.flatnonzero(allowed).tolist()[-1] == 300


@pytest.mark.parametrize(
    ("changed", "tokens", "stops"),
    [
        ({}, [262], {1}),
        ({"pre": "llama-bpe"}, [0, 262], {1}),
        ({"pre": "llama-bpe", "add_bos_token": False, "add_eos_token": True}, [262, 1], {1}),
        ({"eos_token_id": None}, [262], {11}),
        ({"pre": "llama-bpe", "bos_token_id": None}, [11, 262], {1}),
        ({"eot_token_id": 2, "unknown_token_id": 0}, [262], {1, 2}),
        ({"add_space_prefix": True, "pre": "gpt-2"}, [262], {1}),
        ({"token_type": None}, [262], {1}),
        ({"tokens": [*tiny.tokens()[:-1], "</s>"]}, [262], {1, 263}),
        ({"tokens": [*tiny.tokens()[:-1], "<|repo_name|>"]}, [262], {1, 263}),
    ],
)
def test_absent_keys_of_a_gguf_are_llama_cpps(
    tmp_path: Path, changed: dict[str, Any], tokens: list[int], stops: set[int]
) -> None:
    if "tokens" in changed:
        changed["merges"] = [" ".join(pair) for pair in tiny.MERGES[:-1]]
    found = load_tokenizer(str(write_gguf(tmp_path / "x.gguf", **changed)))
    assert (found.encode("hello"), set(found.stop_ids)) == (tokens, stops)


def test_texts_are_split_as_the_pre_tokenizers_name_says(tmp_path: Path) -> None:
    """GPT-2's rule on its own would put the second space of "a  1" in front of the digit."""
    more = [("Ġ", "Ġ"), ("1", "2"), ("!", "a")]
    merges = [" ".join(pair) for pair in [*tiny.MERGES, *more]]
    tokens = [*tiny.tokens(), *(left + right for left, right in more)]
    keys = {"merges": merges, "tokens": tokens, "token_type": None}
    spaces, twelve, _ = range(len(tokens) - 3, len(tokens))
    smollm = load_tokenizer(str(write_gguf(tmp_path / "smollm.gguf", **keys)))
    assert smollm.encode("  12") == [spaces, *of_bytes("12")]
    default = load_tokenizer(str(write_gguf(tmp_path / "default.gguf", pre=None, **keys)))
    assert default.encode("12312") == [twelve, *of_bytes("3"), twelve]
    assert default.encode("!a") == of_bytes("!a")


def test_the_text_of_an_answer_continues_the_prompts(tmp_path: Path) -> None:
    """Also after a special token, and where bytes follow that are no text."""
    found, word = load_tokenizer(str(layouts.write_sentences(tmp_path))), 261
    byte = {each: 3 + each for each in range(256)}
    for prompt in ([1, 260], [1, 260, 2], [1, byte[0xC3], byte[0xA9]]):
        text = AnswerText(found, [], (), prompt)
        pushed = [text.push(token) for token in (word, 2, byte[0xC3], byte[0xA9])]
        assert pushed == [" a", "", "", "é"]
        assert [text.push(byte[0x80]), text.push(word), text.flush()] == ["\ufffd", " a", ""]
    assert found.piece(word) == " a"
    endings = TextEndings(found, [" a"], {2}, {0: 9}, {0: [1, 260]})
    assert endings.kept(0, 0, [260, word]) == 2
    exchange = made({"prompt": "a"}, CompletionBody)
    exchange.prompts = [[1, 260]]
    exchange.begin(found, Ready("m", 9, [2], 1, "ar", 300), "m")
    exchange.add(Tokens(0, [word]))
    assert exchange.choice()["text"] == " a"


@given(
    st.lists(st.sampled_from([0x41, 0x80, 0xC3, 0xA9, 0xE6, 0x97, 0xFF]), max_size=12)
    | st.text(max_size=9).map(lambda text: [*text.encode()])
)
def test_bytes_wait_only_while_they_can_complete_a_character(
    words: Tokenizer, values: list[int]
) -> None:
    text, shown = AnswerText(words, [], (), ()), ""
    for count, value in enumerate(values, 1):
        shown += text.push(tiny.of_byte(value))
        certain = codecs.utf_8_decode(bytes(values[:count]), "replace", False)[0]
        assert shown == certain
    assert shown + text.flush() == bytes(values).decode(errors="replace")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% generation %}{% set a = 1 %}x{{ a }}{% endgeneration %}{{ a }}", "x1"),
        ("{{ messages | tojson(true) }}", '[{"role": "user", "content": "\\u00e9"}]'),
        ("{{ messages[0] | tojson(indent=1, sort_keys=true) }}", '{\n "content": "é",\n "role"'),
        ("{% for n in [1, 2] %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}", "1"),
        ("{{ documents is none }}{{ messages[0].name is defined }}", "TrueFalse"),
        ("{{ messages[0].thinking }}-{{ messages[0].reasoning_content }}", "-"),
    ],
)  # fmt: skip
def test_templates_have_what_transformers_gives_them(
    tmp_path: Path, template: str, text: str
) -> None:
    found = load_tokenizer(str(tiny.write(tmp_path, chat_template=template)))
    shown = found.decode(found.chat([{"role": "user", "content": "é", "name": None}]))
    assert shown.startswith(text)


def test_a_template_for_tools_is_used_for_tools(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, chat_template=[{"name": "default", "template": "no"}])
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ tools[0] }}")
    (folder / "chat_template.jinja").write_text("plain")
    found = load_tokenizer(str(folder))
    assert [found.decode(found.chat(CHAT)), found.decode(found.chat(CHAT, ["a"]))] == ["plain", "a"]


def test_white_space_is_a_prompt_and_a_text_beyond_any_context_is_none(words: Tokenizer) -> None:
    (found,) = read_prompts(asked(prompt=" \n", chat_template="false"), words)
    assert found.tokens == tuple(of_bytes(" \n"))
    with pytest.raises(ConfigError, match=r"prompt: 1000 bytes: allowed: at most 70, the model's"):
        read_prompts(asked(prompt="é" * 500, chat_template="false"), words, context=10)


READERS: dict[str, Any] = {
    "prompts": read_entries, "grammar": read_grammar, "profile": load_profile,
    "tokenizer.json": lambda path: load_tokenizer(str(Path(path).parent)),
    "rows": lambda path: load_rows([path]),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match="is a pipe or a device"):
        READERS[name](str(tmp_path / name))
