#!/usr/bin/env bash
# What SSD's choices are worth on a GPU machine, one command:  results/h200-ssd/measure.sh OUT NUM_GPUS
# Lateness (8b/1b, K = 7: growth takes longer than a verification), backups over the batch, adaptive
# fan-out, sampled decoding with a language-model pair, and several draft ranks (4 GPUs). ROUNDS=400,
# LIMIT_S=60 a run; PARTS="late backup fanout sampled drafts framework" to choose.
set -u -o pipefail
out=${1:?usage: results/h200-ssd/measure.sh OUT NUM_GPUS} gpus=${2:?usage: results/h200-ssd/measure.sh OUT NUM_GPUS}
parts=(framework late backup fanout sampled)
[ "$gpus" -lt 4 ] || parts+=(drafts)
read -ra wanted <<<"${PARTS:-${parts[*]}}"
LIMIT_S=${LIMIT_S:-60} ROUNDS=${ROUNDS:-400} study=(--backend=cupy --fuse --progress=off)
# shellcheck source-path=SCRIPTDIR
. "${0%/*}/../study.sh"

framework() { measure 2 --mode=ssd --backend=emulated --device=null --pair=toy --rounds=5000; }
small=(--pair=8b/1b --alpha=.8)
late() {
    local on_late
    measure 2 --mode=sd "${small[@]}" --lookahead=7
    for on_late in finish serve auto; do
        measure 2 "${small[@]}" --lookahead=7 --fan_out=geometric:24 --on_late=$on_late
        measure 2 "${small[@]}" --lookahead=7 --fan_out=geometric:24 --on_late=$on_late \
            --backup_lookahead=3
    done
}
backup() {
    local batch way
    for batch in 1 4 16 64; do
        for way in jit fast auto; do
            measure 2 "${small[@]}" --lookahead=4 --fan_out=geometric:12 --batch_size=$batch \
                --backup=$way
        done
    done
}
fanout() {
    local way
    for way in uniform:3 geometric:24 adaptive:24; do
        measure 2 --pair=8b/1b --alpha=.65 --hit_a=1 --hit_r=.6 --lookahead=5 --fan_out=$way
    done
}
sampled() {
    local mode way
    for mode in sd ssd; do
        measure 2 --mode=$mode --pair=8b/1b --workload=markov --vocab=1000 --divergence=.1 \
            --temperature=1 --lookahead=4 --rounds=200
    done
    for way in 1 .5 0; do
        measure 2 --pair=8b/1b --workload=markov --vocab=1000 --divergence=.1 --temperature=1 \
            --lookahead=4 --fan_out=geometric:20 --saguaro_c=$way --rounds=200
    done
}
large=(--pair=70b/1b --alpha=.8 --lookahead=7)
drafts() {
    local budget
    measure 2 --mode=ar "${large[@]}"
    measure 3 --mode=sd "${large[@]}"
    for budget in 24 48 96; do
        measure 3 "${large[@]}" --fan_out=geometric:$budget
    done
}

for part in "${wanted[@]}"; do "$part"; done
exit $failed
