#!/usr/bin/env bash
# A draft that verifies looked-up tokens, on one CPU core:  results/hierarchy/measure.sh TARGET OUT
# TARGET: SmolLM2-135M-Instruct (smollm2, or its file). About ten minutes. PYTHON=.venv/bin/python; COUNT and
# TOKENS to rehearse. GPU=1 measures SD inline on a GPU instead (gpu.grid), in BUDGET_S=300; BACKEND to rehearse.
set -u -o pipefail
cd "${0%/*}/../.." || exit
target=${1:?usage: results/hierarchy/measure.sh TARGET OUT} out=${2:?usage: results/hierarchy/measure.sh TARGET OUT}
export PYTHON=${PYTHON:-$PWD/.venv/bin/python} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out"
if [ -n "${GPU:-}" ]; then
    BUDGET_S=${BUDGET_S:-300} gpus=1
    # shellcheck source-path=SCRIPTDIR
    . results/study.sh
    for prompts in humaneval edit summarise chat; do
        head -n "${COUNT:-24}" "tests/data/prompts/$prompts.jsonl" >"$out/$prompts.jsonl"
        within 100 step "$prompts" 1 sweep --workload=text --backend="${BACKEND:-cupy}" --target="$target" --draft=smollm2-draft \
            --num_drafts=0 --prompts="$out/$prompts.jsonl" --num_tokens="${TOKENS:-128}" --repeats=1 --progress=off \
            --grid=results/hierarchy/gpu.grid
        "$PYTHON" results/rates.py lookahead,draft_lookup,backup,acceptance_length,draft_forwards,t_draft_s,tok_per_s "$out/$prompts"
    done
    exit "$failed"
fi
set -e
for model in smollm2-draft "$target"; do
    "$PYTHON" results/cpu-forward/forward.py --model="$model" --beside="$target" --kinds=trunk --rows=1,2,3,4,5,6,7,8
done >"$out/costs.jsonl"
"$PYTHON" results/hierarchy/forwards.py "$out/costs.jsonl" >"$out/forwards.jsonl"
for prompts in edit summarise humaneval chat; do
    "$PYTHON" results/hierarchy/decode.py --target="$target" --prompts="tests/data/prompts/$prompts.jsonl" \
        --count="${COUNT:-10}" --tokens="${TOKENS:-96}" --methods="${METHODS:-ar,lookup,draft4,draft4+suffix,draft4+prompt}"
done >"$out/decoded.jsonl"
