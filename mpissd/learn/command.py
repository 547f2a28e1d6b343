"""`python -m mpissd distill`: from a target's weights to the folder of its draft."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from mpissd.common.errors import ConfigError, MpissdError
from mpissd.common.output import check_output
from mpissd.learn.config import DistillConfig

_TICK_S = 2.0


def distill(config: DistillConfig) -> int:
    """Makes a draft and prints its figures, with a process for each GPU; returns the exit code."""
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
        return _work(0, config, "", begun)
    from mpissd.learn.source import read

    read(config)  # refuses faults before any process starts
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
    """Runs one of several processes; an MpissdError is one line and the exit code."""
    try:
        code = _work(rank, config, place, begun)
    except MpissdError as error:
        print(f"mpissd: {error}", flush=True)
        code = error.exit_code
    if code:
        raise SystemExit(code)


@contextmanager
def ticking(begun: float, *, is_shown: bool) -> Iterator[None]:
    """Shows the seconds since `begun` on the terminal's last line, which the next line replaces."""
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


def _work(rank: int, config: DistillConfig, place: str, begun: float) -> int:
    """Runs one process's part of the distillation; returns 1 if the disk or the device fails."""
    import torch

    from mpissd.learn.draft import architectures
    from mpissd.learn.job import Distillation
    from mpissd.learn.source import read
    from mpissd.learn.train import join

    source = read(config)
    architectures(config, source.checkpoint.config, 0)  # refuses before time goes into samples

    def log(text: str) -> None:
        """Prints a line with the seconds so far; later processes print only lines about samples."""
        if not rank or "batch" in text:
            print(f"{time.monotonic() - begun:7.1f} s  {text}", flush=True)

    gpu = config.device != "cpu" and torch.cuda.is_available()
    group = join(rank, config.processes, place, gpu, config.seconds_evaluating)
    with ticking(begun, is_shown=not rank and sys.stderr.isatty()):
        code = Distillation(config, source, log, group, begun).run()
    if config.processes > 1:
        torch.distributed.destroy_process_group()
    return code
