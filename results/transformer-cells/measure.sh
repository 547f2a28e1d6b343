#!/usr/bin/env bash
# Imposed laws over transformers, predicted from a probe of another job and measured:
#   results/transformer-cells/measure.sh cpu|gpu OUT
# cpu: small random models on two cores, some 5 minutes; gpu: 8b/1b on one GPU. A sweep that was
# interrupted goes on where it was when it is started again with the same OUT.
# LIMIT_S=420 bounds each step; ROUNDS=40, BACKEND=emulated (gpu) rehearse; ONLY=cpu_two: one of the grids. PYTHON and MPIRUN: launch/env.sh.
set -u -o pipefail
kind=${1:?usage: results/transformer-cells/measure.sh cpu|gpu OUT} out=${2:?OUT is missing} gpus=2
here=${0%/*} LIMIT_S=${LIMIT_S:-420}
# shellcheck source-path=SCRIPTDIR
. "$here/../study.sh"

cells() { # grid, ranks, drafts, flags of the probe: the sweep, a probe, and the errors of all rows
    local name=$1 ranks=$2 drafts=$3
    shift 3
    [ -z "${ONLY:-}" ] || [ "$ONLY" = "$name" ] || return 0
    step "$name" "$ranks" sweep --grid="$here/$name.grid" --num_drafts="$drafts" --repeats=1 \
        "$backend" --rounds="${ROUNDS:-$rounds}" --progress=off
    step "probe-$name" "$ranks" probe --name="$name" --num_drafts="$drafts" --forward=transformer \
        "$backend" "$@"
    PATH=$PATH "$PYTHON" -m mpissd predict --rows="$out/$name" \
        --profile="$out/probe-$name/profiles/$name.json" | grep -v '^{' | tee "$out/$name.md"
}

case $kind in
    cpu)
        backend=--backend=numpy rounds=400
        pair=("--target=gen:layers=6,hidden=512,ffn=1536,kv_heads=2,vocab=8192"
            "--draft=gen:layers=1,hidden=256,ffn=768,kv_heads=2,vocab=8192")
        cells cpu_alone 1 0 --mode=sd "${pair[@]}" --context=3072
        cells cpu_two 2 0 --mode=sd "${pair[@]}" --context=3072
        cells cpu_draft 2 1 --mode=ssd "${pair[@]}" --context=3072
        ;;
    gpu)
        backend=--backend=${BACKEND:-cupy} rounds=60
        cells gpu 1 0 --mode=sd --pair=8b/1b --context=8192
        ;;
    *) echo "kind $kind: cpu or gpu" >&2; exit 2 ;;
esac
exit $failed
