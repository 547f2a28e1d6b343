"""The command `python -m mpissd distill`, which trains a draft model for a target."""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from mpissd.common.errors import ConfigError, MpissdError
from mpissd.common.output import check_output
from mpissd.learn.config import DistillConfig
from mpissd.learn.source import Inputs, read

_TICK_S = 2.0


def distill(config: DistillConfig) -> int:
    """Runs the command `distill`: trains, evaluates and writes a draft model, in one process or
    several; returns the exit code. config: the command's flags."""
    source = read(config)  # Refuse wrong flags first.
    try:
        import torch
        import torch.multiprocessing as mp
    except ModuleNotFoundError as error:
        raise ConfigError("PyTorch is missing: pip install 'mpissd[distill]'") from error
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and not gpus:
        raise ConfigError("device=cuda: PyTorch finds no GPU: allowed: auto, cpu")
    if config.device != "cpu" and gpus and config.processes > gpus:
        raise ConfigError(f"processes={config.processes}: allowed: 1 to {gpus}, one a GPU")
    check_output(config.out)
    begun = time.monotonic()
    if config.processes == 1:
        return _work(0, config, source, "", begun)
    with tempfile.TemporaryDirectory() as place:
        arguments = config, f"{place}/meet", begun
        try:
            mp.start_processes(_worker, arguments, nprocs=config.processes)
        except mp.ProcessExitedException as error:
            if error.exit_code in (1, 2):
                return int(error.exit_code)
            raise MpissdError(f"distill: a process ended: {error}") from error
    return 0


def _worker(rank: int, config: DistillConfig, place: str, begun: float) -> None:
    """Runs one of several processes. Prints an MpissdError as one line, and ends the process with
    its exit code. place: a file by which the processes find each other. begun: when the command
    began, in seconds of time.monotonic()."""
    try:
        code = _work(rank, config, read(config), place, begun)
    except MpissdError as error:
        print(f"mpissd: {error}", flush=True)
        code = error.exit_code
    if code:
        raise SystemExit(code)


@contextmanager
def ticking(begun: float, *, is_shown: bool) -> Iterator[None]:
    """Inside the block, shows the seconds since `begun` on the last line, if `is_shown`."""
    is_over = Event()

    def show() -> None:
        while not is_over.wait(_TICK_S):
            sys.stderr.write(f"{time.monotonic() - begun:7.1f} s  …\r")
            sys.stderr.flush()

    if is_shown:
        Thread(target=show, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _work(rank: int, config: DistillConfig, source: Inputs, place: str, begun: float) -> int:
    """Runs one process's part of the distillation; returns 1 if disk or device fail, else 0."""
    import torch

    from mpissd.learn.draft import architectures
    from mpissd.learn.job import Distillation
    from mpissd.learn.train import join

    architectures(config, source.checkpoint.config, 0)  # Refuse wrong shapes before sampling.

    def log(text: str) -> None:
        """Prints a line with the seconds so far; later processes print only about batches."""
        if not rank or "batch" in text:
            print(f"{time.monotonic() - begun:7.1f} s  {text}", flush=True)

    gpu = config.device != "cpu" and torch.cuda.is_available()
    group = join(rank, config.processes, place, gpu, config.seconds_evaluating)
    with ticking(begun, is_shown=not rank and sys.stderr.isatty()):
        code = Distillation(config, source, log, group, begun).run()
    if config.processes > 1:
        torch.distributed.barrier()  # A process that leaves early can make another one abort.
        torch.distributed.destroy_process_group()
    return code
