#!/usr/bin/env bash
# Backups over the batch and interrupted growth of SmolLM2's pair, timed on two CPU cores, one a rank:
#   results/real-pair/cpu.sh OUT [TARGET]      twice about five minutes on a quiet machine
# PART=ssd or PART=rivals for one half; REPEATS=3 adds what is missing to them. An interrupted sweep goes on where it
# stopped. PYTHON, MPIRUN: launch/env.sh. timed.py OUT/ssd OUT/rivals >cpu.jsonl
set -u -o pipefail
out=${1:?usage: results/real-pair/cpu.sh OUT [TARGET]} here=${0%/*} gpus=2 LIMIT_S=${LIMIT_S:-590}
# shellcheck source-path=SCRIPTDIR
. "$here/../study.sh"
mkdir -p "$out"
{ head -24 "$here/../../tests/data/prompts/chat.jsonl"; head -24 "$here/../../tests/data/prompts/humaneval.jsonl"; } >"$out/prompts.jsonl"
text=(--workload=text --backend=numpy --target="${2:-smollm2}" --draft=smollm2-draft --prompts="$out/prompts.jsonl")
text+=(--num_tokens=64 --repeats="${REPEATS:-1}" --progress=off)
[ "${PART:-ssd}" != ssd ] || step ssd 2 sweep "${text[@]}" --grid="$here/cpu.grid"
[ "${PART:-rivals}" != rivals ] || for cell in 1:160 2:100 4:60 8:40 16:24 32:14; do
    step rivals 2 sweep "${text[@]}" --num_drafts=0 --rounds="${cell#*:}" \
        --grid="mode=sd; lookahead=4; batch_size=${cell%:*}"
done
exit "$failed"
