"""Finds what disturbs a measurement: other processes, hypervisor, CPU quota, or slow GPU clocks."""

from __future__ import annotations

import os
import subprocess
from collections import ChainMap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING

from mpissd.engine.comm.topology import usable_cores

if TYPE_CHECKING:  # A real import would load MPI, but the command `doctor` must run without MPI.
    from mpissd.engine.session.session import Machine, Session

_NAMED = 0.05  # smallest share of time that is reported as a disturbance; usual are 1 to 2%
_TEXTS = {  # texts for each kind of disturbance
    "others": "other processes used {:.0%} of its {}",
    "delayed": "its ranks waited {:.0%} of the time for a core",
    "stolen": "the hypervisor took {:.0%} of its {}",
    "throttled": "a quota stopped it {:.0%} of the time",
}
_QUOTA = "/sys/fs/cgroup/cpu.stat", "/sys/fs/cgroup/cpu/cpu.stat"
_ASK_S = 5.0
_GPU = "uuid,clocks_throttle_reasons.hw_slowdown,clocks_throttle_reasons.sw_thermal_slowdown"


def counters() -> dict[str, float]:
    """Returns {name: seconds} of the operating system's counters, as far as they exist. wall: the
    clock. own: CPU time of this process. delayed: its waits for a core. busy, stolen: time of all
    usable cores that processes used, and that the hypervisor took. throttled: time for which a CPU
    quota stopped this process."""
    tick = os.sysconf("SC_CLK_TCK")
    values = {"wall": perf_counter(), "own": process_time()}
    with suppress(OSError, ValueError, IndexError):
        values["delayed"] = int(Path("/proc/self/schedstat").read_text().split()[1]) * 1e-9
    with suppress(OSError, ValueError, IndexError):
        rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        names = {f"cpu{n}" for n in usable_cores()}
        times = [[int(word) / tick for word in row[1:9]] for row in rows if row[0] in names]
        # A line of /proc/stat has the times: user nice system idle iowait irq softirq steal.
        values["busy"] = sum(sum(row[:3]) + row[5] + row[6] for row in times)
        values["stolen"] = sum(row[7] for row in times)
    for path in _QUOTA:  # files of cgroup version 2 and version 1
        with suppress(OSError, ValueError):
            fields = dict(line.split() for line in Path(path).read_text().splitlines())
            micro, nano = (int(fields.get(f"throttled_{unit}", 0)) for unit in ("usec", "time"))
            values["throttled"] = micro * 1e-6 + nano * 1e-9
    return values


def reasons(spent: Sequence[Mapping[str, float]], cores: int) -> dict[str, float]:
    """Returns {text on a disturbance of one host's ranks: share of time lost}. spent: for each rank
    of the host, the increase of its `counters`. cores: number of cores that the ranks may use;
    other processes do no harm on cores beyond one for each rank."""
    ranks = len(spent)
    first = spent[0]
    used = min(ranks, cores)
    wall_s = max(first["wall"], 1e-9)
    shares = {"throttled": first.get("throttled", 0.0) / wall_s}
    shares["delayed"] = sum(of.get("delayed", 0.0) for of in spent) / (ranks * wall_s)
    shares["stolen"] = first.get("stolen", 0.0) / (used * wall_s)
    others = first.get("busy", 0.0) - sum(of["own"] for of in spent)
    shares["others"] = (others - max(0, cores - ranks) * wall_s) / (used * wall_s)
    what = "core" if used == 1 else f"{used} cores"
    return {text.format(shares[name], what): shares[name] for name, text in _TEXTS.items()
            if shares[name] >= _NAMED}  # fmt: skip


def disturbances(before: Mapping[str, float], session: Session | Machine) -> dict[str, float]:
    """Returns {text on a disturbance of any host's ranks: share of time lost} since this rank read
    the counters `before`. The share lost by a disturbed GPU is unknown and given as 0. All ranks
    must call this, and get the same result."""
    topology = session.topology
    rank = topology.world.rank
    now = counters()
    host = topology.hosts[rank]
    spent = {name: now[name] - value for name, value in before.items() if name in now}
    ranks = topology.world.allgather((host, spent, session.infos[rank].uuid))
    mine = [(took, uuid) for name, took, uuid in ranks if name == host]
    texts = reasons([took for took, _ in mine], len(usable_cores()))
    if (uuids := [uuid for _, uuid in mine if uuid]) and topology.local_rank == 0:
        texts |= dict.fromkeys(gpu_reasons(uuids), 0.0)
    return dict(ChainMap(*topology.world.allgather(texts)))


def gpu_reasons(uuids: Sequence[str], command: str = "nvidia-smi") -> list[str]:
    """Returns texts on what slows the GPUs with the ids `uuids` of this host now, by nvidia-smi; []
    if nothing does, or if nvidia-smi is missing."""

    def asked(query: str) -> list[str]:
        words = [command, query, "--format=csv,noheader"]
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(words, capture_output=True, text=True, timeout=_ASK_S, check=True)
            return done.stdout.splitlines()
        return []

    states = [line.split(", ") for line in asked(f"--query-gpu={_GPU}")]
    is_slow = any(uuid in uuids and "Active" in slowed for uuid, *slowed in states)
    users = [line.split(",")[0] for line in asked("--query-compute-apps=gpu_uuid,pid")]
    is_shared = any(users.count(uuid) > uuids.count(uuid) for uuid in uuids)
    slow = ["a GPU is hot or short of power, and its clock low"] * is_slow
    return slow + ["another process is on one of its GPUs"] * is_shared
