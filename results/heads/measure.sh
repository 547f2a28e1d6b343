#!/usr/bin/env bash
# Distils Medusa heads, an MLP speculator and an EAGLE layer on one GPU, and measures them there beside the shipped
# draft, lookups and AR:  results/heads/measure.sh TARGET OUT
# Some ten minutes on an H200. PYTHON=.venv/bin/python; SAMPLING and TRAINING (seconds), BACKEND, TOKENS, PROMPTS,
# OTHER (drafts beside them) and DISTILL (further flags) to change or to rehearse.
set -eu -o pipefail
cd "${0%/*}/../.."
target=${1:?usage: results/heads/measure.sh TARGET OUT} out=${2:?usage: results/heads/measure.sh TARGET OUT}
export PYTHON=${PYTHON:-$PWD/.venv/bin/python}
recordings=results/recordings/smollm2-chat.npz,results/recordings/smollm2-humaneval.npz
mkdir -p "$out"
"$PYTHON" -m mpissd distill --target="$target" --out="$out/drafts" --kinds=medusa,mlp,eagle --heads=4 --vocab=16384 \
    --optimizer=muon --learning_rate=0.002 --length=256 --batch=64 --held_out=0 --prompts="$recordings" \
    --seconds_sampling="${SAMPLING:-120}" --seconds_training="${TRAINING:-60}" ${DISTILL:-}
{ head -16 tests/data/prompts/chat.jsonl; head -8 tests/data/prompts/humaneval.jsonl; } >"$out/prompts.jsonl"
text="--workload=text --target=$target --backend=${BACKEND:-cupy} --prompts=${PROMPTS:-$out/prompts.jsonl}"
text="$text --num_tokens=${TOKENS:-64} --progress=off --out=$out/rate"
drafts="$out/drafts/medusa,$out/drafts/mlp,$out/drafts/eagle${OTHER-,smollm2-draft}"
for temperature in 0 0.7; do
    launch/local.sh 1 $text --mode=ar --temperature=$temperature
    COMMAND=sweep launch/local.sh 1 $text --repeats=1 --temperature=$temperature \
        --grid="mode=sd; num_drafts=0; lookahead=2,4; draft=$drafts"
    COMMAND=sweep launch/local.sh 1 $text --repeats=1 --temperature=$temperature \
        --grid="mode=sd; num_drafts=0; backup=fast; lookahead=4; lookup=prompt,suffix; draft=$out/drafts/mlp"
done
"$PYTHON" -m analysis kinds --results="$out/rate" --out="$out/figures"
