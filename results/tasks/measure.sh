#!/usr/bin/env bash
# Drafts by task against one draft of the same size:  results/tasks/measure.sh TARGET OUT
# On one H200: from the shipped draft a draft for everything and one for each task go on, all with the same further time
# (the first is as strong a rival); then every draft on every kind of prompts, and the router. A draft that OUT has
# already is kept. BUDGET_S=590 in all. PYTHON=.venv/bin/python; SAMPLING, TRAINING (seconds of each draft), PROCESSES,
# START (a draft's folder), COUNT (prompts of a kind); SMALL="--device=cpu …", BACKEND and TOKENS to rehearse.
set -u -o pipefail
cd "${0%/*}/../.." || exit
target=${1:?usage: results/tasks/measure.sh TARGET OUT} out=${2:?usage: results/tasks/measure.sh TARGET OUT}
export PYTHON=${PYTHON:-$PWD/.venv/bin/python} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
BUDGET_S=${BUDGET_S:-590} gpus=1
# shellcheck source-path=SCRIPTDIR
. results/study.sh
prompts=tests/data/prompts recordings=results/recordings/smollm2
start=${START:-mpissd/engine/model/shipped/smollm2_draft}
mkdir -p "$out/drafts"

distil() { # name, folder, task, seconds of samples, of training
    # shellcheck disable=SC2086
    [ -f "$2/config.json" ] || within 130 told "distill-$1" "$PYTHON" -m mpissd distill --target="$target" --out="$2" \
        --start="$start" --task="$3" --head=target --optimizer=muon --learning_rate=0.001 --length=384 --batch=96 \
        --held_out=0 --processes="${PROCESSES:-1}" --seconds_sampling="$4" --seconds_training="$5" \
        --prompts="$recordings-chat.npz,$recordings-humaneval.npz,$recordings-edit.npz,$recordings-summarise.npz" \
        --seconds_evaluating=25 --seconds=120 ${SMALL:-}
}

distil warm "$out/warm" any 2 2 # compiles once, so that the first draft has as many samples as the others
for kind in any chat code text; do
    folder=$out/drafts/$kind
    [ "$kind" != any ] || folder=$out/any
    distil "$kind" "$folder" "$kind" "${SAMPLING:-25}" "${TRAINING:-40}"
done
cp "$out"/any/* "$out/drafts" # the folder's own draft is the one for everything
"$PYTHON" results/tasks/table.py "$out/drafts" | tee "$out/table.md" # the gain, and what a wrong choice costs
within 60 told router "$PYTHON" -m mpissd router --target="$target" --draft="$out/drafts" \
    --prompts="chat=$prompts/chat.jsonl;code=$prompts/humaneval.jsonl,$prompts/edit.jsonl;text=$prompts/summarise.jsonl"
cp "$out/router.log" "$out/router.txt"
drafts=$out/drafts,$out/any,$start # by the router, the rival, and the one that all began from
for kind in chat code text; do
    [ ! -f "$out/drafts/$kind/config.json" ] || drafts+=,$out/drafts/$kind
done
for kind in chat humaneval edit summarise; do
    head -n "${COUNT:-40}" "$prompts/$kind.jsonl" >"$out/$kind.jsonl"
    within 60 step "rate-$kind" 1 sweep --workload=text --backend="${BACKEND:-cupy}" --target="$target" --num_drafts=0 --batch_size=4 \
        --prompts="$out/$kind.jsonl" --num_tokens="${TOKENS:-128}" --repeats=1 --progress=off \
        --grid="mode=sd; lookahead=${K:-4}; draft=$drafts"
    "$PYTHON" results/rates.py draft,acceptance_length,tok_per_s "$out/rate-$kind"
done
exit "$failed"
