#!/usr/bin/env bash
# Compares the machine code of every kernel but those of the whole forward with that of another commit:
#   results/h200-transformer/same_code.sh COMMIT          needs nvcc and cuobjdump; ARCHS="80 90a" to choose
# Prints a line for each set of sources and macros, and ends 1 if a kernel differs.
set -uo pipefail
commit=${1:?usage: results/h200-transformer/same_code.sh COMMIT}
cd "$(dirname "$0")/../.." || exit 1
folder=mpissd/engine/backend/kernels scratch=$(mktemp -d) different=0
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/then" && git archive "$commit" "$folder" | tar x -C "$scratch/then"

code() { # code ROOT ARCH FILES MACROS: the instructions of all kernels
    local root=$1 sources=() file
    for file in $3; do sources+=("$root/$folder/$file.cu"); done
    cat "${sources[@]}" >"$scratch/all.cu" || return 1
    # shellcheck disable=SC2086
    nvcc -std=c++17 -arch="sm_$2" $4 -cubin -o "$scratch/all.cubin" "$scratch/all.cu" || return 1
    cuobjdump -sass "$scratch/all.cubin" | grep -v '^Fatbin\|host\|compile_size'
}
compare() { # compare ARCH FILES-THEN FILES-NOW MACROS
    if code "$scratch/then" "$1" "$2" "$4" >"$scratch/a" && code . "$1" "$3" "$4" >"$scratch/b" &&
        [ -s "$scratch/a" ] && cmp -s "$scratch/a" "$scratch/b"; then
        echo "same       sm_$1  ${2##* }  $4  ($(wc -l <"$scratch/a") lines)"
    else
        echo "DIFFERENT  sm_$1  ${2##* }  $4"
        different=1
    fi
}

chain="types system hopper inbox plan columns chain"
for arch in ${ARCHS:-80 90a}; do
    for head in 32 64 128; do
        macros="-DHEAD=$head -DPAGE=256 -DQUERY_TILES=1"
        compare "$arch" "types ampere attention prefill" "types ampere cache attention prefill" "$macros"
    done
    compare "$arch" "types ampere rows" "types ampere rows" ""
    compare "$arch" "types ampere chained" "types ampere chained" ""
    for kind in "1 1 6" "1 2 5" "1 3 4" "1 4 4" "2 1 5" "2 2 4" "2 3 3" "2 4 3" "4 8 3" "2 8 4"; do
        read -r tiles rows stages <<<"$kind"
        macros="-DTILES=$tiles -DROW_TILES=$rows -DSTAGES=$stages"
        compare "$arch" "types ampere skinny" "types ampere skinny" "$macros"
    done
    compare "$arch" "types fill pack" "types fill pack" ""
    compare "$arch" "types system inbox exchange" "types system inbox exchange" ""
    compare "$arch" "types fill gather top_k read copy_ints packed_product" \
        "types fill gather top_k read copy_ints packed_product" ""
    [ "$arch" = 80 ] && continue
    for kind in "1 8 11 4 3" "2 8 10 3 4" "3 6 8 3 4" "4 4 8 2 4"; do
        read -r rows tiles slots ahead flying <<<"$kind"
        macros="-DROW_TILES=$rows -DTILES=$tiles -DSLOTS=$slots -DAHEAD=$ahead -DFLYING=$flying"
        compare "$arch" "$chain" "types system ampere hopper inbox plan columns units chain" "$macros"
    done
done
exit "$different"
