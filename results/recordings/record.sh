#!/usr/bin/env bash
# The recordings of the SmolLM2 pair beside this script, on a CPU or one GPU (ten minutes on one core):
#   results/recordings/record.sh OUT
# PAIR=smollm2, TOKENS=128, PYTHON=.venv/bin/python
set -eu -o pipefail
cd "${0%/*}/../.."
out=${1:?usage: results/recordings/record.sh OUT}
record() { # name, licence of the prompts
    "${PYTHON:-.venv/bin/python}" -m mpissd record --pair="${PAIR:-smollm2}" \
        --prompts="tests/data/prompts/$1.jsonl" --num_tokens="${TOKENS:-128}" --licence="$2" \
        --to="$out/smollm2-$1.npz"
}
record humaneval "HumanEval (arXiv 2107.03374), MIT"
record chat "written for this project, MIT"
record edit "HumanEval (arXiv 2107.03374), MIT"
record summarise "this project's documentation, MIT"
