#!/usr/bin/env bash
# Distils Medusa heads, an MLP speculator and an EAGLE layer on one GPU, and measures them there beside the shipped
# draft, lookups and AR:  results/heads/measure.sh TARGET OUT
# BUDGET_S=480 in all. PYTHON=.venv/bin/python; SAMPLING and TRAINING (seconds, the latter of each kind), BACKEND,
# TOKENS, PROMPTS (a file), OTHER (drafts beside them) and DISTILL (further flags) to change or to rehearse.
set -u -o pipefail
cd "${0%/*}/../.." || exit
target=${1:?usage: results/heads/measure.sh TARGET OUT} out=${2:?usage: results/heads/measure.sh TARGET OUT}
export PYTHON=${PYTHON:-$PWD/.venv/bin/python}
BUDGET_S=${BUDGET_S:-480} gpus=1
# shellcheck source-path=SCRIPTDIR
. results/study.sh
mkdir -p "$out"
# shellcheck disable=SC2086
within 330 told distill "$PYTHON" -m mpissd distill --target="$target" --out="$out/drafts" --kinds=medusa,mlp,eagle --heads=4 \
    --vocab=16384 --optimizer=muon --learning_rate=0.002 --length=256 --batch=64 --held_out=0 --seconds_evaluating=20 --seconds=310 \
    --prompts=results/recordings/smollm2-chat.npz,results/recordings/smollm2-humaneval.npz \
    --seconds_sampling="${SAMPLING:-60}" --seconds_training="${TRAINING:-45}" ${DISTILL:-}
{ head -16 tests/data/prompts/chat.jsonl; head -8 tests/data/prompts/humaneval.jsonl; } >"$out/prompts.jsonl"
text=(--workload=text --target="$target" --backend="${BACKEND:-cupy}" --prompts="${PROMPTS:-$out/prompts.jsonl}")
text+=(--num_tokens="${TOKENS:-64}" --repeats=1 --num_drafts=0 --progress=off)
drafts=${OTHER-smollm2-draft} # what could not be trained is left out
for kind in medusa mlp eagle; do
    [ ! -f "$out/drafts/$kind/config.json" ] || drafts=$out/drafts/$kind${drafts:+,$drafts}
done
for temperature in 0 0.7; do
    at=(sweep "${text[@]}" --temperature=$temperature)
    within 90 step "drafts$temperature" 1 "${at[@]}" --grid="mode=sd; lookahead=2,4; draft=$drafts"
    within 90 step "ar$temperature" 1 "${at[@]}" --draft="${drafts##*,}" --grid="mode=ar"
    within 90 step "lookup$temperature" 1 "${at[@]}" --draft="${drafts##*,}" \
        --grid="mode=sd; backup=fast; lookahead=4; lookup=prompt,suffix"
done
"$PYTHON" results/rates.py draft,mode,lookup,lookahead,temperature,acceptance_length,T_SD,tok_per_s "$out" | tee "$out/table.md"
within 40 told figure "$PYTHON" -m analysis kinds --results="$out" --out="$out/figures"
exit "$failed"
