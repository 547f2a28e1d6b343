#!/usr/bin/env bash
# The rows that the poster's figures are made of, as far as there are GPUs:
#   launch/poster.sh OUT GPUS [flags of sweep]
# 2 GPUs: 8b/1b; 3: 70b/1b with T=2; 4: two drafts, and T=4. Started again, each sweep goes on where it
# was. LIMIT_S (300) bounds each of them, SWEEPS="8b 70b two_drafts t4" chooses. PYTHON, MPIRUN: env.sh.
set -u -o pipefail
out=${1:?usage: launch/poster.sh OUT GPUS} gpus=${2:?usage: launch/poster.sh OUT GPUS} failed=0
shift 2
mkdir -p "$out"
sweep() { # name GPUS grid [flags]: rows in OUT/name
    local name=$1 ranks=$2 grid=$3 code=0
    [[ " ${SWEEPS:-8b 70b two_drafts t4} " == *" $name "* && $ranks -le $gpus ]] || return 0
    shift 3
    COMMAND=sweep timeout -k 15 "${LIMIT_S:-300}" launch/local.sh "$ranks" --grid="launch/grids/$grid" \
        --backend=cupy --out="$out/$name" "$@" >"$out/$name.log" 2>&1 || code=$?
    echo "$name: $(cat "$out/$name"/runs*.jsonl 2>/dev/null | wc -l) rows, exit code $code"
    [ "$code" = 0 ] || failed=1
}
sweep 8b 2 poster_8b.grid "$@"
sweep 70b 3 poster_70b.grid "$@"
sweep two_drafts 4 poster_70b_two_drafts.grid "$@"
sweep t4 4 poster_70b_4.grid --num_drafts=0 "$@"
exit $failed
