#!/usr/bin/env bash
# Distils Medusa heads, an MLP speculator and an EAGLE layer on one GPU and measures them there beside the shipped
# draft, lookups and AR:  results/heads/measure.sh TARGET OUT
# Some ten minutes on an H200. PYTHON=.venv/bin/python; KINDS, SAMPLING and TRAINING (seconds) and BACKEND to change or
# to rehearse: SAMPLING=30 TRAINING=30 BACKEND=numpy on a CPU.
set -eu -o pipefail
cd "${0%/*}/../.."
target=${1:?usage: results/heads/measure.sh TARGET OUT} out=${2:?usage: results/heads/measure.sh TARGET OUT}
export PYTHON=${PYTHON:-$PWD/.venv/bin/python}
recordings=results/recordings/smollm2-chat.npz,results/recordings/smollm2-humaneval.npz
kinds=${KINDS:-medusa,mlp,eagle}
mkdir -p "$out"
"$PYTHON" -m mpissd distill --target="$target" --out="$out/drafts" --kinds="$kinds" --heads=4 --vocab=16384 \
    --optimizer=muon --learning_rate=0.002 --length=256 --batch=64 --held_out=0 --prompts="$recordings" \
    --seconds_sampling="${SAMPLING:-120}" --seconds_training="${TRAINING:-60}"
{ head -16 tests/data/prompts/chat.jsonl; head -8 tests/data/prompts/humaneval.jsonl; } >"$out/prompts.jsonl"
text="--workload=text --target=$target --backend=${BACKEND:-cupy} --prompts=$out/prompts.jsonl --num_tokens=${TOKENS:-64}"
text="$text --progress=off --out=$out/rate"
drafts=$(printf "$out/drafts/%s," ${kinds//,/ })
COMMAND=sweep launch/local.sh 1 $text --repeats="${REPEATS:-1}" \
    --grid="mode=sd; num_drafts=0; lookahead=1,2,4; draft=${drafts}smollm2-draft"
for temperature in 0 0.7; do
    COMMAND=sweep launch/local.sh 1 $text --repeats="${REPEATS:-1}" --temperature=$temperature \
        --grid="mode=sd; num_drafts=0; backup=fast; draft=smollm2-draft; lookahead=4; lookup=prompt,suffix"
    launch/local.sh 1 $text --mode=ar --temperature=$temperature
    for kind in ${kinds//,/ }; do
        launch/local.sh 1 $text --mode=sd --num_drafts=0 --lookahead=4 --temperature=$temperature --draft="$out/drafts/$kind"
    done
done
"$PYTHON" -m analysis kinds --results="$out/rate" --out="$out/figures"
