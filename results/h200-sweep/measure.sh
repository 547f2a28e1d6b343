#!/usr/bin/env bash
# The rows that most figures are made of, as far as there are GPUs:
#   results/h200-sweep/measure.sh OUT GPUS [flags of sweep]
# 2 GPUs: 8b/1b; 3: 70b/1b with T=2; 4: two drafts, and T=4. Started again, each sweep goes on where it
# was. LIMIT_S (300) bounds each of them, SWEEPS="8b 70b t4" chooses. PYTHON, MPIRUN: launch/env.sh.
set -u -o pipefail
out=${1:?usage: results/h200-sweep/measure.sh OUT GPUS} gpus=${2:?usage: results/h200-sweep/measure.sh OUT GPUS}
here=${0%/*} LIMIT_S=${LIMIT_S:-300}
shift 2
# shellcheck source-path=SCRIPTDIR
. "$here/../study.sh"
sweep() { # name GPUS grid [flags]
    [[ " ${SWEEPS:-8b 70b t4} " != *" $1 "* ]] ||
        step "$1" "$2" sweep --grid="$here/$3" --backend=cupy "${@:4}"
}
sweep 8b 2 poster_8b.grid "$@"
sweep 70b 3 poster_70b.grid "$@"
sweep t4 4 poster_70b_4.grid --num_drafts=0 "$@"
exit "$failed"
