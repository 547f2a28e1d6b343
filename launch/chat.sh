#!/usr/bin/env bash
# A chat in this terminal; mpissd starts the ranks itself:
#   launch/chat.sh [flags of mpissd chat]       PYTHON and MPIRUN: see env.sh
set -eu
# shellcheck source-path=SCRIPTDIR
. "${0%/*}/env.sh"
exec "$PYTHON" -m mpissd chat "$@"
