#!/usr/bin/env bash
# Times transformers on one GPU (see measure.py); arguments are the cases.
#     results/h200-transformer/measure.sh [8b] [1b] [smollm2]
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec "${PYTHON:-python3}" results/h200-transformer/measure.py "$@"
