#!/usr/bin/env bash
# The reference rows of this machine, one command: launch/measure.sh OUT NUM_GPUS
# One GPU measures AR and inline SD of 8b/1b, two add SSD with T=1, three or more 70b/1b with T=2.
# Each line is one run; a run that fails is said so, and the others go on.
set -u
out=${1:?usage: launch/measure.sh OUT NUM_GPUS} gpus=${2:?usage: launch/measure.sh OUT NUM_GPUS}
here=${0%/*}
rounds=${ROUNDS:-1000}
failed=0

measure() { # ranks, flags of mpissd run
    local np=$1
    shift
    echo "== np=$np $*"
    "$here/local.sh" "$np" --backend=cupy --out="$out" --rounds="$rounds" "$@" | grep -v '^{' ||
        { echo "FAILED: np=$np $*"; failed=1; }
}

law=(--alpha=.8 --lookahead=4)
measure 1 --pair=8b/1b --mode=ar --fuse
measure 1 --pair=8b/1b --mode=ar
measure 1 --pair=8b/1b --mode=sd --num_drafts=0 --fuse "${law[@]}"
if [ "$gpus" -ge 2 ]; then
    measure 2 --pair=8b/1b --mode=sd --fuse "${law[@]}"
    measure 2 --pair=8b/1b --mode=ssd --fuse "${law[@]}"
    measure 2 --pair=8b/1b --mode=ssd --fuse "${law[@]}" --p_hit=1
    measure 2 --pair=8b/1b --mode=ssd --fuse "${law[@]}" --p_hit=0
    measure 2 --pair=8b/1b --mode=ar --fuse
fi
if [ "$gpus" -ge 3 ]; then
    law=(--alpha=.8 --lookahead=7)
    measure 2 --pair=70b/1b --mode=ar --fuse
    measure 3 --pair=70b/1b --mode=sd --fuse "${law[@]}"
    measure 3 --pair=70b/1b --mode=ssd --fuse "${law[@]}" --fan_out=geometric:24
    measure 3 --pair=70b/1b --mode=ssd --fuse "${law[@]}" --p_hit=1
fi
exit $failed
