"""What nvidia-smi says, as drivers of several years say it; one that hangs, one that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpissd.ops.doctor.smi import (
    parse_gpus,
    parse_links,
    parse_users,
    read_gpus,
    read_users,
    short_bus_id,
)
from tests.ops.doctor_facts import SMI, TOPO

V100 = """\
index, uuid, pci.bus_id, name, driver_version, compute_cap, memory.total [MiB], memory.free [MiB], \
persistence_mode, compute_mode, mig.mode.current, ecc.errors.uncorrected.volatile.total, \
clocks.current.sm [MHz], clocks.max.sm [MHz], clocks_throttle_reasons.active
3, GPU-55aa, 00000000:B2:00.0, Tesla V100-SXM2-32GB, 525.147.05, 7.0, 32768 MiB, 1021 MiB, \
Disabled, Exclusive_Process, [N/A], 2, 1530 MHz, 1530 MHz, 0x0000000000000060
"""
WINDOWLESS = """\
index, uuid, pci.bus_id, name, driver_version, compute_cap
0, GPU-1, 00000000:01:00.0, "NVIDIA RTX, odd", [Unknown Error], [N/A]
a line that is no GPU
1, GPU-2, , , ,
"""


def test_an_h200_box() -> None:
    found = parse_gpus(SMI)
    assert [gpu.bus_id for gpu in found] == [f"0000:{bus}:00.0" for bus in ("18", "2a", "3a", "5d")]
    first = found[0]
    assert (first.index, first.name, first.driver) == (0, "NVIDIA H200", "580.95.05")
    assert first.uuid == "GPU-0a1b2c3d-0000-4000-8000-000000000000"
    assert first.capability == 9.0 and first.memory_total == 143771 << 20
    assert (first.persistence, first.mig, first.compute_mode) == (True, False, "Default")
    assert (first.ecc_errors, first.clock, first.max_clock, first.throttle) == (0, 345, 1980, 1)


def test_a_v100_of_an_older_driver() -> None:
    (gpu,) = parse_gpus(V100)
    assert (gpu.mig, gpu.persistence, gpu.ecc_errors) == (None, False, 2)
    assert (gpu.throttle, gpu.compute_mode) == (0x60, "Exclusive_Process")
    assert gpu.memory_free == 1021 << 20


def test_what_is_not_told() -> None:
    (gpu,) = parse_gpus(WINDOWLESS)
    assert (gpu.name, gpu.driver) == ("NVIDIA RTX, odd", "[Unknown Error]")
    assert gpu.capability is gpu.memory_total is gpu.persistence is gpu.throttle is None


@pytest.mark.parametrize("text", ["", "\n", "No devices were found\n", "a,b\n1\n", "\x00"])
def test_no_gpus_at_all(text: str) -> None:
    assert parse_gpus(text) == [] and parse_users(text) == [] and parse_links(text) == {}


def test_who_uses_them() -> None:
    text = (
        "gpu_uuid, pid, used_gpu_memory [MiB], process_name\n"
        "GPU-1, 4242, 1024 MiB, /usr/bin/python3\n"
        "GPU-2, 17, [N/A], [Not Found]\n"
    )
    found = [(user.uuid, user.pid, user.num_bytes, user.name) for user in parse_users(text)]
    assert found == [
        ("GPU-1", 4242, 1 << 30, "/usr/bin/python3"),
        ("GPU-2", 17, None, "[Not Found]"),
    ]


def test_how_they_are_linked() -> None:
    found = parse_links(TOPO)
    assert found["GPU0"] == {"GPU1": "NV18", "GPU2": "NV18", "GPU3": "NV18"}
    assert set(found) == {"GPU0", "GPU1", "GPU2", "GPU3"}
    mixed = parse_links("\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1\tPHB\t X \n")
    assert mixed == {"GPU0": {"GPU1": "PHB"}, "GPU1": {"GPU0": "PHB"}}


def test_bus_ids_as_cuda_writes_them() -> None:
    assert short_bus_id("00000000:B2:00.0") == "0000:b2:00.0"
    assert short_bus_id("0000:b2:00.0") == "0000:b2:00.0"


def fake_smi(tmp_path: Path, script: str) -> str:
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_the_name_of_the_reasons_changed(tmp_path: Path) -> None:
    """Driver 525 knows no clocks_event_reasons."""
    script = (
        '[[ "$*" != *clocks_event_reasons* ]] || '
        "{ echo 'Field \"clocks_event_reasons.active\" is not a valid field to query.'; exit 2; }\n"
        f"cat <<'END'\n{V100}END"
    )
    gpus, error = read_gpus(fake_smi(tmp_path, script))
    assert error == "" and gpus[0].throttle == 0x60


def test_no_driver_answers(tmp_path: Path) -> None:
    words = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    smi = fake_smi(tmp_path, f'echo "{words}"; exit 9')
    gpus, error = read_gpus(smi)
    assert gpus == [] and words in error
    assert read_users(smi) == []


def test_a_driver_that_hangs_costs_its_timeout(tmp_path: Path) -> None:
    gpus, error = read_gpus(fake_smi(tmp_path, "trap '' TERM; sleep 60"), timeout_s=0.3)
    assert gpus == [] and "no answer within" in error


def test_no_nvidia_smi_is_no_complaint() -> None:
    assert read_gpus("/nowhere/nvidia-smi") == ([], "")
