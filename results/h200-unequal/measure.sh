#!/usr/bin/env bash
# measure.sh OUT: drafts on a core of the host of one GPU, beside inline drafts, lookups and AR (3 minutes)
#
# Needs a GPU, three cores and SmolLM2 (make venv PAIR=smollm2).
set -euo pipefail
cd "${0%/*}/../.."
out=$1
. launch/env.sh
mkdir -p "$out"
head -n 40 tests/data/prompts/chat.jsonl > "$out/chat.jsonl"
sweep() { # sweep GRID FLAG…: all uses of a grid in one job of two ranks
    $MPIRUN -np 2 "$PYTHON" -m mpi4py -m mpissd sweep --grid="results/h200-unequal/$1.grid" --backend=cupy \
        --draft_backend=numpy --repeats=2 --out="$out/$1" "${@:2}" </dev/null
}
sweep 8b --target=8b --draft=results/h200-unequal/draft/config.json --forward=transformer --workload=replay
sweep smollm2 --pair=smollm2 --prompts="$out/chat.jsonl"
