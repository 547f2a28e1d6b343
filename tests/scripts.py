"""Loads programs outside the packages, and starts them with a fake Python and mpirun."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# A profile without measurements: the datasheet of an H100, under which committed rows ran.
DATASHEET = str(ROOT / "results/emulated-predictions/h100.json")


def load(path: str) -> Any:
    """Returns a file of the repository, such as results/study.py, as a module of its own."""
    name = f"script_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a dataclass looks its module up there
    spec.loader.exec_module(module)
    return module


def printed_command(out: str, name: str = "run") -> tuple[int, list[str]]:
    """Returns (ranks, words after `mpissd`) of the command line that a plan prints."""
    script = "COMMAND=probe launch" if name == "probe" else "(?m:^)    launch"
    start = rf"(?:{script}/local.sh (\d+)|mpirun -np (\d+) python -m mpi4py -m mpissd {name})"
    joined = re.sub(r" \\\n +", " ", out).replace("\\\n", "")
    found = re.search(rf"{start} (.*)", joined)
    assert found is not None, out
    return int(found[1] or found[2]), [name, *shlex.split(found[3])]


def fake_tools(folder: Path, program: str) -> None:
    """Writes `program` as folder/fakes/bin/python and folder/fakes/bin/mpirun."""
    for name in ("python", "mpirun"):
        path = folder / "fakes" / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(program)
        path.chmod(0o755)


def call(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder, with PATH, HOME and `env` as its whole environment.

    So it sees neither the MAKEFLAGS of a make around the tests nor the user's MPI settings.
    """
    return subprocess.run(
        command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def python(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs this Python at the root of the repository; options: of subprocess.run."""
    told = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 240, **options}
    return subprocess.run([sys.executable, *map(str, words)], **told)


def spawn(*words: object, **options: Any) -> subprocess.Popen[str]:
    """Starts a command in a session of its own, with nothing on stdin; options: of Popen."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    told: dict[str, Any] = {"cwd": ROOT, **pipes, "text": True, "start_new_session": True}
    return subprocess.Popen([*map(str, words)], **told | options)


def refused(capfd: Any, *words: object) -> str:
    """Returns the one line that a refused command prints; it ends with exit code 2."""
    from mpissd.__main__ import main

    assert main([*map(str, words)]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("mpissd: ") and err.count("\n") == 1
    return err


def resident_bytes() -> int:
    """Returns this process's memory; needs Linux."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def until(true: Callable[[], object], wait_s: float = 60.0, what: object = "it") -> None:
    """Waits until something is so; AssertionError if it is not in time."""
    end = time.monotonic() + wait_s
    while not true():
        assert time.monotonic() < end, f"{what} did not come to be in {wait_s} s"
        time.sleep(0.01)
