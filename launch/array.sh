#!/usr/bin/env bash
# A sweep as a job array: task I measures shard I of the grid, and a configuration that has a row is
# not measured again, so the same line goes on where scancel, a time limit or a fault ended it:
#   sbatch --array=0-7 --ntasks=3 --gpus=3 launch/array.sh --grid=FILE [flags]
#   make submit ARRAY=0-7 TP=2 GRID=FILE …     checked; ARRAY=0-7%2: two at once
# One world size an array: T + D = tasks. OUT=out/sweep is the folder of the rows. To submit some
# tasks alone, say how many shards there are: SHARDS=8 sbatch --array=2,5 …
#SBATCH --job-name=mpissd-sweep
#SBATCH --nodes=1
#SBATCH --time=4:00:00
#SBATCH --signal=B:TERM@60
#SBATCH --output=slurm-%x-%A_%a.log
OUT=${OUT:-out/sweep}
. launch/job.sh || exit 2 # submit in the project's folder
export COMMAND=sweep
first=${SLURM_ARRAY_TASK_MIN:-0} last=${SLURM_ARRAY_TASK_MAX:-0} shards=${SHARDS:-${SLURM_ARRAY_TASK_COUNT:-1}}
[ -n "${SHARDS:-}" ] || [ "$first-$last" = "0-$((shards - 1))" ] ||
    refuse "tasks $first-$last, $shards of them: sbatch --array=0-$((shards - 1)), or SHARDS=N for some of N"
run "${SLURM_NTASKS:-0}" --shard="$((${SLURM_ARRAY_TASK_ID:-0} + 1))/$shards"
exit "$code"
