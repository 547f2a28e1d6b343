#!/usr/bin/env bash
# Replicas of a server as a job array: each task is a server with ranks of its own, which says its
# address in a folder that all nodes share while it takes requests (--register=out/replicas):
#   export MPISSD_API_KEY=…; sbatch --array=0-1 --ntasks=2 --gpus=2 launch/replica.sh --pair=… [flags of serve]
#   make submit SERVE=2 PAIR=… …                checked
# Clients use one address in front of them: python -m mpissd replicas (docs/serving.md).
#   scancel --signal=TERM --batch JOB_TASK      finishes what it has, and ends; so does the time limit
#   scancel JOB_TASK                            ends it at once: what it had fails
#SBATCH --job-name=mpissd-serve
#SBATCH --nodes=1
#SBATCH --time=4:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --output=slurm-%x-%A_%a.log
[ -f launch/serve.sh ] || { echo "job: submit in the project's folder" >&2; exit 2; }
# shellcheck disable=SC2086  # several modules
[ -z "${MODULES:-}" ] || module load $MODULES
[ -z "${PROJECT:-}" ] || export CUPY_CACHE_DIR="${CUPY_CACHE_DIR:-$PROJECT/.cache/cupy}"
# With GPUs no CuPy is an error, not a reason to answer by NumPy.
[ -z "${SLURM_GPUS_ON_NODE:-}" ] || set -- --backend=cupy "$@"
# All nodes reach it (hence the key), on a port that is free; the flags of the command line win. The
# server takes this shell's place, so that Slurm's warning reaches it and no rank.
exec launch/serve.sh --host=0.0.0.0 --port=0 --register=out/replicas "$@"
