#!/usr/bin/env bash
# Loads on emulated H100s: every use of one and two GPUs by 8B/1B, of four, five and eight by 70B/1B,
# at six rates from idle to saturation, and all at once, b = 1 … 128 together. In virtual time: no
# GPU and no mpirun, some minutes on one core.
#   results/serving/emulated.sh OUT [further flags of mpissd load, for all]
set -eu
out=$1
shift
: "${PYTHON:=.venv/bin/python}"
prompts=${0%/*}/prompts.jsonl
all=(--prompts="$prompts" --device=h100 --out="$out" "$@")

load() { # flags of mpissd load
    echo "== $*"
    "$PYTHON" -m mpissd load "${all[@]}" "$@" | grep -v '^{'
}

at_once() { # flags of mpissd load: b sequences together, for every b
    local b
    for b in 1 2 4 8 16 32 64 128; do
        load --rate=inf --max_running=$b --requests=$((b < 6 ? 32 : 6 * b)) "$@"
    done
}

some=(--requests=400 --max_running=128)
small=("${some[@]}" --pair=8b/1b "--rate=4,16,48,96,144,192" --ttft=0.1 --tpot=0.005)
for use in --mode=ar "--mode=sd --num_drafts=0" --mode=sd --mode=ssd --mode=auto; do
    load "${small[@]}" --tp=1 $use
done
for use in --mode=ar "--mode=sd --num_drafts=0"; do
    load "${small[@]}" --tp=2 $use
    load "${small[@]}" --tp=1 --replicas=2 $use
done

large=("${some[@]}" --pair=70b/1b "--rate=1,4,16,32,48,64" --ttft=0.2 --tpot=0.012)
for use in --mode=ar "--mode=sd --num_drafts=0" --mode=sd --mode=ssd --mode=auto; do
    load "${large[@]}" --tp=4 $use
done
for use in --mode=ar "--mode=sd --num_drafts=0"; do
    load "${large[@]}" --tp=8 $use
    load "${large[@]}" --tp=4 --replicas=2 $use
done

for use in --mode=ar "--mode=sd --num_drafts=0" --mode=sd --mode=ssd --mode=auto; do
    at_once --pair=8b/1b --tp=1 $use
    at_once --pair=70b/1b --tp=4 $use
done
for use in --mode=ar "--mode=sd --num_drafts=0"; do
    at_once --pair=8b/1b --tp=2 $use
    at_once --pair=70b/1b --tp=8 $use
done
