"""Reads a TransformerConfig from a preset, a config.json or a .gguf, and refuses the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mpissd.common import hf_config
from mpissd.common.errors import ConfigError
from mpissd.common.gguf import GgufFile
from mpissd.common.heads import STATE_KINDS
from mpissd.common.presets import ModelShape
from mpissd.engine.model.transformer.checkpoint import Floats
from mpissd.engine.model.transformer.config import Llama3Scaling, TransformerConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_DENSE = "weights in 32 or 16 bits, a .gguf, or a draft that mpissd distilled"


def _llama3(factor: float, tied: bool = False) -> dict[str, Any]:
    scaling = Llama3Scaling(factor, 1.0, 4.0, 8192)
    return {
        "rope_theta": 5e5,
        "rope_scaling": scaling,
        "tied": tied,
        "max_positions": 131072,
    }


def _qwen3(tied: bool = False) -> dict[str, Any]:
    positions = {"rope_theta": 1e6, "norm_eps": 1e-6, "max_positions": 40960}
    return {"family": "qwen3", "qk_norm": True, "tied": tied, **positions}


# Where a preset's published config.json differs from TransformerConfig's defaults.
_PRESETS: dict[str, dict[str, Any]] = {
    "llama-3.1-70b": _llama3(8.0),
    "llama-3.1-8b": _llama3(8.0),
    "llama-3.2-3b": _llama3(32.0, tied=True),
    "llama-3.2-1b": _llama3(32.0, tied=True),
    "smollm2-135m-instruct": {"rope_theta": 1e5, "tied": True, "max_positions": 8192},
    "qwen3-32b": _qwen3(),
    "qwen3-0.6b": _qwen3(tied=True),
    "toy-target": {"max_positions": 131072},
    "toy-draft": {"max_positions": 131072},
}


def of_preset(shape: ModelShape) -> TransformerConfig:
    """Returns the transformer's configuration for a named preset or a generated shape (`gen:…`).

    Raises ConfigError for an architecture that the transformer does not support.
    """
    if shape.head is not None or not shape.gated:
        kind = "a head-sized draft" if shape.head is not None else "no gated FFN (OPT)"
        raise ConfigError(
            f"{shape.name} with forward=transformer: it has {kind}, which is not supported"
        )
    name = shape.name.partition("@")[0]
    known = {"max_positions": 131072} if name.startswith("gen:") else _PRESETS.get(name, {})
    return _checked(TransformerConfig(shape, **{"family": "llama", **known}))


def _checked(config: TransformerConfig) -> TransformerConfig:
    """Returns the configuration; raises ConfigError if its positions cannot be rotated."""
    if config.shape.head_dim % 2:
        raise ConfigError(
            f"{config.shape.name}: head_dim={config.shape.head_dim} with forward=transformer: "
            "allowed: even numbers"
        )
    return config


# (key, whether the model can be computed, the values that are supported)
Rule = tuple[str, bool, str]


def _refuse(path: Path, values: Mapping[str, Any], rules: Sequence[Rule]) -> None:
    """Raises ConfigError for the first key that describes another architecture."""
    for key, is_supported, allowed in rules:
        if not is_supported:
            raise ConfigError(
                f"{str(path)!r}: {key}={values[key]!r} is not supported: allowed: {allowed}"
            )


def of_folder(path: Path, shape: ModelShape) -> TransformerConfig:
    """Returns the configuration that a config.json describes.

    Raises ConfigError, one line that names the file and the key, for what is not supported.
    """
    config = hf_config.load(path)
    family, rope, ours = config.get("model_type"), _rope(config), own_keys(config)
    # Qwen's files name a window and turn it off.
    slides = bool(config.get("use_sliding_window", family == "mistral"))
    packed = config.get("quantization_config")
    kinds = config.get("layer_types") or []
    values = {
        "hidden_act": "silu",
        "partial_rotary_factor": 1,
        **config,
        "rope_type": rope["rope_type"],
        "sliding_window": config.get("sliding_window") if slides else None,
        "quantization_config": packed.get("quant_method") if isinstance(packed, dict) else packed,
        **{f"mpissd.{key}": ours.get(key) for key in ("quantization", "head", "kind")},
    }
    kind = values["mpissd.kind"]
    plain = isinstance(kinds, list) and all(each == "full_attention" for each in kinds)
    biased = bool(config.get("attention_bias")) and family != "qwen2"
    rules = [
        ("model_type", family in FAMILIES, ", ".join(FAMILIES)),
        ("rope_type", rope["rope_type"] in ("default", "llama3"), "default, llama3"),
        ("sliding_window", values["sliding_window"] is None, "null, or one that is not used"),
        ("layer_types", plain, "full_attention"),
        ("quantization_config", not packed, _DENSE),
        ("mpissd.quantization", values["mpissd.quantization"] in (None, "int8-32"), "int8-32"),
        ("mpissd.head", values["mpissd.head"] in (None, "own", "target"), "own, target"),
        ("mpissd.kind", kind in (None, *STATE_KINDS), ", ".join(STATE_KINDS)),
        ("hidden_act", values["hidden_act"] == "silu", "silu"),
        ("attention_bias", not biased, "false"),
        ("mlp_bias", not config.get("mlp_bias"), "false"),
        ("partial_rotary_factor", values["partial_rotary_factor"] in (None, 1), "1"),
    ]
    _refuse(path, values, rules)
    return _checked(
        TransformerConfig(
            shape,
            str(family),
            rope_theta=_number(path, rope, "rope_theta", 10000.0),
            rope_scaling=_scaling(path, rope),
            norm_eps=_number(path, config, "rms_norm_eps", 1e-6),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            tied=bool(config.get("tie_word_embeddings", False)),
            max_positions=int(_number(path, config, "max_position_embeddings", 2048)),
            kind=kind or "",
        )
    )


def own_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of a config.json's object "mpissd"; {} without one."""
    ours = config.get("mpissd")
    return ours if isinstance(ours, dict) else {}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the rotary positions, in one dictionary for all versions.

    Older versions have rope_theta and rope_scaling, newer ones both in rope_parameters.
    """
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(key), dict):
            rope.update(config[key])
    if config.get("rope_theta") is not None:
        rope["rope_theta"] = config["rope_theta"]
    rope.setdefault("rope_type", rope.get("type") or "default")
    return rope


def _scaling(path: Path, rope: Mapping[str, Any]) -> Llama3Scaling | None:
    if rope["rope_type"] == "default":
        return None
    keys = "low_freq_factor", "high_freq_factor"
    factor, low, high = (_number(path, rope, key) for key in ("factor", *keys))
    original = int(_number(path, rope, "original_max_position_embeddings"))
    if factor < 1 or not low < high:
        raise ConfigError(f"{str(path)!r}: rope_scaling: allowed: factor >= 1 and low < high")
    return Llama3Scaling(factor, low, high, original)


def _number(path: Path, config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e12:
        raise ConfigError(f"{str(path)!r}: {key}={value!r}: allowed: numbers above 0")
    return float(value)


def of_gguf(file: GgufFile, shape: ModelShape, factors: Floats | None) -> TransformerConfig:
    """Returns the configuration that a .gguf's metadata describes; raises ConfigError.

    factors: its tensor rope_freqs.weight, float32 [head_dim / 2], which divides the frequencies.
    """
    path, family = file.path, str(file.metadata["general.architecture"])
    own = {
        key.removeprefix(f"{family}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{family}.")
    }
    rotated = own.get("rope.dimension_count", shape.head_dim)
    rules = [
        ("rope.scaling.type", own.get("rope.scaling.type", "none") in ("none", ""), "none"),
        ("attention.sliding_window", not own.get("attention.sliding_window"), "none"),
        ("rope.dimension_count", rotated == shape.head_dim, str(shape.head_dim)),
    ]
    rules = [(f"{family}.{key}", is_supported, allowed) for key, is_supported, allowed in rules]
    _refuse(path, file.metadata, rules)
    config = TransformerConfig(
        shape,
        family,
        rope_theta=_number(path, own, "rope.freq_base", 10000.0),
        norm_eps=_number(path, own, "attention.layer_norm_rms_epsilon", 1e-5),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied="output.weight" not in file.tensors,
        max_positions=int(_number(path, own, "context_length", 2048)),
    )
    if factors is not None:
        # The file does not name the constants, which are the same for all models of Llama 3.
        scaling = Llama3Scaling(float(factors.max()), 1.0, 4.0, 8192)
        scaled = replace(config, rope_scaling=scaling)
        if not np.allclose(config.frequencies() / scaled.frequencies(), factors, rtol=1e-3):
            where = f"{str(path)!r}: rope_freqs.weight"
            raise ConfigError(f"{where} is not supported: allowed: Llama 3's")
        config = scaled
    return _checked(config)
