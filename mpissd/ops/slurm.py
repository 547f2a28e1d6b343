"""Makes an sbatch command from a request for ranks and GPUs, and checks cluster limits first.

Error messages name the make variable to change. Bridges-2's limits are from the PSC user guide
(https://www.psc.edu/resources/bridges-2/user-guide/, "GPU partitions").
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from mpissd.common.errors import ConfigError, unknown

_DIRECTIVE = re.compile(r"#SBATCH\s+--([a-z-]+)=(\S+)")


@dataclass(frozen=True)
class GpuType:
    """A type of GPU: its memory, and the CPU cores a job gets with each one (None: unknown)."""

    memory_bytes: int
    cores: int | None = None


BRIDGES2_TYPES = {
    "v100-16": GpuType(16_000_000_000, cores=5),
    "v100-32": GpuType(32_000_000_000, cores=5),
    "l40s-48": GpuType(48_000_000_000),
    "h100-80": GpuType(80_000_000_000),
}
SHARED = "GPU-shared"  # Bridges-2's partition for jobs on a part of one node
WHOLE = "GPU"  # Bridges-2's partition for jobs on whole nodes
_MOST_SHARED = 4
_GPUS_A_NODE = 8
_DGX2 = ("v100-32", 16)  # type and number of the GPUs in the one node that has 16 rather than 8
_DEFAULT_CPUS = 5
CLUSTERS = ("bridges2", "other")


@dataclass(frozen=True)
class JobRequest:
    """A request to Slurm for a job. Where a field is None, the script's header or the cluster's
    default decides.

    script: path of the job's script. header: the options in its #SBATCH lines. ranks: how many MPI
    ranks, each with a GPU if needs_gpus (a GPU partition is asked for GPUs in any case). exports:
    environment variables that the job gets in addition. extra: further sbatch options. flags: the
    script's arguments.
    """

    script: str
    ranks: int
    header: Mapping[str, str] = field(default_factory=dict)
    cluster: str = "bridges2"
    partition: str | None = None
    gpu_type: str | None = None
    gpus: int | None = None
    nodes: int | None = None
    cpus: int | None = None
    time: str | None = None
    account: str | None = None
    array: str | None = None
    extra: tuple[str, ...] = ()
    exports: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    needs_gpus: bool = True

    def command(self) -> list[str]:
        """Returns the words of the sbatch command, without options that the script's header has."""
        options = self.resolve().items()
        given = [f"--{name}={text}" for name, text in options if self.header.get(name) != text]
        return ["sbatch", *given, *self.extra, self.script, *self.flags]

    def resolve(self) -> dict[str, str]:
        """Returns all sbatch options by name; raises ConfigError if Slurm would refuse them."""
        if self.cluster not in CLUSTERS:
            raise unknown("CLUSTER", self.cluster, CLUSTERS)
        name = self.partition or self.header.get("partition", "")
        limited = name if self.cluster == "bridges2" and name in (SHARED, WHOLE) else None
        nodes = self.nodes or self._number("nodes") or 1
        ranks = max(self.ranks, self._number("ntasks"))
        kind, _, count = self.header.get("gpus", "").rpartition(":")
        gpu_type = self.gpu_type or kind or ("v100-32" if limited else None)
        gpus = int(count) if count.isdigit() else 0
        if self.gpus is not None:
            gpus = self.gpus
        elif limited == WHOLE:
            gpus = max(gpus, nodes * _GPUS_A_NODE)
        elif self.needs_gpus or limited:
            gpus = max(gpus, ranks)
        cpus = self.cpus or self._number("cpus-per-task") or (_DEFAULT_CPUS if limited else 0)
        if self.needs_gpus and gpus and ranks > gpus:
            fix = f"NODES={ceil(ranks / _GPUS_A_NODE)}" if limited == WHOLE else f"GPUS={ranks}"
            raise ConfigError(f"GPUS={gpus}: T + D = {ranks} ranks need one each: {fix}")
        if limited:
            _check_bridges2(limited, ranks, gpu_type or "", gpus, nodes, cpus)
        options = {
            "partition": self.partition,
            "account": self.account,
            "nodes": str(nodes),
            "ntasks": str(ranks),
            "cpus-per-task": str(cpus) if cpus else None,
            "gpus": (f"{gpu_type}:{gpus}" if gpu_type else str(gpus)) if gpus else None,
            "time": self.time,
            "array": self.array,
        }
        if self.exports:
            listed = (f"{name}={value}" for name, value in self.exports.items())
            options["export"] = ",".join(("ALL", *listed))
        return {**self.header, **{name: text for name, text in options.items() if text is not None}}

    def _number(self, name: str) -> int:
        """Returns a number from the script's header; 0 if it is not there."""
        text = self.header.get(name, "0")
        if not text.isdecimal():
            raise ConfigError(f"{self.script}: #SBATCH --{name}={text}: allowed: a whole number")
        return int(text)


def _check_bridges2(
    partition: str, ranks: int, gpu_type: str, gpus: int, nodes: int, cpus: int
) -> None:
    """Raises ConfigError if the GPU partition `partition` of Bridges-2 would refuse the request."""
    if gpu_type not in BRIDGES2_TYPES:
        raise unknown("GPU_TYPE", gpu_type, BRIDGES2_TYPES)
    if partition == SHARED and nodes > 1:
        raise ConfigError(f"NODES={nodes}: {SHARED} gives part of one node: PARTITION={WHOLE}")
    if partition == SHARED and not 1 <= gpus <= _MOST_SHARED:
        raise ConfigError(
            f"{gpus} GPUs for T + D = {ranks} ranks: {SHARED} gives 1 to {_MOST_SHARED}: "
            f"PARTITION={WHOLE} (whole nodes of 8), or a smaller TP"
        )
    num_gpus = nodes * _GPUS_A_NODE
    if partition == WHOLE and gpus != num_gpus and (gpu_type, gpus, nodes) != (*_DGX2, 1):
        raise ConfigError(
            f"GPUS={gpus}: {WHOLE} gives whole nodes: GPUS={num_gpus} with NODES={nodes} "
            "(unused ones are charged, too)"
        )
    cores = BRIDGES2_TYPES[gpu_type].cores
    if cores is not None and ranks * cpus > gpus * cores:
        raise ConfigError(
            f"CPUS={cpus}: {ranks} ranks of {cpus} cores, but {gpus} {gpu_type} come with "
            f"{gpus * cores}: allowed: up to {gpus * cores // ranks}"
        )


def read_header(script: str) -> dict[str, str]:
    """Returns the options in a script's #SBATCH lines as {name: value}. script: its text."""
    return dict(_DIRECTIVE.findall(script))
