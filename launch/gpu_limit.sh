#!/usr/bin/env bash
# How near to the physical limit this machine's GPUs are driven, beside the bars, one command:
#   launch/gpu_limit.sh OUT GPUS      T = 1, 2 and 4, as far as there are GPUs; TP="2 4" to choose
# PYTHON and MPIRUN: see env.sh. LIMIT_S=300 for each T.
set -u -o pipefail
out=${1:?usage: launch/gpu_limit.sh OUT GPUS} gpus=${2:?usage: launch/gpu_limit.sh OUT GPUS}
# shellcheck source-path=SCRIPTDIR
. "${0%/*}/env.sh"
failed=0
for tp in ${TP:-1 2 4}; do
    [ "$tp" -le "$gpus" ] || continue
    echo "== T=$tp"
    timeout -k 5 "${LIMIT_S:-300}" $MPIRUN -np "$tp" "$PYTHON" -m mpi4py -m mpissd.bench.gpu_limit "$out" \
        </dev/null || { echo "FAILED: T=$tp"; failed=1; }
done
exit $failed
