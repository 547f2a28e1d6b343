#!/usr/bin/env bash
# mpissd against Hugging Face transformers and llama.cpp: make parity [LIBRARY=PYTHON]
# Greedy tokens of tiny random models of every family, and of SmolLM2 behind 64 prompts, 128 tokens
# each; logits of random .gguf files and folders. Some minutes.
# LIBRARY is a Python that has PyTorch, transformers and cyllama, a wheel of llama.cpp; without it
# they go into .venv-parity. FILES and SEED: the number of random files, and which.
set -euo pipefail
cd "${0%/*}/../.."
python=${PYTHON:-.venv/bin/python} library=${LIBRARY:-.venv-parity/bin/python}
if [ -z "${LIBRARY:-}" ] && [ ! -e .venv-parity/complete ]; then
    echo "parity: installing PyTorch and transformers in .venv-parity … (once)" >&2
    rm -rf .venv-parity
    "$python" -m venv .venv-parity
    "$library" -m pip install -q --disable-pip-version-check gguf torch transformers cyllama
    touch .venv-parity/complete
fi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
gguf=$("$python" -c 'from mpissd.common.presets import files_of; print(files_of("smollm2"))')
# One thread: on a busy machine those of PyTorch wait busily for each other.
export HF_HUB_DISABLE_PROGRESS_BARS=1 TQDM_DISABLE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
"$library" tests/parity/library.py "$out"
"$library" tests/parity/library.py "$out" --gguf="$gguf"
PYTHONPATH=. "$python" tests/parity/greedy.py "$out"/*.json
files=("$out/files" "${FILES:-700}" "${SEED:-0}")
PYTHONPATH=. "$python" tests/parity/files.py write "${files[@]}"
"$library" tests/parity/library_files.py "${files[0]}" 2>"$out/log"
PYTHONPATH=. "$python" tests/parity/files.py check "${files[@]}"
mkdir "$out/vocabularies"
GGML_NO_BACKTRACE=1 "$library" tests/parity/vocabularies.py make "$out/vocabularies" 2> "$out/log" || { tail "$out/log" >&2; exit 1; }
PYTHONPATH=. "$python" tests/parity/vocabularies.py compare "$out/vocabularies"
