#!/usr/bin/env bash
# Whole models on one GPU against the memory's limit, beside PyTorch and Hugging Face (make bench-gpu runs it):
#   results/h200-whole/measure.sh OUT [MODEL…]      8b, 1b, smollm2 and inline; all by default
# Rows are added to OUT/T1.jsonl as they are measured; the table is `python -m mpissd.lab.limits.bars OUT`.
# LIMIT_S=300 for each model; RECORDING=FILE.npz decides the rounds of inline SD.
set -u -o pipefail
out=${1:?usage: results/h200-whole/measure.sh OUT [MODEL…]}
# shellcheck source=../../launch/env.sh
. "${0%/*}/../../launch/env.sh"
shift
for model in "${@:-8b 1b smollm2 inline}"; do
    for one in $model; do
        case $one in
            inline) command=(whole_rounds "$out" "${RECORDING:-${0%/*}/../recordings/smollm2-chat.npz}") ;;
            *) command=(whole "$out" "$one") ;;
        esac
        timeout -k 5 "${LIMIT_S:-300}" "$PYTHON" -m mpi4py -m "mpissd.lab.limits.${command[0]}" "${command[@]:1}" \
            </dev/null || { echo "FAILED: $one"; failed=1; }
    done
done
exit "${failed:-0}"
