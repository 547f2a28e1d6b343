#!/usr/bin/env bash
# Sweeps of 8b/1b on emulated devices, T=1 and D=1, one repeat; 2 to 4 minutes a device on two cores:
#   results/emulated-sweep/measure.sh OUT [DEVICE …]     default: h100 v100-32; rows in OUT/DEVICE
# Then the draft on each other kind of device, in OUT/DEVICE-drafts. PYTHON, MPIRUN: launch/env.sh.
set -u -o pipefail
out=${1:?usage: results/emulated-sweep/measure.sh OUT [DEVICE …]} here=${0%/*} gpus=2 LIMIT_S=${LIMIT_S:-900}
shift
devices=("$@") kinds=(h200 h100 a100-80 v100-32)
[ $# -gt 0 ] || devices=(h100 v100-32)
# shellcheck source-path=SCRIPTDIR
. "$here/../study.sh"
sweep() { # name, device, grid, flags
    step "$1" 2 sweep --grid="$here/$3" --repeats=1 --backend=emulated --device="$2" "${@:4}"
}
for device in "${devices[@]}"; do
    sweep "$device" "$device" emulated.grid
    for kind in "${kinds[@]}"; do
        [ "$kind" = "$device" ] || sweep "$device-drafts" "$device" drafts.grid --draft_device="$kind"
    done
done
exit "$failed"
