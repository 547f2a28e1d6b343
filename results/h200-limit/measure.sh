#!/usr/bin/env bash
# How near to the physical limit this machine's GPUs are driven, one command (make bench-gpu): ten bars of
# products alone, and those of whole models on one GPU beside Hugging Face and PyTorch:
#   results/h200-limit/measure.sh OUT [GPUS]    T = 1, 2 and 4, as far as there are GPUs; TP="2 4" to choose
# For each T: replays of forwards and all-reduces, beside cuBLAS, NCCL and PyTorch; then RUNS=3 runs of
# ROUNDS=2000 rounds each, AR and (on one GPU more) SSD with p_hit=1. Rows go to OUT/T1.jsonl …, which
# are begun anew, and to OUT/runs.jsonl; the table is made of all that OUT holds. T = 1, 2 and 4 take
# 2, 6.5 and 3 minutes on H200s. REPLAYS=2000 of a run; LIMIT_S=300 for each command; PYTHON, MPIRUN: launch/env.sh.
# Without a GPU it says so and ends 2: nothing was measured.
set -u -o pipefail
out=${1:?usage: results/h200-limit/measure.sh OUT [GPUS]}
# shellcheck source=../../launch/env.sh
. "${0%/*}/../../launch/env.sh"
gpus=${2:-${GPUS:-$("$PYTHON" -c 'import cupy; print(cupy.cuda.runtime.getDeviceCount())' 2>&1)}} ||
    { echo "bench-gpu: nothing to measure: ${gpus##*$'\n'} (needs a GPU, and CuPy: make venv there)" >&2; exit 2; }
LIMIT_S=${LIMIT_S:-300} ROUNDS=${ROUNDS:-2000} study=(--backend=cupy --fuse --alpha=.8)
# shellcheck source-path=SCRIPTDIR
. "${0%/*}/../study.sh"
mkdir -p "$out" && scratch=$(mktemp -d) && trap 'rm -rf "$scratch"' EXIT

replays() { # T
    echo "== T=$1"
    # shellcheck disable=SC2086
    timeout -k 5 "$LIMIT_S" $MPIRUN -np "$1" "$PYTHON" -m mpi4py -m mpissd.lab.limits.replays "$out" \
        "${REPLAYS:-2000}" </dev/null || { echo "FAILED: T=$1"; failed=1; }
}
rounds() { # ranks, flags of mpissd run
    [ "$1" -le "$gpus" ] || return 0
    local trace=$scratch/trace.json n
    for ((n = 0; n < ${RUNS:-3}; n++)); do
        rm -f "$trace"
        measure "$@" --trace="$trace"
        "$PYTHON" -m mpissd.lab.limits.rounds "$out" "$trace" || failed=1
    done
}
small=(--pair=8b/1b --lookahead=4)
large=(--pair=70b/1b --lookahead=7)
for tp in ${TP:-1 2 4}; do
    [ "$tp" -le "$gpus" ] || continue
    : >"$out/T$tp.jsonl"
    replays "$tp"
    case $tp in
        1) "${0%/*}/../h200-whole/measure.sh" "$out" || failed=1
           rounds 1 --mode=ar "${small[@]}"; rounds 2 --mode=ssd --p_hit=1 "${small[@]}" ;;
        2) rounds 2 --mode=ar "${large[@]}"; rounds 3 --mode=ssd --p_hit=1 "${large[@]}" ;;
        4) rounds 4 --mode=ar "${large[@]}" ;;
    esac
done
"$PYTHON" -m mpissd.lab.limits.bars "$out" || failed=1
exit $failed
