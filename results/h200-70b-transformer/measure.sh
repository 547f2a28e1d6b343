#!/usr/bin/env bash
# 70b/1b as whole transformers with random weights on four GPUs, imposed acceptance and the recording of a real pair:
#   results/h200-70b-transformer/measure.sh OUT [steps: t4 t3 t2 replay2 forwards, default all]
# T=4 without a draft rank; T=3 with one; T=2 with none, one and two. Run it in the project's folder. LIMIT_S=120 bounds each step; BACKEND=emulated rehearses.
# PYTHON and MPIRUN: launch/env.sh.
set -u -o pipefail
usage="usage: results/h200-70b-transformer/measure.sh OUT [t4 t3 t2 replay2 forwards]"
out=${1:?$usage} gpus=4
here=${0%/*} LIMIT_S=${LIMIT_S:-120}
# shellcheck source-path=SCRIPTDIR
. "$here/../study.sh"
# shellcheck source-path=SCRIPTDIR
. "$here/../../launch/env.sh"
shift
[ $# -gt 0 ] || set -- t4 t3 t2 replay2 forwards

ranks() { # T: forwards of T ranks against their floor, and their rows' bits
    PYTHONPATH=$here/../..${PYTHONPATH:+:$PYTHONPATH} timeout -k 5 "$LIMIT_S" $MPIRUN -np "$1" "$PYTHON" -m mpi4py \
        "$here/../h200-transformer/ranks.py" llama-3.1-70b --backend="${BACKEND:-cupy}" \
        >"$out/forwards-T$1.txt" 2>&1 </dev/null || failed=1
    cat "$out/forwards-T$1.txt"
}

sweep() { # most drafts: the grid of the step's name, on all four GPUs
    step "$step" 4 sweep --grid="$here/$step.grid" --num_drafts="$1" --repeats=1 "${flags[@]}"
}

flags=(--backend="${BACKEND:-cupy}" ${DEVICE:+--device="$DEVICE"} --progress=off)
mkdir -p "$out"
for step; do
    case $step in
        forwards) ranks 4 ;;
        t4) sweep 0 ;;
        t3) sweep 1 ;;
        t2 | replay2) sweep 2 ;;
        *) echo "$usage" >&2; exit 2 ;;
    esac
done
exit $failed
