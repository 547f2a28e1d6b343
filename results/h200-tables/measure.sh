#!/usr/bin/env bash
# What `mpissd compare --show=tables` compares with the milestone report, T=1, alpha .9, K = 2 … 12; two GPUs:
#   results/h200-tables/measure.sh OUT
# ROUNDS=1000, LIMIT_S=120 a run; PYTHON, MPIRUN: launch/env.sh.
set -u -o pipefail
out=${1:?usage: results/h200-tables/measure.sh OUT}
LIMIT_S=${LIMIT_S:-120} ROUNDS=${ROUNDS:-1000} study=(--backend=cupy --fuse)
# shellcheck source-path=SCRIPTDIR
. "${0%/*}/../study.sh"
measure 1 --mode=ar --pair=8b/1b
measure 1 --mode=ar --pair=70b/1b
for k in 2 4 6 8 10 12; do
    measure 1 --mode=sd --num_drafts=0 --pair=8b/1b --alpha=.9 --lookahead=$k
    measure 2 --mode=sd --pair=70b/1b --alpha=.9 --lookahead=$k
done
exit "$failed"
