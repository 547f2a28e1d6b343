#!/usr/bin/env bash
# One command for a machine with GPUs: the single-GPU tests, then T = 1 and 2 ranks (sharing a GPU
# where there is only one), a short table last. PYTHON and MPIRUN choose other ones.
#     tests/gpu/check.sh
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
. launch/env.sh
LOGS=${LOGS:-$(mktemp -d)}
mkdir -p "$LOGS"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-4}
failed=0
table=()

step() { # step <name> <seconds> <command…>: runs it, its output in a log, its verdict in the table
    local name=$1 seconds=$2 log=$LOGS/$1.log code=0
    shift 2
    timeout "$seconds" "$@" </dev/null >"$log" 2>&1 || code=$?
    tail -n 40 "$log"
    ((code == 0)) || failed=1
    table+=("$( ((code == 0)) && echo pass || echo "FAIL ($code)")  $name  $(tail -n 1 "$log")")
}

check() { # check <ranks> [option…]: mpi_shard_check on that many ranks
    local ranks=$1
    shift
    step "shard-$ranks" 300 "$MPIRUN" -np "$ranks" "$PYTHON" -m mpi4py tests/gpu/mpi_shard_check.py "$@"
}

step tests 600 "$PYTHON" -m pytest -q -m gpu tests/gpu
check 1 --all_reduce=oneshot,nccl
check 2
step transformer-2 300 "$MPIRUN" -np 2 "$PYTHON" -m mpi4py tests/gpu/mpi_shard_check.py \
    --all_reduce=auto --models=five,three
# Ranks that share a GPU reduce on the host (staged), so that no round can be chained there.
gpus=$("$PYTHON" -c 'import cupy; print(cupy.cuda.runtime.getDeviceCount())') || gpus=0
if ((gpus < 2)); then
    table+=("skip  chained-2  needs 2 GPUs, here $gpus")
else
    step chained-2 300 "$MPIRUN" -np 2 "$PYTHON" -m mpi4py tests/gpu/mpi_chained_check.py cupy
fi
echo
printf '%s\n' "${table[@]}" "logs: $LOGS"
exit $failed
