#!/usr/bin/env bash
# A server with a real pair (SmolLM2) under a load, on one GPU: AR, SD with the draft inline, and auto with the
# draft inline; on two GPUs also T = 2, SSD and auto with a draft rank. Behind each load 12 requests are asked at once
# and one by one: their answers have to be the same, and those of the first way. One table at the end.
#   results/serving/gpu.sh OUT [GPUS]       some 4 minutes on one GPU, 6 on two
# RATES=16,32,64,128 requests a second, for DURATION=10 s each; MODES="ar inline auto-inline", on two GPUs "ar ar2
# inline2 ssd auto" (ar2, inline2: T = 2). Two servers of a GPU each at a rate are one of the first at half of it.
# FLAGS="--pair=smollm2", of mpissd serve; LIMIT_S=180 for a start, and for a load beyond its arrivals.
# On CPUs, a core a rank (some 9 minutes):
#   FLAGS="--pair=smollm2 --backend=numpy" RATES=.5,1,1.5 DURATION=30 \
#   MODES="ar inline ssd auto" results/serving/gpu.sh OUT 2
# Where GPUS is not said and there is no GPU, it says so and ends 2.
set -u -o pipefail
out=${1:?usage: results/serving/gpu.sh OUT [GPUS]}
here=${0%/*}
# shellcheck source=../../launch/env.sh
. "$here/../../launch/env.sh"
gpus=${2:-$("$PYTHON" -c 'import cupy; print(cupy.cuda.runtime.getDeviceCount())' 2>/dev/null)} ||
    { echo "gpu.sh: no GPU, or no CuPy" >&2; exit 2; }
LIMIT_S=${LIMIT_S:-180} DURATION=${DURATION:-10} failed=0
[ "$gpus" -lt 2 ] && default_modes="ar inline auto-inline" || default_modes="ar ar2 inline2 ssd auto"
mkdir -p "$out" && rm -f "$out/answers.json" "$out/loads.jsonl"
log=$out/serve.log server=
trap '[ -z "$server" ] || kill -TERM "$server" 2>/dev/null' EXIT
: >"$log"

ready() { # process of the server: says its URL once it takes requests, within LIMIT_S
    local n url
    for ((n = 0; n < 2 * LIMIT_S; n++)); do
        url=$(grep -o 'http://[^ ]*/v1' "$out/said" 2>/dev/null) && { echo "$url"; return; }
        kill -0 "$1" 2>/dev/null || return 1
        sleep .5
    done
    return 1
}

serve_and_load() { # flags of mpissd serve
    local url rates=${RATES:-16,32,64,128} commas
    commas=${rates//[!,]/}
    echo "== $*"
    : >"$out/said"
    # shellcheck disable=SC2086
    "$here/../../launch/serve.sh" ${FLAGS:---pair=smollm2} --port=0 --max_running=32 --max_queue=512 "$@" \
        >"$out/said" 2>>"$log" </dev/null &
    server=$!
    if url=$(ready "$server"); then
        timeout -k 5 "$((LIMIT_S + (${#commas} + 1) * DURATION))" "$PYTHON" -m mpissd load --url="$url" --out="$out" \
            --prompts="$here/prompts.jsonl" --rate="$rates" --duration="$DURATION" | grep -v '^{' &&
            timeout -k 5 "$LIMIT_S" "$PYTHON" "$here/same.py" "$url" "$out/answers.json"
    else
        false
    fi || { echo "FAILED: $* ($log says why)"; failed=1; }
    kill -TERM "$server" 2>/dev/null
    wait "$server" || { echo "FAILED: the server ended with $?"; failed=1; }
    server=
}

for mode in ${MODES:-$default_modes}; do
    case $mode in
        inline) serve_and_load --mode=sd --num_drafts=0 ;;
        ar2) serve_and_load --mode=ar --tp=2 ;;
        inline2) serve_and_load --mode=sd --num_drafts=0 --tp=2 ;;
        auto-inline) serve_and_load --mode=auto --num_drafts=0 ;;
        *) serve_and_load --mode="$mode" ;;
    esac
done
rm -f "$out/said" "$out/answers.json"
"$PYTHON" "$here/table.py" "$out/loads.jsonl" || failed=1
exit $failed
