#!/usr/bin/env bash
# The configuration of the SSD paper, 70b/1b at T=4 with a draft GPU, and what eight GPUs give otherwise:
#   launch/full_size.sh OUT [GPUS [flags of sweep]]         8 GPUs: everything; 5: without T=8 and D=2, 4
# Probes for five and eight GPUs, then three sweeps of one repeat, about six minutes on H200s; started
# again, each goes on where it was. What was foretold beforehand is judged at the end (foretell.py).
# LIMIT_S (240) bounds each step; PYTHON, MPIRUN: env.sh. A rehearsal without GPUs:
#   BACKEND=emulated launch/full_size.sh OUT 8 --device=null
set -u -o pipefail
out=${1:?usage: launch/full_size.sh OUT [GPUS]} gpus=${2:-8} failed=0
shift $(($# < 2 ? $# : 2))
# shellcheck source-path=SCRIPTDIR
. "${0%/*}/env.sh"
mkdir -p "$out"
step() { # name ranks command flags…: what it says goes to OUT/name.log
    local name=$1 ranks=$2 command=$3 code=0
    shift 3
    [ "$ranks" -le "$gpus" ] || return 0
    COMMAND=$command timeout -k 15 "${LIMIT_S:-240}" "${0%/*}/local.sh" "$ranks" \
        --backend="${BACKEND:-cupy}" --out="$out/$name" "$@" >"$out/$name.log" 2>&1 || code=$?
    echo "$name: $(cat "$out/$name"/runs*.jsonl 2>/dev/null | wc -l) rows, exit code $code"
    [ "$code" = 0 ] || failed=1
}
device=()
for flag in "$@"; do [[ $flag != --device=* ]] || device=("$flag"); done
grids=${0%/*}/grids
step probe5 5 probe --pair=70b/1b --fuse --name=70b-1b-T4D1 "${device[@]}"
step probe8 8 probe --pair=70b/1b --fuse --mode=ar --name=70b-T8 "${device[@]}"
step t4 5 sweep --grid="$grids/full_size.grid" --repeats=1 "$@"
step t8 8 sweep --grid="$grids/full_size_t8.grid" --num_drafts=0 --repeats=1 "$@"
step drafts 8 sweep --grid="$grids/full_size_drafts.grid" --repeats=1 "$@"
foretold=${FORETOLD:-results/full-size/foretold.jsonl}
[ ! -f "$foretold" ] || [ "${BACKEND:-cupy}" != cupy ] || "$PYTHON" "${0%/*}/foretell.py" judge "$foretold" "$out"
exit $failed
