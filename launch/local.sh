#!/usr/bin/env bash
# One run on this machine (or in this allocation):
#   launch/local.sh NP [flags of mpissd run]       PYTHON and MPIRUN: see env.sh
#   COMMAND=probe launch/local.sh NP [flags of mpissd probe]       or sweep
set -eu
case ${1:-} in
    '' | *[!0-9]*) echo "usage: launch/local.sh NP [flags of mpissd run]" >&2; exit 2 ;;
esac
# shellcheck source-path=SCRIPTDIR
. "${0%/*}/env.sh"
np=$1 command=${COMMAND:-run}
shift
# Ranks can't see whether a person is watching: mpirun stands between. The user's own flag comes later.
[ ! -t 2 ] || set -- --progress=on "$@"
# Nor can they write a part of a line: the lead shows text on the terminal itself.
[ ! -t 1 ] || { MPISSD_TERMINAL=$(uname -n):$(tty <&3) && export MPISSD_TERMINAL; } 3>&1

# A mistake in the flags costs one line here, instead of one from each rank and mpirun's comments.
trap 'exit 130' INT
(trap '' INT && MPISSD_CHECKS=1 exec "$PYTHON" -m mpissd "$command" --dry_run="$np" "$@" </dev/null >/dev/null)
exec $MPIRUN -n "$np" "$PYTHON" -m mpi4py -m mpissd "$command" "$@" </dev/null
