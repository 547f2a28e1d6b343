#!/usr/bin/env bash
# 8b/1b and 70b/1b on two GPUs: what SSD is worth beside the strongest other use of both.
#   results/two-gpus/measure.sh OUT [steps, in this order; default: all]
# In the project's folder, nine minutes: BUDGET_S=530 bounds all steps, each has a bound of its own, and what the first
# visit did not reach comes first. Rows are written as they are measured; the table stands last. SMOLLM2=FILE.gguf adds real text.
# PYTHON, MPIRUN: launch/env.sh. DRY=1 only plans. A rehearsal: BACKEND=emulated … with FLAGS="--device=null".
set -u -o pipefail
all=(idle serve 70b-more real rivals advised inline 70b text probe-real bare bare-inline crowd crowd-inline probe batches
    batches-inline)
usage="usage: results/two-gpus/measure.sh OUT [${all[*]}]"
out=${1:?$usage} gpus=2 here=${0%/*} BUDGET_S=${BUDGET_S:-530}
shift
# shellcheck source-path=SCRIPTDIR
. "$here/../study.sh"
# shellcheck source-path=SCRIPTDIR
. "$here/../../launch/env.sh"
read -ra flags <<<"--backend=${BACKEND:-cupy} ${FLAGS:-}"
[ $# -gt 0 ] || set -- "${all[@]}"

text() { # equal tokens by AR, SD inline, SD and SSD, T = 1 and 2
    local models=(--target="${SMOLLM2:-}" --draft=smollm2-draft)
    [ -n "${SMOLLM2:-}" ] || { echo "text: SKIPPED, SMOLLM2 names no file"; return 0; }
    cells text-T1D1 "${models[@]}"
    cells text-T2D0 "${models[@]}"
}

serve() { # SmolLM2 under a load: auto with a draft GPU beside AR and SD inline over both
    local script=$here/../serving/gpu.sh
    [ -n "${SMOLLM2:-}" ] && [ -x "$script" ] || { echo "serve: SKIPPED, no SMOLLM2 or no $script"; return 0; }
    [ -z "${DRY:-}" ] || return 0
    MODES=${MODES:-ar2 inline2 auto} RATES=${RATES:-16,64,256} DURATION=${DURATION:-6} \
        FLAGS="--target=$SMOLLM2 --draft=smollm2-draft --backend=${BACKEND:-cupy}" \
        timeout -k 15 "$LIMIT_S" "$script" "$out/serve" 2 || failed=1
}

for one; do
    case $one in
        idle) within 90 cells idle-T1D1 ;;
        crowd) within 90 cells crowd-T1D1 ;;
        crowd-inline) within 80 cells crowd-T2D0 ;;
        real) within 100 cells real-T1D1 ;;
        rivals) within 80 cells real-T2D0 ;;
        advised) within 70 cells advised-T1D1 ;;
        inline) within 60 cells advised-T2D0 ;;
        70b) within 90 cells 70b-T2D0 ;;
        text) within 40 text ;;
        probe-real)
            within 60 step probe-real 2 probe --pair=8b/1b --forward=transformer --context=512 --lookahead=4 \
                --name=8b-1b-T1D1-transformer --progress=off "${flags[@]}"
            ;;
        bare) within 90 cells bare-T1D1 ;;
        bare-inline) within 60 cells bare-T2D0 ;;
        probe)
            within 60 step probe 2 probe --pair=70b/1b --fuse --lm_head --lookahead=7 --mode=sd --num_drafts=0 \
                --name=70b-1b-T2D0-head --progress=off "${flags[@]}"
            ;;
        batches) within 60 cells batches-T1D1 ;;
        batches-inline) within 40 cells batches-T2D0 ;;
        serve) within 240 serve ;;
        70b-more) within 120 cells 70b-more-T2D0 ;;
        *) echo "$usage" >&2; exit 2 ;;
    esac
done
[ -z "${DRY:-}" ] || exit $failed
rivals=() # of another visit: without them no claim, as uses of the same GPUs would be missing
[ "${BACKEND:-cupy}" != cupy ] || rivals=("$here"/../h200-pairs/runs_t[12].jsonl)
"$PYTHON" "$here/../beside.py" table "$here/expected.jsonl" "$out" "${rivals[@]}" || failed=1
"$PYTHON" "$here/../idle.py" "$out/idle-T1D1" "$out/real-T1D1"
exit $failed
