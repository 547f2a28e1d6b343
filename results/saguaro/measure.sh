#!/usr/bin/env bash
# What Saguaro sampling does to acceptance and hits on a markov pair (docs/ssd.md), NumPy, two cores:
#   results/saguaro/measure.sh OUT
# F = 1, 2, 4, 8 by C = 1 … 0: 24 runs; LIMIT_S=600 each, ROUNDS=200; PYTHON, MPIRUN: launch/env.sh.
set -u -o pipefail
out=${1:?usage: results/saguaro/measure.sh OUT}
LIMIT_S=${LIMIT_S:-600} ROUNDS=${ROUNDS:-200}
study=(--backend=numpy --workload=markov --pair=toy --vocab=1000 --divergence=.2 --temperature=1)
study+=(--mode=ssd --lookahead=4 --batch_size=32 --progress=off)
# shellcheck source-path=SCRIPTDIR
. "${0%/*}/../study.sh"
for c in 1 .7 .5 .3 .1 0; do
    for f in 1 2 4 8; do
        measure 2 --fan_out=uniform:"$f" --saguaro_c="$c"
    done
done
exit "$failed"
