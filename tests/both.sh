#!/usr/bin/env bash
# All tests in two halves at once: those that start mpirun or measure a GPU, one after the other, and
# beside them the others, whose report comes second. Exits 0 only where both halves pass.
#   PYTHON=… tests/both.sh [flags of pytest, but -m]
set -u
cd "${0%/*}/.."
alone='mpi or gpu or slurm'
report=$(mktemp)
"$PYTHON" -m pytest -p no:cacheprovider -m "not ($alone)" "$@" >"$report" 2>&1 </dev/null &
others=$!
trap 'kill $others 2>/dev/null; rm -f "$report"' EXIT
trap 'exit 130' INT TERM
code=0
"$PYTHON" -m pytest -m "$alone" "$@" </dev/null || code=$?
wait $others || code=$?
cat "$report"
[ $code = 0 ] || echo "make test: one half failed, or both (exit code $code): see both reports" >&2
exit $code
