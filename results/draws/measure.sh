#!/usr/bin/env bash
# Measures AR and inline SD of sampled text on one GPU, tokens drawn on the host and on the device:
#     results/draws/measure.sh TARGET OUT
# BUDGET_S=80 in all. PYTHON=.venv/bin/python; DRAFT (smollm2-draft), BACKEND, TOKENS, PROMPTS (a file) to change or to rehearse.
set -u -o pipefail
cd "${0%/*}/../.." || exit
target=${1:?usage: results/draws/measure.sh TARGET OUT} out=${2:?usage: results/draws/measure.sh TARGET OUT}
export PYTHON=${PYTHON:-$PWD/.venv/bin/python}
BUDGET_S=${BUDGET_S:-80} gpus=1
# shellcheck source-path=SCRIPTDIR
. results/study.sh
mkdir -p "$out"
head -12 tests/data/prompts/chat.jsonl >"$out/prompts.jsonl"
text=(--workload=text --target="$target" --draft="${DRAFT:-smollm2-draft}" --backend="${BACKEND:-cupy}" --num_drafts=0)
text+=(--prompts="${PROMPTS:-$out/prompts.jsonl}" --num_tokens="${TOKENS:-64}" --repeats=1 --progress=off)
for draw in 0 1; do
    where=host
    [ $draw = 0 ] || where=device
    export MPISSD_DRAW=$draw
    within 40 step $where 1 sweep "${text[@]}" --grid="mode=ar,sd; temperature=0.7,1; lookahead=2,4"
done
for where in host device; do
    echo "tokens drawn on the $where:"
    "$PYTHON" results/rates.py mode,temperature,lookahead,acceptance_length,T_SD,tok_per_s,token_digest "$out/$where"
done | tee "$out/table.md"
digests() { "$PYTHON" results/rates.py mode,temperature,lookahead,token_digest "$out/$1" | sort; }
[ "$(digests host)" = "$(digests device)" ] || { echo "$0: the device drew other tokens than the host" >&2 && failed=1; }
exit "$failed"
