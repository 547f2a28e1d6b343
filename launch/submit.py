"""Judges a job, prints the sbatch line, runs it; `make submit` calls this.

    python -m launch.submit --ranks=5 --partition=GPU --gpu_type=h100-80 -- --mode=ssd --pair=70b/1b

What follows -- are flags of `mpissd run` (of `mpissd sweep` with --array, of `mpissd serve` with
--serve=N, which submits N replicas). --dry only asks Slurm when such a job would start.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from mpissd.cli import arguments as cli
from mpissd.common.errors import ConfigError, line_of, unknown
from mpissd.common.flags import read, words
from mpissd.engine.comm.topology import check_world
from mpissd.engine.job import Serving, resolve
from mpissd.lab.sweep.commands import check_sweep
from mpissd.ops.slurm import BRIDGES2_TYPES, JobRequest, read_header
from mpissd.serve.config import ServeConfig

ROOT = Path(__file__).resolve().parents[1]
_ARRAY, _SLURM, _REPLICA = "launch/array.sh", "launch/slurm.sh", "launch/replica.sh"
_EVERYWHERE = "--host=0.0.0.0"  # as launch/replica.sh says it: refused without a key
WORDS = ("partition", "gpu_type", "account", "time", "array")
COUNTS = ("gpus", "nodes", "cpus")
EXPORTS = ("tp", "command", "python", "mpirun", "launcher")
LAUNCHERS = ("mpirun", "srun")
FLAGS = ("ranks", "script", "serve", "cluster", *WORDS, *COUNTS, "sbatch", *EXPORTS, "dry")
# What launch/job.sh reads; make's contract is that only MPIRUN counts from the environment.
UNSEEN = ("BACKEND", "COMMAND", "DEVICE", "NUM_LAYERS", "OUT", "PAIR", "PYTHON", "ROUNDS", "TP")


def flags_in(arguments: list[str]) -> dict[str, str]:
    """Returns this script's flags, a make variable each; an empty value counts as left out."""
    given = read(arguments, FLAGS)
    if stray := [name for name in given if name not in FLAGS]:
        raise unknown("flag", f"--{stray[0]}", (f"--{name}" for name in FLAGS))
    given = {name: text for name, text in given.items() if text}
    for name, text in given.items():
        if name != "dry":
            words(name, text)
    if replicas := count("serve", given.get("serve")):
        if said := [name for name in ("array", "script", "command") if name in given]:
            raise ConfigError(f"{said[0].upper()} with SERVE={replicas}: allowed: one of them")
        given["array"] = f"0-{replicas - 1}"
    return given


def count(name: str, text: str | None) -> int | None:
    """Returns a count from 1, or None if the text is empty."""
    if text and not (text.isdecimal() and int(text)):
        raise ConfigError(f"{name.upper()}={text}: allowed: a whole number from 1")
    return int(text) if text else None


def request_of(
    given: dict[str, str], script: str, flags: list[str], *, needs_gpus: bool
) -> JobRequest:
    """Returns the request to Slurm; `flags` are the script's arguments."""
    try:
        header = read_header((ROOT / script).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"SCRIPT={script}: {getattr(error, 'strerror', 'no text')}") from error
    if given.get("launcher", "srun") not in LAUNCHERS:
        raise unknown("LAUNCHER", given["launcher"], LAUNCHERS)
    exports = {name.upper(): given[name] for name in EXPORTS if name in given}
    if "script" not in given:  # T = tasks - D there
        exports.pop("TP", None)
    if bad := [name for name, value in exports.items() if "," in value]:
        raise ConfigError(f"{bad[0]}={exports[bad[0]]}: sbatch takes no comma there")
    try:
        extra = tuple(shlex.split(given.get("sbatch", "")))
    except ValueError as error:
        raise ConfigError(f"SBATCH={given['sbatch']}: {error}") from error
    ranks = count("ranks", given.get("ranks"))
    if ranks is None:
        raise ConfigError("--ranks: needs a value")
    sizes: dict[str, Any] = {name: count(name, given.get(name)) for name in COUNTS}
    return JobRequest(
        script=script,
        ranks=ranks,
        header=header,
        cluster=given.get("cluster", "bridges2"),
        extra=extra,
        exports=exports,
        flags=tuple(flags),
        needs_gpus=needs_gpus,
        **{name: given.get(name) for name in WORDS},
        **sizes,
    )


def check_shards(array: str, configurations: int) -> None:
    """ConfigError for an array of which launch/array.sh cannot tell how many shards there are, or
    with more of them than the grid has configurations."""
    said = os.environ.get("SHARDS", "")
    last = array.partition("%")[0].removeprefix("0-")
    whole = array.partition("%")[0] in ("0", f"0-{last}") and last.isdecimal()
    if not said and not whole:
        raise ConfigError(
            f"ARRAY={array}: allowed: 0-N for all shards; of N: SHARDS=N make submit …"
        )
    shards = count("shards", said) or int(last) + 1
    if max(map(int, re.findall(r"\d+", array.partition("%")[0]))) >= shards:
        raise ConfigError(f"ARRAY={array}: SHARDS={shards}: allowed: 0 to {shards - 1}")
    if shards > configurations:
        raise ConfigError(
            f"ARRAY={array}: {shards} shards of {configurations} configurations: allowed: at most "
            f"as many: 0-{configurations - 1}"
        )


def check_job(request: JobRequest, command: cli.Command) -> None:
    """ConfigError for what the job would refuse when its turn comes: a grid, or memory."""
    if request.script == _ARRAY:
        plan = check_sweep(command.config, command.given, request.ranks)
        if request.array:
            check_shards(request.array, len(plan.points))
    if isinstance(command.config, ServeConfig):
        command.config.fit_world("serve", request.ranks)
    asked = request.resolve().get("gpus")
    if asked is None or not request.needs_gpus:
        return
    gpu = BRIDGES2_TYPES.get(asked.partition(":")[0])
    memory = gpu.memory_bytes if gpu else None
    if request.script == _SLURM and command.name == "run":
        tp = check_world(request.ranks, command.run.drafts, command.run.groups)
        resolve(command.run, tp, backend="cupy", memory_bytes=memory)
    elif isinstance(command.config, ServeConfig):
        config = command.config
        serving = Serving(config.kv_tokens, config.sampling)
        resolve(config.decoding, config.tp, backend="cupy", memory_bytes=memory, serving=serving)


def check_cupy(request: JobRequest, *, is_dry: bool) -> None:
    """ConfigError where the job needs CuPy and this Python has none; a dry run only says so."""
    has_gpus = request.needs_gpus and request.resolve().get("gpus") is not None
    if not has_gpus or importlib.util.find_spec("cupy") is not None:
        return
    lacks = (
        f"{sys.executable} has no CuPy, and a login node cannot tell which one the GPUs need: "
        "make venv CUDA=cuda12 (V100 and newer), or BACKEND=emulated"
    )
    if not is_dry:
        raise ConfigError(lacks)
    print(f"submit: warning: {lacks}", file=sys.stderr)


def main() -> int:
    """Exit 2 with one line where a job would be refused; otherwise sbatch's code."""
    arguments = [*sys.argv[1:], "--"]
    end = arguments.index("--")
    options = arguments[:end]
    flags = arguments[end + 1 : -1]
    if {"-h", "--help"} & set(options):
        print(__doc__, *(f"--{name}" for name in FLAGS))
        return 0
    try:
        given = flags_in(options)
        is_dry = given.get("dry", "0") not in ("0", "False")
        default = _REPLICA if "serve" in given else _ARRAY if "array" in given else _SLURM
        script = given.get("script", default)
        if script == _REPLICA:
            command = cli.parse(["serve", _EVERYWHERE, *flags])
        else:
            name = "sweep" if script == _ARRAY else given.get("command", "run")
            command = cli.parse([name, *flags])
        needs_gpus = command.run.backend in ("auto", "cupy")
        request = request_of(given, script, flags, needs_gpus=needs_gpus)
        line = request.command()
        check_job(request, command)
        check_cupy(request, is_dry=is_dry)
    except ConfigError as error:
        print(f"submit: {line_of(error)}", file=sys.stderr)
        return error.exit_code
    print(shlex.join(line), flush=True)
    os.chdir(ROOT)
    if is_dry:
        return ask_when(line)
    if shutil.which("sbatch") is None:
        print("submit: no sbatch here: log in to the cluster, or DRY=1", file=sys.stderr)
        return 2
    return call(line)


def call(command: list[str]) -> int:
    """Runs it, without what a shell may hold for other reasons; its code."""
    env = {name: text for name, text in os.environ.items() if name not in UNSEEN}
    return subprocess.run(command, env=env, check=False).returncode


def ask_when(command: list[str]) -> int:
    """Slurm's own estimate of the start, where there is a Slurm."""
    if shutil.which("sbatch") is None:
        print("submit: no sbatch here: when it would start is not known", file=sys.stderr)
        return 0
    code = call([command[0], "--test-only", *command[1:]])
    if code:
        print("submit: sbatch cannot say when it would start: its words are above", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
