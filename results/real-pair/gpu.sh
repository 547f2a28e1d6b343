#!/usr/bin/env bash
# SmolLM2's pair as SSD on two GPUs, one a rank: backups over the batch, interrupted growth, lists, C; beside SD inline
# and AR over both.
#   results/real-pair/gpu.sh OUT [TARGET]      in BUDGET_S=300
# BACKEND, COUNT (prompts of a kind) and TOKENS to rehearse. PYTHON, MPIRUN: launch/env.sh. timed.py OUT/* >gpu.jsonl
set -u -o pipefail
out=${1:?usage: results/real-pair/gpu.sh OUT [TARGET]} here=${0%/*} gpus=2 BUDGET_S=${BUDGET_S:-300}
# shellcheck source-path=SCRIPTDIR
. "$here/../study.sh"
mkdir -p "$out"
for kind in chat humaneval; do
    head -n "${COUNT:-16}" "$here/../../tests/data/prompts/$kind.jsonl"
done >"$out.prompts.jsonl"
text=(--workload=text --backend="${BACKEND:-cupy}" --target="${2:-smollm2}" --draft=smollm2-draft --prompts="$out.prompts.jsonl")
text+=(--num_tokens="${TOKENS:-64}" --repeats=1 --progress=off)
within 200 step ssd 2 sweep "${text[@]}" --grid="$here/gpu.grid"
within 90 step rivals 2 sweep "${text[@]}" --num_drafts=0 --grid="mode=sd; lookahead=4; batch_size=1,4,32"
within 40 step ar 2 sweep "${text[@]}" --num_drafts=0 --grid="mode=ar; batch_size=1,32"
within 30 step warm 2 sweep "${text[@]}" --num_drafts=0 --grid="mode=sd; lookahead=4; temperature=.7,1"
"${PYTHON:-python3}" "$here/../rates.py" \
    mode,tp,batch_size,lookahead,fan_out,backup,on_late,saguaro_c,temperature,acceptance_length,hit_rate,tok_per_s "$out"
exit "$failed"
