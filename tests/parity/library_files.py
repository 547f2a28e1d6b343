"""Logits that references read from random model files: library_files.py OUT

Needs PyTorch, transformers and cyllama (llama.cpp), and nothing of mpissd. OUT has the files that
tests/parity/files.py wrote. A .npy gets the logits of each file that its reference reads: llama.cpp
for a .gguf, transformers for a folder, in float32.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cyllama.llama import llama_cpp as library
from transformers import AutoModelForCausalLM


class Loaded(library.LlamaModel):  # type: ignore[misc]
    """A model of llama.cpp, with the size that get_logits_ith of the wheel looks for."""

    n_vocab = 50


def llama_cpp(path: Path, tokens: list[int]) -> Any:
    """Returns the logits of all tokens in llama.cpp."""
    library.disable_logging()
    library.ggml_backend_load_all()
    places, options = library.LlamaModelParams(), library.LlamaContextParams()
    places.use_mmap = places.use_extra_bufts = False
    options.n_ctx = options.n_batch = options.n_ubatch = 64
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = options.flash_attn_type = 0  # keys and values in float32
    context = library.LlamaContext(Loaded(str(path), places), options)
    batch = library.LlamaBatch(n_tokens=64, embd=0, n_seq_max=1)
    batch.set_batch(tokens, n_past=0, logits_all=True)
    context.decode(batch)
    return [list(context.get_logits_ith(place)) for place in range(len(tokens))]


def transformers(folder: Path, tokens: list[int]) -> Any:
    """Returns the logits of all tokens in transformers; raises if a tensor is missing, which it
    would fill at random."""
    options = {"dtype": torch.float32, "attn_implementation": "eager", "local_files_only": True}
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **options
    )
    if report["missing_keys"]:
        raise ValueError(f"{folder} lacks {report['missing_keys']}")
    return model.eval()(torch.tensor([tokens])).logits[0].tolist()


def answer(path: Path, tokens: list[int], logits: Path) -> None:
    """Writes the logits of a file's reference, or why there are none."""
    try:
        rows = (transformers if path.is_dir() else llama_cpp)(path, tokens)
        np.save(logits, np.array(rows, np.float32))
    except Exception as error:  # noqa: BLE001, a reference refuses files in many ways
        logits.with_suffix(".log").write_text(repr(error))


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_grad_enabled(False)
    plan = json.loads((out / "cases.json").read_text())
    for case in plan["cases"]:
        path = out / case["reference"]
        logits = out / f"{case['name']}.npy"
        if path.is_dir():
            answer(path, plan["tokens"], logits)
        elif (child := os.fork()) == 0:  # llama.cpp may abort
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            answer(path, plan["tokens"], logits)
            os._exit(0)
        else:
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
