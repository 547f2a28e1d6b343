#!/usr/bin/env bash
# 8b/1b on two GPUs, SSD as `plan` tunes it beside its rivals, in one visit to one machine:
#   results/h200-tuned/measure.sh OUT
# LIMIT_S=180 bounds each sweep; BACKEND=emulated rehearses. PYTHON and MPIRUN: launch/env.sh.
set -u -o pipefail
out=${1:?usage: results/h200-tuned/measure.sh OUT} gpus=2
here=${0%/*} LIMIT_S=${LIMIT_S:-180}
# shellcheck source-path=SCRIPTDIR
. "$here/../study.sh"
step t1 2 sweep --grid="$here/t1.grid" --num_drafts=1 --repeats=1 --backend="${BACKEND:-cupy}" --progress=off
step t2 2 sweep --grid="$here/t2.grid" --num_drafts=0 --repeats=1 --backend="${BACKEND:-cupy}" --progress=off
exit $failed
