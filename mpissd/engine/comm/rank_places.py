"""Describes where the ranks run, for the result row: host, device, NUMA node, links between
GPUs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from mpissd.engine.backend.base import DeviceInfo
from mpissd.engine.comm.topology import Topology, usable_cores

_SMI_S = 10.0
_SMI_CHARACTERS = 8000
# nvidia-smi underlines its heading by control sequences.
_CONTROL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def seat(topology: Topology, info: DeviceInfo) -> dict[str, Any]:
    """Returns this rank's place; the first rank of a host adds how its GPUs are linked."""
    rank = topology.world.rank
    role = "draft" if topology.is_draft else "lead" if topology.leads_group else "target"
    first = info.kind == "gpu" and topology.local_rank == 0
    return {
        "rank": rank,
        "role": role,
        "host": topology.hosts[rank],
        "device": info.name,
        "uuid": info.uuid,
        "bus_id": info.bus_id,
        "numa_node": numa_node(info.bus_id),
        "cores": len(usable_cores()),
        "core_numa_nodes": core_numa_nodes(usable_cores()),
        "peer_access": peer_access() if first else None,
        "gpu_links": gpu_links() if first else None,
    }


def numa_node(bus_id: str | None, root: str = "/sys") -> int | None:
    """Returns the NUMA node of a PCI device; None if the system does not report it."""
    if bus_id is None:
        return None
    try:
        node = int(Path(root, "bus/pci/devices", bus_id.lower(), "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def core_numa_nodes(cores: set[int], root: str = "/sys") -> list[int] | None:
    """Returns the NUMA nodes of these cores, ascending; None if the system does not report them."""
    nodes = set()
    for path in Path(root, "devices/system/node").glob("node[0-9]*/cpulist"):
        try:
            listed = path.read_text().strip()
        except OSError:
            return None
        for part in filter(None, listed.split(",")):
            low, _, high = part.partition("-")
            if cores & set(range(int(low), int(high or low) + 1)):
                nodes.add(int(path.parent.name.removeprefix("node")))
    return sorted(nodes) or None


def peer_access() -> list[list[bool]]:
    """Returns [i][j]: whether GPU i of this host can map GPU j's memory, by this process's
    numbers."""
    from mpissd.engine.backend.cupy_device import can_access_peers

    return can_access_peers()


def gpu_links(command: str = "nvidia-smi") -> str | None:
    """Returns the output of `nvidia-smi topo -m` (NV#, PIX, NODE, SYS); None if it fails or takes
    10 s."""
    if shutil.which(command) is None:
        return None
    try:
        done = subprocess.run(
            [command, "topo", "-m"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SMI_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return None
    return _CONTROL.sub("", done.stdout).strip()[:_SMI_CHARACTERS] or None
