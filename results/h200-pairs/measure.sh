#!/usr/bin/env bash
# 8b/1b on two GPUs, every use of both:
#   results/h200-pairs/measure.sh OUT [sweeps: t2 t1 t2_scan t1_scan, default all]
# A sweep that was interrupted goes on where it was when it is started again with the same OUT.
# LIMIT_S=420 bounds each sweep; BACKEND=emulated rehearses. PYTHON and MPIRUN: launch/env.sh.
set -u -o pipefail
out=${1:?usage: results/h200-pairs/measure.sh OUT [t2 t1 t2_scan t1_scan]} gpus=2
here=${0%/*} LIMIT_S=${LIMIT_S:-420}
shift
# shellcheck source-path=SCRIPTDIR
. "$here/../study.sh"
[ $# -gt 0 ] || set -- t2 t1 t2_scan t1_scan
for sweep; do
    drafts=1
    [[ $sweep == t2* ]] && drafts=0
    step "$sweep" 2 sweep --grid="$here/$sweep.grid" --num_drafts=$drafts --repeats=1 \
        --backend="${BACKEND:-cupy}" --progress=off
done
exit $failed
