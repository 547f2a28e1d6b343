"""What disturbs a measurement: other processes, the hypervisor, a quota, or a GPU's clocks."""

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

if TYPE_CHECKING:  # `doctor` probes a machine whose MPI may not load
    from mpissd.engine.session.session import Machine, Session

_NAMED = 0.05  # least share that is named; quiet machines have 1 to 2%
_TEXTS = {  # by counter
    "others": "other processes used {:.0%} of its {}",
    "delayed": "its ranks waited {:.0%} of the time for a core",
    "stolen": "the hypervisor took {:.0%} of its {}",
    "throttled": "a quota stopped it {:.0%} of the time",
}
_QUOTA = "/sys/fs/cgroup/cpu.stat", "/sys/fs/cgroup/cpu/cpu.stat"
_ASK_S = 5.0
_GPU = "uuid,clocks_throttle_reasons.hw_slowdown,clocks_throttle_reasons.sw_thermal_slowdown"


def counters() -> dict[str, float]:
    """Returns those counters of seconds that this system has: the clock (wall), this rank's CPU
    time (own) and waits for a core (delayed), its cores' CPU time (busy, stolen), and a quota."""
    tick = os.sysconf("SC_CLK_TCK")
    values = {"wall": perf_counter(), "own": process_time()}
    with suppress(OSError, ValueError, IndexError):
        values["delayed"] = int(Path("/proc/self/schedstat").read_text().split()[1]) * 1e-9
    with suppress(OSError, ValueError, IndexError):
        rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        names = {f"cpu{n}" for n in usable_cores()}
        times = [[int(word) / tick for word in row[1:9]] for row in rows if row[0] in names]
        # user nice system idle iowait irq softirq steal
        values["busy"] = sum(sum(row[:3]) + row[5] + row[6] for row in times)
        values["stolen"] = sum(row[7] for row in times)
    for path in _QUOTA:  # of cgroup 2, and of 1
        with suppress(OSError, ValueError):
            fields = dict(line.split() for line in Path(path).read_text().splitlines())
            micro, nano = (int(fields.get(f"throttled_{unit}", 0)) for unit in ("usec", "time"))
            values["throttled"] = micro * 1e-6 + nano * 1e-9
    return values


def reasons(spent: Sequence[Mapping[str, float]], cores: int) -> dict[str, float]:
    """Returns {why a host was too busy for its ranks: share of time lost}. spent: by rank, how far
    the counters went. cores: that ranks may use; others may use those left free."""
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
    """Returns {what disturbed the ranks of any host: share of time lost} since the counters
    `before` of this rank; a GPU's share is unknown, 0. Collective."""
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
    """Returns what slows these GPUs of this host now; empty if nothing is known to."""

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
