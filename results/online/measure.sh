#!/usr/bin/env bash
# How fast the draft learns a stream of prompts:  results/online/measure.sh TARGET.gguf OUT
# PART=replay: chat → texts → edits of code on one GPU, whose answers are computed once and kept in ANSWERS (large; by
# default OUT/replay/answers). PART=runs, with two GPUs or more: runs with a learner beside equal uses of their GPUs. Both by
# default, in BUDGET_S=590. PYTHON=.venv/bin/python; OWN (prompts of a stage), EPOCHS, EVERY, BATCH, STEPS (for each new
# prompt), DEVICE, BACKEND, COUNT (prompts of a file), TOKENS to rehearse.
set -u -o pipefail
cd "${0%/*}/../.." || exit
target=${1:?usage: results/online/measure.sh TARGET.gguf OUT} out=${2:?usage: results/online/measure.sh TARGET.gguf OUT}
export PYTHON=${PYTHON:-$PWD/.venv/bin/python}
BUDGET_S=${BUDGET_S:-590} backend=${BACKEND:-cupy} gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
[ "$backend" = cupy ] || gpus=3
# shellcheck source-path=SCRIPTDIR
. results/study.sh
mkdir -p "$out"

replay() { # name, most seconds, flags of online; points go to OUT/replay/curves.jsonl as they are made
    local name=$1 most=$2
    shift 2
    within "$most" told "$name" "$PYTHON" -m mpissd online --target="$target" --draft=smollm2-draft --device="${DEVICE:-cuda}" \
        --stream="$stream" --own="${OWN:-2667}" --batch="${BATCH:-16}" --every="${EVERY:-250}" --exact \
        --out="$out/replay" --answers="${ANSWERS:-$out/replay/answers}" "$@"
}

if [ "${PART:-replay}" = replay ]; then
    # A quarter of 2,667 prompts is held out, so that 2,000 are seen. Each of them is learned from BATCH · STEPS = 4 times.
    steps=${STEPS:-.25} chat=chat=own:asking text=text=own:working
    stream=$chat,$text,edits=own:editing
    replay online 260 --schedules=static,online --rate=1e-4 --steps="$steps"
    # The ceiling: the better of two rates, of more steps than online takes in a stage.
    replay steeper 180 --schedules=offline --rate=3e-4 --epochs="${EPOCHS:-6}"
    stream=$text,edits=own:editing replay offline 150 --schedules=offline --rate=1e-4 --epochs="${EPOCHS:-6}"
    replay slower 120 --schedules=online --rate=3e-5 --steps="$steps"
    stream=$chat replay repeated 120 --schedules=online --rate=1e-4 --steps=1
    stream=$text replay rejected 120 --schedules=online --rate=1e-4 --steps="$steps" --learn_from=rejected
    "$PYTHON" results/online/table.py "$out/replay/curves.jsonl" | tee "$out/table.md"
fi
[ "${PART:-runs}" = runs ] || exit "$failed"
if [ "$gpus" -lt 2 ]; then
    echo "one GPU: no run with a draft rank, which needs a second one" >&2
    exit "$failed"
fi
# 444 prompts, a kind after the other: a minute a run. Eight sequences are held out, and versions judged, after 64.
for kind in chat humaneval edit summarise; do head -n "${COUNT:-200}" tests/data/prompts/$kind.jsonl; done >"$out/stream.jsonl"
text=(run --workload=text --backend="$backend" --target="$target" --prompts="$out/stream.jsonl")
text+=(--num_tokens="${TOKENS:-256}" --context=1024 --progress=off)
ranks=$gpus gpus=3 # a learner is a third rank; on two GPUs it shares the draft's
within 90 step ar 1 "${text[@]}" --mode=ar
for mode in ssd sd; do
    within 120 step "$mode-learner" 3 "${text[@]}" --draft=smollm2-draft --mode=$mode --learners=1 --learn_batch="${BATCH:-16}" \
        --learn_steps="${STEPS:-.25}" --publish_s=1 --learn_rate=1e-4
    within 90 step "$mode" 2 "${text[@]}" --draft=smollm2-draft --mode=$mode
    [ "$ranks" -lt 3 ] || # what the learner's GPU would give as another target
        within 90 step "$mode-targets" 3 "${text[@]}" --draft=smollm2-draft --mode=$mode --num_drafts=1
done
"$PYTHON" results/rates.py mode,learners,learner_state,tp,num_drafts,acceptance_length,draft_versions,tok_per_s,tok_per_s_per_gpu "$out" |
    tee "$out/rates.md"
exit "$failed"
