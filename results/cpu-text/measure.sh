#!/usr/bin/env bash
# What speculation is worth for real text on two cores, one core a rank:  results/cpu-text/measure.sh OUT
# First all of smollm2.grid on 6 prompts of 32 tokens (OUT/explore); then each method's best on 16 chat and
# 8 code prompts of 64 tokens, REPEATS times in turn (OUT/final), and llama.cpp on the same file and prompts
# (LLAMA: a Python with xllamacpp; without one it is left out). About ten minutes on a quiet machine;
# PROMPTS=2 EXPLORED=1 REPEATS=1 to rehearse.
set -u -o pipefail
out=${1:?usage: results/cpu-text/measure.sh OUT} here=${0%/*} gpus=2
LIMIT_S=${LIMIT_S:-900} PROMPTS=${PROMPTS:-24} EXPLORED=${EXPLORED:-6} REPEATS=${REPEATS:-2} LLAMA=${LLAMA:-}
# shellcheck source-path=SCRIPTDIR
. "$here/../study.sh"
# shellcheck source-path=SCRIPTDIR
. "$here/../../launch/env.sh"

sweep() { # name, prompts, tokens, D, repeats, grid: on two ranks
    step "$1" 2 sweep --pair=smollm2 --backend=numpy --num_drafts="$4" --prompts="$out/$2.jsonl" \
        --num_tokens="$3" --repeats="$5" --grid="$6" --progress=off
}

mkdir -p "$out"
"$PYTHON" "$here/choose.py" prompts "$PROMPTS" >"$out/prompts.jsonl"
head -n "$EXPLORED" "$out/prompts.jsonl" >"$out/few.jsonl"
sweep explore few 32 1 1 "$here/smollm2.grid"
sweep explore_t2 few 32 0 1 "mode=ar,sd; lookahead=1..4"
"$PYTHON" "$here/choose.py" grid "$out/explore" >"$out/final.grid"
"$PYTHON" "$here/choose.py" grid "$out/explore_t2" >"$out/final_t2.grid"
for repeat in $(seq "$REPEATS"); do # a sweep measures only the repeats that it has not measured
    sweep final prompts 64 1 "$repeat" "$out/final.grid"
    sweep final_t2 prompts 64 0 "$repeat" "$out/final_t2.grid"
    [ -z "$LLAMA" ] || "$LLAMA" "$here/llama.py" "$("$PYTHON" "$here/choose.py" file)" \
        "$out/prompts.jsonl" >>"$out/llama.jsonl" || failed=1
done

mkdir -p "$out/rows" && cat "$out"/final*/runs.jsonl >"$out/rows/runs.jsonl"
"$PYTHON" -m mpissd compare "$out/rows" --show=best | tee "$out/best.txt"
"$PYTHON" "$here/choose.py" table "$out" | tee "$out/table.md"
exit $failed
