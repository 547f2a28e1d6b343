#!/usr/bin/env bash
# Distils drafts of equal parameters on one GPU and measures them there:  results/drafts/measure.sh TARGET OUT
# BUDGET_S=420 in all. PYTHON=.venv/bin/python; SHAPES (two or more), SAMPLING and TRAINING (seconds, the latter of each shape),
# BACKEND, TOKENS, PROMPTS (a file) and DISTILL (further flags) to change or to rehearse.
set -u -o pipefail
cd "${0%/*}/../.." || exit
target=${1:?usage: results/drafts/measure.sh TARGET OUT} out=${2:?usage: results/drafts/measure.sh TARGET OUT}
export PYTHON=${PYTHON:-$PWD/.venv/bin/python}
BUDGET_S=${BUDGET_S:-420} gpus=1
# shellcheck source-path=SCRIPTDIR
. results/study.sh
shapes=${SHAPES:-1x18x3x3200,2x9x3x1536,3x6x2x1024,4x4x2x768,6x3x1x512}
mkdir -p "$out"
# shellcheck disable=SC2086
within 310 told distill "$PYTHON" -m mpissd distill --target="$target" --out="$out/shapes" --shapes="$shapes" --vocab=12288 \
    --head=target --optimizer=muon --learning_rate=0.002 --length=256 --batch=128 --held_out=0 --seconds_evaluating=20 --seconds=290 \
    --prompts=results/recordings/smollm2-chat.npz,results/recordings/smollm2-humaneval.npz \
    --seconds_sampling="${SAMPLING:-40}" --seconds_training="${TRAINING:-22}" ${DISTILL:-}
{ head -16 tests/data/prompts/chat.jsonl; head -8 tests/data/prompts/humaneval.jsonl; } >"$out/prompts.jsonl"
drafts=
for shape in ${shapes//,/ }; do # what could not be trained is left out
    [ ! -f "$out/shapes/$shape/config.json" ] || drafts+=${drafts:+,}$out/shapes/$shape
done
text=(--workload=text --target="$target" --backend="${BACKEND:-cupy}" --prompts="${PROMPTS:-$out/prompts.jsonl}")
text+=(--num_tokens="${TOKENS:-64}" --repeats=1 --num_drafts=0 --progress=off)
within 110 step rate 1 sweep "${text[@]}" --grid="mode=sd; lookahead=2,4,7; draft=$drafts"
within 110 step ar 1 sweep "${text[@]}" --draft="${drafts##*,}" --grid="mode=ar"
"$PYTHON" results/rates.py draft,mode,lookahead,acceptance_length,T_SD,tok_per_s "$out" | tee "$out/table.md"
exit "$failed"
