# shellcheck shell=bash
# Sourced by the Slurm scripts beside it, in the project's folder: `run RANKS [flags]` starts one run
# of the job, and $code is the first exit code that was not 0. What is overridden where, last wins:
#   the script's flags, then BACKEND DEVICE PAIR ROUNDS of the environment, then the script's arguments
# OUT is the folder of the rows (a job's own: two jobs never write one file), PYTHON and MPIRUN are
# env.sh's, MODULES="openmpi/5.0.3-gcc13.2.1" loads modules first.
set -u
out=${OUT:-out/job-${SLURM_JOB_ID:-$$}} code=0 child=''
# With GPUs no CuPy is an error, not a reason to measure NumPy.
[ -n "${BACKEND:-}${SLURM_GPUS_ON_NODE:+cupy}" ] && BACKEND=${BACKEND:-cupy}
overrides=("--out=$out")
[ -z "${BACKEND:-}" ] || overrides+=("--backend=$BACKEND")
[ -z "${DEVICE:-}" ] || overrides+=("--device=$DEVICE")
[ -z "${PAIR:-}" ] || overrides+=("--pair=$PAIR")
[ -z "${ROUNDS:-}" ] || overrides+=("--rounds=$ROUNDS")
overrides+=("$@")
# shellcheck disable=SC2086  # several modules
[ -z "${MODULES:-}" ] || module load $MODULES
# Compiled kernels stay: of the project's file system there is more than of $HOME's.
[ -z "${PROJECT:-}" ] || export CUPY_CACHE_DIR="${CUPY_CACHE_DIR:-$PROJECT/.cache/cupy}"

# Slurm's warning a minute before the time limit, or scancel. bash hears it only while it waits for
# a child in the background.
stop() {
    echo "job: ended by a signal; the rows so far are in $out" >&2
    [ -z "$child" ] || { kill -TERM "$child" 2>/dev/null; wait "$child"; }
    exit 143
}
trap stop TERM INT

refuse() {
    echo "job: $1" >&2
    exit 2
}

run() {
    local ranks=$1 tasks=${SLURM_NTASKS:-1} gpus=${SLURM_GPUS_ON_NODE:-} nodes=${SLURM_JOB_NUM_NODES:-1}
    shift
    [ "$ranks" -gt 0 ] || refuse "the job says no number of tasks: sbatch --ntasks=T+D"
    [ "$ranks" -le "$tasks" ] ||
        refuse "$ranks ranks, but the job has $tasks tasks: sbatch --ntasks=$ranks"
    [ "${BACKEND:-}" != cupy ] || [ -z "$gpus" ] || [ "$ranks" -le $((gpus * nodes)) ] ||
        refuse "$ranks ranks, but the job has $((gpus * nodes)) GPUs: sbatch --gpus=TYPE:$ranks"
    echo "job: ${COMMAND:-run} on $ranks ranks: $* ${overrides[*]}" >&2
    launch/local.sh "$ranks" "$@" "${overrides[@]}" &
    child=$!
    wait "$child"
    set -- $?
    child=''
    [ "$code" != 0 ] || code=$1
}
