"""Prompts from flags and files, and which of them are refused."""

import json
from pathlib import Path

import pytest

from mpissd.common.config import RunConfig, parse_flags
from mpissd.common.errors import ConfigError
from mpissd.engine.workload.tokenizer import Tokenizer, load_tokenizer, read_prompts
from tests.text import tiny


def text_config(**flags: str) -> RunConfig:
    return parse_flags({"workload": "text", **flags})


def lines(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_a_prompt_is_a_users_message_of_a_template(words: Tokenizer, tmp_path: Path) -> None:
    (found,) = read_prompts(text_config(prompt="hello"), words)
    assert found.tokens == tuple(words.chat([{"role": "user", "content": "hello"}]))
    assert found.entry == {"prompt": "hello"}
    plain = load_tokenizer(str(tiny.write(tmp_path, chat_template=None)))
    (found,) = read_prompts(text_config(prompt="hello"), plain)
    assert found.tokens == tuple(plain.encode("hello"))


def test_a_file_holds_prompts_and_conversations(words: Tokenizer, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    path = lines(tmp_path / "p.jsonl", {"prompt": "hello"}, {"messages": messages})
    text = path.read_text().replace("\n", "\r\n\n")  # blank lines count for nothing
    path.write_text(f"\ufeff{text}", "utf-8", newline="")
    one, two = read_prompts(text_config(prompts=str(path)), words)
    assert one.tokens == tuple(words.chat(messages[1:]))
    assert two.tokens == tuple(words.chat(messages))


def test_token_ids_need_no_tokenizer() -> None:
    found = read_prompts(text_config(prompt_ids="1,2,3; 4,5"), None, context=4, vocab=6)
    assert [prompt.tokens for prompt in found] == [(1, 2, 3), (4, 5)]
    for ids, message in (
        ("1;", "prompt 2: ''"),
        ("1,-2", "prompt 1"),
        ("1;5,6", "prompt 2: token 6: allowed: 0..5"),
        ("1,2,3,4", "prompt 1: 4 tokens: allowed: at most 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_prompts(text_config(prompt_ids=ids), None, context=4, vocab=6)


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
        read_prompts(text_config(prompts=str(path)), words, context=100)


def test_no_prompt_and_no_file_are_refused(words: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prompt: needed with workload=text"):
        read_prompts(text_config(), words)
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(text_config(prompts=str(tmp_path / "none.jsonl")), words)
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(text_config(prompts=str(lines(tmp_path / "none.jsonl"))), words)


def test_stop_strings_are_one_or_a_json_list() -> None:
    assert text_config().stop_strings == ()
    assert text_config(stop="a,b").stop_strings == ("a,b",)
    assert text_config(stop="[x]").stop_strings == ("[x]",)
    assert text_config(stop='["\\n\\n", "#"]').stop_strings == ("\n\n", "#")
