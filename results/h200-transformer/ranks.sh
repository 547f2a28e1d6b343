#!/usr/bin/env bash
# One kernel of ranks that share a model, on two GPUs of one host: bits and tokens, then forwards against their floor beside
# those by separate kernels, in the same job.
#   results/h200-transformer/ranks.sh OUT [steps: check 70b 8b, default all]
# In the project's folder, 100 s at most (BUDGET_S). ROWS=1,5,8 CONTEXTS=512 choose forwards; WHOLE="0 2": MPISSD_WHOLE of each run.
# BACKEND=emulated rehearses the forwards. PYTHON, MPIRUN: launch/env.sh.
set -u -o pipefail
out=${1:?usage: results/h200-transformer/ranks.sh OUT [check 70b 8b]} BUDGET_S=${BUDGET_S:-100}
here=${0%/*}
# shellcheck source-path=SCRIPTDIR
. "$here/../study.sh"
# shellcheck source-path=SCRIPTDIR
. "$here/../../launch/env.sh"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OPENBLAS_NUM_THREADS=4
shift
[ $# -gt 0 ] || set -- check 70b 8b

ranks() { # name, command: on two ranks
    told "$1" $MPIRUN -np 2 "$PYTHON" -m mpi4py "${@:2}"
    cat "$out/$1.log"
}

forwards() { # model, seconds: by each kind of kernels
    for whole in ${WHOLE:-0 2}; do
        MPISSD_WHOLE=$whole within "$2" ranks "$1-$whole" results/h200-transformer/ranks.py "$1" \
            --backend="${BACKEND:-cupy}" --rows="${ROWS:-1,5,8}" --contexts="${CONTEXTS:-512}" $([ "$whole" = 0 ] || echo --trace)
    done
}

for one; do
    case $one in
        check) within 50 ranks check tests/gpu/mpi_transformer_check.py --whole ;;
        8b) forwards llama-3.1-8b 25 ;;
        70b) forwards llama-3.1-70b 30 ;;
        *) echo "no step $one" >&2; exit 2 ;;
    esac
done
exit $failed
