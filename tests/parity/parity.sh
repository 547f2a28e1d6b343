#!/usr/bin/env bash
# Greedy tokens of mpissd against those of Hugging Face transformers: make parity [LIBRARY=PYTHON]
# Tiny random models of every family, and SmolLM2 behind 64 prompts, 128 tokens each, some minutes.
# LIBRARY is a Python that has PyTorch and transformers; without it they go into .venv-parity.
set -euo pipefail
cd "${0%/*}/../.."
python=${PYTHON:-.venv/bin/python} library=${LIBRARY:-.venv-parity/bin/python}
if [ -z "${LIBRARY:-}" ] && [ ! -e .venv-parity/complete ]; then
    echo "parity: installing PyTorch and transformers in .venv-parity … (once)" >&2
    rm -rf .venv-parity
    "$python" -m venv .venv-parity
    "$library" -m pip install -q --disable-pip-version-check gguf torch transformers
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
