"""Each fault of healthy ranks is one line of the doctor's table; how its facts are read."""

import os
import signal
from typing import Any

import pytest

from mpissd.common.flags import parse_into, said
from mpissd.lab.measure import load
from mpissd.ops.doctor import BAD, NOT_PASSED, OK, WARN, DoctorConfig, ask, judge, of_load, render

GPUS = ["NVIDIA H200, 580.95.05"] * 4
VERSIONS = {
    "python": ("3.12.4", "/home/user/.venv/bin/python"),
    "mpissd": ("0.1.0", "/home/user/mpissd"),
    "MPI library": ("Open MPI v5.0.11", "(mpi4py 4.1.2)"),
}
CHOICES = {"backend": "cupy on NVIDIA H200", "pair": "70b / 1b"}
IDLE = {"backend": "numpy on a CPU"}


def report(only: int | None = None, error: str = "", choices: Any = CHOICES, **changes: Any) -> Any:
    """The report of three healthy ranks; changes: of rank `only`, or of every rank."""
    ranks: list[dict[str, Any]] = []
    for n, role in enumerate(("lead", "target", "draft")):
        rank = {"rank": n, "role": role, "host": "gpu1", "versions": VERSIONS}
        rank |= {"world_size": 3, "launcher_size": 3, "cores": list(range(48))}
        rank |= {"device": "NVIDIA H200", "shm_free": 10**11}
        ranks.append({**rank, **changes} if only in (None, n) else rank)
    return {"ranks": ranks, "choices": choices, "error": error}


def version(what: str, text: str) -> Any:
    return report(2, versions={**VERSIONS, what: (text, "/there")})


HUNG: dict[str, Any] = {"ranks": [], "choices": {}, "error": "MPI_Init: no answer within 80 s"}
FAULTS: list[tuple[str, Any, str, str, str]] = [
    # the fault, the report, the line's subject, its verdict, a word of its fix
    ("another Python", version("python", "3.10.1"), "python", WARN, "one Python"),
    ("another mpissd", version("mpissd", "0.0.9"), "mpissd", BAD, "the same version"),
    ("two libraries", version("MPI library", "MPICH 4.2.1"), "MPI library", BAD, "one MPI"),
    ("singletons", report(error="launcher mismatch: 3", world_size=1, choices={}), "launcher",
     BAD, "MPI4PY_LIBMPI"),
    ("a launcher that hangs", HUNG, "ranks", BAD, "mpirun -np 2 hostname"),
    ("few cores", report(cores=[0, 1]), "cores", WARN, "--cpus-per-task"),
    ("Docker's shared memory", report(shm_free=64 << 20), "/dev/shm", WARN, "--shm-size"),
    ("a broken CuPy", report(error="opening a session: ImportError: libcudart.so.13"), "session",
     BAD, "pip uninstall"),
    ("too large a pair", report(error="70b at tp=2 needs 70.5 GB a rank", choices={}), "session",
     BAD, "larger TP"),
    ("an idle GPU", report(choices=IDLE), "backend", WARN, "mpissd[cuda13]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "what", "verdict", "fix"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_a_fault_is_the_line_of_its_subject(facts: Any, what: str, verdict: str, fix: str) -> None:
    findings = judge(facts, 3, GPUS)
    faults = [finding for finding in findings if finding.verdict != OK]
    assert {(fault.what, fault.verdict) for fault in faults} == {(what, verdict)}, faults
    assert fix in faults[0].fix
    last = render(faults).splitlines()[-1]
    assert last.startswith(f"doctor: this run {'fails: ' + what if verdict == BAD else 'works'}")


def test_healthy_machines_have_no_fault() -> None:
    for facts, gpus in ((report(), GPUS), (report(choices=IDLE), [])):
        findings = judge(facts, 3, gpus)
        assert [finding for finding in findings if finding.verdict != OK] == []
        assert render(findings).endswith("\ndoctor: this run works\n")


def test_a_busy_machine_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "reasons", lambda spent, cores: dict.fromkeys(["others"], 0.4))
    (finding,) = of_load(3)
    assert (finding.verdict, finding.detail) == (WARN, "the machine is busy: others")
    assert render([finding]).endswith("\ndoctor: this run works; 1 warning\n")


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo fine", ""),
        ("echo 'Traceback' >&2; echo 'ImportError: libx' >&2; exit 1", "ImportError: libx"),
        ("kill -11 $$", "ended by signal 11"),
        ("printf -- '---\nThere are not enough slots\navailable in\n---' >&2; exit 1",
         "There are not enough slots available in"),
        ("exit 7", "printed nothing and ended with code 7"),
    ],
)  # fmt: skip
def test_what_a_child_complains_of(script: str, problem: str) -> None:
    assert ask(["bash", "-c", script])[1] == problem


def test_a_child_that_hangs_is_ended_with_its_children() -> None:
    """The grandchild holds the pipes."""
    script = "echo $$; trap '' TERM; sleep 60 & wait; sleep 60"
    out, problem = ask(["bash", "-c", script], 0.3, signal.SIGTERM)
    assert problem == "no answer within 0 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int(out), 0)
    assert ask(["/nowhere/it"]) == ("", "/nowhere/it: No such file or directory")


def test_the_ranks_get_the_same_flags() -> None:
    given = {"mode": "sd", "num_drafts": "0", "pair": "8b/1b", "lm_head": "true", "tp": "2"}
    config = parse_into(DoctorConfig, given)
    passed = {name: text for name, text in said(config.run).items() if name not in NOT_PASSED}
    assert parse_into(DoctorConfig, {**passed, "tp": "2"}) == config
    text = parse_into(DoctorConfig, {"workload": "text", "pair": "toy"}).run
    assert (text.workload, text.prompt) == ("text", "Hello")  # a prompt that only the trial needs
