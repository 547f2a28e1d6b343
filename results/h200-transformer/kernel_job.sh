#!/usr/bin/env bash
# What one H200 has to say about the whole forward in one kernel, in at most 9 minutes (PLAN.md has the figures
# that are expected):
#   results/h200-transformer/kernel_job.sh OUT
# Compiles all forms while the tests of text and bits run, then times the separate kernels and each form at the
# bars' shapes, 1B before 8B before SmolLM2; the remaining tests last. Rows go to OUT/forms.jsonl as they are
# measured, logs to OUT/*.log, the table to OUT/table.md. BUDGET_S=540 for all of it; DRY=1 says what would run.
# Ends 1 if a step failed, or a form's logits are not those of the others.
set -uo pipefail
out=${1:?usage: results/h200-transformer/kernel_job.sh OUT}
mkdir -p "$out" && out=$(cd "$out" && pwd)
cd "$(dirname "$0")/../.." || exit 1
# shellcheck source=../../launch/env.sh
. launch/env.sh
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=4 OPENBLAS_NUM_THREADS=4
BUDGET_S=${BUDGET_S:-540} failed=0 verdicts=()

step() { # step NAME SECONDS COMMAND…: runs it within what is left, its output in OUT/NAME.log
    local name=$1 seconds=$(($2 < BUDGET_S - SECONDS ? $2 : BUDGET_S - SECONDS)) code=0
    shift 2
    if [ "${DRY:-0}" != 0 ]; then
        echo "$name ($seconds s): $*"
        return
    fi
    if ((seconds < 10)); then
        verdicts+=("left out  $name") failed=1
        return
    fi
    timeout -k 5 "$seconds" "$@" </dev/null >"$out/$name.log" 2>&1 || code=$?
    if [[ $name =~ parity|tests ]] && ! tail -n 1 "$out/$name.log" | grep -q passed; then
        code=${code/#0/3} # what is skipped proves nothing
    fi
    tail -n 3 "$out/$name.log"
    ((code == 0)) || failed=1
    verdicts+=("$( ((code == 0)) && echo pass || echo "FAIL ($code)")  $name, $SECONDS s  $(tail -n 1 "$out/$name.log")")
}

forms=("$PYTHON" results/h200-transformer/forms.py "$out")
tests=("$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu/test_transformer.py -k)
first="bits or twins or real_models"
if [ "${DRY:-0}" = 0 ]; then
    : >"$out/forms.jsonl"
    timeout -k 5 150 "${forms[@]}" --compile </dev/null >"$out/compile.log" 2>&1 &
    compiling=$!
fi
step parity 150 "${tests[@]}" "$first"
[ -z "${compiling:-}" ] || wait "$compiling" || { verdicts+=("FAIL  compile: $(tail -n 1 "$out/compile.log")") failed=1; }
step 1b 110 "${forms[@]}" 1b --seconds=100
step 8b 200 "${forms[@]}" 8b --seconds=180
step smollm2 60 "${forms[@]}" smollm2 --seconds=50
step tests 240 "${tests[@]}" "not ($first)"
[ "${DRY:-0}" = 0 ] || exit 0
"${forms[@]}" --table | tee "$out/table.md"
! grep -q WRONG "$out/table.md" || failed=1
printf '%s\n' "" "${verdicts[@]}"
exit "$failed"
