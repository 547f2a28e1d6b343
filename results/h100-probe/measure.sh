#!/usr/bin/env bash
# Probes one GPU, and measures rows to hold the profiles against:
#   results/h100-probe/measure.sh OUT [steps: 8b products 70b, default 8b products]
# 8b: 8b/1b as whole transformers; products: 8b/1b as products, with the LM head and without; 70b: 70b/1b as whole
# transformers, where 144 GB fit. In at most BUDGET_S=480 seconds; what no longer fits into them is skipped and reported.
# OUT then holds one profile for each probe, rows.jsonl and log.txt. PYTHON and MPIRUN: launch/env.sh. A rehearsal:
#   BACKEND=emulated DEVICE=h100 results/h100-probe/measure.sh OUT
set -u -o pipefail
usage="usage: results/h100-probe/measure.sh OUT [8b products 70b]"
out=${1:?$usage} gpus=1
here=${0%/*} BUDGET_S=${BUDGET_S:-480} ROUNDS=${ROUNDS:-120}
# shellcheck source-path=SCRIPTDIR
. "$here/../study.sh"
shift
[ $# -gt 0 ] || set -- 8b products
flags=(--backend="${BACKEND:-cupy}" ${DEVICE:+--device="$DEVICE"} --progress=off)

probe() { # NAME, most seconds, flags: the profile NAME
    within "$2" step "$1" 1 probe --name="$1" --num_drafts=0 "${flags[@]}" "${@:3}"
}

rows() { # GRID, most seconds
    within "$2" step "rows-$1" 1 sweep --grid="$here/$1.grid" --rounds="$ROUNDS" --repeats=1 "${flags[@]}"
}

for step; do
    case $step in
        8b)
            probe whole 120 --pair=8b/1b --lookahead=4 --forward=transformer --context=4096
            rows whole 120
            ;;
        products)
            probe products 60 --pair=8b/1b --lookahead=4 --fuse
            probe products-head 60 --pair=8b/1b --lookahead=4 --fuse --lm_head
            rows products 90
            ;;
        70b)
            probe whole-70b 220 --pair=70b/1b --lookahead=7 --forward=transformer --context=1024
            rows whole-70b 90
            ;;
        *) echo "$usage" >&2; exit 2 ;;
    esac
done
cat "$out"/*.log >"$out/log.txt"
cat "$out"/rows-*/runs*.jsonl >"$out/rows.jsonl"
for folder in "$out"/*/; do
    cp "$folder"profiles/"$(basename "$folder")".json "$out" 2>/dev/null
    rm -rf "$folder" "${folder%/}.log"
done
ls -l "$out"
exit $failed
