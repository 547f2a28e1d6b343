#!/usr/bin/env bash
# A draft that verifies looked-up tokens, on one CPU core:  results/hierarchy/measure.sh TARGET OUT
# TARGET: SmolLM2-135M-Instruct (smollm2, or its file). About ten minutes. PYTHON=.venv/bin/python; COUNT and
# TOKENS to rehearse; GPU=1 adds costs of rows and inline SD on a GPU.
set -eu -o pipefail
cd "${0%/*}/../.."
target=${1:?usage: results/hierarchy/measure.sh TARGET OUT} out=${2:?usage: results/hierarchy/measure.sh TARGET OUT}
python=${PYTHON:-$PWD/.venv/bin/python}
export PYTHONPATH=$PWD PYTHON=$python
mkdir -p "$out"
for model in smollm2-draft "$target"; do
    "$python" results/cpu-forward/forward.py --model="$model" --beside="$target" --kinds=trunk --rows=1,2,3,4,5,6,7,8
done >"$out/costs.jsonl"
"$python" results/hierarchy/forwards.py "$out/costs.jsonl" >"$out/forwards.jsonl"
for prompts in edit summarise humaneval chat; do
    "$python" results/hierarchy/decode.py --target="$target" --prompts="tests/data/prompts/$prompts.jsonl" \
        --count="${COUNT:-10}" --tokens="${TOKENS:-96}" --methods="${METHODS:-ar,lookup,draft4,draft4+suffix,draft4+prompt}"
done >"$out/decoded.jsonl"
[ -z "${GPU:-}" ] || for prompts in edit summarise humaneval chat; do
    for lookup in "" --draft_lookup=suffix --draft_lookup=prompt "--backup=fast --lookup=suffix"; do
        # shellcheck disable=SC2086
        launch/local.sh 1 --workload=text --backend=cupy --target="$target" --draft=smollm2-draft --mode=sd --num_drafts=0 \
            --lookahead="${K:-7}" --prompts="tests/data/prompts/$prompts.jsonl" --num_tokens=128 --progress=off --out="$out/gpu" $lookup
    done
done
