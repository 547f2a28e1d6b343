"""A command ends quietly: 141 where its reader has left (`| head`), 130 behind Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import mpissd.__main__ as command_line

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "results/h200-limit"


@pytest.mark.parametrize(
    "words",
    [
        ("mpissd", "--help"),
        ("mpissd", "plan", "--profile=h200"),
        ("mpissd", "plan", "--mode=sd", "--profile=h200", "--rounds=20"),
        ("mpissd", "compare", RESULTS, "--show=tables"),
        ("mpissd", "sweep", "--grid=mode=sd", "--dry_run", "--backend=emulated", "--world_size=2"),
        ("analysis", "--help"),
    ],
    ids=" ".join,
)
def test_nobody_reads_stdout(words: Sequence[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    launched = ("OMPI_", "PMI_", "SLURM_")
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={name: text for name, text in os.environ.items() if not name.startswith(launched)},
        stdin=subprocess.DEVNULL,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_ctrl_c_is_a_code_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "execute", interrupted)
    monkeypatch.setattr(command_line, "launcher_size", lambda: None)
    assert command_line.main(["serve"]) == 130
