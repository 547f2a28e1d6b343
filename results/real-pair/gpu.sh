#!/usr/bin/env bash
# SmolLM2's pair as SSD on two GPUs, one a rank: backups over the batch, interrupted growth, lists, C; beside SD inline
# and AR over both.
#   results/real-pair/gpu.sh OUT [TARGET]      in BUDGET_S=300; expected: 65 s of cells and 30 s, 8 to 30 s a start
# BACKEND, COUNT (prompts of a kind) and TOKENS to rehearse. PYTHON, MPIRUN: launch/env.sh. timed.py OUT/* >gpu.jsonl
# A rank that waits for 30 s ends its step with a line that says for what; one that the step's bound ends says where it was.
set -u -o pipefail
out=${1:?usage: results/real-pair/gpu.sh OUT [TARGET]} here=${0%/*} gpus=2 BUDGET_S=${BUDGET_S:-300}
# shellcheck source-path=SCRIPTDIR
. "$here/../study.sh"
mkdir -p "$out"
for kind in chat humaneval; do
    head -n "${COUNT:-16}" "$here/../../tests/data/prompts/$kind.jsonl"
done >"$out.prompts.jsonl"
flags=(--workload=text --backend="${BACKEND:-cupy}" --target="${2:-smollm2}" --draft=smollm2-draft --prompts="$out.prompts.jsonl")
flags+=(--num_tokens="${TOKENS:-64}" --deadline_s="${DEADLINE_S:-30}")
within 160 cells gpu-T1D1
within 100 cells gpu-T2D0
"${PYTHON:-python3}" "$here/../rates.py" \
    mode,tp,batch_size,lookahead,fan_out,backup,on_late,saguaro_c,temperature,acceptance_length,hit_rate,tok_per_s "$out"
exit "$failed"
