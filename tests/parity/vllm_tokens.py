"""Greedy tokens of vLLM on the CPU, with our drafts and without: vllm_tokens.py PYTHON FOLDER

Runs with vLLM's Python; PYTHON is mpissd's, for the draft. FOLDER keeps SmolLM2 as vLLM reads it.
64 prompts, 24 tokens each. Exit code 1 if a token differs, or no drafted one was accepted.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPTS = Path(__file__).parents[1] / "data" / "prompts" / "chat.jsonl"
COUNT, TOKENS = 64, 24
OURS = {"method": "custom_class", "model": "mpissd.vllm.Proposer", "num_speculative_tokens": 3}
FULL = {"kv_cache_memory_bytes": 512 << 20, "speculative_config": OURS}
# Prompts in parts, and room for 190 tokens, so that requests are preempted.
SMALL = {"max_num_batched_tokens": 32, "block_size": 32, "kv_cache_memory_bytes": 9_000_000}
RUNS: dict[str, dict[str, Any]] = {
    "alone": {**FULL, "max_num_seqs": 4, "speculative_config": None},
    "batch 4": {**FULL, "max_num_seqs": 4},
    "batch 16": {**FULL, "max_num_seqs": 16},
    "little room": {**FULL, **SMALL, "max_num_seqs": 4},
}
SETTINGS = (
    "MPISSD_ALWAYS=1 MPISSD_PATIENCE_MS=5000 HF_HUB_OFFLINE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 "
    "VLLM_LOGGING_LEVEL=WARNING VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1"
)


def convert(file: Path, out: str, dtype: str = "float32") -> None:
    """Writes a .gguf as a Hugging Face folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    AutoTokenizer.from_pretrained(**place).save_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=dtype)
    model.hf_quantizer = None  # its matrices are dequantised
    del model.config.quantization_config
    model.save_pretrained(out)


def decode(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the tokens of an engine with these options, and its counts."""
    from vllm import LLM, SamplingParams

    fixed = {"dtype": "float32", "enforce_eager": True, "max_model_len": 160}
    llm = LLM(model=folder, disable_log_stats=False, **fixed, **options)
    lines = PROMPTS.read_text().splitlines()[:COUNT]
    chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]
    start = time.perf_counter()
    outs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=TOKENS), use_tqdm=False)
    seconds = round(time.perf_counter() - start, 1)
    wanted = "vllm:num_preemptions", "vllm:spec_decode_num_accepted_tokens"
    counts = {m.name[5:]: m.value for m in llm.get_metrics() if m.name in wanted}
    return {"seconds": seconds, "tokens": [list(o.outputs[0].token_ids) for o in outs], **counts}


def main() -> None:
    if sys.argv[1] in RUNS:  # one engine a process
        print("\n" + json.dumps(decode(sys.argv[2], RUNS[sys.argv[1]])))
        return
    python, folder = sys.argv[1:]
    where = "from mpissd.common.presets import files_of; print(files_of('smollm2'))"
    if not Path(folder, "config.json").exists():
        convert(Path(subprocess.check_output([python, "-c", where], text=True).strip()), folder)
    os.environ.update(word.split("=") for word in SETTINGS.split())
    os.environ["MPISSD_DRAFT"] = f"{python} -m mpissd draft --pair=smollm2"
    wanted, failed = list[list[int]](), False
    for run in RUNS:
        out = subprocess.check_output([sys.executable, __file__, run, folder], text=True)
        result = json.loads(out.splitlines()[-1])
        tokens = result.pop("tokens")
        wanted = wanted or tokens
        equal = sum(map(list.__eq__, tokens, wanted))
        failed |= equal < COUNT or result.get("spec_decode_num_accepted_tokens") == 0
        print(f"{run}: {equal} of {COUNT} prompts equal, {result}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
