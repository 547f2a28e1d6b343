#!/usr/bin/env bash
# Bridges-2, one node of 8 V100-32: qwen3-32b/0.6b at T=4 and a draft; 70b at T=8, which leaves no GPU
# for a draft (AR, and SD with the draft inline); 70b at T=4 and a draft with 64 of its 80 layers,
# because the whole of it is 34.2 GB a rank. Rows of it are labelled llama-3.1-70b@64L. docs/bridges2.md
#   sbatch launch/bridges2_8gpu.sh [flags]           or, checked: make submit SCRIPT=launch/bridges2_8gpu.sh
#SBATCH --job-name=mpissd-8gpu
#SBATCH --partition=GPU
#SBATCH --nodes=1
#SBATCH --gpus=v100-32:8
#SBATCH --ntasks=8
#SBATCH --cpus-per-task=5
#SBATCH --time=1:00:00
#SBATCH --signal=B:TERM@60
#SBATCH --output=slurm-%x-%j.log
. launch/job.sh || exit 2 # submit in the project's folder
tp=${TP:-4}
qwen=(--fuse --pair=32b/0.6b --lookahead=7)
run "$tp" "${qwen[@]}" --mode=ar
run $((tp + 1)) "${qwen[@]}" --mode=sd
run $((tp + 1)) "${qwen[@]}" --mode=ssd --fan_out=geometric:24
llama=(--fuse --pair=70b/1b --lookahead=7)
run 8 "${llama[@]}" --mode=ar
run 8 "${llama[@]}" --mode=sd --num_drafts=0
scaled=(--fuse --pair="70b@${NUM_LAYERS:-64}L/1b" --lookahead=7)
run "$tp" "${scaled[@]}" --mode=ar
run $((tp + 1)) "${scaled[@]}" --mode=sd
run $((tp + 1)) "${scaled[@]}" --mode=ssd --fan_out=geometric:24
exit "$code"
