#!/usr/bin/env bash
# 70b/1b as whole transformers on four GPUs: the uses of two, three and four of them.
#   results/four-gpus/measure.sh OUT [steps, in this order; default: all]
# In the project's folder, nine minutes: BUDGET_S=530 bounds all steps, each has a bound of its own, and what matters
# most comes first. Rows are written as they are measured; the table stands last. PYTHON, MPIRUN: launch/env.sh.
# DRY=1 only plans. A rehearsal: BACKEND=emulated … with FLAGS="--device=null".
set -u -o pipefail
all=(t4 t3 t2 far4 far2 probe far3 forwards)
usage="usage: results/four-gpus/measure.sh OUT [${all[*]}]"
out=${1:?$usage} gpus=4 here=${0%/*} BUDGET_S=${BUDGET_S:-530}
shift
# shellcheck source-path=SCRIPTDIR
. "$here/../study.sh"
# shellcheck source-path=SCRIPTDIR
. "$here/../../launch/env.sh"
read -ra flags <<<"--backend=${BACKEND:-cupy} ${FLAGS:-}"
[ $# -gt 0 ] || set -- "${all[@]}"

forwards() { # of T = 4 alone, against their floor, and their rows' bits
    [ -z "${DRY:-}" ] || return 0
    PYTHONPATH=$here/../..${PYTHONPATH:+:$PYTHONPATH} timeout -k 5 "$LIMIT_S" $MPIRUN -np 4 "$PYTHON" -m mpi4py \
        "$here/../h200-transformer/ranks.py" llama-3.1-70b --backend="${BACKEND:-cupy}" \
        >"$out/forwards-T4.txt" 2>&1 </dev/null || failed=1
    cat "$out/forwards-T4.txt"
}

for one; do
    case $one in
        t4) within 80 cells whole-T4D0 ;;
        t3) within 100 cells whole-T3D1 ;;
        t2) within 190 cells whole-T2D1 ;;
        far4) within 40 cells far-T4D0 ;;
        far2) within 80 cells far-T2D1 ;;
        probe)
            within 80 step probe 4 probe --pair=70b/1b --forward=transformer --mode=sd --num_drafts=0 --lookahead=5 \
                --context=4096 --name=70b-1b-T4D0-transformer --progress=off "${flags[@]}"
            ;;
        far3) within 30 cells far-T3D1 ;;
        forwards) within 30 forwards ;;
        *) echo "$usage" >&2; exit 2 ;;
    esac
done
[ -z "${DRY:-}" ] || exit $failed
"$PYTHON" "$here/../beside.py" table "$here/expected.jsonl" "$out" || failed=1
"$PYTHON" "$here/../idle.py" "$out/whole-T3D1" "$out/whole-T2D1"
exit $failed
