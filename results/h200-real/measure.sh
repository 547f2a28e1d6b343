#!/usr/bin/env bash
# 8b/1b as whole transformers with random weights on two GPUs, where the recording of a real pair decides:
#   results/h200-real/measure.sh OUT [steps: t1 t2, default both]
# LIMIT_S=120 bounds each step; BACKEND=emulated rehearses. PYTHON and MPIRUN: launch/env.sh.
set -u -o pipefail
out=${1:?usage: results/h200-real/measure.sh OUT [t1 t2]} gpus=2
here=${0%/*} LIMIT_S=${LIMIT_S:-120}
# shellcheck source-path=SCRIPTDIR
. "$here/../study.sh"
shift
[ $# -gt 0 ] || set -- t1 t2
for step; do
    drafts=1
    [ "$step" = t1 ] || drafts=0
    step "$step" 2 sweep --grid="$here/$step.grid" --num_drafts=$drafts --repeats=1 --workload=replay \
        --recording="$here/../recordings/smollm2-humaneval.npz" --progress=off \
        --backend="${BACKEND:-cupy}" ${DEVICE:+--device="$DEVICE"}
done
exit $failed
