#!/usr/bin/env bash
# The configuration of the SSD paper, 70b/1b at T=4 with a draft GPU, and what eight GPUs give otherwise:
#   results/full-size/measure.sh OUT [GPUS [flags of sweep]]     8 GPUs: everything; 5: without T=8
# Probes for five and eight GPUs, then two sweeps of one repeat, about six minutes on H200s; started
# again, each goes on where it was. The rows are held against predicted.jsonl at the end.
# LIMIT_S (240) bounds each step; PYTHON, MPIRUN: launch/env.sh. A rehearsal without GPUs:
#   BACKEND=emulated results/full-size/measure.sh OUT 8 --device=null
set -u -o pipefail
out=${1:?usage: results/full-size/measure.sh OUT [GPUS]} gpus=${2:-8} here=${0%/*} LIMIT_S=${LIMIT_S:-240}
shift $(($# < 2 ? $# : 2))
# shellcheck source-path=SCRIPTDIR
. "$here/../study.sh"
# shellcheck source=../../launch/env.sh
. "$launch/env.sh"
backend=(--backend="${BACKEND:-cupy}") device=()
for flag in "$@"; do [[ $flag != --device=* ]] || device=("$flag"); done
step probe5 5 probe "${backend[@]}" --pair=70b/1b --fuse --name=70b-1b-T4D1 "${device[@]}"
step probe8 8 probe "${backend[@]}" --pair=70b/1b --fuse --mode=ar --name=70b-T8 "${device[@]}"
step t4 5 sweep "${backend[@]}" --grid="$here/t4.grid" --repeats=1 "$@"
step t8 8 sweep "${backend[@]}" --grid="$here/t8.grid" --num_drafts=0 --repeats=1 "$@"
predicted=${PREDICTED:-$here/predicted.jsonl}
[ ! -f "$predicted" ] || [ "${BACKEND:-cupy}" != cupy ] ||
    "$PYTHON" "$here/predict_full_size.py" judge "$predicted" "$out"
exit "$failed"
