"""Asks nvidia-smi for the GPUs, their users and their links, and reads its answers.

nvidia-smi prints [N/A], [Not Supported] or [Unknown Error] for a field that the driver or GPU
lacks.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
from collections.abc import Callable, Mapping
from typing import TypeVar

from mpissd.ops.doctor.child import ASK_S, ask
from mpissd.ops.doctor.facts import Gpu, GpuUser

Value = TypeVar("Value")

_FIELDS = (
    "index uuid pci.bus_id name driver_version compute_cap memory.total memory.free "
    "persistence_mode compute_mode mig.mode.current ecc.errors.uncorrected.volatile.total "
    "clocks.sm clocks.max.sm"
).split()
# Two names of one field; drivers from 535 on know the first.
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
_USERS = "gpu_uuid,pid,used_memory,process_name"
_MIB = 1 << 20
_LINK = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS")


def read_gpus(command: str = "nvidia-smi", timeout_s: float = ASK_S) -> tuple[list[Gpu], str]:
    """Returns (this host's GPUs, why there are none); ([], "") where there is no nvidia-smi."""
    if shutil.which(command) is None:
        return [], ""
    problem = ""
    for reason in _REASONS:
        fields = [*_FIELDS, reason]
        answer = ask([command, f"--query-gpu={','.join(fields)}", "--format=csv"], timeout_s)
        if not answer.problem:
            gpus = parse_gpus(answer.out)
            return gpus, "" if gpus else f"{command}: {answer.out.strip()[:200] or 'no answer'}"
        problem = problem or answer.problem
        if (
            answer.code is None
        ):  # nvidia-smi hangs, and would hang with the field's other name as well
            break
    return [], f"{command}: {problem}"


def parse_gpus(text: str) -> list[Gpu]:
    """Returns the GPUs in the output of `--query-gpu=… --format=csv`; skips malformed lines."""
    gpus = []
    for row in _rows(text):
        index, bus_id = _whole(row.get("index", "")), row.get("pci.bus_id", "")
        if index is None or not bus_id:
            continue
        reason = next((row[name] for name in _REASONS if name in row), "")
        gpus.append(
            Gpu(
                index=index,
                uuid=row.get("uuid", ""),
                bus_id=short_bus_id(bus_id),
                name=row.get("name", ""),
                driver=row.get("driver_version", ""),
                capability=_parsed(row.get("compute_cap", ""), float),
                memory_total=_mib(row.get("memory.total", "")),
                memory_free=_mib(row.get("memory.free", "")),
                persistence=_switch(row.get("persistence_mode", "")),
                compute_mode=row.get("compute_mode", ""),
                mig=_switch(row.get("mig.mode.current", "")),
                ecc_errors=_whole(row.get("ecc.errors.uncorrected.volatile.total", "")),
                clock=_whole(row.get("clocks.current.sm", row.get("clocks.sm", ""))),
                max_clock=_whole(row.get("clocks.max.sm", "")),
                throttle=_parsed(reason, lambda mask: int(mask, 16)),
            )
        )
    return gpus


def read_users(command: str = "nvidia-smi", timeout_s: float = ASK_S) -> list[GpuUser]:
    """Returns the processes that use this host's GPUs, as far as the driver says."""
    answer = ask([command, f"--query-compute-apps={_USERS}", "--format=csv"], timeout_s)
    return [] if answer.problem else parse_users(answer.out)


def parse_users(text: str) -> list[GpuUser]:
    """Returns the processes in the output of `--query-compute-apps=… --format=csv`."""
    users = []
    for row in _rows(text):
        pid = _whole(row.get("pid", ""))
        if pid is not None:
            used = row.get("used_gpu_memory", row.get("used_memory", ""))
            name = row.get("process_name", "")
            users.append(GpuUser(row.get("gpu_uuid", ""), pid, name, _mib(used)))
    return users


def read_links() -> dict[str, dict[str, str]]:
    """Returns how the GPUs of this host are linked: {"GPU0": {"GPU1": "NV18"}}."""
    from mpissd.engine.comm.seats import gpu_links

    return parse_links(gpu_links() or "")


def parse_links(text: str) -> dict[str, dict[str, str]]:
    """Returns the links in the output of `nvidia-smi topo -m`; skips columns that are no GPU."""
    rows = [line.split() for line in text.splitlines()]
    gpus = [word for word in next(iter(rows), []) if re.fullmatch(r"GPU\d+", word)]
    links: dict[str, dict[str, str]] = {}
    for row in rows[1:]:
        cells = row[1 : 1 + len(gpus)]
        if row and row[0] in gpus and all(_LINK.fullmatch(cell) for cell in cells):
            pairs = zip(gpus, cells, strict=False)
            links[row[0]] = {gpu: cell for gpu, cell in pairs if cell != "X"}
    return links


def short_bus_id(bus_id: str) -> str:
    """Returns nvidia-smi's 00000000:18:00.0 as CUDA writes it, 0000:18:00.0."""
    domain, _, rest = bus_id.strip().partition(":")
    return f"{domain[-4:]}:{rest}".lower()


def _rows(text: str) -> list[Mapping[str, str]]:
    """Returns a dictionary for each line, keyed by the heading without its units."""
    lines = [line for line in csv.reader(io.StringIO(text), skipinitialspace=True) if line]
    if not lines:
        return []
    heading = [name.partition(" [")[0].strip() for name in lines[0]]
    return [
        {name: cell.strip() for name, cell in zip(heading, line, strict=True)}
        for line in lines[1:]
        if len(line) == len(heading)
    ]


def _parsed(text: str, convert: Callable[[str], Value]) -> Value | None:
    try:
        return convert(text)
    except ValueError:
        return None


def _whole(text: str) -> int | None:
    """Returns the leading whole number: "1980 MHz" gives 1980; None for none."""
    return _parsed(text.partition(" ")[0], int)


def _mib(text: str) -> int | None:
    count = _whole(text)
    return None if count is None else count * _MIB


def _switch(text: str) -> bool | None:
    return {"enabled": True, "disabled": False}.get(text.lower())
