#!/usr/bin/env bash
# The predictor against random configurations on GPUs, 8b/1b with T=1 and (3 GPUs) 70b/1b with T=2:
#   results/h200-predictions/measure.sh OUT GPUS [flags of predictions.py]
set -eu
out=${1:?usage: results/h200-predictions/measure.sh OUT GPUS} gpus=${2:?usage: results/h200-predictions/measure.sh OUT GPUS}
shift 2
# shellcheck source=../../launch/env.sh
. "${0%/*}/../../launch/env.sh"
exec "$PYTHON" "${0%/*}/../emulated-predictions/predictions.py" "$out" --gpus="$gpus" --cells=12 "$@"
