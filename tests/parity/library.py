"""Greedy tokens of Hugging Face transformers: library.py OUT [--gguf=FILE --count=64 --tokens=128]

Needs PyTorch and transformers, and nothing of mpissd. Arithmetic is float32, eager attention.
Matrices of the tiny models are rounded to bfloat16 first, as mpissd stores them; those of a .gguf
are its dequantised ones. OUT gets one .json a model: prompts,
the tokens after them, and each prompt's smallest relative margin between the best two logits.
Without --gguf the models are tiny random ones of each family, whose folders lie in OUT too; with
it, the model is the file's, and the prompts come from tests/data/prompts/chat.jsonl.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

PROMPTS = Path(__file__).parents[1] / "data" / "prompts" / "chat.jsonl"
BATCH = 8
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 307,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "sliding_window": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "mistral": {},
    "qwen2": {"num_key_value_heads": 3, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "rms_norm_eps": 1e-6},
}


def rounded(model: Any) -> Any:
    """Rounds every matrix to bfloat16 in place."""
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data = weight.data.to(torch.bfloat16).to(torch.float32)
    return model.eval()


def greedy(model: Any, prompts: list[list[int]], count: int) -> tuple[list[list[int]], list[float]]:
    """Returns `count` tokens after each prompt, and its smallest relative margin.

    The prompts are one batch, padded on the left.
    """
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    cache, found, margins = DynamicCache(), [], []
    for _ in range(count):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        told = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
        best = model(ids, use_cache=True, **told).logits[:, -1].topk(2)
        ids = best.indices[:, :1]
        margins.append((best.values[:, 0] - best.values[:, 1]) / best.values[:, 0].abs())
        found.append(ids)
        mask = torch.cat([mask, torch.ones_like(ids)], -1)
    least = torch.stack(margins).amin(0)
    return torch.cat(found, -1).tolist(), [float(f"{margin:.3g}") for margin in least]


def decode(
    model: Any, prompts: list[list[int]], count: int, said: dict[str, Any]
) -> dict[str, Any]:
    """Returns the record of one model; prompts of about one length are in one batch."""
    order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))
    tokens: list[list[int]] = [[] for _ in prompts]
    margins = [0.0] * len(prompts)
    for first in range(0, len(order), BATCH):
        chosen = order[first : first + BATCH]
        found = greedy(model, [prompts[n] for n in chosen], count)
        for n, text, margin in zip(chosen, *found, strict=True):
            tokens[n], margins[n] = text, margin
    versions = f"transformers {transformers.__version__}, PyTorch {torch.__version__}"
    return {
        "source": f"{versions}, float32, eager attention",
        **said,
        "prompts": prompts,
        "tokens": tokens,
        "margins": margins,
    }


def family(name: str, out: Path, count: int) -> None:
    """Writes a tiny model of a family and its tokens."""
    torch.manual_seed(1)
    told = {"model_type": name, **SIZES, **FAMILIES[name]}
    config = AutoConfig.for_model(**told)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for key, weight in model.named_parameters():
        spread = weight.shape[-1] ** -0.5 if weight.dim() == 2 else 0.1
        torch.nn.init.normal_(weight, float("norm" in key), spread)
    rounded(model).save_pretrained(out / name)
    vocab = SIZES["vocab_size"]
    prompts = [torch.randint(0, vocab, (5 + 7 * n,)).tolist() for n in range(8)]
    said = {"model": name}
    (out / f"{name}.json").write_text(json.dumps(decode(model, prompts, count, said)))


def from_gguf(file: Path, out: Path, prompts: int, count: int) -> None:
    """Writes the tokens of a .gguf after chat prompts."""
    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    kinds = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(**place, **kinds).eval()
    ids = []
    for line in PROMPTS.read_text().splitlines()[:prompts]:
        chat = [{"role": "user", "content": json.loads(line)["prompt"]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    said = {"model": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    found = decode(model, ids, count, said)
    (out / f"{file.stem}.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("out", type=Path)
    flags.add_argument("--gguf", type=Path)
    flags.add_argument("--count", type=int, default=64)
    flags.add_argument("--tokens", type=int, default=128)
    told = flags.parse_args()
    torch.set_grad_enabled(False)
    told.out.mkdir(parents=True, exist_ok=True)
    if told.gguf:
        from_gguf(told.gguf, told.out, told.count, told.tokens)
    else:
        for name in FAMILIES:
            family(name, told.out, told.tokens)


if __name__ == "__main__":
    main()
