"""Layouts of tokenizer files, and what PreTrainedTokenizerFast of transformers makes of them.

tests/parity/vocabularies.py compares hundreds more with the library itself.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from tests.text import tiny

TEXT = " <x>hello 12<|e|>"
TOKEN = {"content": "<x>", "lstrip": True, "normalized": False, "rstrip": False, "special": True}
TOKEN["single_word"] = False
DECODER = {"264": TOKEN, "1": {**TOKEN, "content": "<|e|>"}}
PAD = {"strategy": {"Fixed": 30}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 2}
BATCH = {
    "truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
    "padding": {**PAD, "pad_token": "<x>", "pad_type_id": 0},
}
TYPED = {"__type": "AddedToken", **TOKEN}
HELLO, BYTES = [262, 35, 52, 53, 1], [35, 63, 123, 65, 262, 35, 52, 53, 1]
PREPEND = {"tokenizer.json": {"normalizer": {"type": "Prepend", "prepend": "h"}}}
CLASSES = ("GPT2Tokenizer", "LlamaTokenizer", "Qwen2TokenizerFast", "BertTokenizer")
# (keys of tokenizer_config.json, other files with their keys, the tokens of TEXT).
LAYOUTS: list[tuple[dict[str, Any], dict[str, Any], list[int]]] = [
    ({"added_tokens_decoder": DECODER}, {}, [264, *HELLO]),
    ({"added_tokens_decoder": {"264": TOKEN}}, {}, [264, *HELLO]),
    ({}, {"added_tokens.json": {"<x>": 264}}, [35, 264, *HELLO]),
    ({"extra_special_tokens": ["<x>"]}, {"added_tokens.json": {"<x>": 264}}, [35, 264, *HELLO]),
    ({"pad_token": TYPED}, {"added_tokens.json": {"<x>": 264}, **PREPEND}, [107, *BYTES]),
    ({}, {"special_tokens_map.json": {"pad_token": TOKEN}}, [264, *HELLO]),
    ({"added_tokens_decoder": {}}, {"special_tokens_map.json": {"pad_token": TOKEN}}, BYTES),
    ({"additional_special_tokens": ["<y>", "<x>"]}, {}, [35, 265, *HELLO]),
    ({"extra_special_tokens": {"b_token": "<x>"}, "a_token": "<y>"}, {}, [35, 265, *HELLO]),
    ({"pad_token": TYPED, "unk_token": "<y>"}, {}, [265, *HELLO]),
    ({}, {"tokenizer.json": BATCH}, [35, 264, *HELLO]),
    ({"add_bos_token": True, "add_eos_token": True}, {}, BYTES),
    ({"split_special_tokens": True}, {}, [*BYTES[:-1], 63, 127, 104, 127, 65]),
    *(({"tokenizer_class": name, "add_prefix_space": True}, {}, BYTES) for name in CLASSES),
]


def write(folder: Path, config: dict[str, Any], files: dict[str, Any]) -> Path:
    """Writes the tiny tokenizer with changes, and other files."""
    tiny.write(folder, **{"bos_token": None, **config})
    base = json.loads((folder / "tokenizer.json").read_text())
    for name, keys in {"config.json": {"model_type": "llama"}, **files}.items():
        value = {**base, **keys} if name == "tokenizer.json" else keys
        (folder / name).write_text(json.dumps(value))
    return folder


def write_sentences(folder: Path, **config: Any) -> Path:
    """Writes a byte-fallback tokenizer with a dummy prefix, as of Llama 2."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    numbers = {text: number for number, text in enumerate(tokens)}
    made = tokenizers.Tokenizer(
        models.BPE(numbers, [("▁", "a")], fuse_unk=True, byte_fallback=True)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    made.add_special_tokens(tokens[:3])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **config}))
    return folder
