#!/usr/bin/env bash
# The reference rows of a GPU machine, one command:  results/h200/measure.sh OUT NUM_GPUS
# One GPU measures AR and inline SD of 8b/1b, two add SSD with T=1, three 70b/1b with T=2, four AR with
# T=4, and first of all the framework itself on the null device. A run that fails is said so, and the
# others go on. ROUNDS=1000, LIMIT_S=120 a run; PARTS="framework one two
# three four probes" to choose.
set -u -o pipefail
out=${1:?usage: results/h200/measure.sh OUT NUM_GPUS} gpus=${2:?usage: results/h200/measure.sh OUT NUM_GPUS}
parts=(framework one two three four)
read -ra wanted <<<"${PARTS:-${parts[*]:0:$((gpus + 1))}}"
LIMIT_S=${LIMIT_S:-120} ROUNDS=${ROUNDS:-1000} study=(--backend=cupy --fuse)
# shellcheck source-path=SCRIPTDIR
. "${0%/*}/../study.sh"

framework() {
    for _ in 1 2 3; do
        measure 2 --mode=ssd --backend=emulated --device=null --pair=toy --rounds=5000
    done
}
small=(--pair=8b/1b --alpha=.8 --lookahead=4)
one() {
    measure 1 --mode=ar "${small[@]}"
    measure 1 --mode=ar "${small[@]}" --nofuse
    measure 1 --mode=sd --num_drafts=0 "${small[@]}"
}
two() {
    measure 2 --mode=ar "${small[@]}"
    measure 2 --mode=sd "${small[@]}"
    for hits in "" --p_hit=1 --p_hit=0; do
        measure 2 --mode=ssd "${small[@]}" $hits
    done
}
large=(--pair=70b/1b --alpha=.8 --lookahead=7)
three() {
    measure 2 --mode=ar "${large[@]}"
    measure 3 --mode=sd "${large[@]}"
    for hits in --fan_out=geometric:24 --p_hit=1 --p_hit=0; do
        measure 3 --mode=ssd "${large[@]}" $hits
    done
}
four() { measure 4 --mode=ar "${large[@]}"; }

probe() { # what the machine gives each pair: profiles for the emulated backend and the predictor
    local np=$1
    shift
    echo "== probe np=$np $*"
    COMMAND=probe timeout -k 5 "$LIMIT_S" "$launch/local.sh" "$np" --backend=cupy --fuse \
        --out="$out" "$@" || { echo "FAILED: probe np=$np $*"; failed=1; }
}
probes() {
    probe 1 --mode=sd --num_drafts=0 "${small[@]}" --name=h200-8b-1b-T1
    [ "$gpus" -lt 2 ] || probe 2 "${small[@]}" --name=h200-8b-1b-T1D1
    [ "$gpus" -lt 3 ] || probe 3 "${large[@]}" --name=h200-70b-1b-T2D1
    [ "$gpus" -lt 4 ] || probe 4 --mode=ar "${large[@]}" --name=h200-70b-T4
}

for part in "${wanted[@]}"; do "$part"; done
exit $failed
