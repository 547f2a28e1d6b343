"""Reads a model's shape (widths and depth) from a Hugging Face config.json, without weights.

Mixture-of-experts models, latent and linear attention, and encoder-decoders are refused, because
their layers are not the seven matrix products that mpissd models.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.common.files import read_file

# {field of ModelShape: its keys in config.json}: the usual key, then those of OPT and GPT-2.
_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "ffn": ("ffn_dim", "intermediate_size", "n_inner"),
    "vocab_size": ("vocab_size",),
}
_PLAIN_FFN = ("opt", "gpt2", "gptj", "gpt_neox", "phi", "starcoder2")
_GATED_FFN = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3")
_FOURFOLD_FFN = ("gpt2", "gptj")  # GPT-2's n_inner = null means 4 · n_embd
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# Defaults of absent keys that differ between model families; source: transformers 5.
_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
_MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
_ABSENT: dict[str, dict[str, Any]] = {
    "mistral": _MISTRAL,
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}
_SOFTMAX_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def read_fields(path: Path) -> dict[str, Any]:
    """Returns {field: value} of presets.ModelShape; for a multi-modal model, of its text model.
    Raises ConfigError with file and key if the file is unreadable or incomplete, or refused."""
    config = load(path)
    # Refuse layers that are not softmax attention and one dense feed-forward block.
    experts = ((key, config.get(key)) for key in _EXPERTS)
    refused = [(key, "mixture-of-experts") for key, n in experts if isinstance(n, int) and n > 1]
    if config.get("kv_lora_rank") is not None:
        refused.append(("kv_lora_rank", "latent attention"))
    if config.get("is_encoder_decoder"):
        refused.append(("is_encoder_decoder", "an encoder-decoder"))
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and not {str(kind) for kind in kinds} <= _SOFTMAX_LAYERS:
        refused.append(("layer_types", "not softmax attention throughout"))
    for key, what in refused:
        raise ConfigError(f"{str(path)!r}: {key} says {what}, which is not supported")
    model_type = str(config.get("model_type"))

    def integer(field: str, default: int | None = None) -> int:
        """Returns the first value that is not null among the keys of a quantity `field`, or
        `default`. Raises ConfigError if there is neither."""
        for key in _NAMES[field]:
            value = config.get(key)
            if value is None:
                continue
            if type(value) is not int or value < 1:
                raise ConfigError(f"{str(path)!r}: {key}={value!r}: allowed: whole numbers from 1")
            return value
        if default is None:
            raise ConfigError(f"{str(path)!r}: {' or '.join(_NAMES[field])} is missing")
        return default

    hidden = integer("hidden")
    num_heads = integer("num_heads")
    parents = [part for part in path.absolute().parts if part.startswith("models--")]
    folder = path.absolute().parent.name if path.name == "config.json" else path.stem
    return {
        "name": parents[0].rpartition("--")[2] if parents else folder,
        "num_layers": integer("num_layers"),
        "hidden": hidden,
        "num_heads": num_heads,
        "num_kv_heads": integer("num_kv_heads", num_heads),
        "head_dim": integer("head_dim", None if hidden % num_heads else hidden // num_heads),
        "ffn": integer("ffn", 4 * hidden if model_type in _FOURFOLD_FFN else None),
        "gated": _is_gated(path, model_type, config),
        "vocab_size": integer("vocab_size"),
    }


def load(path: Path) -> Mapping[str, Any]:
    """Returns the file's JSON object, or its text_config for a multi-modal model. Absent keys get
    the defaults of the model family where these differ between families. Raises ConfigError if the
    file cannot be read or is no JSON object."""
    try:
        config = json.loads(read_file(path).decode())
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} is not JSON text") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{str(path)!r} holds no JSON object but a {type(config).__name__}")
    text_config = config.get("text_config")
    if isinstance(text_config, dict) and config.get("model_type") not in _GATED_FFN:
        config = text_config
    return {**_ABSENT.get(str(config.get("model_type")), {}), **config}


def _is_gated(path: Path, model_type: str, config: Mapping[str, Any]) -> bool:
    """Returns whether the feed-forward block has a gate. An unknown model_type is judged by its
    activation: silu means a gate and relu none, as in all known models. Else raises ConfigError."""
    if model_type in _PLAIN_FFN or model_type in _GATED_FFN:
        return model_type in _GATED_FFN
    activation = config.get("hidden_act", config.get("activation_function"))
    if activation in ("silu", "swish", "swiglu", "geglu"):
        return True
    if activation == "relu":
        return False
    raise ConfigError(
        f"{str(path)!r}: cannot tell whether model_type={model_type!r} with "
        f"hidden_act={activation!r} has a gated FFN; allowed: write it as gen:…,gated=0 or gated=1"
    )
