#!/usr/bin/env bash
# Examines this machine for a run (mpissd doctor), which starts the ranks itself:
#   launch/doctor.sh [--tp=T] [flags of mpissd run]       PYTHON and MPIRUN: see env.sh
set -eu
# Without an mpirun env.sh stops: one more thing for the table to say.
# shellcheck source-path=SCRIPTDIR
if (. "${0%/*}/env.sh") >/dev/null 2>&1; then
    # shellcheck source-path=SCRIPTDIR
    . "${0%/*}/env.sh"
else
    : "${PYTHON:=${0%/*}/../.venv/bin/python}"
    command -v "$PYTHON" >/dev/null || {
        echo "no Python at $PYTHON: run make venv first, or set PYTHON" >&2
        exit 2
    }
fi
exec "$PYTHON" -m mpissd doctor "$@" </dev/null
