"""Model files of other tools: what changes the result is read, or refused by name.

tests/parity/files.py compares many random files with transformers and llama.cpp.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mpissd.common.presets import has_weights, resolve_model
from mpissd.engine.model.transformer.checkpoint import EMBEDDING, HEAD, Checkpoint, digest
from mpissd.engine.model.transformer.config import of_folder
from mpissd.engine.model.transformer.sources import config_of, open_checkpoint
from mpissd.learn.export import save
from tests.weight_files import (
    CONFIG,
    parsed,
    random_folder,
    refused,
    values_of,
    write_folder,
    write_gguf,
)

Values = dict[str, np.ndarray]
LAYER = "model.layers.1."
# Keys that change the result, with JSON values; absent ones are null.
GGUF_KEYS = """
    attention.scale=0.5 attention.causal=false attention.value_length=8 attention.sliding_window=4
    attention.layer_norm_rms_epsilon=null attention.head_count_kv=[2,2] attn_logit_softcapping=30.0
    context_length=null expert_used_count=2 logit_scale=0.5 embedding_scale=12.0 unheard_of="x"
    rope.dimension_count=8 rope.scaling.attn_factor=2.0 rope.scaling.type="longrope"
    rope.scaling.yarn_ext_factor=1.0 use_parallel_residual=true general.type="adapter"
    expert_count=8 block_count=null
    """.split()
CONFIG_KEYS = """
    architectures=["LlamaForSequenceClassification"] embedding_multiplier=12.0 is_causal=false
    quantization={"bits":4} rope_interleaved=true partial_rotary_factor=0.5 sliding_window=4
    rope_parameters={"factor":4.0} rope_parameters={"partial_rotary_factor":0.5}
    rope_scaling={"rope_type":"yarn"} rope_scaling="dynamic" text_config={"model_type":"llama"}
    tie_word_embeddings="false" model_type="gemma2" mpissd={"head":"low-rank"}
    mpissd={"masks":64} mpissd={"masks":true} mpissd={"masks":2,"kind":"mlp"}
    quantization_config={"quant_method":"awq"} mpissd={"quantization":"int4"} hidden_act="gelu"
    rope_scaling={"rope_type":"llama3","factor":8.0} head_dim=15 rope_theta=-1
    """.split()
HARMLESS_GGUF = """
    vocab_size=50 tensor_data_layout="reference" attention.key_length=16 attention.value_length=16
    attention.causal=true attention.sliding_window=0 expert_count=0 expert_used_count=0
    rope.dimension_count=16 rope.scaling.attn_factor=1.0 rope.scaling.finetuned=false
    rope.scaling.original_context_length=64 use_parallel_residual=false
    """.split()
HARMLESS_CONFIG = """
    _name_or_path="x" torch_dtype="float32" temperature=0.6 architectures=["LlamaForCausalLM"]
    scale_emb=null attention_dropout=0.1 use_mrope=false logit_scale=1.0 training_steps=9
    """.split()
GGUF_SCALINGS = {  # with the divisor of all frequencies
    'rope.scaling.type="linear" rope.scaling.factor=4.0': 4,
    "rope.scaling.factor=4.0": 4,
    "rope.scale_linear=4.0": 4,
    "rope.scale_linear=4.0 rope.scaling.factor=2.0": 2,
    'rope.scaling.type="none" rope.scaling.factor=4.0': 1,
}
SCALING = 'rope_parameters={"rope_type":"linear","factor":4.0,"rope_theta":10000.0} rope_theta=5'
UNREAD = """
    lm_head.bias score.weight model.layers.1.self_attn.o_proj.bias model.layers.1.mlp.down_proj.bias
    model.layers.1.self_attn.sinks model.layers.1.self_attn.q_proj.lora_A.weight
    model.layers.1.self_attn.q_norm.weight model.layers.2.input_layernorm.weight
    """.split()


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Values:
    return random_folder(tmp_path_factory.mktemp("llama"), 7)[1]


def assert_equal(where: Path, values: Values) -> Checkpoint:
    checkpoint = open_checkpoint(str(where))
    read = values_of(checkpoint)
    assert read.keys() == values.keys()
    assert all(np.array_equal(read[name], value) for name, value in values.items())
    return checkpoint


@pytest.mark.parametrize(("keys", "divisor"), [*GGUF_SCALINGS.items(), (SCALING, 4)])
def test_linear_scaling(tmp_path: Path, values: Values, keys: str, divisor: float) -> None:
    """In a .gguf as llama.cpp reads it, and in config.json as transformers does."""
    more = parsed(*keys.split())
    if keys == SCALING:
        path = write_folder(tmp_path / "m", {**CONFIG, **more}, values)
    else:
        path = write_gguf(tmp_path / "m.gguf", values, metadata=more)
    frequencies = config_of(str(path)).frequencies()
    assert np.array_equal(frequencies * divisor, 10000.0 ** -(np.arange(0, 16, 2) / 16))


@pytest.mark.parametrize("key", [*GGUF_KEYS, *CONFIG_KEYS])
def test_a_key_that_changes_the_result_is_named(tmp_path: Path, values: Values, key: str) -> None:
    name = key.partition("=")[0]
    if key in GGUF_KEYS:
        refused(write_gguf(tmp_path / "m.gguf", values, metadata=parsed(key)), name)
    else:
        message = "" if name in ("rope_scaling", "rope_parameters") else name
        refused(write_folder(tmp_path / "m", {**CONFIG, **parsed(key)}, values), message)


def test_absent_keys_mean_what_transformers_takes_them_for(tmp_path: Path, values: Values) -> None:
    messages = {"mistral": "sliding_window=4096", "qwen3": "q_proj.weight is [64, 64]: allowed: [5"}
    for family, message in messages.items():
        config = {**CONFIG, "model_type": family, "use_sliding_window": False}
        config["max_position_embeddings"] = 4097  # of which a window of 4096 hides one
        refused(write_folder(tmp_path / family, config, values), message)
    config |= {"model_type": "mistral", "max_position_embeddings": 4096}
    assert_equal(write_folder(tmp_path / "short", config, values), values)


def test_what_changes_nothing_passes(tmp_path: Path, values: Values) -> None:
    more = {**values, f"{LAYER}self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    folder = write_folder(tmp_path / "m", {**CONFIG, **parsed(*HARMLESS_CONFIG)}, more)
    assert_equal(folder, values)
    assert_equal(write_gguf(tmp_path / "m.gguf", values, metadata=parsed(*HARMLESS_GGUF)), values)
    cut = open_checkpoint(f"{folder}@1L")  # a part of the file's layers, on request
    assert cut.config.shape.num_layers == 1 and cut.by_name.keys() < values.keys()


@pytest.mark.parametrize("name", UNREAD)
def test_a_tensor_that_nothing_reads_is_named(tmp_path: Path, values: Values, name: str) -> None:
    more = {**values, name: np.ones(16, np.float32)}
    refused(write_folder(tmp_path / "m", CONFIG, more), f"the tensor {name!r} is not supported")
    refused(write_gguf(tmp_path / "m.gguf", more), " is not supported: allowed: files without")


def test_biases_of_a_llama_file_are_read(tmp_path: Path) -> None:
    biased = random_folder(tmp_path / "qwen2", 7, model_type="qwen2")[1]
    assert assert_equal(write_gguf(tmp_path / "m.gguf", biased), biased).config.qkv_bias
    refused(write_folder(tmp_path / "folder", CONFIG, biased), "self_attn.k_proj.bias")
    keys = {"rope.scale_linear": 4.0}
    target = config_of(str(write_gguf(tmp_path / "target.gguf", biased, metadata=keys)))
    save(tmp_path, target, {}, {})  # a distilled draft is written with its target's parts
    draft = of_folder(tmp_path / "config.json", target.shape)
    assert (draft.rope_divisor, draft.qkv_bias) == (4, True)
    del biased[f"{LAYER}self_attn.v_proj.bias"]
    refused(write_gguf(tmp_path / "part.gguf", biased), "v_proj.bias is missing")


def test_all_shards_of_a_gguf_are_read(tmp_path: Path, values: Values) -> None:
    first = write_gguf(tmp_path / "m.gguf", values, shards=9)
    checkpoint, paths = assert_equal(first, values), sorted(tmp_path.glob("m-*.gguf"))
    assert len(paths) == 3 and checkpoint.sha256 == digest(paths)[0]
    assert not checkpoint.config.tied  # output.weight lies in another shard than the metadata
    refused(paths[1], "split.no=1, split.count=3: this is a shard")
    refused(shutil.copy(first, tmp_path / "renamed.gguf"), "split.no=0, split.count=3")
    write_gguf(tmp_path / "other.gguf", {**values, "more": np.ones(4, "f4")}, shards=9)
    shutil.copy(tmp_path / "other-00003-of-00003.gguf", paths[2])
    refused(first, "split.tensors.count=21: its shards have 22")
    shutil.copy(paths[1], paths[2])
    refused(first, "is not shard 3 of 3")
    paths[2].unlink()
    refused(first, "No such file")


def test_a_head_in_the_files_is_read_though_config_json_ties_it(
    tmp_path: Path, values: Values
) -> None:
    config = {**CONFIG, "tie_word_embeddings": True}
    assert not assert_equal(write_folder(tmp_path / "m", config, values), values).config.tied
    tied = {name: value for name, value in values.items() if name != HEAD}
    checkpoint = assert_equal(write_folder(tmp_path / "tied", config, tied), tied)
    assert checkpoint.config.tied and np.array_equal(checkpoint.read(HEAD), values[EMBEDDING])


def test_files_are_chosen_as_transformers_does(tmp_path: Path, values: Values) -> None:
    """model.safetensors, or else what the index names; no name twice."""
    other = {name: value + 1 for name, value in values.items()}
    folder = write_folder(tmp_path / "m", CONFIG, other, 2)
    save_file(values, folder / "model_1.safetensors")
    assert_equal(folder, other)
    save_file(values, folder / "model.safetensors")
    assert_equal(folder, values)
    (folder / "model.safetensors").unlink()
    save_file(other, folder / "model-00002-of-00002.safetensors")
    refused(folder, f"{HEAD!r} is in model-00001-of-00002.safetensors, too")
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, "has no *.safetensors of a model")


@pytest.mark.parametrize("name", ["m.GGUF", "model.bin", "sha256-0123", "config.json"])
def test_a_gguf_is_recognised_whatever_its_name(tmp_path: Path, values: Values, name: str) -> None:
    where = tmp_path / name
    where.symlink_to(write_gguf(tmp_path / "blob", values))
    assert_equal(where, values)
    assert has_weights(str(where)) and resolve_model(str(where)).vocab_size == 50


def test_a_gguf_of_another_family_or_with_a_name_twice(tmp_path: Path, values: Values) -> None:
    refused(write_gguf(tmp_path / "g.gguf", values, architecture="gemma2"), "='gemma2' is not supp")
    path = write_gguf(tmp_path / "m.gguf", values, metadata={"vocab_sizes": 5, "vocab_size": 5})
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"blk.1.attn_k.w", b"blk.0.attn_k.w"))
    refused(path, "the tensor blk.0.attn_k.weight is there twice")
    path.write_bytes(whole.replace(b"llama.block_count", b"llama.vocab_sizes"))
    refused(path, "the key llama.vocab_sizes is there twice")


CODE = """
import sys
from mpissd.common.errors import ConfigError
from mpissd.engine.model.transformer.sources import config_of
for name in sys.argv[1:]:
    try:
        config_of(name)
    except ConfigError as error:
        print(error)
"""


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, values: Values) -> None:
    """A pipe blocks its reader, and a device has no end: a process of its own, with a deadline."""
    names = []
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        folder = write_folder(tmp_path / name, CONFIG, values if "model" in name else {})
        (folder / "model.safetensors").unlink()
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        names.append(str(folder))
    for name in ("zero.gguf", "zero.json", "zero"):
        (tmp_path / name).symlink_to("/dev/zero")
        names.append(str(tmp_path / name))
    command = [sys.executable, "-c", CODE, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(names) and all("allowed: a regular file" in line for line in lines)
