#!/usr/bin/env bash
# Bridges-2, up to 4 GPUs of a shared node: AR, SD and SSD with T=2 and a draft. docs/bridges2.md
#   sbatch launch/bridges2_shared.sh [flags]         or, checked: make submit SCRIPT=launch/bridges2_shared.sh
# PAIR=8b/1b by default: 32b at T=2 is 31.2 GB a rank, more than a V100-32 takes.
#SBATCH --job-name=mpissd-shared
#SBATCH --partition=GPU-shared
#SBATCH --nodes=1
#SBATCH --gpus=v100-32:3
#SBATCH --ntasks=3
#SBATCH --cpus-per-task=5
#SBATCH --time=0:30:00
#SBATCH --signal=B:TERM@60
#SBATCH --output=slurm-%x-%j.log
. launch/job.sh || exit 2 # submit in the project's folder
tp=${TP:-2}
flags=(--fuse --pair=8b/1b --lookahead=4)
run "$tp" "${flags[@]}" --mode=ar
run $((tp + 1)) "${flags[@]}" --mode=sd
run $((tp + 1)) "${flags[@]}" --mode=ssd
exit "$code"
