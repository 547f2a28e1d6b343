#!/usr/bin/env bash
# Examines this machine for a run (mpissd doctor), which starts the ranks itself:
#   launch/doctor.sh [--tp=T] [flags of mpissd run]       PYTHON and MPIRUN: see env.sh
set -eu
# shellcheck source-path=SCRIPTDIR
if why=$( (. "${0%/*}/env.sh") 2>&1 >/dev/null); then
    # shellcheck source-path=SCRIPTDIR
    . "${0%/*}/env.sh"
else
    # Without an mpirun env.sh stops: one more thing for the table to say.
    case $why in "no "*": load an MPI module"*) ;; *) echo "$why" >&2; exit 2 ;; esac
    : "${PYTHON:=${0%/*}/../.venv/bin/python}"
fi
exec "$PYTHON" -m mpissd doctor "$@" </dev/null
