#!/usr/bin/env bash
# Distils drafts of equal parameters on one GPU and measures them there:  results/drafts/measure.sh TARGET OUT
# Some seven minutes on an H200. PYTHON=.venv/bin/python; SHAPES, SAMPLING and TRAINING (seconds) to change or to rehearse.
set -eu -o pipefail
cd "${0%/*}/../.."
target=${1:?usage: results/drafts/measure.sh TARGET OUT} out=${2:?usage: results/drafts/measure.sh TARGET OUT}
export PYTHON=${PYTHON:-$PWD/.venv/bin/python}
recordings=results/recordings/smollm2-chat.npz,results/recordings/smollm2-humaneval.npz
shapes=${SHAPES:-1x18x3x3200,2x9x3x1536,3x6x2x1024,4x4x2x768,6x3x1x512}
mkdir -p "$out"
"$PYTHON" -m mpissd distill --target="$target" --out="$out/shapes" --shapes="$shapes" --vocab=12288 --head=target \
    --optimizer=muon --learning_rate=0.002 --length=256 --batch=128 --held_out=0 --prompts="$recordings" \
    --seconds_sampling="${SAMPLING:-40}" --seconds_training="${TRAINING:-22}"
{ head -16 tests/data/prompts/chat.jsonl; head -8 tests/data/prompts/humaneval.jsonl; } >"$out/prompts.jsonl"
drafts=$(printf "$out/shapes/%s," ${shapes//,/ })
text="--workload=text --target=$target --backend=${BACKEND:-cupy} --prompts=$out/prompts.jsonl --num_tokens=64 --progress=off"
COMMAND=sweep launch/local.sh 1 $text --repeats=1 --out="$out/rate" \
    --grid="mode=sd; num_drafts=0; lookahead=2,4,7; draft=${drafts%,}"
launch/local.sh 1 $text --mode=ar --out="$out/rate"
