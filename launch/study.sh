# shellcheck shell=bash disable=SC2034,SC2154
# Sourced by the studies: one run of one. They set out, LIMIT_S, ROUNDS, and in `study` the flags
# that all their runs have; a run that fails is said so, sets `failed`, and the others go on.
failed=0

measure() { # ranks, flags of mpissd run
    local np=$1
    shift
    echo "== np=$np $*"
    timeout -k 5 "$LIMIT_S" "${0%/*}/local.sh" "$np" "${study[@]}" --out="$out" --rounds="$ROUNDS" "$@" |
        grep -v '^{' || { echo "FAILED: np=$np $*"; failed=1; }
}
