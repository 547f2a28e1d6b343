"""A transformer's architecture beyond its widths, read from a preset, config.json or .gguf.

All supported families (Llama, SmolLM2, Mistral, Qwen2.5, Qwen3) are one architecture: RMSNorm,
rotary positions, grouped-query attention and SwiGLU. They differ in the fields of
TransformerConfig. An unsupported model is refused in one line that names the file and the key.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common import hf_config
from mpissd.common.errors import ConfigError
from mpissd.common.gguf import GgufFile
from mpissd.common.presets import ModelShape
from mpissd.common.shapes import MOST_MASKS, STATE_KINDS

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_DENSE = "weights in 32 or 16 bits, a .gguf, or a draft that mpissd distilled"
_NO_KEY = "a file without this key"
# A config.json that sets one of these keys is refused: only other programs would obey the key.
CHANGING = """
    text_config vision_config per_layer_config quantization compression_config
    rope_ratio rotary_dim
    rotary_pct rotary_emb_base qkv_bias o_bias attention_out_bias use_qk_norm qk_norm qk_layernorm
    clip_qkv no_rope_layers no_rope_layer_interval attn_temperature_tuning query_pre_attn_scalar
    attn_logit_softcapping final_logit_softcapping logit_scale logits_scaling logit_softcap
    embedding_multiplier attention_multiplier residual_multiplier lm_head_multiplier mup_multiplier
    scale_emb scale_depth dim_model_base use_mrope rope_interleaved mlp_bias parallel_attn
    use_parallel_residual norm_type add_cross_attention pruned_heads lora_rank transformers_weights
    """.split()
_ROPE_READ = {
    "default": "",
    "linear": "factor",
    "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
}
_ROPE_SHARED = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# Metadata keys allowed in a .gguf, without the architecture's name; the last four are not read.
_GGUF_KEYS = """
    block_count embedding_length feed_forward_length context_length attention.head_count
    attention.head_count_kv attention.key_length attention.layer_norm_rms_epsilon rope.freq_base
    rope.scaling.type rope.scaling.factor rope.scale_linear
    vocab_size tensor_data_layout rope.scaling.original_context_length rope.scaling.finetuned
    """.split()


@dataclass(frozen=True)
class Llama3Scaling:
    """Stretches the rotary wavelengths of Llama 3.1 and later (rope_type "llama3"). factor: divides
    the frequencies whose wavelength exceeds original / low. low, high: frequencies whose wavelength
    lies between original / high and original / low are interpolated. original: the context length
    in tokens before the scaling."""

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True)
class TransformerConfig:
    """The architecture of a supported transformer.

    qkv_bias: whether q, k and v have a bias (Qwen2.5). qk_norm: whether q and k are normalised head
    by head (Qwen3). tied: whether the LM head is the embedding. rope_divisor: divides all rotary
    frequencies (linear scaling). max_positions: the longest context in tokens. head_vocab: rows of
    the LM head, fewer than shape.vocab_size if a draft can propose only some of its target's
    tokens. bits: the mean size in bits of a weight in a CPU's memory. kind: one of
    shapes.STATE_KINDS, for a draft that reads its target's hidden state; "" for others. Medusa
    heads count as layers. masks: the number J of mask tokens of a parallel draft, whose ids V, …, V
    + J − 1 follow its vocabulary of V tokens (PARD, 2504.18583). Raises ConfigError for an odd
    head_dim, which cannot be rotated.
    """

    shape: ModelShape
    family: str
    rope_theta: float = 10000.0
    rope_scaling: Llama3Scaling | None = None
    rope_divisor: float = 1.0
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    max_positions: int = 2048
    head_vocab: int = 0
    bits: float = 16.0
    kind: str = ""
    masks: int = 0

    def __post_init__(self) -> None:
        if self.shape.head_dim % 2:
            raise ConfigError(
                f"{self.shape.name}: head_dim={self.shape.head_dim} with forward=transformer: "
                "allowed: even numbers"
            )
        if not self.head_vocab:
            object.__setattr__(self, "head_vocab", self.shape.vocab_size)

    def frequencies(self) -> NDArray[np.float64]:
        """Returns the angle of each rotated pair, in radians per position: float64 [head_dim / 2].
        Source: RoFormer (2104.09864), equation 15, and Llama 3.1's scaling of long wavelengths."""
        half = np.arange(0, self.shape.head_dim, 2) / self.shape.head_dim
        angles = self.rope_theta**-half / self.rope_divisor
        scaling = self.rope_scaling
        if scaling is None:
            return angles
        turns = scaling.original * angles / (2 * math.pi)  # turns over the original context length
        smooth = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
        return np.asarray((1 - smooth) * angles / scaling.factor + smooth * angles)


_LLAMA3: dict[str, Any] = {"rope_theta": 5e5, "max_positions": 131072}
_QWEN3: dict[str, Any] = {
    "family": "qwen3",
    "qk_norm": True,
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
    "max_positions": 40960,
}
_LLAMA31 = {**_LLAMA3, "rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 8192)}
_LLAMA32 = {**_LLAMA3, "rope_scaling": Llama3Scaling(32.0, 1.0, 4.0, 8192), "tied": True}
# The fields in which a preset's published config.json differs from TransformerConfig's defaults.
_PRESETS: dict[str, dict[str, Any]] = {
    "llama-3.1-70b": _LLAMA31,
    "llama-3.1-8b": _LLAMA31,
    "llama-3.2-3b": _LLAMA32,
    "llama-3.2-1b": _LLAMA32,
    "smollm2-135m-instruct": {"rope_theta": 1e5, "tied": True, "max_positions": 8192},
    "qwen3-32b": _QWEN3,
    "qwen3-0.6b": {**_QWEN3, "tied": True},
    "toy-target": {"max_positions": 131072},
    "toy-draft": {"max_positions": 131072},
}


def of_preset(shape: ModelShape) -> TransformerConfig:
    """Returns the configuration of a named preset or a generated shape (`gen:…`); raises
    ConfigError for an architecture that is not supported."""
    if shape.head is not None or not shape.gated:
        kind = "a head-sized draft" if shape.head is not None else "no gated FFN (OPT)"
        raise ConfigError(
            f"{shape.name} with forward=transformer: it has {kind}, which is not supported"
        )
    name = shape.name.partition("@")[0]
    fields = {"max_positions": 131072} if name.startswith("gen:") else _PRESETS.get(name, {})
    return TransformerConfig(shape, **{"family": "llama", **fields})


# The check of a key: (key, its value, whether the value is supported, which values are).
Rule = tuple[str, Any, bool, str]


def _check(path: Path, rules: Sequence[Rule]) -> None:
    """Raises ConfigError for the first rule, the check of one key, whose value is not supported.
    path: the file that has the keys."""
    for key, value, is_supported, allowed in rules:
        if not is_supported:
            raise ConfigError(
                f"{str(path)!r}: {key}={value!r:.80} is not supported: allowed: {allowed}"
            )


def _unknown(prefix: str, keys: Mapping[str, Any], read: Iterable[str]) -> list[Rule]:
    """Returns a check (Rule) of each key not in `read`, the keys that the caller understands. A
    null value or a key that begins with "_" passes. prefix: text before keys in messages."""
    return [
        (prefix + repr(key)[1:-1], keys[key], keys[key] is None or key.startswith("_"), _NO_KEY)
        for key in sorted(keys.keys() - set(read))
    ]


def of_folder(path: Path, shape: ModelShape) -> TransformerConfig:
    """Returns the configuration in the config.json at `path`; raises ConfigError if unsupported."""
    config = hf_config.load(path)
    family = config.get("model_type")
    ours = own_keys(config)
    # Qwen's files give a sliding window, but turn it off.
    slides = bool(family not in ("qwen2", "qwen3") or config.get("use_sliding_window"))
    window = config.get("sliding_window") if slides else None
    longest = int(_number(path, config, "max_position_embeddings", 2048))
    fits = window is None or (isinstance(window, int) and window >= longest)
    packed = config.get("quantization_config")
    method = packed.get("quant_method") if isinstance(packed, dict) else packed
    kinds = config.get("layer_types") or []
    activation = config.get("hidden_act", "silu")
    is_plain = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    bias = config.get("attention_bias")
    tied = config.get("tie_word_embeddings")
    causal = config.get("is_causal")
    classes = config.get("architectures") or []
    own_class = f"{family}".title() + "ForCausalLM"
    is_own = isinstance(classes, list) and {str(n).lower() for n in classes} <= {own_class.lower()}
    quantization, head, kind = (ours.get(key) for key in ("quantization", "head", "kind"))
    masks = ours.get("masks", 0)
    has_some = type(masks) is int and 0 < masks <= MOST_MASKS and not kind
    others = [(key, config.get(key)) for key in CHANGING]
    rules: list[Rule] = [
        ("model_type", family, family in FAMILIES, ", ".join(FAMILIES)),
        ("architectures", classes, is_own, f"{own_class} alone"),
        ("sliding_window", window, fits, "null, or max_position_embeddings at least"),
        ("layer_types", kinds, is_plain, "full_attention"),
        ("quantization_config", method, not packed, _DENSE),
        ("mpissd.quantization", quantization, quantization in (None, "int8-32"), "int8-32"),
        ("mpissd.head", head, head in (None, "own", "target"), "own, target"),
        ("mpissd.kind", kind, kind in (None, *STATE_KINDS), ", ".join(STATE_KINDS)),
        ("mpissd.masks", masks, masks in (0, None) or has_some, f"1..{MOST_MASKS}, of no kind"),
        ("is_causal", causal, causal in (None, True), "true"),
        ("hidden_act", activation, activation in ("silu", "swish"), "silu"),
        ("attention_bias", bias, not bias or family == "qwen2", "false"),
        ("tie_word_embeddings", tied, tied is None or isinstance(tied, bool), "false, true"),
    ]
    rules += [(k, v, not v or (v == 1 and v is not True), _NO_KEY) for k, v in others]
    _check(path, rules)
    return TransformerConfig(
        shape,
        str(family),
        **_rotation(path, config),
        norm_eps=_number(path, config, "rms_norm_eps", 1e-6),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied=bool(tied),
        max_positions=longest,
        kind=kind or "",
        masks=masks or 0,
    )


def _rotation(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of TransformerConfig that say how positions are rotated."""
    # Older files have rope_theta and rope_scaling, newer ones have both in rope_parameters.
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaling = scaling if isinstance(scaling, dict) else {"rope_type": scaling}
    rope = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")} | scaling
    kind = rope.get("rope_type", rope.get("type") or "default")
    rotated = rope["partial_rotary_factor"]
    read = _ROPE_READ.get(str(kind), "").split()
    rules: list[Rule] = [
        ("rope_type", kind, str(kind) in _ROPE_READ, ", ".join(_ROPE_READ)),
        ("partial_rotary_factor", rotated, rotated in (None, 1), "1"),
        *_unknown("rope_parameters.", rope, {*_ROPE_SHARED, *read}),
    ]
    _check(path, rules)
    theta = _number(path, rope, "rope_theta", 10000.0)
    if not read:
        return {"rope_theta": theta}
    numbers = [_number(path, rope, key) for key in read]
    if kind == "linear":
        return {"rope_theta": theta, "rope_divisor": numbers[0]}
    factor, low, high, original = numbers
    if factor < 1 or not low < high:
        raise ConfigError(f"{str(path)!r}: rope_scaling: allowed: factor >= 1 and low < high")
    return {"rope_theta": theta, "rope_scaling": Llama3Scaling(factor, low, high, int(original))}


def own_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what mpissd wrote to a draft's config.json, its object "mpissd"; {} without one."""
    ours = config.get("mpissd")
    return ours if isinstance(ours, dict) else {}


def _number(path: Path, config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e12:
        raise ConfigError(f"{str(path)!r}: {key}={value!r}: allowed: numbers above 0")
    return float(value)


def of_gguf(
    file: GgufFile, shape: ModelShape, factors: NDArray[np.float32] | None
) -> TransformerConfig:
    """Returns the configuration in a .gguf's metadata; raises ConfigError if unsupported. factors:
    the file's tensor rope_freqs.weight, float32 [head_dim / 2], which divides frequencies."""
    path = file.path
    family = str(file.metadata["general.architecture"])
    prefix = f"{family}."
    of_family = (item for item in file.metadata.items() if item[0].startswith(prefix))
    keys = {key.removeprefix(prefix): value for key, value in of_family}
    # For absent keys the defaults are llama.cpp's.
    scaling = keys.get("rope.scaling.type", "linear")
    keys.setdefault("attention.value_length", shape.hidden // shape.num_heads)
    neutral = {
        "attention.value_length": shape.head_dim,
        "attention.causal": True,
        "attention.sliding_window": 0,
        "rope.dimension_count": shape.head_dim,
        "rope.scaling.attn_factor": 1,
        "expert_count": 0,
        "expert_used_count": 0,
        "use_parallel_residual": False,
    }
    needed = ("context_length", "attention.layer_norm_rms_epsilon")
    rules: list[Rule] = [
        (f"{prefix}rope.scaling.type", scaling, scaling in ("none", "linear"), "none, linear"),
        *((prefix + key, keys.get(key), key in keys, "numbers above 0") for key in needed),
        *((prefix + k, keys.get(k), keys.get(k, v) == v, str(v)) for k, v in neutral.items()),
        *_unknown(prefix, keys, {*_GGUF_KEYS, *neutral}),
    ]
    _check(path, rules)
    factor = "rope.scaling.factor" if "rope.scaling.factor" in keys else "rope.scale_linear"
    config = TransformerConfig(
        shape,
        family,
        rope_theta=_number(path, keys, "rope.freq_base", 10000.0),
        rope_divisor=_number(path, keys, factor, 1.0) if scaling == "linear" else 1.0,
        norm_eps=_number(path, keys, "attention.layer_norm_rms_epsilon"),
        qkv_bias=family == "qwen2" or (family == "llama" and "blk.0.attn_q.bias" in file.tensors),
        qk_norm=family == "qwen3",
        tied="output.weight" not in file.tensors,
        max_positions=int(_number(path, keys, "context_length")),
    )
    if factors is None:
        return config
    # A .gguf lacks the scaling's constants, which are the same for all models of Llama 3.
    scaled = replace(config, rope_scaling=Llama3Scaling(float(factors.max()), 1.0, 4.0, 8192))
    wanted = config.frequencies() / scaled.frequencies()
    has_others = config.rope_divisor != 1 or len(factors) != len(wanted)
    if has_others or not np.allclose(wanted, factors, rtol=1e-4):
        where = f"{str(path)!r}: rope_freqs.weight"
        raise ConfigError(f"{where} is not supported: allowed: Llama 3's, without another scaling")
    return scaled
