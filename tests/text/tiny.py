"""A tokenizer of 256 bytes, a few merges and three special tokens, written for a test."""

import json
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for message in messages %}{{ '<|s|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|e|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|s|>assistant\\n' }}{% endif %}"
)
SPECIALS = ("<|s|>", "<|e|>", "<|pad|>")
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"))


def byte_letters() -> list[str]:
    """GPT-2's letter for each of the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, extra = {}, 256
    for byte in range(256):
        letters[byte] = chr(byte) if byte in plain else chr(extra)
        extra += byte not in plain
    return [letters[byte] for byte in range(256)]


def tokens() -> list[str]:
    return [*SPECIALS, *byte_letters(), *(left + right for left, right in MERGES)]


def of_byte(byte: int) -> int:
    return len(SPECIALS) + byte


def write(folder: Path, **tokenizer_config: Any) -> Path:
    """Writes tokenizer.json and its companions; tokenizer_config: keys to change (None: drop)."""
    special = [
        {"id": i, "content": text, "special": True, "single_word": False, "lstrip": False}
        | {"rstrip": False, "normalized": False}
        for i, text in enumerate(SPECIALS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    model = {"type": "BPE", "vocab": {text: i for i, text in enumerate(tokens())}}
    whole = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "decoder": byte_level,
        "model": {**model, "merges": [list(pair) for pair in MERGES]},
    }
    config = {"eos_token": "<|e|>", "bos_token": {"content": "<|s|>"}, "chat_template": TEMPLATE}
    config = {k: v for k, v in (config | tokenizer_config).items() if v is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
