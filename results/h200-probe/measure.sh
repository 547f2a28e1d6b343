#!/usr/bin/env bash
# Probes every placement of 8b/1b and 70b/1b that fits: results/h200-probe/measure.sh OUT NUM_GPUS
# Profiles go to OUT/profiles, each probe's output to OUT/NAME.log. What matters most comes first:
# when BUDGET_S=240 seconds are over nothing more is started, and no probe gets more than LIMIT_S=60.
# A probe that fails is said so, and the others go on. A rehearsal without GPUs:
#     BACKEND=emulated DEVICE=h200 results/h200-probe/measure.sh OUT 4
set -u -o pipefail
usage="usage: results/h200-probe/measure.sh OUT NUM_GPUS"
out=${1:?$usage} gpus=${2:?$usage} failed=0
BUDGET_S=${BUDGET_S:-240} LIMIT_S=${LIMIT_S:-60}
flags=(--backend="${BACKEND:-cupy}" ${DEVICE:+--device="$DEVICE"} --progress=off --out="$out")
mkdir -p "$out"

probe() { # NAME RANKS FLAGS…
    local name=$1 ranks=$2 left=$((BUDGET_S - SECONDS)) begun=$SECONDS code=0
    shift 2
    [ "$ranks" -le "$gpus" ] || return
    if [ "$left" -lt 15 ]; then
        echo "$name: SKIPPED, $left s are left"
        failed=1
        return
    fi
    COMMAND=probe timeout -k 5 $((left < LIMIT_S ? left : LIMIT_S)) \
        "${0%/*}/../../launch/local.sh" "$ranks" "${flags[@]}" --name="$name" "$@" \
        >"$out/$name.log" 2>&1 || code=$?
    echo "$name: exit code $code, $((SECONDS - begun)) s"
    [ "$code" = 0 ] || { failed=1; grep mpissd: "$out/$name.log" | tail -n 3; }
}

placements() { # SUFFIX FLAGS…
    local suffix=$1
    shift
    local small=(--pair=8b/1b --lookahead=4 "$@") large=(--pair=70b/1b --lookahead=7 "$@")
    local inline=(--mode=sd --num_drafts=0)
    probe "8b-1b-T1D1$suffix" 2 "${small[@]}"
    probe "8b-1b-T2D0$suffix" 2 "${small[@]}" "${inline[@]}"
    probe "8b-1b-T1D0$suffix" 1 "${small[@]}" "${inline[@]}"
    probe "70b-1b-T2D1$suffix" 3 "${large[@]}"
    probe "70b-1b-T2D0$suffix" 2 "${large[@]}" "${inline[@]}"
    probe "70b-1b-T1D1$suffix" 2 "${large[@]}"
    probe "70b-1b-T4D0$suffix" 4 "${large[@]}" "${inline[@]}"
    probe "8b-1b-T4D0$suffix" 4 "${small[@]}" "${inline[@]}"
}

placements "" --fuse
placements -head --fuse --lm_head
exit $failed
