#!/usr/bin/env bash
# How fast the draft learns a stream of prompts:  results/online/measure.sh TARGET.gguf OUT
# With a GPU: replays of chat → code → summaries, then, with two GPUs or more, runs with a learner beside equal uses of them.
# PYTHON=.venv/bin/python; OWN (prompts of a stage that the target writes), EPOCHS, BATCH, DEVICE, BACKEND to change or to rehearse.
set -eu -o pipefail
cd "${0%/*}/../.."
target=${1:?usage: results/online/measure.sh TARGET.gguf OUT} out=${2:?usage: results/online/measure.sh TARGET.gguf OUT}
export PYTHON=${PYTHON:-$PWD/.venv/bin/python}
device=${DEVICE:-cuda} backend=${BACKEND:-cupy} own=${OWN:-2667}
mkdir -p "$out"
# A quarter of 2,667 prompts is held out, so that 2,000 are seen.
stream=chat=own:asking,code=own:coding,summarise=results/recordings/smollm2-summarise.npz,edit=results/recordings/smollm2-edit.npz
replay="-m mpissd online --target=$target --draft=smollm2-draft --device=$device --stream=$stream --own=$own --exact --out=$out/replay"
for from in all rejected; do
    for rate in 3e-5 1e-4; do
        "$PYTHON" $replay --schedules=static,online --batch="${BATCH:-16}" --every=250 --learn_from=$from --rate=$rate
    done
done
"$PYTHON" $replay --schedules=offline --batch="${BATCH:-16}" --epochs="${EPOCHS:-8}" --rate=1e-4
gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
if [ "$backend" = cupy ] && [ "$gpus" -lt 2 ]; then
    echo "one GPU: no run with a draft rank, which needs a second one" >&2
    exit 0
fi
# Three ranks: a learner (on two GPUs it shares the draft's), and what its GPU would give as another draft or target.
cat tests/data/prompts/chat.jsonl tests/data/prompts/humaneval.jsonl >"$out/stream.jsonl"
text="--workload=text --backend=$backend --target=$target --prompts=$out/stream.jsonl --num_tokens=128 --context=1024 --progress=off --out=$out/runs"
draft=--draft=smollm2-draft
for mode in sd ssd; do
    launch/local.sh 2 $text $draft --mode=$mode
    launch/local.sh 3 $text $draft --mode=$mode --learners=1 --learn_batch="${BATCH:-16}"
    if [ "$gpus" -ge 3 ] || [ "$backend" != cupy ]; then
        launch/local.sh 3 $text $draft --mode=$mode --num_drafts=2
        launch/local.sh 3 $text $draft --mode=$mode --num_drafts=1
    fi
done
launch/local.sh 1 $text --mode=ar
