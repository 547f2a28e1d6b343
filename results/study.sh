# shellcheck shell=bash disable=SC2034,SC2154
# Sourced by the studies of the folders beside it: one run of one. They set out, LIMIT_S, ROUNDS, and in
# `study` the flags that all their runs have; a run that fails is said so, sets `failed`, and the others go on.
failed=0
export PYTHONFAULTHANDLER=1 # ranks that a bound ends say where they were
launch=${BASH_SOURCE[0]%/*}/../launch

measure() { # ranks, flags of mpissd run
    local np=$1
    shift
    echo "== np=$np $*"
    timeout -k 5 "$LIMIT_S" "$launch/local.sh" "$np" "${study[@]}" --out="$out" --rounds="$ROUNDS" "$@" |
        grep -v '^{' || { echo "FAILED: np=$np $*"; failed=1; }
}

step() { # name, ranks, command, its flags: into OUT/name, what it says into OUT/name.log; DRY=1: only plans it
    local name=$1 ranks=$2 command=$3 code=0 begun=$SECONDS
    shift 3
    [ "$ranks" -le "$gpus" ] || return 0
    mkdir -p "$out"
    if [ -n "${DRY:-}" ]; then
        "${PYTHON:-python3}" -m mpissd "$command" --dry_run="$ranks" --out="$out/$name" "$@" \
            >"$out/$name.log" 2>&1 </dev/null || code=$?
        echo "$name: planned for $ranks GPUs, exit code $code"
        [ "$code" = 0 ] || { failed=1; tail -n 3 "$out/$name.log"; }
        return 0
    fi
    COMMAND=$command timeout -k 15 "$LIMIT_S" "$launch/local.sh" "$ranks" --out="$out/$name" \
        "$@" >"$out/$name.log" 2>&1 || code=$?
    echo "$name: $(cat "$out/$name"/runs*.jsonl 2>/dev/null | wc -l) rows, exit code $code, $((SECONDS - begun)) s"
    [ "$code" = 0 ] || failed=1
}

told() { # name, a command: what it says into OUT/name.log
    local name=$1 code=0 begun=$SECONDS
    shift
    mkdir -p "$out"
    timeout -k 15 "$LIMIT_S" "$@" >"$out/$name.log" 2>&1 </dev/null || code=$?
    echo "$name: exit code $code, $((SECONDS - begun)) s"
    [ "$code" = 0 ] || { failed=1; tail -n 3 "$out/$name.log"; }
}

within() { # seconds, a command: LIMIT_S is what BUDGET_S leaves of them; with less than 15 s left it is skipped
    local LIMIT_S=$((BUDGET_S - SECONDS))
    if [ "$LIMIT_S" -lt 15 ]; then
        echo "${*:2}: SKIPPED, $LIMIT_S s are left"
        failed=1
        return 0
    fi
    LIMIT_S=$((LIMIT_S < $1 ? LIMIT_S : $1))
    "${@:2}"
}

cells() { # NAME-T1D1: the sweep of the grid of that name beside the study, on T ranks and D drafts; flags
    local name=$1
    [[ $name =~ -T([0-9]+)D([0-9]+)$ ]] || { echo "cells: $name names no T and D" >&2; exit 2; }
    step "$name" $((BASH_REMATCH[1] + BASH_REMATCH[2])) sweep --grid="$here/$name.grid" \
        --num_drafts="${BASH_REMATCH[2]}" --repeats=1 --progress=off "${flags[@]}" "${@:2}"
}
