"""Files that cannot be used are refused in one line, before a tensor is read."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpissd.common import token_lists
from mpissd.common.config import parse_flags
from mpissd.common.errors import ConfigError
from mpissd.engine.job import resolve
from mpissd.engine.model.transformer.checkpoint import tensors
from mpissd.engine.model.transformer.sources import check_vocabularies, config_of, open_checkpoint
from tests.weight_files import CONFIG, random_folder, write_folder, write_gguf

ANY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def refused(where: Path, told: str = "") -> str:
    with pytest.raises(ConfigError) as error:
        config_of(str(where))
    text = str(error.value)
    assert "\n" not in text and told in text, text
    return text


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad")


@pytest.fixture(scope="module")
def values(home: Path) -> dict[str, np.ndarray]:
    return random_folder(home / "one")[1]


@pytest.fixture(scope="module")
def one(home: Path, values: dict[str, np.ndarray]) -> Path:
    return home / "one"


@pytest.fixture(scope="module")
def gguf(home: Path, values: dict[str, np.ndarray]) -> Path:
    return write_gguf(home / "good.gguf", values, "Q8_0")


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "gemma2"}, "model_type='gemma2' is not supported: allowed: llama"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window=4096"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config='awq'"),
        ({"quantization_config": {}, "mpissd": {"quantization": "int4"}}, "quantization='int4'"),
        ({"mpissd": {"head": "low-rank"}}, "mpissd.head='low-rank' is not supported"),
        ({"rope_scaling": YARN}, "rope_type='yarn' is not supported: allowed: default, llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor=None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"head_dim": 15}, "head_dim=15 with forward=transformer: allowed: even numbers"),
        ({"rope_theta": -1}, "rope_theta=-1: allowed: numbers above 0"),
    ],
)
def test_other_architectures_are_refused(home: Path, change: dict[str, Any], told: str) -> None:
    (home / "config.json").write_text(json.dumps({**CONFIG, **change}), "utf-8")
    refused(home / "config.json", told)


@ANY
@given(data=st.data())
def test_a_cut_file_is_refused(home: Path, one: Path, gguf: Path, data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        folder = home / "cut"
        shutil.copytree(one, folder, dirs_exist_ok=True)
        path = folder / "model.safetensors"
        whole = (one / path.name).read_bytes()
    else:
        folder = path = home / "cut.gguf"
        whole = gguf.read_bytes()
    # The last bytes of a .gguf may be padding.
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 33))])
    told = refused(folder)
    assert any(word in told for word in ("damaged", "cut off", "no GGUF", "empty file")), told


@ANY
@given(at=st.floats(0, 1), value=st.binary(min_size=1, max_size=9), kind=st.sampled_from("sg"))
def test_a_damaged_header_is_refused_or_harmless(
    home: Path, one: Path, gguf: Path, at: float, value: bytes, kind: str
) -> None:
    source = gguf if kind == "g" else one / "model.safetensors"
    whole = bytearray(source.read_bytes())
    start = int(at * 3000)
    whole[start : start + len(value)] = value
    folder = path = home / "damaged.gguf"
    if kind == "s":
        folder = home / "damaged"
        shutil.copytree(one, folder, dirs_exist_ok=True)
        path = folder / "model.safetensors"
    path.write_bytes(whole)
    try:
        checkpoint = open_checkpoint(str(folder))
        for name, size in tensors(checkpoint.config):
            assert checkpoint.read(name).shape == size
    except ConfigError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("lm_head.weight", None, "the tensor lm_head.weight is missing"),
        ("model.norm.weight", np.ones(63, "f4"), "model.norm.weight is [63]: allowed: [64]"),
        ("lm_head.weight", np.ones((50, 64), "f8"), "lm_head.weight is F64: allowed: F32, F16"),
        ("head_ids", np.arange(50), "head_ids is I64: allowed: I32"),
        ("model.norm.weight", np.ones(64, "i1"), "model.norm.weight is I8: allowed: of a matrix"),
    ],
)
def test_tensors_fit_the_config(
    home: Path, values: dict[str, np.ndarray], name: str, value: np.ndarray | None, told: str
) -> None:
    changed = {key: each for key, each in {**values, name: value}.items() if each is not None}
    refused(write_folder(home / "unfit", CONFIG, changed), told)
    if name not in ("lm_head.weight", "head_ids") and (
        value is None or value.dtype != "i1"
    ):  # a .gguf without an LM head is tied
        refused(write_gguf(home / "unfit.gguf", changed), name.partition(".")[0])


def test_a_missing_shard_and_a_broken_index(home: Path) -> None:
    folder, _ = random_folder(home / "lacking", shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "names 'model-00002-of-00002.safetensors', which is not there")
    for index in ("{}", '{"weight_map": {"a": 3}}', "[" * 99_999):
        (folder / "model.safetensors.index.json").write_text(index)
        refused(folder, "is no index of safetensors")


def test_folders_without_weights(home: Path) -> None:
    folder = home / "empty"
    folder.mkdir()
    refused(folder, "config.json")
    (folder / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    refused(folder, "has no *.safetensors")
    refused(home / "no-such.gguf", "No such file")
    (home / "text.gguf").write_text("hello")
    refused(home / "text.gguf")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"architecture": "gemma2"}, "general.architecture='gemma2' is not supported"),
        ({"metadata": {"expert_count": 8}}, "expert_count=8 says mixture-of-experts"),
        ({"metadata": {"rope.scaling.type": "yarn"}}, "rope.scaling.type='yarn'"),
        ({"metadata": {"block_count": 3}}, "model.layers.2.input_layernorm.weight is missing"),
        ({"metadata": {"block_count": None}}, "llama.block_count is missing"),
    ],
)
def test_gguf_files_of_other_architectures(
    home: Path, values: dict[str, np.ndarray], changes: dict[str, Any], told: str
) -> None:
    refused(write_gguf(home / "other.gguf", values, **changes), told)


def test_a_ggml_type_that_the_library_lacks(home: Path, gguf: Path) -> None:
    data = gguf.read_bytes()
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 16
    (home / "odd.gguf").write_bytes(data[:at] + (99).to_bytes(4, "little") + data[at + 4 :])
    refused(home / "odd.gguf", "self_attn.q_proj.weight is of ggml's type 99")


def write_tokens(path: Path, tokens: list[str], added: dict[str, int], rows: int = 50) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": rows}))
    return write_tokenizer(path, tokens, added)


def write_tokenizer(path: Path, tokens: list[str], added: dict[str, int]) -> Path:
    vocab = {token: number for number, token in enumerate(tokens)}
    told = [{"id": number, "content": token} for token, number in added.items()]
    text = {"model": {"vocab": {**vocab, **added}}, "added_tokens": told}
    (path / "tokenizer.json").write_text(json.dumps(text), "utf-8")
    return path


def test_equal_tokens_may_differ_in_padding_and_in_special_ones(tmp_path: Path) -> None:
    left = write_tokens(tmp_path / "left", ["a", "b", "c"], {"<end>": 3})
    right = write_tokens(tmp_path / "right", ["a", "b", "c"], {"<stop>": 5}, rows=64)
    check_vocabularies(str(left), str(right))
    longer = write_tokens(tmp_path / "longer", ["a", "b", "c", "d", "e"], {})
    with pytest.raises(ConfigError, match="vocabularies: 3 tokens in left and 5 in longer: allow"):
        check_vocabularies(str(left), str(longer))
    other = write_tokens(tmp_path / "other", ["a", "x", "c"], {})
    with pytest.raises(ConfigError, match="token 1 is 'b' in left and 'x' in other"):
        check_vocabularies(str(left), str(other))
    check_vocabularies(str(left), "8b")  # without files
    (right / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="50 tokens in left and 64 in right"):
        check_vocabularies(str(left), str(right))
    (other / "tokenizer.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tokenizer\.json' is damaged"):
        token_lists.tokens_of(other)


def test_pairs_that_cannot_run_are_refused_while_their_job_is_resolved(tmp_path: Path) -> None:
    def pair_refused(told: str, *names: str, tp: int = 1, memory: int | None = None) -> None:
        models = dict(
            zip(("target", "draft"), (str(tmp_path / name) for name in names), strict=True)
        )
        config = parse_flags({"mode": "sd", "workload": "text", "prompt_ids": "1,2", **models})
        with pytest.raises(ConfigError, match=told):
            resolve(config, tp, backend="numpy", memory_bytes=memory)

    for name, tokens in (("target", "abc"), ("draft", "xyz"), ("short", "abc")):
        folder, _ = random_folder(tmp_path / name)
        write_tokenizer(folder, list(tokens), {})
    pair_refused("unequal vocabularies: token 0 is 'a' in target and 'x' in dra", "target", "draft")
    pair_refused("tp=3 with .*: allowed: at most its 2 KV heads", "target", "target", tp=3)
    pair_refused("the device has 1.1 GB: use fewer layers", "target", "target", memory=1 << 30)
    (tmp_path / "short" / "model.safetensors").write_bytes(b"short")
    for names in (("target", "short"), ("short", "target")):
        pair_refused("model.safetensors' is damaged", *names)
