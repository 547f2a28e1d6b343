#!/usr/bin/env bash
# Does a draft pay for a pair of models, on so many GPUs? Records the pair, measures its acceptance
# and hits, probes this machine, and plans:
#   launch/pair.sh GPUS [flags of mpissd pair]     PROFILE=NAME|FILE: no probe; OUT=out; PYTHON, MPIRUN: see env.sh
# All files are in OUT/pair-KEY. The key depends on the flags and on the files that they name, so that
# a second call uses the recording and the probes again.
set -eu
trap 'exit 130' INT
gpus=$1 out=${OUT:-out} profile=${PROFILE:-} models=() backend=() files=''
shift
: "${PYTHON:=${0%/*}/../.venv/bin/python}"
export PYTHON
mpissd() { "$PYTHON" -m mpissd "$@" </dev/null; }

for word; do
    case $word in
        --target=* | --draft=* | --pair=*) models+=("$word") ;;
        --backend=*) backend+=("$word") ;;
    esac
    [ ! -e "${word#*=}" ] || files+=$(ls -lLR --time-style=full-iso "${word#*=}")
done
here=$out/pair-$(printf '%s\n' "$@" "$files" "$(uname -n)" | cksum | cut -d ' ' -f 1)
plan() { mpissd plan --profile="$profile" --gpus="$gpus" "${models[@]}" "$@"; }

# Runs a command with its output in a file. A terminal shows the seconds and the newest line meanwhile.
watched() { # LABEL FILE COMMAND…
    local label=$1 log=$2 code=0 ticker='' line
    shift 2
    if [ -t 2 ]; then
        while sleep 1 && kill -0 $$ 2>/dev/null; do
            line=$(tail -c 400 "$log" 2>/dev/null | tr '\r' '\n' | grep -av '^ *$' | tail -n 1)
            line="$label, $SECONDS s: $line"
            printf '\e[2K%s\r' "${line:0:99}" >&2
        done &
        ticker=$!
    else
        echo "$label …" >&2
    fi
    "$@" >"$log" 2>&1 || code=$?
    [ -z "$ticker" ] || { kill "$ticker" && wait "$ticker" || printf '\e[2K' >&2; } 2>/dev/null
    [ "$code" = 0 ] || [ "$code" = 130 ] || tr '\r' '\n' <"$log" | grep -av '^ *$' | tail -n 5 >&2
    return "$code"
}

# A wrong profile is refused now, not after the recording.
[ -z "$profile" ] || plan --measured=none >/dev/null
mkdir -p "$here"
if [ -s "$here/pair.npz" ]; then
    echo "$here: used again; remove it to record and probe anew"
else
    watched 'recording the pair' "$here/pair.txt" mpissd pair "$@" --out="$here/pair.npz"
fi
rm -f "$here/laws.json"
watched 'measuring acceptance' "$here/laws.txt" mpissd pair "$here/pair.npz" --out="$here/laws.json"
context=$(grep -o '"context": [0-9]*' "$here/laws.json" | tr -dc 0-9) || context=0

# Probes T target and D draft ranks, unless that is done, and adds the profile.
tried=''
probe() { # T D
    tried+=" $1 $2"$'\n'
    local file=$here/profiles/T$1D$2.json name=T$1D$2 mode=ssd
    [ "$2" -gt 0 ] || mode=sd
    if [ ! -s "$file" ]; then
        # A target that cannot be divided among so many GPUs is planned without.
        COMMAND=probe watched "probing T=$1 D=$2" "$here/$name.txt" "${0%/*}/local.sh" "$(($1 + $2))" \
            --forward=transformer --mode=$mode --deadline_s=1800 --num_drafts="$2" --brief --progress=on \
            $([ "${context:-0}" -le 1024 ] || echo "--context=$context") "${models[@]}" \
            ${backend[@]+"${backend[@]}"} --out="$here" --name="$name" ||
            echo "T=$1 D=$2 is planned without" >&2
    fi
    [ ! -s "$file" ] || profile+=${profile:+,}$file
}

answer() { watched 'planning' "$here/plan.txt" plan --laws="$here/laws.json"; }
if [ -n "$profile" ]; then
    answer
else
    [ "$gpus" = 1 ] || probe "$((gpus - 1))" 1
    [ "$gpus" = 1 ] || probe "$gpus" 0
    probe 1 0
    # Then what decides and is not measured, in turn.
    way=none
    while [ -n "$way" ]; do
        answer
        way=$(grep -o '"probe_first": \[[^]]*' "$here/plan.txt" | grep -o '"tp": [0-9]*, "num_drafts": [0-9]*' |
            tr -dc '0-9 \n' | tr -s ' ' | grep -vxF "$tried" | head -n 1)
        # shellcheck disable=SC2086
        [ -z "$way" ] || probe $way
    done
fi
head -n 2 "$here/laws.txt"
sed '$d' "$here/plan.txt" # without its JSON
