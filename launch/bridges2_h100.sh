#!/usr/bin/env bash
# Bridges-2, 70b at T=4 and a draft on H100s: 5 GPUs are more than GPU-shared gives, so a whole node.
#   sbatch launch/bridges2_h100.sh [flags]           or, checked: make submit SCRIPT=launch/bridges2_h100.sh
#SBATCH --job-name=mpissd-h100
#SBATCH --partition=GPU
#SBATCH --nodes=1
#SBATCH --gpus=h100-80:8
#SBATCH --ntasks=5
#SBATCH --cpus-per-task=5
#SBATCH --time=0:30:00
#SBATCH --signal=B:TERM@60
#SBATCH --output=slurm-%x-%j.log
. launch/job.sh || exit 2 # submit in the project's folder
tp=${TP:-4}
flags=(--fuse --pair=70b/1b --lookahead=7)
run "$tp" "${flags[@]}" --mode=ar
run $((tp + 1)) "${flags[@]}" --mode=sd
run $((tp + 1)) "${flags[@]}" --mode=ssd --fan_out=geometric:24
exit "$code"
