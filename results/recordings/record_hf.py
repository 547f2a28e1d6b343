"""Records a pair of Hugging Face models, for mpissd run --workload=replay --recording=FILE.

    python results/recordings/record_hf.py --target=NAME --draft=NAME \
        --prompts=FILE.jsonl --licence="of the prompts" --to=FILE.npz

Needs torch and transformers (for a .gguf: gguf as well; accelerate for --device=auto); one GPU or
several, or a CPU. Both models read the target's tokenizer. A line of the prompts is
{"prompt": …} or {"messages": […]}, put into the chat template unless --plain. Ties and near ties
are as these forwards round them. docs/recordings.md describes the file; `python -m mpissd pair
FILE.npz` reads it, and reports a fault.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

Model = Any  # of transformers


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "draft", "prompts", "to"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--target_gguf", help="a .gguf in the folder --target")
    parser.add_argument("--licence", default="", help="of the prompts, with their source")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--lookahead", type=int, default=8, help="K, the longest to be replayed")
    parser.add_argument("--fan_out", type=int, default=16, help="F, the widest to be replayed")
    parser.add_argument("--count", type=int, help="prompts at most")
    parser.add_argument("--device", default="auto", help="auto, cuda:0, cpu …")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    parser.add_argument("--plain", action="store_true", help="without the chat template")
    return parser.parse_args()


def encode(tokenizer: Any, entry: dict[str, Any], plain: bool) -> list[int]:
    """Returns the ids of a line's prompt; those of a chat end where the answer begins."""
    messages = entry.get("messages") or [{"role": "user", "content": entry["prompt"]}]
    if "messages" not in entry and (plain or not tokenizer.chat_template):
        return list(tokenizer(entry["prompt"])["input_ids"])
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def greedy(model: Model, prompt: list[int], limit: int, stops: set[int], more: int) -> list[int]:
    """Returns the model's greedy tokens to a stop token or the limit, and `more` behind them."""
    tokens: list[int] = []
    fed, cache, end = torch.tensor([prompt], device=model.device), None, limit
    while len(tokens) < end + more:
        out = model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, fed = out.past_key_values, out.logits[:, -1].argmax(dim=-1, keepdim=True)
        tokens.append(int(fed))
        if end == limit and tokens[-1] in stops:
            end = min(limit, len(tokens))
    return tokens


def drafted(model: Model, prompt: list[int], tokens: list[int], K: int, F: int) -> tuple[Any, Any]:
    """Returns the draft's greedy K tokens [n, K] and its F + 1 likeliest [n, F+1] behind every
    prefix of the n tokens but the whole.

    All prefixes grow in one forward a step, each a lane that sees its prefix and its own tokens.
    """
    count, start = len(tokens), len(prompt) - 1
    device, dtype = model.device, model.dtype
    trunk = torch.tensor([[*prompt, *tokens[:-1]]], device=device)
    out = model(input_ids=trunk, use_cache=True)
    logits = out.logits[0, start:, : model.config.vocab_size]
    top = logits.topk(F + 1, dim=-1).indices
    found, lanes = [logits.argmax(dim=-1)], torch.arange(count, device=device)
    prefix = torch.arange(trunk.shape[1], device=device) <= start + lanes[:, None]
    own, seen = torch.eye(count, dtype=torch.bool, device=device), prefix
    for step in range(1, K):
        seen = torch.cat([seen, own], dim=1)
        mask = torch.zeros(seen.shape, dtype=dtype, device=device)
        mask.masked_fill_(~seen, torch.finfo(dtype).min)
        out = model(
            input_ids=found[-1][None],
            attention_mask=mask[None, None],
            position_ids=(start + lanes + step)[None],
            past_key_values=out.past_key_values,
            use_cache=True,
        )
        found.append(out.logits[0].argmax(dim=-1))
    return array(torch.stack(found, dim=1)), array(top)


def array(tensor: Tensor) -> Any:
    return tensor.cpu().numpy().astype(np.int64)


def digest(model: Model) -> str:
    """Returns a SHA-256 over the weights as loaded: names, types, shapes and bytes."""
    state = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


@torch.inference_mode()
def main() -> None:
    told = flags()
    tokenizer = AutoTokenizer.from_pretrained(told.target, gguf_file=told.target_gguf)
    kind = {"device_map": told.device, "dtype": told.dtype}
    target = AutoModelForCausalLM.from_pretrained(
        told.target, gguf_file=told.target_gguf, **kind
    ).eval()
    draft = AutoModelForCausalLM.from_pretrained(
        told.draft, attn_implementation="sdpa", **kind
    ).eval()
    ends = target.generation_config.eos_token_id, tokenizer.eos_token_id
    stops = {int(i) for end in ends if end is not None for i in np.atleast_1d(end)}
    lines = Path(told.prompts).read_text("utf-8").splitlines()
    entries = [json.loads(line) for line in lines if line.strip()][: told.count]
    K, F, vocab = told.lookahead, told.fan_out, target.config.vocab_size
    arrays: dict[str, list[Any]] = {name: [] for name in ("prompts", "tokens", "rollout", "top")}
    ends_at, stopped = [], []
    for number, entry in enumerate(entries, 1):
        prompt = encode(tokenizer, entry, told.plain)
        tokens = greedy(target, prompt, told.tokens, stops, K)
        end = len(tokens) - K
        rollout, top = drafted(draft, prompt, tokens[:end], K, F)
        ends_at.append(end)
        stopped.append(tokens[end - 1] in stops)
        for name, values in zip(arrays, (prompt, tokens, rollout, top), strict=True):
            arrays[name].append(np.array(values))
        agreed = float((rollout[:, 0] == np.array(tokens[:end])).mean())
        print(f"{number}/{len(entries)}: {end} tokens, {agreed:.3f} as drafted", flush=True)
    about = {
        "target": told.target_gguf or told.target,
        "draft": told.draft,
        "target_sha256": digest(target),
        "draft_sha256": digest(draft),
        "dtype": [str(model.dtype) for model in (target, draft)],
        "prompts": Path(told.prompts).name,
        "licence": told.licence,
        "tokens": told.tokens,
        "temperature": 0,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "tool": f"record_hf.py, transformers {transformers.__version__}, torch {torch.__version__}",
    }
    header = {"schema": 1, "vocab": vocab, "longest": 3, "filler": None, "about": about}
    kind = np.uint16 if vocab <= 1 << 16 else np.uint32
    np.savez_compressed(
        told.to,
        header=np.frombuffer(json.dumps(header).encode(), np.uint8),
        prompt_counts=np.array([len(prompt) for prompt in arrays["prompts"]], np.int32),
        ends=np.array(ends_at, np.int32),
        stopped=np.array(stopped, np.bool_),
        **{name: np.concatenate(parts).astype(kind) for name, parts in arrays.items()},
    )


if __name__ == "__main__":
    main()
