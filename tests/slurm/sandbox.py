"""A Slurm of its own on this machine: one node of fake GPUs, on loopback, in a temporary folder.

Ports are free ones and munge has a key and a socket of its own, so several may run at once. Needs
root: slurmd starts jobs as their users, and a fake GPU is a character device.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.scripts import spawn, until

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol")
START_S = 30.0  # of a daemon; a second on an idle machine
COMMAND_S = 60.0
NULL_DEVICE = os.makedev(1, 3)

# Bridges-2's partitions, and two of its nodes in one: 8 V100s, 8 H100s, 40 cores. `sbatch --wait`
# asks every 2 s as long as MinJobAge is at most 4, and every 8 or 32 s if it is more.
CONFIG = """\
ClusterName=sandbox
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1
KillWait=10
MinJobAge=4
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=40 RealMemory=1000 Gres=gpu:v100-32:8,gpu:h100-80:8
PartitionName=GPU Nodes={host} DefaultTime=1:00:00 MaxTime=48:00:00 State=UP
PartitionName=GPU-shared Nodes={host} DefaultTime=1:00:00 MaxTime=48:00:00 State=UP Default=YES
"""
GPUS = """\
AutoDetect=off
Name=gpu Type=v100-32 File={folder}/dev/gpu[0-7]
Name=gpu Type=h100-80 File={folder}/dev/gpu[8-15]
"""


def why_not() -> str:
    """Name the requirements of a sandbox that this machine lacks; empty if none."""
    if missing := [name for name in PROGRAMS if which(name) is None]:
        return ", ".join(missing)
    if os.geteuid() != 0:
        return "root, for a Slurm of its own"
    with tempfile.TemporaryDirectory() as folder:
        try:
            os.mknod(Path(folder, "gpu"), stat.S_IFCHR | 0o666, NULL_DEVICE)
        except OSError as error:
            return f"device files, for fake GPUs ({error.strerror})"
    return ""


def which(program: str) -> str | None:
    """Daemons lie in /usr/sbin, which some PATHs lack."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Sandbox:
    """A context: Slurm runs inside it, and none of its processes outside."""

    def __init__(self) -> None:
        self.env: dict[str, str] = {}
        self.left: list[int] = []  # what had to be killed at the end
        self._daemons: list[subprocess.Popen[str]] = []
        self._held = ExitStack()

    def __enter__(self) -> Sandbox:
        with ExitStack() as undo:
            undo.callback(self._end)
            self.folder = Path(self._held.enter_context(tempfile.TemporaryDirectory("-slurm")))
            self.folder.chmod(0o755)
            self._write()
            told = os.environ.items()
            outer = ("SLURM_", "SBATCH_", "MAKE", "MFLAGS")  # an allocation's, a make's around us
            self.env = {k: v for k, v in told if not k.startswith(outer)}
            self.env["SLURM_CONF"] = str(self.folder / "slurm.conf")
            self._start_munge()
            self._start("slurmctld", "-D")
            self._start("slurmd", "-D")
            until(lambda: "idle" in self.ask("sinfo", "-h", "-o", "%T"), START_S, "an idle node")
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, *command: str) -> str:
        """stdout of a Slurm command."""
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=COMMAND_S
        )
        return done.stdout

    def processes(self, job: str = "") -> list[int]:
        """All processes of this Slurm: daemons, jobs and their children; or of one job of it."""
        wanted = {f"SLURM_CONF={self.env['SLURM_CONF']}"}
        if job:
            wanted.add(f"SLURM_JOB_ID={job}")
        pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        return [pid for pid in pids if wanted <= environ(pid)]

    def _write(self) -> None:
        for name in ("state", "spool", "dev", "munge"):
            (self.folder / name).mkdir(mode=0o755)
        for number in range(16):
            os.mknod(self.folder / "dev" / f"gpu{number}", stat.S_IFCHR | 0o666, NULL_DEVICE)
        with socket.socket() as ctld, socket.socket() as slurmd:
            for each in (ctld, slurmd):
                each.bind(("127.0.0.1", 0))
            told = {
                "folder": self.folder,
                "host": socket.gethostname().partition(".")[0],
                "ctld_port": ctld.getsockname()[1],
                "slurmd_port": slurmd.getsockname()[1],
            }
        (self.folder / "slurm.conf").write_text(CONFIG.format(**told))
        (self.folder / "gres.conf").write_text(GPUS.format(**told))
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        key = folder / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = [f"--{name}-file={folder / name}" for name in ("key", "log", "pid", "seed")]
        self._start("munged", "--foreground", "--force", f"--socket={folder / 'socket'}", *files)
        until((folder / "socket").exists, START_S, "munge's socket")

    def _start(self, program: str, *arguments: str) -> None:
        found = which(program)
        assert found is not None
        with (self.folder / f"{program}.log").open("wb") as log:
            made = spawn(found, *arguments, env=self.env, stdout=log, stderr=log)
        self._daemons.append(made)

    def _end(self) -> None:
        """Jobs first, by their own Slurm; then the daemons; then whatever is left."""
        if len(self._daemons) > 1:
            self.ask("scancel", "--full", "--user=root")
            with suppress(AssertionError):
                until(lambda: not self.ask("squeue", "-h"), 15.0)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self.left = self.processes() if self.env else []
        for pid in self.left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._daemons.clear()
        self._held.close()


def environ(pid: int) -> set[str]:
    """A process's environment, name=value; empty if it is gone."""
    try:
        told = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return set()
    return set(told.decode(errors="replace").split("\0"))
