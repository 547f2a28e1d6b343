"""The command line in one process: its exit codes, and one line for each refusal."""

import json
import os
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpissd.__main__ import main
from mpissd.cli import arguments as cli
from mpissd.cli.arguments import Command
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.flags import flags_of
from tests.scripts import ROOT, python, refused

HERE = ("run", "--dry_run=2", "--backend=emulated", "--device=null")


def parse(*arguments: str) -> RunConfig:
    command = cli.parse(list(arguments))
    assert isinstance(command, Command) and isinstance(command.config, RunConfig)
    assert command.name == "run"
    return command.config


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("OMPI_COMM", "PMI_", "SLURM_")):
            monkeypatch.delenv(name)


def test_flags_in_every_way() -> None:
    assert parse("run") == RunConfig()
    assert parse("run", "--mode=ar").mode == "ar"
    assert parse("run", "--mode", "ar", "--rounds", "7") == RunConfig(mode="ar", rounds=7)
    assert parse("run", "--num-drafts=0", "--mode=sd").num_drafts == 0
    assert parse("run", "--fuse", "--nograph") == RunConfig(fuse=True, graph=False)
    assert parse("run", "--mode=ar", "--mode=sd").mode == "sd"  # the last one counts


def test_values_that_look_like_python_stay_text() -> None:
    for text in ("1e5", "None", "[1]", "{}", "007", "0x10", "list:4,4,3,3,2"):
        assert parse("run", f"--out={text}").out == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rum"], r"unknown command 'rum': did you mean 'run'\?"),
        (["--mode=ar"], "unknown command '--mode=ar'"),
        (["run", "ssd"], "'ssd' is not a flag: write --name=value"),
        (["run", "--mod=ssd"], "did you mean '--mode'"),
        (["run", "--top_k=5"], "unknown flag '--top_k': allowed: "),
        (["run", "--lookahead"], "lookahead=True"),
        (["run", "--nolookahead"], "lookahead=False"),
        (["run", "--mode="], "unknown mode ''"),
        (["run", "-", "name"], "'-' is not a flag"),
        (["run", "--out", "-"], "'-' is not a flag"),
        (["run", "--", "--interactive"], "'--' is not a flag"),
        (["--"], "'--' is not a flag"),
    ],
)
def test_refusals_come_before_anything_else(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cli.parse(arguments)


def test_help_is_shown_and_nothing_runs(capfd: pytest.CaptureFixture[str]) -> None:
    asked = [[], ["-h"], ["--help"], ["run", "-h"], ["run", "--", "--help"]]
    for words in [*asked, *([name, "--help"] for name in cli.SPECS)]:
        with pytest.raises(SystemExit) as left:
            main(words)
        shown, stderr = capfd.readouterr()  # stdout: `--help | grep` finds a flag
        assert left.value.code == 0 and "mpissd" in shown and not stderr
        if words and (spec := cli.SPECS.get(words[0])):
            assert all(f"--{name}" in shown for name in flags_of(spec.config))
            assert all(word.upper() in shown for word in spec.words)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dry_run=1",), "world of 1 rank is too small for num_drafts=1"),
        (("--pair=toy", "--dry_run=4"), "num_heads=8 is not divisible by tp=3"),
        (("--pair=8b/1c",), "unknown model '1c'"),
        (("--device=h10",), "unknown device 'h10': did you mean 'h100'?"),
        (("--device=./none.json",), "none.json"),
        (("--device=v100-32", "--pair=70b/1b"), "needs 136.9 GB a rank"),
        (("--fan_out=list:1,2",), "has 2 values: allowed: lookahead + 1 = 5 (lookahead: K)"),
        (("--hit_law=smolm2",), "unknown hit_law 'smolm2': did you mean 'smollm2'?"),
        (("--acceptance=rates:.9,.8",), "has 2 values: allowed: lookahead = 4"),
        (("--out=" + "a" * 300,), "File name too long"),
    ],
)
def test_a_bad_configuration_is_one_line_and_exit_2(
    flags: tuple[str, ...], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capfd, *HERE, *flags)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_knows_the_memory_that_ranks_of_one_host_share(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """launch/local.sh refuses it in one line; mpirun would print a box too."""
    available = "mpissd.engine.job.available_memory_bytes"
    for one_host, memory_gb, code in (("1", 40, 2), ("1", 80, 0), ("", 40, 0)):
        monkeypatch.setenv("MPISSD_ONE_HOST", one_host)
        monkeypatch.setattr(available, lambda gb=memory_gb: gb * 10**9)
        assert main(["run", "--backend=numpy", "--pair=8b/1b", "--dry_run=2"]) == code
        err = capfd.readouterr().err
        assert ("the device has 20.0 GB" in err) == bool(code)
        assert ("another pair or --backend=emulated\n" in err) == bool(code)


@pytest.mark.parametrize(("is_there", "says"), [(False, "is not installed"), (True, "no usable")])
def test_a_dry_run_knows_that_the_ranks_of_one_host_have_no_gpu(
    is_there: bool, says: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cupy = SimpleNamespace(__spec__=ModuleSpec("cupy", None), is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "cupy", cupy if is_there else None)
    for words in (["run"], ["sweep", "--grid=mode=sd,ssd"]):
        words = [*words, "--dry_run=2", "--backend=cupy"]
        monkeypatch.delenv("MPISSD_ONE_HOST", raising=False)
        assert main(words) == 0  # as on a login node, for ranks elsewhere
        capfd.readouterr()
        monkeypatch.setenv("MPISSD_ONE_HOST", "1")
        err = refused(capfd, *words)
        assert "backend 'cupy': " in err and says in err and "numpy, emulated" in err


def test_arguments_are_judged_without_mpi_and_with_one_thread(tmp_path: Path) -> None:
    program = (
        "import json, os, sys\n"
        "from mpissd.__main__ import main\n"
        "code = main(sys.argv[1:])\n"
        "print(json.dumps([code, os.environ['OPENBLAS_NUM_THREADS'], "
        "[m for m in sys.modules if m in ('mpi4py.MPI', 'cupy')]]))"
    )
    environ = {k: v for k, v in os.environ.items() if "NUM_THREADS" not in k}
    root = str(Path(cli.__file__).parents[2])
    for flags, code in (((*HERE, "--out=a/b"), 0), ((*HERE, "--mode=x"), 2)):
        env = {**environ, "PYTHONPATH": root}
        done = python("-c", program, *flags, env=env, cwd=tmp_path, check=True)
        assert json.loads(done.stdout) == [code, "1", []]
    assert list(tmp_path.iterdir()) == []
    program = "import sys, mpissd.__main__; sys.exit('numpy' in sys.modules)"  # for --help
    assert python("-c", program).returncode == 0


def test_a_python_without_the_packages_is_told_which_one_has_them(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "mpissd", tmp_path / "mpissd", ignore=shutil.ignore_patterns("*cache*"))
    venv = tmp_path / ".venv/bin/python"
    run = "import runpy, sys; sys.modules['numpy'] = None; sys.argv[1:] = ['compare']"
    run += "; runpy.run_module('mpissd', None, '__main__')"
    for use in ("pip install . there, or make venv", f"use {venv}"):
        done = python("-c", run, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr == f"mpissd: {sys.executable} has no numpy: {use}\n"
        venv.parent.mkdir(parents=True, exist_ok=True)
        venv.touch()


@pytest.mark.parametrize("words", ["--help", "replicas none"])
def test_nobody_reads_stdout(words: str) -> None:
    read, write = os.pipe()
    os.close(read)
    pipes = {"stdin": subprocess.DEVNULL, "stdout": write, "stderr": subprocess.PIPE}
    done = python("-m", "mpissd", *words.split(), capture_output=False, **pipes)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_ctrl_c_is_a_code_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("mpissd.__main__.execute", interrupted)
    assert main(["serve"]) == 130
