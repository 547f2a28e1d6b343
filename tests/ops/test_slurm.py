"""Requests that a cluster would refuse are refused before they wait in a queue."""

import re
import shlex
import subprocess
import sys
from typing import Any

import pytest

from mpissd.common.errors import ConfigError
from mpissd.ops.slurm import JobRequest, read_header
from mpissd.serve.config import DRAIN_S
from tests.scripts import ROOT, call

SCRIPTS = ("slurm", "array", "replica", "bridges2_shared", "bridges2_8gpu", "bridges2_h100")
WARNING_S = {"replica": int(1.2 * DRAIN_S)}  # it drains meanwhile


def header(name: str) -> dict[str, str]:
    return read_header((ROOT / "launch" / f"{name}.sh").read_text())


def request(name: str = "slurm", **given: Any) -> JobRequest:
    told: dict[str, Any] = {"ranks": 3, "partition": "GPU-shared", **given}
    return JobRequest(f"launch/{name}.sh", header=header(name), **told)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ranks": 5}, "5 GPUs for T + D = 5 ranks: GPU-shared gives 1 to 4: PARTITION=GPU"),
        ({"gpus": 2}, "GPUS=2: T + D = 3 ranks need one each: GPUS=3"),
        ({"gpu_type": "v100"}, "unknown GPU_TYPE 'v100': did you mean 'v100-32'? allowed: h100-80"),
        ({"cpus": 6}, "CPUS=6: 3 ranks of 6 cores, but 3 v100-32 come with 15: allowed: up to 5"),
        ({"partition": "GPU", "gpus": 5}, "GPUS=5: GPU gives whole nodes: GPUS=8 with NODES=1"),
        ({"partition": "GPU", "ranks": 9}, "GPUS=8: T + D = 9 ranks need one each: NODES=2"),
    ],
)
def test_refused_with_a_line_that_says_how_to_fix_it(given: dict[str, Any], says: str) -> None:
    given.setdefault("gpu_type", "v100-32")
    with pytest.raises(ConfigError) as caught:
        request(**given).command()
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "--partition=GPU-shared --ntasks=3 --cpus-per-task=5 --gpus=v100-32:3"),
        ({"partition": "GPU", "ranks": 5, "time": "2-0"}, "--time=2-0 --partition=GPU --ntasks=5 "
         "--cpus-per-task=5 --gpus=v100-32:8"),
        ({"partition": "GPU", "ranks": 10, "nodes": 2, "account": "abc123p"}, "--nodes=2 "
         "--partition=GPU --account=abc123p --ntasks=10 --cpus-per-task=5 --gpus=v100-32:16"),
        ({"partition": "GPU-shared", "ranks": 6, "cluster": "other", "time": "5-0"},
         "--time=5-0 --partition=GPU-shared --ntasks=6 --gpus=6"),
        ({"array": "0-7%2", "exports": {"SHARDS": "8"}}, "--partition=GPU-shared --ntasks=3 "
         "--cpus-per-task=5 --gpus=v100-32:3 --array=0-7%2 --export=ALL,SHARDS=8"),
        ({"extra": ("--qos=a b",), "flags": ("--pair=8b/1b",)}, "--partition=GPU-shared "
         "--ntasks=3 --cpus-per-task=5 --gpus=v100-32:3 '--qos=a b'"),
    ],
)  # fmt: skip
def test_the_line(given: dict[str, Any], line: str) -> None:
    asked = request(**given)
    flags = "".join(f" {flag}" for flag in asked.flags)
    assert shlex.join(asked.command()) == f"sbatch {line} launch/slurm.sh{flags}"


@pytest.mark.parametrize(
    ("name", "given", "line"),
    [
        ("bridges2_8gpu", {"ranks": 2}, ""),
        ("bridges2_shared", {"ranks": 4}, "--gpus=v100-32:4 --ntasks=4 "),
    ],
)
def test_a_script_s_own_lines_are_kept(name: str, given: dict[str, Any], line: str) -> None:
    asked = request(name, partition=None, **given)
    assert shlex.join(asked.command()) == f"sbatch {line}launch/{name}.sh"


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_is_a_request_that_is_taken(name: str) -> None:
    told = header(name)
    request(name, partition=None).command()
    assert told["signal"] == f"B:TERM@{WARNING_S.get(name, 60)}" and "%" in told["output"]
    assert re.search(r"%[jA]", told["output"]), "logs are named by job"


def submit(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Where there is no Slurm."""
    return call(ROOT, sys.executable, "-m", "launch.submit", *words, PATH="/nowhere", **env)


H100 = ("--ranks=5", "--partition=GPU", "--gpu_type=h100-80")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--ranks=5", "--partition=GPU", "--", "--pair=70b/1b"),
            "70b at tp=4 needs 34.2 GB a rank",
        ),
        (("--ranks=3", "--partition=GPU-shared", "--", "--mod=sd"), "unknown flag '--mod'"),
        (
            ("--ranks=3", "--array=0-3%2", "--", "--grid=mode=sd; lookahead=2,4,6"),
            "ARRAY=0-3%2: 4 shards of 3 configurations: allowed: at most as many: 0-2",
        ),
        ((*H100, "--launcher=run", "--"), "unknown LAUNCHER 'run': did you mean 'srun'"),
        ((*H100, "--", "--backend=emulated"), "no sbatch here: log in to the cluster, or DRY=1"),
    ],
)
def test_what_would_fail_later_is_refused_now(words: tuple[str, ...], says: str) -> None:
    done = submit(*words)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("submit: ") and says in line


DRY = [
    (
        (*H100, "--tp=4", "--dry=1", "--launcher=srun", "--", "--backend=emulated"),
        "--partition=GPU --ntasks=5 --cpus-per-task=5 --gpus=h100-80:8 --export=ALL,LAUNCHER=srun "
        "launch/slurm.sh --backend=emulated",
    ),
    (  # replicas are an array of servers
        "--ranks=2 --serve=2 --cluster=other --dry=1 -- --pair=smollm2 --backend=numpy".split(),
        "--ntasks=2 --array=0-1 launch/replica.sh --pair=smollm2 --backend=numpy",
    ),
]


@pytest.mark.parametrize(("words", "line"), DRY)
def test_dry_prints_the_line_alone(words: tuple[str, ...], line: str) -> None:
    done = submit(*words, MPISSD_API_KEY="sesame")
    assert (done.returncode, done.stdout) == (0, f"sbatch {line}\n")
    assert done.stderr == "submit: no sbatch here: when it would start is not known\n"
