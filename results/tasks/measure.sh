#!/usr/bin/env bash
# Drafts by task against one draft of the same size:  results/tasks/measure.sh TARGET OUT
# On one H200 some 25 minutes: a draft for everything, one for each task that goes on from it with the same time, and
# as strong a rival the first one trained on for as long; then every draft on every kind of prompts, and the router.
# PYTHON=.venv/bin/python; SAMPLING, TRAINING (seconds), PROCESSES; SMALL="--device=cpu …" to rehearse.
set -eu -o pipefail
cd "${0%/*}/../.."
target=${1:?usage: results/tasks/measure.sh TARGET OUT} out=${2:?usage: results/tasks/measure.sh TARGET OUT}
export PYTHON=${PYTHON:-$PWD/.venv/bin/python} PYTHONPATH=$PWD
prompts=tests/data/prompts recordings=results/recordings/smollm2
mkdir -p "$out"
judged=$recordings-chat.npz,$recordings-humaneval.npz,$recordings-edit.npz,$recordings-summarise.npz

distil() { # folder, flags
    local folder=$1
    shift
    # shellcheck disable=SC2086
    "$PYTHON" -m mpissd distill --target="$target" --out="$folder" --head=target --vocab=16384 --optimizer=muon \
        --learning_rate=0.001 --length=384 --batch=96 --held_out=0 --prompts="$judged" --processes="${PROCESSES:-1}" \
        --seconds_sampling="${SAMPLING:-60}" --seconds_training="${TRAINING:-90}" ${SMALL:-} "$@"
}

distil "$out/first" --layers="${LAYERS:-0,1,2,27,28,29}" --learning_rate=0.002
distil "$out/any" --start="$out/first" --task=any # the rival: as much more time, on everything
rm -rf "$out/drafts" && cp -r "$out/any" "$out/drafts"
for kind in chat code text; do
    distil "$out/drafts/$kind" --start="$out/first" --task="$kind"
done
"$PYTHON" -m mpissd router --target="$target" --draft="$out/drafts" \
    --prompts="chat=$prompts/chat.jsonl;code=$prompts/humaneval.jsonl,$prompts/edit.jsonl;text=$prompts/summarise.jsonl" |
    tee "$out/router.txt"
"$PYTHON" results/tasks/table.py "$out/drafts" | tee "$out/table.md"
for kind in chat humaneval edit summarise; do # drafts: by the router; the others alone, right choices and wrong ones
    for draft in drafts any drafts/chat drafts/code drafts/text; do
        launch/local.sh 1 --workload=text --backend="${BACKEND:-cupy}" --target="$target" --draft="$out/$draft" --mode=sd \
            --num_drafts=0 --lookahead="${K:-4}" --batch_size=4 --prompts="$prompts/$kind.jsonl" --num_tokens="${TOKENS:-128}" \
            --progress=off --out="$out/rates"
    done
done
