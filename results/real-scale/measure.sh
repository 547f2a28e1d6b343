#!/usr/bin/env bash
# 8B/1B under a recording of SmolLM2's pair, by `sweep`, on two H200s (a minute) or emulated:
#   results/real-scale/measure.sh OUT cupy|emulated [RECORDING.npz]
# LIMIT_S=300 a step; PYTHON, MPIRUN: launch/env.sh. LAWS=FILE: of the fan-outs.
set -u -o pipefail
out=${1:?usage: results/real-scale/measure.sh OUT cupy|emulated [RECORDING.npz]} gpus=2 LIMIT_S=${LIMIT_S:-300}
here=${0%/*} backend=${2:?cupy or emulated} recording=${3:-results/recordings/smollm2-humaneval.npz}
# shellcheck source-path=SCRIPTDIR
. "$here/../study.sh"
flags=(--backend="$backend" --recording="$recording" --fuse --progress=off --repeats=1)
flags+=(--laws="${LAWS:-results/recordings/smollm2.laws.json}")
[ "$backend" = emulated ] && flags+=(--device=h200)
step pair 2 sweep --grid="$here/pair.grid" "${flags[@]}"
step target 2 sweep --grid="$here/target.grid" "${flags[@]}"
exit "$failed"
