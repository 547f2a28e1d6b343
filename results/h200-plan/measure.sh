#!/usr/bin/env bash
# 8b/1b on two GPUs: a probe, what `plan` advises by it, and that beside its strongest rival, in one visit:
#   results/h200-plan/measure.sh OUT [steps: probe t1 t2, default all]
# LIMIT_S=120 bounds each step; BACKEND=emulated rehearses. PYTHON and MPIRUN: launch/env.sh.
set -u -o pipefail
out=${1:?usage: results/h200-plan/measure.sh OUT [probe t1 t2]} gpus=2
here=${0%/*} LIMIT_S=${LIMIT_S:-120}
# shellcheck source-path=SCRIPTDIR
. "$here/../study.sh"
# shellcheck source-path=SCRIPTDIR
. "$here/../../launch/env.sh"
shift
[ $# -gt 0 ] || set -- probe t1 t2
flags=(--backend="${BACKEND:-cupy}" ${DEVICE:+--device="$DEVICE"} --progress=off)

advise() { # a block of a grid for each alpha, by the profile of `probe`
    local alpha
    for alpha in .5 .6 .7 .8 .9; do
        "$PYTHON" -m mpissd plan --profile="$out/probe/profiles/8b-1b-T1D1-head.json" --gpus=2 --pair=8b/1b \
            --fuse --lm_head --hit_law=power:A=0.75,r=1.0 --alpha=$alpha >"$out/plan-$alpha.txt" 2>>"$out/plan.err" </dev/null &
    done
    wait
    "$PYTHON" "$here/grid.py" "$out"/plan-*.txt >"$out/advised.grid"
}

for step; do
    case $step in
        probe)
            step probe 2 probe --pair=8b/1b --fuse --lm_head --lookahead=4 --name=8b-1b-T1D1-head "${flags[@]}"
            advise
            ;;
        t1) step t1 2 sweep --grid="$out/advised.grid" --num_drafts=1 --repeats=1 "${flags[@]}" ;;
        t2) step t2 2 sweep --grid="$here/t2.grid" --num_drafts=0 --repeats=1 "${flags[@]}" ;;
        *) echo "step $step: probe, t1 or t2" >&2; exit 2 ;;
    esac
done
exit $failed
