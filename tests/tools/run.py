"""Runs the tools by which people judge servers against `serve`: run.py FOLDER [TOOL …]

FOLDER has an environment for each tool (tests/tools/install.sh), and gets SmolLM2 as a Hugging Face
folder in bfloat16. Each tool runs its own command in the modes ar, sd and ssd, on the CPU, and its
output is printed. Exit code 1 if a tool or one of its requests fails, or if lm-eval's
log-likelihoods of that folder, served, differ by more than NEAR from its Hugging Face backend's.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
MODES, NAME = ("ar", "sd", "ssd"), "smollm2-135m-instruct"
NEAR = 1e-3
VLLM = (
    "from argparse import ArgumentParser; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
RANDOM = "--dataset-name random --random-input-len 24 --random-output-len 12 --num-prompts 4"
FAILURES = (
    r"Failed requests:\s+[1-9]",
    r"errored=[1-9]",
    r"Error Request Count.*[1-9]",
    "Traceback",
)


def commands(venvs: Path, model: Path, url: str, out: Path) -> dict[str, list[list[str]]]:
    """The commands of each tool."""
    vllm = [str(venvs / "vllm/bin/python"), "-c", VLLM, "--base-url", url, "--model", NAME]
    vllm += ["--tokenizer", str(model), *RANDOM.split()]
    chat = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--ignore-eos"]
    guide = f"run --backend kind=openai_http,target={url} --tokenizer kind=hf_auto,model={model}"
    guide += " --data kind=synthetic_text,prompt_tokens=24,output_tokens=8 --disable-progress"
    guide += f" --output kind=json,path={out}/guide.json --output kind=console"
    guidellm = [str(venvs / "guidellm/bin/guidellm"), *guide.split()]
    constant = "--profile kind=constant,rate=1 --constraint kind=max_requests,count=6"
    sweep = "--profile kind=sweep,sweep_size=3 --constraint kind=max_requests,count=4"
    aiperf = f"profile --model {NAME} --url {url} --endpoint-type chat --streaming --isl 24 --osl 8"
    aiperf += f" --tokenizer {model} --request-count 6 --concurrency 2 --ui none"
    aiperf += f" --extra-inputs ignore_eos:true --extra-inputs min_tokens:8 --artifact-dir {out}/ai"
    told = f"model={NAME},base_url={url}/v1/completions,tokenizer={model},num_concurrent=2"
    lm_eval = [str(venvs / "lmeval/bin/lm_eval"), "--include_path", str(HERE), "--tasks"]
    lm_eval += ["choice,answer", "--log_samples", "--batch_size", "2"]
    api = ["--model", "local-completions", "--model_args", told, "--output_path", f"{out}/api"]
    return {
        "vllm": [vllm, [*vllm, *chat]],
        "guidellm": [[*guidellm, *constant.split()], [*guidellm, *sweep.split()]],
        "aiperf": [[str(venvs / "aiperf/bin/aiperf"), *aiperf.split()]],
        "lmeval": [[*lm_eval, *api]],
        "chats": [[str(venvs / "chats/bin/python"), str(HERE / "chats.py"), url, NAME]],
        "llm": [[str(venvs / "chats/bin/llm"), "-m", "here", "-o", "max_tokens", "12", "Hello"]],
    }


@contextmanager
def serving(mode: str, out: Path, *models: str) -> Iterator[str]:
    """Runs a server of these models; yields its address."""
    command = [str(ROOT / "launch/serve.sh"), *models, f"--mode={mode}", "--port=0"]
    with (out / "serve.log").open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line, (out / "serve.log").read_text()
            print(f"\n=== {line.strip()}")
            yield line.split("/v1 ")[0]
        finally:
            server.terminate()
            server.wait(60)


def ran(name: str, command: list[str], env: dict[str, str]) -> bool:
    """Runs a tool; returns whether it ended well."""
    start = time.monotonic()
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=env, cwd=HERE, timeout=1800, **told)
    lines = [line for line in done.stdout.splitlines() if "leaked" not in line]
    failed = [found for failure in FAILURES if (found := re.search(failure, done.stdout))]
    print(f"--- {name}: exit code {done.returncode}, {time.monotonic() - start:.0f} s", *failed)
    print("\n".join(lines[-45:]), flush=True)
    return done.returncode == 0 and not failed


def scores(folder: Path) -> dict[tuple[str, int], list[list[float]]]:
    """The log-likelihoods and answers in lm-eval's samples."""
    found = {}
    for task in ("choice", "answer"):
        (path,) = folder.rglob(f"samples_{task}_*.jsonl")
        for line in path.read_text().splitlines():
            sample = json.loads(line)
            found[task, sample["doc_id"]] = sample["filtered_resps"]
    return found


def are_near(ours: Path, theirs: Path) -> bool:
    """Whether lm-eval found the same through the server as with its Hugging Face backend."""
    mine, other, worst = scores(ours), scores(theirs), 0.0
    assert mine.keys() == other.keys()
    for key, found in mine.items():
        for one, two in zip(found, other[key], strict=True):
            if key[0] == "answer":
                worst = max(worst, float(one != two))
            else:
                worst = max(worst, abs(float(one[0]) - float(two[0])), str(one[1]) != str(two[1]))
    print(f"--- lm-eval: {len(mine)} samples, at most {worst:.1e} from Hugging Face's")
    return worst <= NEAR


def converted(venvs: Path) -> Path:
    """Returns SmolLM2 as a Hugging Face folder, made at the first call."""
    model = venvs / NAME
    if not (model / "model.safetensors").exists():
        from mpissd.common.presets import files_of

        code = "from vllm_tokens import convert; from pathlib import Path; "
        code += f"convert(Path({str(files_of(NAME))!r}), {str(model)!r}, 'bfloat16')"
        told = {**os.environ, "PYTHONPATH": str(ROOT / "tests/parity")}
        subprocess.run([str(venvs / "lmeval/bin/python"), "-c", code], env=told, check=True)
    return model


def main(venvs: Path, *tools: str) -> int:
    """Runs the tools, or all if none is named; returns the exit code."""
    model, results = converted(venvs), dict[str, bool]()
    # PyTorch's CPU wheel ends lm-eval with another layer.
    env = {**os.environ, "MKL_THREADING_LAYER": "SEQUENTIAL", "COLUMNS": "110"}
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        if not tools or "lmeval" in tools:
            hf = [str(venvs / "lmeval/bin/lm_eval"), "--include_path", str(HERE), "--tasks"]
            hf += ["choice,answer", "--log_samples", "--model", "hf", "--model_args"]
            hf += [f"pretrained={model},dtype=float32", "--device=cpu", f"--output_path={top}/hf"]
            results["lmeval hf"] = ran("lm-eval, Hugging Face", hf, env)
        for mode in MODES:
            out = top / mode
            out.mkdir()
            with serving(mode, out, "--pair=smollm2") as url:
                settings = {"model_id": "here", "model_name": NAME, "api_base": f"{url}/v1"}
                text = json.dumps([settings])  # JSON is YAML
                (out / "extra-openai-models.yaml").write_text(text)
                told = {**env, "LLM_USER_PATH": str(out), "OPENAI_API_KEY": "none"}
                for name, every in commands(venvs, model, url, out).items():
                    for n, command in enumerate(every if not tools or name in tools else ()):
                        results[f"{mode} {name} {n}"] = ran(f"{mode}: {name} {n}", command, told)
                with urllib.request.urlopen(f"{url}/metrics") as page:
                    refused = re.findall(r'_responses_total.*status="4.*', page.read().decode())
                print("refused:", *refused or ["nothing"])
            if f"{mode} lmeval 0" in results:
                with serving(mode, out, f"--target={model}", "--draft=smollm2-draft") as url:
                    (command,) = commands(venvs, model, url, out / "same")["lmeval"]
                    results[f"{mode} lmeval, bfloat16"] = ran(f"{mode}: lmeval", command, told)
                results[f"{mode} lm-eval's numbers"] = are_near(out / "same", top / "hf")
    print("\n=== " + "\n    ".join(f"{n}: {'well' if r else 'FAILED'}" for n, r in results.items()))
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), *sys.argv[2:]))
