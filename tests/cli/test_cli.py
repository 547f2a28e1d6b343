"""The command line in one process: its exit codes, and one line for each refusal. plan's JSON."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpissd.__main__ import main
from mpissd.cli import arguments as cli
from mpissd.cli.arguments import Command, ProbeConfig
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.flags import flags_of
from mpissd.engine.job import resolve
from tests.scripts import ROOT, printed_command, python, refused
from tests.text import tiny
from tests.tiny_pair import tiny_pair

HERE = ("run", "--dry_run=2", "--backend=emulated", "--device=null")


@pytest.mark.parametrize("command", ["-m mpissd plan --help", "-m analysis --help"])
@pytest.mark.parametrize(
    ("streams", "code", "last"),
    [
        ("PYTHONIOENCODING=ascii", 0, ""),
        ("LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0", 0, ""),
        ("<&- >&-", 0, ""),
        (">/dev/full", 5, "stdout: No space left on device\n"),
    ],
)
def test_help_is_printed_to_any_stdout(command: str, streams: str, code: int, last: str) -> None:
    """An encoding without …, a closed stdout, a full disk: no traceback."""
    words = streams.split()
    variables = [word for word in words if "=" in word]
    shell = shlex.join(["env", *variables, sys.executable, *command.split()])
    shell += "".join(f" {word}" for word in words if "=" not in word)
    done = subprocess.run(
        ["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr.partition(": ")[2]) == (code, last), done.stderr
    assert done.stdout.isascii() or not variables


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


@pytest.mark.parametrize("word", ["--version", "version"])
def test_versions_are_printed_without_starting_mpi(word: str) -> None:
    code = f"try: m.main([{word!r}])\nfinally: print(*sys.modules)"
    lines = python("-c", f"import sys, mpissd.__main__ as m\n{code}").stdout.splitlines()
    assert lines[0].startswith("mpissd 0.") and f" {sys.version.split()[0]} " in lines[1]
    assert re.match(r"MPI: .*\d", lines[2]) and "numpy " in lines[3]
    assert not {"mpi4py.MPI", "cupy", "numba", "torch"} & set(lines[4].split())


def test_an_environment_in_another_checkout_has_no_commit_of_it(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "mpissd" / "common", tmp_path / "venv" / "mpissd" / "common")
    (tmp_path / "venv/mpissd/__init__.py").touch()
    git = "git init -q && git -c user.name=x -c user.email=x commit -q --allow-empty -m theirs"
    subprocess.run(git, shell=True, cwd=tmp_path, check=True)
    code = "from mpissd.common.origin import commit; print(commit())"
    assert python("-c", code, cwd=tmp_path / "venv").stdout == "None\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dry_run=1",), "world of 1 rank is too small for num_drafts=1"),
        (("--pair=8b/1c",), "unknown model '1c'"),
        (("--device=./none.json",), "none.json"),
        (("--device=v100-32", "--pair=70b/1b"), "needs 136.9 GB a rank"),
        (("--hit_law=smolm2",), "unknown hit_law 'smolm2': did you mean 'smollm2'?"),
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


PROBED = ROOT / "results/h200/profiles"
EIGHT = f"--profile={PROBED / 'h200-8b-1b-T1D1.json'}"  # 8B at T=1 and 1B, fused
TWO = f"--profile={PROBED / 'h200-70b-1b-T2D1.json'}"  # 70B at T=2 and 1B, fused
SEVENTY = f"--profile={PROBED / 'h200-70b-T4.json'}"  # 70B at T=4, no draft
A100 = "--profile=a100-80"


def plan(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    """The JSON on the last line, and all that is printed."""
    assert main(["plan", *arguments]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    return json.loads(out.splitlines()[-1], parse_constant=pytest.fail), out


def command_line(out: str, name: str) -> tuple[int, Any]:
    """(ranks, configuration) of the line that a plan prints for a command."""
    ranks, words = printed_command(out, name)
    return ranks, cli.parse(words).config


def test_a_mode_is_predicted(capfd: pytest.CaptureFixture[str]) -> None:
    flags = "--profile=h100", "--pair=8b/1b", "--lookahead=5", "--rounds=50"
    ar, sd, ssd = (plan(capfd, *flags, f"--mode={mode}")[0] for mode in ("ar", "sd", "ssd"))
    rate = "expected_tok_per_s"
    assert 0 < ar[rate] < sd[rate] < ssd[rate]
    assert plan(capfd, *flags, "--mode=ar", "--tp=2")[0][rate] > ar[rate]
    same = plan(capfd, *flags, "--mode=sd", "--draft_device=h100")[0]
    slower = plan(capfd, *flags, "--mode=sd", "--draft_device=v100-32")[0]
    assert same == sd and slower["t_target_s"] == same["t_target_s"]
    assert slower["t_draft_s"] > same["t_draft_s"]


def test_a_plan_is_of_one_sequence_and_of_all_gpus(capfd: pytest.CaptureFixture[str]) -> None:
    """Two GPUs: one sequence is fastest over both, two on one GPU each give more together."""
    told, out = plan(capfd, "--profile=h200", "--fuse", "--alpha=.7", "--gpus=2", "--details")
    copies = [(2 // (c["tp"] + c["num_drafts"])) * c["tok_per_s"] for c in told["judged"]]
    most = re.search(r"Most tok/s of all 2 GPUs: 2 × (.*) T=1, ([0-9,]+) tok/s", out)
    assert most is not None and int(most[2].replace(",", "")) == round(max(copies))
    assert max(copies) > told["best"]["tok_per_s"]
    assert told["best"] == told["judged"][0] and not told["unjudged"]
    names = {f"{mode} T={tp}" for mode in ("AR", "SD inline", "lookup") for tp in (1, 2)}
    assert all(f"{name} " in out for name in (*names, "SD T=1 D=1", "SSD T=1 D=1"))


def test_a_plan_is_made_for_what_was_probed(capfd: pytest.CaptureFixture[str]) -> None:
    """Pair and fused products are the probe's where no flag sets them; other T are derived."""
    told, _ = plan(capfd, EIGHT, "--gpus=4", "--trees=false")
    for choice in told["judged"]:
        derived = choice["derived"]
        assert derived is None if choice["tp"] == 1 else derived.startswith("derived")
    told, out = plan(capfd, EIGHT, "--gpus=1")
    _, config = command_line(out, "run")
    assert (config.pair, config.fuse) == ("8b/1b", True)
    (ar,) = (choice for choice in told["judged"] if choice["mode"] == "ar")
    assert plan(capfd, EIGHT, "--mode=ar")[0]["expected_tok_per_s"] == pytest.approx(
        ar["tok_per_s"]
    )


def test_what_is_derived_is_run_and_measured(capfd: pytest.CaptureFixture[str]) -> None:
    """The commands that run the fastest use and measure its times are both printed."""
    told, out = plan(
        capfd, "--profile=h200", "--pair=70b/1b", "--gpus=3", "--alpha=.8", "--details"
    )
    assert told["best"] == told["judged"][0] and told["best"]["derived"]
    ranks, config = command_line(out, "run")
    assert (ranks, config.forward, config.context) == (3, "transformer", 512)
    resolve(config, told["best"]["tp"], backend="emulated", memory_bytes=None)
    first = told["probe_first"][0]
    ranks, config = command_line(out, "probe")
    assert ranks == first["tp"] + first["num_drafts"] and isinstance(config, ProbeConfig)
    job = resolve(config.run, first["tp"], backend="emulated", memory_bytes=None)
    # A probe of a tree or of SSD reads lists of candidates, which are measured with them.
    assert job.draft_options.top_k > 1 and first["mode"] in ("tree", "ssd")


def test_without_an_all_reduce_nothing_is_best(capfd: pytest.CaptureFixture[str]) -> None:
    text = Path(EIGHT.partition("=")[2]).read_text().replace("NVIDIA H200", "Another GPU")
    Path("other.json").write_text(text)
    told, out = plan(capfd, "--profile=./other.json", "--gpus=2", "--alpha=.5")
    assert "Not judged: AR T=2, lookup T=2, SD inline T=2" in out and "The fastest use" not in out
    assert "→" not in out and told["best"] is None
    uses = {(use["mode"], use["tp"]) for use in told["unjudged"]}
    assert uses == {("ar", 2), ("lookup", 2), ("sd", 2)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "--profile=h10"), "did you mean 'h100'"),
        (("plan", "--profile=out/mine.json"), "no such file: allowed: what `probe` saved"),
        (("plan", "--lookahead=3"), "lookahead=3 without mode: allowed: with mode"),
        (("plan", "--mode=ar", "--pair=70b/1b"), "needs 139.0 GB a rank"),
        (("plan", TWO, "--gpus=3", "--pair=8b/1b"), "doesn't cover llama-3.1-8b T=1"),
        (("plan", EIGHT, "--pair=8b/0.6b"), "doesn't cover qwen3-0.6b T=1"),
        (("plan", EIGHT, "--pair=8b/1b", "--nofuse"), "doesn't cover llama-3.1-8b T=1: it has"),
        (("plan", EIGHT, "--mode=sd", "--lm_head"), "doesn't cover llama-3.1-8b T=1 fuse lm_head"),
        (("plan", SEVENTY, "--pair=70b/1b", "--gpus=5"), "doesn't cover llama-3."),
    ],
)
def test_refusals(
    arguments: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capfd, *arguments)


def test_a_profile_of_other_weights_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    device = json.loads(Path(EIGHT.partition("=")[2]).read_text())
    for entry in device["tables"]["forwards"]:
        entry["params"] += entry["model"] == "llama-3.1-8b"
    Path("probed.json").write_text(json.dumps(device))
    assert "doesn't cover this llama-3.1-8b" in refused(capfd, "plan", "--profile=./probed.json")


def test_a_plan_for_weights_can_be_run(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With weights, imposed acceptance needs --workload=gemm."""
    pair = tiny_pair(tmp_path, kv_heads=6)
    _, out = plan(capfd, f"--pair={pair.target}/{pair.draft}", "--gpus=1", "--alpha=0.7", A100)
    _, words = printed_command(out)
    assert main([*words, "--dry_run", f"--out={tmp_path / 'out'}"]) == 0


def test_distill_looks_at_its_flags_before_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    pair = tiny_pair(tmp_path / "pair", vocab=len(tiny.tokens()))
    tiny.write(pair.target)
    for more in (f"from_draft={pair.draft}", "layers=0,1"):
        assert main(["distill", f"--target={pair.target}", f"--{more}"]) == 2
        told = more if "from" in more else "PyTorch"
        assert capsys.readouterr().err.startswith(f"mpissd: {told}")
