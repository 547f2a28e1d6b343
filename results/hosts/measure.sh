#!/usr/bin/env bash
# measure.sh OUT DELAY_MS… : the uses of two hosts, joined by a wire of so many milliseconds each way
#
# The hosts are two network namespaces, with a core each, MPI over TCP; the wire's process runs on the second
# one's core. All have real-time priority, so that other processes take no time from them. Needs root, two
# cores, and SmolLM2 (make venv PAIR=smollm2).
set -euo pipefail
cd "${0%/*}/../.."
out=$1
shift
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_btl=tcp,self OMPI_MCA_pml=ob1 OMPI_MCA_btl_tcp_if_include=10.9.0.0/24 PRTE_MCA_prte_if_include=10.9.0.0/24
export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 PATH=$PWD/.venv/bin:$PATH PYTHONPATH=$PWD
export PRTE_MCA_plm_ssh_agent=$PWD/results/hosts/agent.sh
wire=
clean() {
    [ -z "$wire" ] || kill "$wire"
    ip netns del first 2>/dev/null || :
    ip netns del second 2>/dev/null || :
}
trap clean EXIT
sweep() { # sweep GRID FOLDER HOSTS RANKS
    results/hosts/agent.sh 10.9.0.1 "mpirun -np $4 --host $3 --map-by :oversubscribe --bind-to none \
        chrt -r 3 python -m mpi4py -m mpissd sweep --grid=results/hosts/$1.grid --pair=smollm2 --backend=numpy \
        --num_tokens=80 --repeats=1 --out=$out/$2" </dev/null
}
mkdir -p out/hosts "$out"
for n in 0 1 2; do
    sed -n "$((4 * n + 1)),$((4 * n + 4))p" tests/data/prompts/chat.jsonl > out/hosts/chat-$n.jsonl
    sed -n "$((4 * n + 1)),$((4 * n + 4))p" tests/data/prompts/humaneval.jsonl > out/hosts/code-$n.jsonl
done
sed -n 13,15p tests/data/prompts/chat.jsonl > out/hosts/short.jsonl
for delay in "$@"; do
    ip netns add first
    ip netns add second
    chrt -f 10 taskset -c 1 python results/hosts/wire.py first second "$delay" > "$out/wire" &
    wire=$!
    until grep -q ready "$out/wire"; do sleep .1; done
    results/hosts/agent.sh 10.9.0.2 "python results/hosts/trip.py 10.9.0.2" &
    sleep 5
    results/hosts/agent.sh 10.9.0.1 "python results/hosts/trip.py 10.9.0.2 from" > "$out/$delay.trip"
    sweep remote "$delay" 10.9.0.1:1,10.9.0.2:1 2
    [ "$delay" != 0 ] || sweep local local 10.9.0.1:1 1
    ! [[ " ${SHARDED-0} " = *" $delay "* ]] || sweep sharded "sharded-$delay" 10.9.0.1:1,10.9.0.2:1 2
    kill $wire
    wait $wire 2>/dev/null || :
    wire=
    clean
done
