#!/usr/bin/env bash
# What --backup=auto loses to the better of jit and fast, two GPUs, some 140 s on H200s:
#   results/h200-backups/measure.sh OUT [flags of sweep]
# 66 rows in OUT/backups, then their table (losses.py). Started again it goes on where it was.
# LIMIT_S=400 bounds it; PYTHON, MPIRUN: launch/env.sh. A rehearsal: BACKEND=emulated … --device=null
set -u -o pipefail
out=${1:?usage: results/h200-backups/measure.sh OUT [flags of sweep]} here=${0%/*} gpus=2 LIMIT_S=${LIMIT_S:-400}
shift
# shellcheck source-path=SCRIPTDIR
. "$here/../study.sh"
# shellcheck source=../../launch/env.sh
. "$launch/env.sh"
step backups 2 sweep --grid="$here/backups.grid" --repeats=1 --backend="${BACKEND:-cupy}" --progress=off "$@"
"$PYTHON" "$here/losses.py" "$out/backups" || failed=1
exit "$failed"
