#!/usr/bin/env bash
# One run on any Slurm cluster. Its tasks are the ranks, and T = tasks - D:
#   sbatch --ntasks=3 --gpus=3 launch/slurm.sh --mode=ssd --pair=8b/1b
# `make submit` writes that line and checks it first.
#SBATCH --job-name=mpissd
#SBATCH --nodes=1
#SBATCH --time=1:00:00
#SBATCH --signal=B:TERM@60
#SBATCH --output=slurm-%x-%j.log
. launch/job.sh || exit 2 # submit in the project's folder
run "${SLURM_NTASKS:-0}"
exit "$code"
