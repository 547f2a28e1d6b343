#!/usr/bin/env bash
# What Saguaro sampling does to acceptance and hits on a markov pair; decisions only, two cores:
#   results/saguaro/measure.sh OUT [table|figure]
# table (docs/ssd.md): V = 1000, C by F in 24 runs, whose rounds table.py reduces; figure: V = 400, 15 runs.
# LIMIT_S=600 a run; PYTHON, MPIRUN: launch/env.sh.
set -u -o pipefail
out=${1:?usage: results/saguaro/measure.sh OUT [table|figure]} LIMIT_S=${LIMIT_S:-600}
study=(--workload=markov --pair=toy --mode=ssd --order=1 --divergence=.2 --temperature=1)
study+=(--lookahead=4 --batch_size=32 --progress=off)
# shellcheck source-path=SCRIPTDIR
. "${0%/*}/../study.sh"
case ${2:-table} in
    table) ROUNDS=200 all_c="1 .7 .5 .3 .1 0" all_f="1 2 4 8"
        study+=(--backend=emulated --device=null --vocab=1000) ;;
    figure) ROUNDS=60 all_c="1 .6 .3 .1 0" all_f="1 2 4"
        study+=(--backend=numpy --vocab=400) ;;
    *) echo "saguaro: $2: allowed: table, figure" >&2; exit 2 ;;
esac
for c in $all_c; do
    for f in $all_f; do
        measure 2 --fan_out=uniform:"$f" --saguaro_c="$c"
    done
done
exit "$failed"
