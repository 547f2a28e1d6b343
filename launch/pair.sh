#!/usr/bin/env bash
# Does a draft pay for a pair of models, on so many GPUs? Records the pair, measures its acceptance
# and hits, probes this machine, and plans:
#   launch/pair.sh GPUS [flags of mpissd pair]     PROFILE=NAME|FILE: no probe; OUT=out; PYTHON, MPIRUN: see env.sh
# All files are in OUT/pair-KEY. The key depends on the flags and on the files that they name, so that
# a second call uses the recording and the probes again.
set -eu
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

# A wrong profile is refused now, not after the recording.
[ -z "$profile" ] || plan --measured=none >/dev/null
mkdir -p "$here"
if [ -s "$here/pair.npz" ]; then
    echo "$here: used again; remove it to record and probe anew"
else
    mpissd pair "$@" --out="$here/pair.npz"
fi
rm -f "$here/laws.json"
mpissd pair "$here/pair.npz" --out="$here/laws.json"

# No probe has both a draft rank and all GPUs for the target.
ways=("$((gpus - 1)) 1" "$gpus 0")
[ "$gpus" -gt 1 ] || ways=('1 0')
if [ -z "$profile" ]; then
    for way in "${ways[@]}"; do
        tp=${way% *} drafts=${way#* } name=T${way% *}D${way#* }
        if [ ! -s "$here/profiles/$name.json" ]; then
            echo "probing T=$tp D=$drafts … (its table: $here/$name.txt)"
            # A target that cannot be divided among so many GPUs is planned without.
            COMMAND=probe "${0%/*}/local.sh" "$((tp + drafts))" --forward=transformer --mode=sd \
                --deadline_s=1800 --num_drafts="$drafts" "${models[@]}" ${backend[@]+"${backend[@]}"} --out="$here" \
                --name="$name" >"$here/$name.txt" || echo "T=$tp D=$drafts is planned without" >&2
        fi
        [ ! -s "$here/profiles/$name.json" ] || profile+=${profile:+,}$here/profiles/$name.json
    done
fi
plan --laws="$here/laws.json" >"$here/plan.txt"
sed '$d' "$here/plan.txt" # without its JSON
