"""Random model files, read by mpissd and by references: files.py write|check OUT COUNT SEED

write: writes COUNT .gguf files and COUNT Hugging Face folders, tiny models with up to three random
changes of keys, tensors, types or layout each. tests/parity/library_files.py adds the references'
logits. check: mpissd refuses a file in one line, or its logits are the reference's; it does not
refuse a file without changes. A file that only mpissd reads is counted, not judged. Exit code 1 if
a file fails.
"""

import inspect
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from mpissd.common.errors import ConfigError
from mpissd.engine.model.transformer.config import CHANGING
from tests.engine.test_foreign_files import (
    CONFIG_KEYS,
    GGUF_KEYS,
    GGUF_SCALINGS,
    HARMLESS_CONFIG,
    HARMLESS_GGUF,
)
from tests.parity.greedy import CHUNK, Model
from tests.weight_files import parsed, random_folder, write_folder, write_gguf

TOKENS = [5, 9, 40, 33, 25, 7, 7, 41, 0, 12]
# Largest difference of a logit against the largest logit, by whether matrices are quantised: some
# types are rounded to bfloat16 as they are read.
ALLOWED = {True: 5e-2, False: 1e-4}
EXTRA = """
    lm_head.weight=[50,64] lm_head.bias=50 rope_freqs.weight=8 model.layers.0.mlp.down_proj.bias=64
    model.layers.1.self_attn.q_proj.bias=64 model.layers.1.self_attn.o_proj.bias=64
    model.layers.1.self_attn.q_norm.weight=16 model.layers.0.self_attn.rotary_emb.inv_freq=8
    model.layers.2.input_layernorm.weight=64
    """.split()
FAULTS = ("DIFFERENT", "FAILED", "WRONGLY REFUSED")
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
LAYOUTS = "shards both stray twice lost unindexed renamed half double".split()
TYPES = "F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1".split()
ALL_GGUF_KEYS = re.findall(r'"\{arch\}\.([a-z_.]+)"', inspect.getsource(gguf.constants.Keys))
FOREIGN = """
    n_layer ffn_dim num_local_experts layer_norm_eps hidden_dropout attention_chunk_size
    pretraining_tp partial_rotary_factor temperature _name_or_path
    """.split()
PLAIN = [None, 0, 1, 2, 4, 16, 0.5, 1.0, 4.0, True, False, "none", "linear", "yarn", [2, 2]]
# Keys with the values that suit them.
OF_GGUF = [*GGUF_KEYS, *HARMLESS_GGUF, *(key for keys in GGUF_SCALINGS for key in keys.split())]
OF_FOLDER = [*CONFIG_KEYS, *HARMLESS_CONFIG]
OF_FOLDER += """
    rope_scaling={"type":"linear","factor":2.0} rope_scaling={"type":"dynamic","factor":4.0}
    rope_parameters={"rope_type":"linear","factor":4.0,"rope_theta":700.0} rope_theta=700.0
    rope_scaling={"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":64}
    use_sliding_window=true use_sliding_window=false max_window_layers=0 max_window_layers=2
    layer_types=["full_attention","full_attention"] attention_bias=true attention_bias=false
    layer_types=["full_attention","sliding_attention"] mlp_bias=true
    """.split()


def change_tensors(dice: random.Random, values: dict[str, np.ndarray]) -> str:
    """Adds or removes tensors; returns what it did."""
    numbers = np.random.default_rng(dice.randrange(99))
    change = dice.choice([*EXTRA, "biases", ""])
    if not change:
        name = dice.choice(list(values))
        del values[name]
        return f"no {name}"
    added = parsed(change) if "=" in change else {}
    for weight in [name for name in values if change == "biases" and "_proj" in name]:
        if "self_attn" in weight and "o_proj" not in weight:
            added[weight.replace("weight", "bias")] = len(values[weight])
    for name, size in added.items():
        values[name] = 1 + numbers.standard_normal(size).astype(np.float32) / 2
    return f"extra {change}"


def lay_out(layout: str, folder: Path, config: Any, values: Any) -> None:
    """Writes a folder's files, some with other weights that must not be read."""
    weights = folder / "model.safetensors"
    other = {name: value + 1 for name, value in values.items()}
    types = {"half": np.float16, "double": np.float64}
    values = {name: value.astype(types.get(layout, np.float32)) for name, value in values.items()}
    weights.unlink()
    count = 2 if layout in ("shards", "both", "twice", "lost", "unindexed") else 1
    write_folder(folder, config, values, count)
    index = folder / "model.safetensors.index.json"
    match layout:
        case "both":
            save_file(values, weights)
            save_file(other, folder / SHARDS[0])
        case "stray" | "twice":
            save_file(other, folder / (SHARDS[1] if layout == "twice" else "model_1.safetensors"))
        case "lost" | "unindexed":
            (folder / SHARDS[1] if layout == "lost" else index).unlink()
        case "renamed":
            weights.rename(folder / "consolidated.safetensors")


def write_case(dice: random.Random, folder: Path, is_gguf: bool) -> dict[str, Any]:
    """Writes a model; returns its changes, its path, and the file that the reference reads."""
    family = dice.choice(["llama", "llama", "qwen2", "qwen3"] + ["mistral"] * (not is_gguf))
    heads = 4 if family == "qwen2" else dice.choice([2, 4])
    config: dict[str, Any] = {
        "model_type": family,
        "num_attention_heads": heads,
        "num_key_value_heads": dice.choice([1, 2, heads]),
        "head_dim": 16,
        "rms_norm_eps": dice.choice([1e-6, 1e-5, 1e-2]),
        "rope_theta": dice.choice([500.0, 10000.0]),
        "tie_word_embeddings": dice.random() < 0.3,
        "sliding_window": None,
    }
    _, values = random_folder(folder, dice.randrange(1 << 30), **config)
    keys = json.loads((folder / "config.json").read_text())
    names, suited = [*keys, *FOREIGN, *CHANGING], OF_FOLDER
    if is_gguf:
        names, suited = ALL_GGUF_KEYS, OF_GGUF
        widths = ("attention.key_length", "attention.value_length", "rope.dimension_count")
        keys = dict.fromkeys(widths, 16) | {
            "attention.head_count": heads,
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "rope.freq_base": config["rope_theta"],
        }
    layout = "F32" if is_gguf else "one"
    changes = []
    for _ in range(dice.choice([0, 1, 1, 1, 2, 3])):
        change = dice.choice(["key", "suited", "suited", "drop", "tensors", "layout", "layout"])
        match change:
            case "key":
                name = dice.choice(names)
                keys[name] = dice.choice(PLAIN)
                change = f"{name}={keys[name]}"
            case "suited":
                change = dice.choice(suited)
                keys |= parsed(change)
            case "drop":
                name = dice.choice(list(keys))
                del keys[name]
                change = f"no {name}"
            case "tensors":
                change = change_tensors(dice, values)
            case "layout":
                layout = change = dice.choice([*TYPES, "split", "split"] if is_gguf else LAYOUTS)
        changes.append(change)
    for value in values.values():  # bfloat16 represents the matrices
        value.view(np.uint32)[...] &= 0xFFFF0000
    if not is_gguf:
        lay_out(layout, folder, keys, values)
        return {"changes": changes, "path": folder.name, "reference": folder.name}
    shards, kind = (9, "F32") if layout == "split" else (0, layout)
    name = "m.gguf" if shards else dice.choice(["m.gguf", "m.GGUF", "sha256-0123"])
    options: dict[str, Any] = {"shards": shards, "architecture": family}
    options["metadata"] = keys | {"vocab_size": 50, "tokenizer.ggml.model": "no_vocab"}
    path = write_gguf(folder / name, values, kind, **options)
    number = gguf.GGMLQuantizationType[kind]
    for name, value in values.items():  # the reference reads the same values in float32
        if value.ndim == 2:
            blocks = gguf.quants.quantize(value, number)
            values[name] = gguf.quants.dequantize(blocks, number)
    reference = write_gguf(folder / "reference.gguf", values, **options)
    names = [f"{folder.name}/{file.name}" for file in (path, reference)]
    return {"changes": changes, "path": names[0], "reference": names[1]}


def verdict(case: dict[str, Any], out: Path) -> tuple[str, str]:
    """Returns how one file was read, and the refusal or the distance."""
    try:
        rows = Model(str(out / case["path"]), CHUNK).chunks(TOKENS, 0)
        ours = np.array([row for _, row in rows])
    except ConfigError as error:
        is_good = "\n" not in str(error) and case["changes"]
        return ("refused" if is_good else "WRONGLY REFUSED"), str(error)
    except Exception as error:  # noqa: BLE001, every other error is a fault of mpissd
        return "FAILED", repr(error)
    logits = out / f"{case['name']}.npy"
    if not logits.exists():
        return "read here only", ""
    theirs = np.load(logits)
    distance = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    is_quantised = any(change in TYPES[2:] for change in case["changes"])
    return ("equal" if distance < ALLOWED[is_quantised] else "DIFFERENT"), f"{distance:.1e}"


def main() -> None:
    what, out, count, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    if what == "write":
        cases = []
        for name in (f"{kind}-{number}" for kind in ("gguf", "folder") for number in range(count)):
            case = write_case(random.Random(f"{seed} {name}"), out / name, name.startswith("gguf"))
            cases.append({"name": name, **case})
        (out / "cases.json").write_text(json.dumps({"tokens": TOKENS, "cases": cases}))
        return
    counts = Counter[str]()
    for case in json.loads((out / "cases.json").read_text())["cases"]:
        result, reason = verdict(case, out)
        counts[f"{case['name'].partition('-')[0]} {result}"] += 1
        if result in FAULTS:
            print(f"{case['name']}: {result} {reason} {case['changes']}")
    print(f"random model files of seed {seed}: {dict(sorted(counts.items()))}")
    sys.exit(any(name.endswith(FAULTS) for name in counts))


if __name__ == "__main__":
    main()
