"""Decodes prompts with llama.cpp:  PYTHON results/cpu-text/llama.py MODEL.gguf PROMPTS.jsonl

Needs a Python of its own with llama.cpp's CPU build: pip install xllamacpp==2026.10.11549. Greedy,
64 tokens, the model's chat template, one prompt after the other, no keys of an earlier prompt
reused; on 1 and on 2 threads. Prints one JSON line a thread count: tokens a second with and
without the prompts' own time.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import xllamacpp

NUM_TOKENS = 64


def opened(model: str, threads: int) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel, params.n_ctx = 1, 2048
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params)


def measured(server: xllamacpp.Server, prompts: list[str]) -> dict[str, float]:
    tokens, decoding_ms, start = 0, 0.0, time.perf_counter()
    for prompt in prompts:
        asked = {
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": NUM_TOKENS,
            "cache_prompt": False,
        }
        timings = server.handle_chat_completions(asked)["timings"]
        tokens += timings["predicted_n"]
        decoding_ms += timings["predicted_ms"]
    wall = time.perf_counter() - start
    return {
        "num_tokens": tokens,
        "wall_s": round(wall, 6),
        "tok_per_s": round(tokens / wall, 3),
        "decoding_tok_per_s": round(tokens / decoding_ms * 1e3, 3),
    }


def main(model: str, path: str) -> None:
    lines = Path(path).read_text("utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    for threads in (1, 2):
        server = opened(model, threads)
        measured(server, prompts[:1])  # warm-up
        row = {"program": "llama.cpp", "version": f"xllamacpp {xllamacpp.__version__}"}
        row |= {"file": Path(model).name, "threads": threads, **measured(server, prompts)}
        row["system"] = xllamacpp.get_system_info().strip()
        print(json.dumps(row), flush=True)
        del server


if __name__ == "__main__":
    main(*sys.argv[1:])
