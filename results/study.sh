# shellcheck shell=bash disable=SC2034,SC2154
# Sourced by the studies of the folders beside it: one run of one. They set out, LIMIT_S, ROUNDS, and in
# `study` the flags that all their runs have; a run that fails is said so, sets `failed`, and the others go on.
failed=0
launch=${BASH_SOURCE[0]%/*}/../launch

measure() { # ranks, flags of mpissd run
    local np=$1
    shift
    echo "== np=$np $*"
    timeout -k 5 "$LIMIT_S" "$launch/local.sh" "$np" "${study[@]}" --out="$out" --rounds="$ROUNDS" "$@" |
        grep -v '^{' || { echo "FAILED: np=$np $*"; failed=1; }
}

step() { # name, ranks, command, its flags: into OUT/name, what it says into OUT/name.log
    local name=$1 ranks=$2 command=$3 code=0
    shift 3
    [ "$ranks" -le "$gpus" ] || return 0
    mkdir -p "$out"
    COMMAND=$command timeout -k 15 "$LIMIT_S" "$launch/local.sh" "$ranks" --out="$out/$name" \
        "$@" >"$out/$name.log" 2>&1 || code=$?
    echo "$name: $(cat "$out/$name"/runs*.jsonl 2>/dev/null | wc -l) rows, exit code $code"
    [ "$code" = 0 ] || failed=1
}
