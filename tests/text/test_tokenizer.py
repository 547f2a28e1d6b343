"""Text to tokens and back, from a Hugging Face folder and from a GGUF file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from mpissd.common.errors import ConfigError
from mpissd.common.gguf import read_gguf
from mpissd.engine.workload.tokenizer import Tokenizer, load_tokenizer
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
