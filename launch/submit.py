#!/usr/bin/env python3
"""Judges a job, prints the sbatch line, runs it; `make submit` calls this.

    launch/submit.py --ranks=5 --partition=GPU --gpu_type=h100-80 -- --mode=ssd --pair=70b/1b

What follows -- are flags of `mpissd run` (of `mpissd sweep` with --array, of `mpissd serve` with
--serve=N, which submits N replicas). --dry only asks Slurm when such a job would start.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mpissd.cli import arguments as cli  # noqa: E402
from mpissd.common.errors import ConfigError, line_of  # noqa: E402
from mpissd.engine.comm.topology import check_world  # noqa: E402
from mpissd.engine.job import Serving, resolve  # noqa: E402
from mpissd.lab.sweep.commands import check_sweep  # noqa: E402
from mpissd.ops.slurm import BRIDGES2_TYPES, Request, read_header  # noqa: E402
from mpissd.serve.config import ServeConfig  # noqa: E402

_ARRAY, _SLURM, _REPLICA = "launch/array.sh", "launch/slurm.sh", "launch/replica.sh"
_EVERYWHERE = "--host=0.0.0.0"  # as launch/replica.sh says it: refused without a key
WORDS = ("partition", "gpu_type", "account", "time", "array")
COUNTS = ("gpus", "nodes", "cpus")
EXPORTS = ("tp", "command", "python", "mpirun")
# What launch/job.sh reads; make's contract is that only MPIRUN counts from the environment.
UNSEEN = ("BACKEND", "COMMAND", "DEVICE", "NUM_LAYERS", "OUT", "PAIR", "PYTHON", "ROUNDS", "TP")


def arguments() -> argparse.ArgumentParser:
    """The options; a make variable each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--script")
    parser.add_argument("--serve", help="number of replicas of a server")
    for name in ("cluster", *WORDS, *COUNTS):
        parser.add_argument(f"--{name}")
    parser.add_argument("--sbatch", default="", help="further options of sbatch")
    for name in EXPORTS:
        parser.add_argument(f"--{name}")
    parser.add_argument("--dry", nargs="?", const="1", default="")
    parser.add_argument("flags", nargs="*")
    return parser


def count(name: str, text: str | None) -> int | None:
    """A count from 1, where one is given."""
    if text and not (text.isdecimal() and int(text)):
        raise ConfigError(f"{name.upper()}={text}: allowed: a whole number from 1")
    return int(text) if text else None


def serve_as_array(given: argparse.Namespace) -> None:
    """Makes SERVE=N the array of N tasks; ConfigError beside an array or a script."""
    if not given.serve:
        return
    if said := [name for name in ("array", "script", "command") if getattr(given, name)]:
        raise ConfigError(f"{said[0].upper()} with SERVE={given.serve}: allowed: one of them")
    given.array = f"0-{(count('serve', given.serve) or 1) - 1}"


def parsed(given: argparse.Namespace, script: str) -> cli.Command:
    """The flags as the job's command takes them."""
    if script == _REPLICA:
        return cli.parse(["serve", _EVERYWHERE, *given.flags])
    name = "sweep" if script == _ARRAY else given.command or "run"
    return cli.parse([name, *given.flags])


def request_of(given: argparse.Namespace, script: str, command: cli.Command) -> Request:
    """What is asked for."""
    try:
        header = read_header((ROOT / script).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"SCRIPT={script}: {getattr(error, 'strerror', 'no text')}") from error
    flags = {name: getattr(given, name) for name in EXPORTS if getattr(given, name)}
    if not given.script:  # T = tasks - D there
        flags.pop("tp", None)
    if bad := [name for name, value in flags.items() if "," in value]:
        raise ConfigError(f"{bad[0].upper()}={flags[bad[0]]}: sbatch takes no comma there")
    try:
        extra = tuple(shlex.split(given.sbatch))
    except ValueError as error:
        raise ConfigError(f"SBATCH={given.sbatch}: {error}") from error
    sizes: dict[str, Any] = {name: count(name, getattr(given, name)) for name in COUNTS}
    return Request(
        script=script,
        ranks=given.ranks,
        header=header,
        cluster=given.cluster or "bridges2",
        extra=extra,
        exports={name.upper(): value for name, value in flags.items()},
        flags=tuple(given.flags),
        needs_gpus=command.run.backend in ("auto", "cupy"),
        **{name: getattr(given, name) or None for name in WORDS},
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


def check_job(request: Request, command: cli.Command) -> None:
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


def check_cupy(request: Request, *, is_dry: bool) -> None:
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
    given = arguments().parse_args()
    script = given.script or (_ARRAY if given.array else _REPLICA if given.serve else _SLURM)
    is_dry = given.dry not in ("", "0")
    try:
        serve_as_array(given)
        command = parsed(given, script)
        request = request_of(given, script, command)
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
