"""Checks GPUs: their ranks, CUDA and the driver, NCCL, links, health and other users."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mpissd.ops.doctor.facts import CudaView, Facts, Gpu, HostFacts, RankFacts
from mpissd.ops.doctor.finding import Finding, bad, ok, ok_if, warn

# Bits of clocks_event_reasons.active that mean a slower GPU. Other bits (idle, display) are normal.
_SLOWED = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "too warm (software)",
    0x40: "too warm (hardware)",
    0x80: "power brake",
}
_DRIVER_13, _DRIVER_12, _TURING = 580, 525, 7.5
_BUSY_BYTES = 256 << 20
_CUPY = re.compile(r"cupy-cuda(\d+)x")


def check_ranks_gpus(facts: Facts) -> Iterator[Finding]:
    """Finds ranks that share a GPU."""
    first: dict[tuple[str, str], int] = {}
    for rank in facts.ranks:
        if rank.cuda is None or not rank.cuda.bus_id:
            continue
        other = first.setdefault((rank.host, rank.cuda.bus_id), rank.rank)
        if other != rank.rank and facts.asked.backend in ("auto", "cupy"):
            yield warn(
                "GPUs",
                f"ranks {other} and {rank.rank} share {rank.cuda.uuid or rank.cuda.bus_id} of "
                f"{rank.host} (CUDA_VISIBLE_DEVICES={rank.visible})",
                "one rank a GPU: unset CUDA_VISIBLE_DEVICES, fewer ranks or more GPUs; shared, "
                "all-reduces are staged through the host",
            )


def check_cuda(facts: Facts) -> Iterator[Finding]:
    """Finds a driver, a CUDA runtime and a CuPy that don't fit each other or the GPUs."""
    if facts.asked.backend not in ("auto", "cupy"):
        return
    for host in facts.hosts:
        if host.gpu_error:
            fix = "nvidia-smi has to answer: reload the driver, reboot, or ask your site"
            yield warn("driver", f"{host.gpu_error} on {host.host}", fix)
    gpus = [gpu for host in facts.hosts for gpu in host.gpus]
    yield from _check_extra(facts, gpus)
    views = [rank for rank in facts.ranks if rank.cuda is not None]
    for rank in views:
        findings = list(_check_view(facts, rank, _view(rank)))
        yield from findings
        if findings:  # Other ranks would repeat this finding.
            return
    if views and _view(views[0]).count:
        seen = _view(views[0])
        driver = f", driver {gpus[0].driver}" if gpus else ""
        yield ok(
            "CUDA",
            f"CuPy {seen.cupy}, runtime {cuda_version(seen.runtime)}, driver serves "
            f"{cuda_version(seen.driver)}{driver}",
        )


def _check_extra(facts: Facts, gpus: list[Gpu]) -> Iterator[Finding]:
    installed = sorted(name for name in facts.launch.packages if _CUPY.fullmatch(name))
    if len(installed) > 1:
        fix = f"pip uninstall -y {' '.join(installed)}; then install the one: {wanted(gpus)}"
        yield warn("CuPy", f"{' and '.join(installed)} overwrite each other's files", fix)
        return
    if not gpus:
        return
    drivers = [_major(gpu.driver) for gpu in gpus]
    driver, version = min(drivers), gpus[drivers.index(min(drivers))].driver
    if driver and driver < _DRIVER_12:
        fix = f"driver >= {_DRIVER_12} (CUDA 12) or >= {_DRIVER_13} (CUDA 13)"
        yield warn("driver", f"{version} is too old for CUDA 12", fix)
        return
    if not installed:
        if not any(name.startswith("cupy") for name in facts.launch.packages):
            detail = f"not installed, and there are {len(gpus)} × {gpus[0].name}"
            yield warn("CuPy", detail, wanted(gpus))
        return
    cuda = int(_CUPY.fullmatch(installed[0])[1])  # type: ignore[index]
    oldest = min(gpus, key=lambda gpu: gpu.capability or _TURING)
    if cuda >= 13 and (oldest.capability or _TURING) < _TURING:
        detail = f"{installed[0]} has no code for {oldest.name} ({oldest.capability})"
        yield warn("CuPy", detail, f"pip uninstall -y {installed[0]}; {wanted(gpus)}")
    elif cuda >= 13 and driver and driver < _DRIVER_13:
        detail = f"{installed[0]} needs driver >= {_DRIVER_13}, here is {version}"
        yield warn("CuPy", detail, f"pip uninstall -y {installed[0]}; {wanted(gpus)}")


def wanted(gpus: list[Gpu]) -> str:
    """Returns the command that installs the CuPy which the oldest driver and GPU can run."""
    drivers = [_major(gpu.driver) for gpu in gpus]
    new = all(driver >= _DRIVER_13 for driver in drivers)
    turing = all((gpu.capability or 0) >= _TURING for gpu in gpus)
    return f"pip install 'mpissd[{'cuda13' if gpus and new and turing else 'cuda12'}]'"


def _check_view(facts: Facts, rank: RankFacts, seen: CudaView) -> Iterator[Finding]:
    """Finds faults of one rank's CuPy."""
    asked, where = facts.asked.backend, f"rank {rank.rank} ({rank.host})"
    if seen.error and not seen.cupy:  # `run` would import CuPy as well, and fail.
        fix = "pip uninstall -y cupy-cuda12x cupy-cuda13x; then " + wanted(
            [gpu for host in facts.hosts for gpu in host.gpus]
        )
        yield bad("CuPy", f"cannot be imported on {where}: {seen.error}", fix)
    elif seen.error or seen.count == 0:
        detail = f"{seen.error or 'no GPU is visible'} on {where}"
        blind = f" (CUDA_VISIBLE_DEVICES={rank.visible})" if rank.visible is not None else ""
        has_gpus = any(host.gpus for host in facts.hosts)
        if asked == "cupy":
            yield bad("CUDA", detail + blind, "run on a GPU node, or BACKEND=numpy")
        elif has_gpus:
            yield warn("CUDA", detail + blind, "unset CUDA_VISIBLE_DEVICES; else: nvidia-smi -q")
    elif rank.local_rank >= seen.count:
        fix = "fewer ranks on this node, more GPUs, or BACKEND=numpy"
        yield bad("CUDA", f"{seen.count} visible GPU(s) for {where}, its {_nth(rank)}", fix)
    elif (seen.runtime or 0) // 1000 > (seen.driver or 10**6) // 1000:
        detail = f"runtime {cuda_version(seen.runtime)}, driver serves {cuda_version(seen.driver)}"
        yield warn("CUDA", f"{detail} on {where}", f"pip uninstall CuPy; {wanted([])}")
    elif seen.nvmath_error:
        fix = "pip install nvmath-python (without it forwards are not CUDA graphs)"
        yield warn("nvmath", f"{seen.nvmath_error} on {where}", fix)


def _nth(rank: RankFacts) -> str:
    return f"local rank {rank.local_rank}"


def check_nccl(facts: Facts) -> Iterator[Finding]:
    """Finds an NCCL that is missing, differs between ranks, or is older than CuPy's build."""
    views = [rank for rank in facts.ranks if rank.cuda is not None and rank.cuda.count]
    if facts.asked.tp < 2 or not views or facts.asked.backend not in ("auto", "cupy"):
        return
    first = _view(views[0])
    for rank in views:
        seen = _view(rank)
        where = f"on rank {rank.rank} ({rank.host})"
        if seen.nccl is None:
            fix = "pip install nvidia-nccl-cu12 (CUDA 12) or nvidia-nccl-cu13"
            yield warn("NCCL", f"{seen.nccl_error or 'none'} {where}", fix)
            return
        if seen.nccl != first.nccl:
            detail = f"{nccl_version(first.nccl)}, but {nccl_version(seen.nccl)} {where}"
            yield warn("NCCL", detail, "one .venv for all hosts; unset LD_LIBRARY_PATH")
            return
        if seen.nccl_built is not None and seen.nccl // 100 < seen.nccl_built // 100:
            detail = f"{nccl_version(seen.nccl)} loaded, CuPy was built for "
            yield warn(
                "NCCL",
                detail + f"{nccl_version(seen.nccl_built)} {where}",
                "pip install -U the nvidia-nccl wheel; unset LD_LIBRARY_PATH and LD_PRELOAD",
            )
            return
    yield ok("NCCL", f"{nccl_version(first.nccl)} loaded")


def check_gpu_links(facts: Facts) -> Iterator[Finding]:
    """Finds target ranks of a host without peer access or without NVLink between their GPUs."""
    targets = [r for r in facts.ranks if r.role != "draft" and r.cuda and r.cuda.bus_id]
    for host in facts.hosts:
        local = [rank for rank in targets if rank.host == host.host]
        pairs = [(a, b) for n, a in enumerate(local) for b in local[n + 1 :]]
        if not pairs:
            continue
        blocked = [f"{a.rank}-{b.rank}" for a, b in pairs if not _reaches(a, b)]
        if blocked:
            yield warn(
                "peer access",
                f"none between ranks {', '.join(blocked)} of {host.host}",
                "disable ACS/IOMMU for these slots or choose GPUs of one switch; NCCL goes "
                "through the host meanwhile",
            )
        else:
            yield ok("peer access", f"between all {len(local)} target GPUs of {host.host}")
        yield from _check_nvlink(host, pairs)


def _reaches(a: RankFacts, b: RankFacts) -> bool:
    """Returns whether a's process may map the memory of b's GPU; True where it is unknown."""
    peers = _view(a).peers
    if a.visible != b.visible or a.local_rank >= len(peers) or b.local_rank >= len(peers):
        return True
    return peers[a.local_rank][b.local_rank]


def _check_nvlink(host: HostFacts, pairs: list[tuple[RankFacts, RankFacts]]) -> Iterator[Finding]:
    index = {gpu.bus_id: f"GPU{gpu.index}" for gpu in host.gpus}
    links = {}
    for a, b in pairs:
        one, other = (index.get(_view(rank).bus_id.lower(), "") for rank in (a, b))
        kind = host.links.get(one, {}).get(other)
        if kind is not None:
            links[f"{a.rank}-{b.rank}"] = kind
    if not links:
        return
    detail = ", ".join(f"{ranks} {kind}" for ranks, kind in links.items())
    joined = all(kind.startswith("NV") for kind in links.values())
    fix = "choose GPUs that NVLink joins (nvidia-smi topo -m): CUDA_VISIBLE_DEVICES=…"
    yield ok_if(joined, "NVLink", f"{detail} on {host.host}", fix)


def check_gpu_health(facts: Facts) -> Iterator[Finding]:
    """Finds GPUs of the ranks that are slowed down, faulty, in a wrong mode, or used by others."""
    if facts.asked.backend not in ("auto", "cupy"):
        return
    for host in facts.hosts:
        ranks = facts.of_host(host.host)
        used = {rank.cuda.bus_id.lower() for rank in ranks if rank.cuda and rank.cuda.bus_id}
        ours = {rank.pid for rank in ranks}
        for gpu in host.gpus:
            if gpu.bus_id not in used:
                continue
            findings = [*_health(host, gpu), *_users(host, gpu, ours)]
            yield from findings or [ok(f"GPU {gpu.index}", _vital(host, gpu))]


def _vital(host: HostFacts, gpu: Gpu) -> str:
    free = "" if gpu.memory_free is None else f", {gpu.memory_free / 1e9:.1f} GB free"
    clock = "" if gpu.clock is None else f", {gpu.clock} of {gpu.max_clock} MHz"
    return f"{gpu.name} on {host.host}{free}{clock}"


def _health(host: HostFacts, gpu: Gpu) -> Iterator[Finding]:
    name = f"GPU {gpu.index}"
    slowed = [word for bit, word in _SLOWED.items() if (gpu.throttle or 0) & bit]
    if slowed:
        fix = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE; application clocks: nvidia-smi -rac"
        yield warn(name, f"slowed down by {', '.join(slowed)}: {_vital(host, gpu)}", fix)
    if gpu.ecc_errors:
        fix = f"use another GPU, and ask your site to reset this one ({gpu.uuid})"
        yield warn(name, f"{gpu.ecc_errors} uncorrected memory errors on {host.host}", fix)
    if "Exclusive" in gpu.compute_mode or "Prohibited" in gpu.compute_mode:
        fix = f"as root: nvidia-smi -i {gpu.index} -c 0"
        yield warn(name, f"compute mode {gpu.compute_mode} on {host.host}", fix)
    if gpu.mig:
        fix = "GPUs in MIG mode cannot reach each other: ask for whole GPUs"
        yield warn(name, f"in MIG mode on {host.host}", fix)
    if gpu.persistence is False:
        fix = f"as root: nvidia-smi -i {gpu.index} -pm 1 (each start waits for the driver)"
        yield warn(name, f"not in persistence mode on {host.host}", fix)


def _users(host: HostFacts, gpu: Gpu, ours: set[int]) -> Iterator[Finding]:
    others = [user for user in host.gpu_users if user.uuid == gpu.uuid and user.pid not in ours]
    if others:
        who = ", ".join(f"{user.name} ({user.pid})" for user in others[:3])
        fix = "times would be another's: end them, or choose other GPUs (CUDA_VISIBLE_DEVICES)"
        yield warn(f"GPU {gpu.index}", f"also used by {who} on {host.host}", fix)
        return
    total, free = gpu.memory_total, gpu.memory_free
    if total is not None and free is not None and total - free > _BUSY_BYTES + total // 20:
        detail = f"{(total - free) / 1e9:.1f} GB are taken on {host.host}, by nobody that is seen"
        yield warn(f"GPU {gpu.index}", detail, "nvidia-smi; end what holds it, or take another GPU")


def cuda_version(number: int | None) -> str:
    """Returns CUDA's version number as text: 13020 is "13.2"."""
    return "unknown" if number is None else f"{number // 1000}.{number % 1000 // 10}"


def nccl_version(number: int | None) -> str:
    """Returns NCCL's version number as text: 22809 is "2.28.9"."""
    return "none" if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _major(driver: str) -> int:
    """Returns the first number of a driver's version: "580.95.05" gives 580; 0 for none."""
    head = driver.partition(".")[0]
    return int(head) if head.isdigit() else 0


def _view(rank: RankFacts) -> CudaView:
    assert rank.cuda is not None
    return rank.cuda
