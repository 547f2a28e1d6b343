#!/usr/bin/env bash
# A server on this machine, which starts its ranks by itself; Ctrl-C ends it with exit code 0:
#   launch/serve.sh [flags of mpissd serve]       PYTHON and MPIRUN: see env.sh
# MPISSD_API_KEY is the key that clients send; a command line would show it to every user.
set -eu
# shellcheck source-path=SCRIPTDIR
. "${0%/*}/env.sh"
exec "$PYTHON" -m mpissd serve "$@"
