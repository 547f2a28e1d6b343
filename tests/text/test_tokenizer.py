"""Text to tokens and back, from a Hugging Face folder and from a GGUF file; text while it arrives:
only whole characters, and nothing after a stop; prompts from flags and files."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from mpissd.common.config import RunConfig, parse_flags
from mpissd.common.errors import ConfigError
from mpissd.common.gguf import read_gguf
from mpissd.engine.workload.text import TextEndings
from mpissd.engine.workload.tokenizer import AnswerText, Tokenizer, load_tokenizer, read_prompts
from tests.text import tiny

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
    writer = GGUFWriter(path, "llama")
    kinds = {str: writer.add_string, list: writer.add_array, int: writer.add_uint32}
    for key, value in metadata.items():
        kinds[type(value)](f"tokenizer.ggml.{key}", value)
    writer.add_chat_template(tiny.TEMPLATE)
    writer.add_tensor("output.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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


def test_smollm_splits_every_digit_and_the_space_before_it(tmp_path: Path) -> None:
    """GPT-2's rule on its own would put the second space of "a  1" in front of the digit."""
    merges = [" ".join(pair) for pair in [*tiny.MERGES, ("Ġ", "Ġ"), ("1", "2")]]
    tokens = [*tiny.tokens(), "ĠĠ", "12"]
    kinds = [3] * len(tiny.SPECIALS) + [1] * (len(tokens) - len(tiny.SPECIALS))
    path = write_gguf(tmp_path / "d.gguf", merges=merges, tokens=tokens, token_type=kinds)
    found = load_tokenizer(str(path))
    one, two = tiny.of_byte(ord("1")), tiny.of_byte(ord("2"))
    assert found.encode("  12") == [tokens.index("ĠĠ"), one, two]


def test_every_file_that_names_a_stop_token_or_a_template_counts(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, chat_template=None)
    assert load_tokenizer(str(folder)).template is None
    load_tokenizer.cache_clear()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    (folder / "chat_template.jinja").write_text("hello")
    found = load_tokenizer(str(folder))
    assert found.stop_ids == {1, 2} and found.chat(CHAT) == found.encode("hello")


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
    ],
)
def test_a_damaged_or_foreign_file_is_one_line(
    tmp_path: Path, files: dict[str, str], config: dict[str, Any], message: str
) -> None:
    tiny.write(tmp_path, **config)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(str(tmp_path))


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
        ({"token_type": [3]}, "its tokenizer is damaged"),
    ],
)
def test_a_wrong_gguf_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(str(write_gguf(tmp_path / "x.gguf", **changed)))


def test_a_gguf_file_cut_anywhere_is_refused_in_one_line(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    found = read_gguf(tmp_path / "whole.gguf")
    assert found.tensors["output.weight"].shape == (8, 4)
    for size in (0, 3, 10, 23, 30, 100, 900, len(whole) // 2, found.data_start - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError):
            read_gguf(path)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "chat template"),
        ("{% for n in range(10 ** 9) %}{% endfor %}", "chat template: Range too big"),
        ("{{ '\ud800' }}", "chat template"),
    ],
)
def test_a_template_that_fails_is_refused(tmp_path: Path, template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(str(tiny.write(tmp_path, chat_template=template))).chat(CHAT)


END = 1  # <|e|>


def pieces(tokenizer: Tokenizer, tokens: Sequence[int], *stops: Collection[Any]) -> list[str]:
    """The text that each token completes, and the rest at the end. stops: strings, then tokens."""
    text = AnswerText(tokenizer, *stops or ((), ()))
    return [*(text.push(token) for token in tokens), text.flush()]


def of_bytes(text: str) -> list[int]:
    return [tiny.of_byte(byte) for byte in text.encode()]


@given(st.lists(st.integers(0, 263), max_size=30), st.text(max_size=9))
def test_pieces_are_characters_of_the_text(words: Tokenizer, tokens: list[int], text: str) -> None:
    found = pieces(words, of_bytes(text))
    assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found) or "\ufffd" in text
    assert "".join(pieces(words, tokens)) == words.decode(tokens)
    assert pieces(words, of_bytes("é")[:1]) == ["", "\ufffd"]


@given(st.data(), st.lists(st.text("helo", min_size=1, max_size=4), max_size=3))
def test_a_text_ends_before_its_first_stop(
    words: Tokenizer, data: st.DataObject, stops: list[str]
) -> None:
    """The tiny vocabulary has tokens of one letter and of several."""
    letters = st.sampled_from([*of_bytes("helo"), *range(259, 264)])
    tokens = data.draw(st.lists(letters, max_size=12))
    text, shown, all_of_it = AnswerText(words, stops, {END}), "", ""
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
    endings = TextEndings(words, ["lo\n"], {END}, {7: 99, 8: 99, 9: 5})
    assert endings.kept(7, 0, of_bytes("hel")) is None
    assert endings.kept(8, 0, [5, END, 9]) == 2
    assert endings.kept(7, 3, of_bytes("lo\nxx")) == 3
    assert endings.kept(7, 0, of_bytes("\n")) is None  # an id that is used again starts afresh
    assert [endings.kept(9, 0, [3, 4]), endings.kept(9, 2, [3, 4, 5, END])] == [None, 3]


def test_without_stop_strings_no_tokenizer_is_needed() -> None:
    endings = TextEndings(None, [], {END}, {0: 99})
    assert [endings.kept(0, 0, [3, 4]), endings.kept(0, 2, [END])] == [None, 1]
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        TextEndings(None, ["x"], {END}, {})


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
        (b'{"prompt": " \\n"}', "line 2: is empty"),
        (b'{"prompt": null}', "line 2: null is no text"),
        (b'{"prompt": "\\ud800"}', "line 2: is no UTF-8 text"),
        (b'{"messages": []}', "line 2: messages: allowed"),
        (b'{"messages": [{"role": "user"}]}', "line 2: message 1: null is no text"),
        (b'{"messages": [{"role": "user", "content": ""}]}', "line 2: message 1: is empty"),
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
