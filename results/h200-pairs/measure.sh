#!/usr/bin/env bash
# 8b/1b on two GPUs, every use of both: results/h200-pairs/measure.sh OUT [sweeps, default: all]
# A sweep that was interrupted goes on where it was when it is started again with the same OUT.
# LIMIT_S=420 bounds each sweep. PYTHON and MPIRUN: launch/env.sh.
set -u -o pipefail
out=${1:?usage: results/h200-pairs/measure.sh OUT [t2 t1 t2_scan t1_scan]} failed=0
here=${0%/*}
shift
mkdir -p "$out"
for name in "${@:-t2 t1 t2_scan t1_scan}"; do
    for sweep in $name; do
        drafts=1
        [[ $sweep == t2* ]] && drafts=0
        code=0
        COMMAND=sweep timeout -k 15 "${LIMIT_S:-420}" "$here/../../launch/local.sh" 2 \
            --grid="$here/$sweep.grid" --num_drafts="$drafts" --backend="${BACKEND:-cupy}" \
            --repeats=1 --out="$out/$sweep" --progress=off >"$out/$sweep.log" 2>&1 || code=$?
        echo "$sweep: $(cat "$out/$sweep"/runs*.jsonl 2>/dev/null | wc -l) rows, exit code $code"
        [ "$code" = 0 ] || failed=1
    done
done
exit $failed
