# shellcheck shell=bash
# Sourced by the scripts beside it: PYTHON, MPIRUN and an environment in which MPI starts quickly
# and ranks share the machine well. Whatever is set already stays as it is. Only environment
# variables, no flags, so that Open MPI 4 and 5, MPICH and Intel MPI all take the same mpirun line.

default() { [ -n "${!1+set}" ] || export "$1=$2"; }

: "${PYTHON:=$(cd "${BASH_SOURCE[0]%/*}/.." && pwd)/.venv/bin/python}"
if ! command -v "$PYTHON" >/dev/null; then
    echo "no Python at $PYTHON: run make venv first, or set PYTHON" >&2
    exit 2
fi
python_bin=$(dirname "$(command -v "$PYTHON")")

# MPIRUN may hold options as well ("mpirun --hostfile hosts"). LAUNCHER=srun: srun in its place.
case ${LAUNCHER:-mpirun} in
    mpirun) : "${MPIRUN:=mpirun}" ;;
    srun) MPIRUN=srun ;;
    *) echo "LAUNCHER=$LAUNCHER: allowed: mpirun, srun" >&2; exit 2 ;;
esac
export MPIRUN
PATH=$PATH:$python_bin # where the wheel puts mpirun
mpirun_path=$(command -v "${MPIRUN%% *}") || {
    echo "no ${MPIRUN%% *}: load an MPI module, set MPIRUN, or pip install 'mpissd[mpi]'" >&2
    exit 2
}
srun=''
case ${MPIRUN%% *} in srun | */srun) srun=yes ;; esac
if [ -n "$srun" ]; then
    [ -n "${SLURM_JOB_ID:-}" ] || { echo "srun outside a job: salloc first, or sbatch launch/slurm.sh" >&2; exit 2; }
    mpirun_path=$(command -v mpirun) || mpirun_path=$python_bin/mpirun # its MPI's library is meant
fi

# mpi4py's wheels take the first MPI library that they find, and look beside Python first. It has to
# be the library of this mpirun, or each rank believes to be alone.
mpi_home=$(dirname "$(dirname "$mpirun_path")")
case $(readlink -f "$mpirun_path") in *mpich* | *hydra* | *intel*) pmi=pmi2 ;; *) pmi=pmix ;; esac
if [ ! "$mpi_home" -ef "$python_bin/.." ]; then
    libraries=libmpi.so.40:libmpi.so.12
    [ "$pmi" = pmix ] || libraries=libmpi.so.12:libmpi.so.40
    default MPI4PY_LIBMPI "$mpi_home/lib:$mpi_home/lib64:$libraries"
fi

default HOME ~ # of the password file: Open MPI does not start without one

# Where its folder does not fit, Open MPI ends by a signal and says nothing.
tmp=${TMPDIR:-/tmp}
if [ -d "$tmp" ] && { [ ! -w "$tmp" ] || [ "$(df -Pk "$tmp" | awk 'END { print $4 }')" -lt 512 ]; }; then
    echo "TMPDIR=$tmp: not writable, or less than 512 kB free: set another" >&2
    exit 2
fi

# An mpirun that was killed leaves its folder ompi.PID, and Open MPI 5 doesn't start where a later one
# gets the same process id: "The PMIx server's listener thread failed to start". Where hosts or containers
# share TMPDIR, one that runs elsewhere has no process here: its folder holds pmix.HOST.tool of another host.
this_host=$(uname -n)
for folder in "$tmp"/ompi.[0-9]*; do
    pid=${folder##*/ompi.}
    case $pid in *[!0-9]*) continue ;; esac # another release's: ompi.HOST.USER
    for tool in "$folder"/pmix.*.tool; do
        case ${tool##*/pmix.} in "${this_host%%.*}".* | '*.tool') ;; *) continue 2 ;; esac
    done
    [ ! -O "$folder" ] || { [ "$pid" != $$ ] && kill -0 "$pid" 2>/dev/null; } || rm -rf "$folder" || :
done

# NumPy's threads would fight with the other ranks: uncapped, a 2.7 ms round took 104 ms.
default OPENBLAS_NUM_THREADS 1
default MKL_NUM_THREADS 1
default OMP_NUM_THREADS 1

if [ "$(id -u)" = 0 ]; then
    default OMPI_ALLOW_RUN_AS_ROOT 1
    default OMPI_ALLOW_RUN_AS_ROOT_CONFIRM 1
fi

# More ranks than cores (or than Slurm tasks) are allowed; with fewer, the ping-pong is the same
# (1.4 µs). Ranks are not bound: a rank would share one core with its own helper threads (NCCL's,
# the watchdog); on two cores binding changed neither the median nor the tail of a GEMM round.
default OMPI_MCA_rmaps_base_oversubscribe 1 # Open MPI 4
default OMPI_MCA_hwloc_base_binding_policy none
case $MPIRUN in
    *' -host'* | *' --host'* | *' -H'*) ;; # Open MPI 5 would put all ranks on the first of the given hosts
    *) default PRTE_MCA_rmaps_default_mapping_policy :oversubscribe ;;
esac
default PRTE_MCA_hwloc_default_binding_policy none

# How ranks of this library find each other, and the cores that sbatch was asked for; a shell that is
# a step itself (srun --pty) shares its cores and GPUs.
if [ -n "$srun" ]; then
    ! srun --mpi=list 2>&1 | grep -qw $pmi || default SLURM_MPI_TYPE $pmi
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || default SRUN_CPUS_PER_TASK "$SLURM_CPUS_PER_TASK"
    default SLURM_OVERLAP 1
fi

# Open MPI 4 gives up where it finds no ssh, even on one node.
command -v ssh >/dev/null || command -v rsh >/dev/null || default OMPI_MCA_plm_rsh_agent ''
# On one node Open MPI need not look at the network: it starts in 0.2 s, not 1.2. "vader" is the
# name of shared memory that both Open MPI 4 and 5 know.
hosts_told=${PBS_NODEFILE:-}${LSB_HOSTS:-}${LSB_MCPU_HOSTS:-}${PE_HOSTFILE:-}${SLURM_HET_SIZE:-}
hosts_told+=${OMPI_MCA_orte_default_hostfile:-}${PRTE_MCA_prte_default_hostfile:-}
if [ "${SLURM_JOB_NUM_NODES:-1}" = 1 ] && [ -z "$hosts_told" ] && [ "$MPIRUN" = "${MPIRUN%% *}" ]; then
    default OMPI_MCA_btl self,vader
    default MPISSD_ONE_HOST 1 # all ranks share this machine's memory
fi
