"""Each misconfiguration of a healthy machine is one line of the table, and the only one."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from mpissd.ops.doctor.check_gpu import wanted
from mpissd.ops.doctor.check_launch import differ, family
from mpissd.ops.doctor.facts import Facts, HostFacts, build_host, build_rank
from mpissd.ops.doctor.finding import BAD, OK, WARN, Finding, ok
from mpissd.ops.doctor.judge import judge
from mpissd.ops.doctor.ranks import Seen
from mpissd.ops.doctor.table import render, verdict
from tests.ops.doctor_facts import HEALTHY, HOST, RANKS, SESSION, asked, gpu
from tests.ops.doctor_seeds import NO_GPU, OLDER, SEEDED, USER, VOLTA


@pytest.mark.parametrize(
    ("facts", "what", "how", "fix"),
    [seed[1:] for seed in SEEDED],
    ids=[seed[0].replace(" ", "-") for seed in SEEDED],
)
def test_a_misconfiguration(facts: Facts, what: str, how: str, fix: str) -> None:
    found = [finding for finding in judge(facts) if finding.verdict != OK]
    assert {(finding.what, finding.verdict) for finding in found} == {(what, how)}, found
    assert fix in found[0].fix


@pytest.mark.parametrize("facts", [HEALTHY, NO_GPU, asked(HEALTHY, backend="emulated")])
def test_a_healthy_machine(facts: Facts) -> None:
    assert [finding for finding in judge(facts) if finding.verdict != OK] == []
    assert render(judge(facts)).splitlines()[-1] == "doctor: this run works"


def test_what_a_run_would_choose() -> None:
    lines = {finding.what: finding.detail for finding in judge(HEALTHY)}
    assert lines["backend"] == "cupy on NVIDIA H200: CuPy finds a GPU"
    assert lines["all-reduce"] == "oneshot: the target's GPUs map each other's memory"
    assert lines["pair"].startswith("llama-3.1-70b / llama-3.2-1b: the default here: the largest")
    assert "GPU-1a1b2c3d" in lines["rank 1"] and "NUMA 0" in lines["rank 1"]
    assert lines["NCCL"] == "2.28.9 loaded" and lines["NVLink"] == "0-1 NV18 on gpu1"
    assert "runtime 13.2, driver serves 13.0, driver 580.95.05" in lines["CUDA"]


def test_a_draft_of_another_target_is_one_warning() -> None:
    line = "draft=out/d was made for A, not for B, whose weights differ: few of its tokens"
    facts = replace(HEALTHY, session=replace(SESSION, doubts=[line]))
    found = [finding for finding in judge(facts) if finding.verdict != OK]
    assert [(f.what, f.detail, f.verdict) for f in found] == [("draft", line, WARN)]


def test_gpus_that_no_rank_uses_do_not_count() -> None:
    assert judge(gpu(3, throttle=0x40, ecc_errors=9)) == judge(HEALTHY)


def test_other_users_of_a_gpu() -> None:
    users = [
        {"uuid": USER, "pid": 77, "name": "python3", "num_bytes": 1},
        {"uuid": USER, "pid": 1000, "name": "python", "num_bytes": 1},  # rank 0 itself
        {"uuid": HOST.gpus[3].uuid, "pid": 78, "name": "elsewhere", "num_bytes": 1},
    ]
    facts = replace(HEALTHY, hosts=[build_host({**asdict(HOST), "gpu_users": users})])
    found = [finding for finding in judge(facts) if finding.verdict != OK]
    assert [(f.what, f.detail) for f in found] == [("GPU 0", "also used by python3 (77) on gpu1")]


def test_a_control_group_smaller_than_the_weights() -> None:
    tight = replace(NO_GPU, hosts=[replace(NO_GPU.hosts[0], memory_limit=2 << 30)])
    found = [finding for finding in judge(tight) if finding.verdict != OK]
    assert [finding.what for finding in found] == ["memory"] and "--mem" in found[0].fix


def test_nothing_is_known() -> None:
    """Facts that could not be learned are no complaint."""
    unknown = replace(HEALTHY, hosts=[HostFacts("gpu1")], ranks=[replace(RANKS[0], world_size=3)])
    assert [finding for finding in judge(unknown) if finding.verdict != OK] == []


def test_facts_travel_as_json() -> None:
    seen = Seen(RANKS, [HOST], SESSION)
    assert Seen.from_json(seen.to_json()) == seen
    newer = {**asdict(RANKS[0]), "of_a_later_version": 1}
    assert build_rank(json.loads(json.dumps(newer))) == RANKS[0]


def test_the_verdict_names_what_to_fix_first() -> None:
    found = [
        ok("python", "3.12"),
        Finding("out", "full", WARN, "make room"),
        Finding("mpirun", "none", BAD, "install one"),
        Finding("run", "no", BAD, "another"),
    ]
    assert verdict(found) == (
        "doctor: this run fails: mpirun (and 1 more); 1 warning. To fix: install one"
    )
    table = render(found).splitlines()
    assert table[0] == "ok    python  3.12"
    assert table[3:5] == ["BAD   mpirun  none", "              → install one"]


@pytest.mark.parametrize(
    ("text", "whose"),
    [
        ("mpirun (Open MPI) 5.0.11", "Open MPI"),
        ("mpirun (PRRTE) 3.0.8", "Open MPI"),
        ("HYDRA build details: Version: 4.2.1", "MPICH"),
        ("MPICH Version: 4.2.1", "MPICH"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.12", "Intel MPI"),
        ("srun 23.11", ""),
        ("", ""),
    ],
)
def test_whose_mpi(text: str, whose: str) -> None:
    assert family(text) == whose


@pytest.mark.parametrize(
    ("library", "mpirun", "are_two"),
    [
        ("Open MPI v5.0.11", "mpirun (Open MPI) 5.0.3", False),
        ("Open MPI v5.0.11", "mpirun (Open MPI) 4.1.4", True),
        ("Open MPI v5.0.11", "mpirun (PRRTE) 3.0.8", False),
        ("Open MPI v5.0.11", "HYDRA build details: Version: 4.2", True),
        ("MPICH Version: 4.2.1", "HYDRA build details: Version: 4.1", False),
        ("MVAPICH2 Version: 2.3.7", "HYDRA build details: Version: 3.2", False),
        ("Open MPI v5.0.11", "slurm 23.11", False),
        ("", "mpirun (Open MPI) 5.0.3", False),
    ],
)
def test_a_library_and_an_mpirun(library: str, mpirun: str, are_two: bool) -> None:
    assert differ(library, mpirun) == are_two


def test_the_extra_follows_driver_and_gpu() -> None:
    """The same rule as launch/setup.sh."""
    assert wanted(HOST.gpus) == "pip install 'mpissd[cuda13]'"
    assert wanted(OLDER) == wanted(VOLTA) == wanted([]) == "pip install 'mpissd[cuda12]'"
