#!/usr/bin/env bash
# 70b/1b on four GPUs: results/h200-70b/measure.sh OUT [sweeps: t4 t2, default both]
# T=4 without a draft rank, then T=2 with one (three GPUs). A sweep that was interrupted goes on where
# it was. LIMIT_S=420 bounds each sweep; BACKEND=emulated rehearses. PYTHON and MPIRUN: launch/env.sh.
set -u -o pipefail
out=${1:?usage: results/h200-70b/measure.sh OUT [t4 t2]} gpus=4
here=${0%/*} LIMIT_S=${LIMIT_S:-420}
shift
# shellcheck source-path=SCRIPTDIR
. "$here/../study.sh"
[ $# -gt 0 ] || set -- t4 t2
for sweep; do
    case $sweep in
        t4) ranks=4 drafts=0 ;;
        *) ranks=3 drafts=1 ;;
    esac
    step "$sweep" $ranks sweep --grid="$here/$sweep.grid" --num_drafts=$drafts --repeats=1 \
        --backend="${BACKEND:-cupy}" --progress=off
done
exit $failed
