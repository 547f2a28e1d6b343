"""`python -m mpissd distill`: from a target's weights to the folder of its draft."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mpissd.common.errors import ConfigError, MpissdError
from mpissd.common.flags import said
from mpissd.learn.config import DistillConfig

if TYPE_CHECKING:
    from mpissd.learn.job import Distillation, Result


def distill(config: DistillConfig) -> int:
    """Makes the draft and prints its figures; returns the exit code."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ConfigError("PyTorch is missing: pip install 'mpissd[distill]'") from error
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and not gpus:
        raise ConfigError("device=cuda: PyTorch finds no GPU: allowed: auto, cpu")
    if config.device != "cpu" and gpus and config.processes > gpus:
        raise ConfigError(f"processes={config.processes}: allowed: 1 to {gpus}, one a GPU")
    _check_folder(config.out)
    if config.processes == 1:
        return work(0, config, "", time.monotonic())
    return _together(config)


def _check_folder(out: str) -> None:
    """Makes the folder; raises ConfigError for one that cannot be made or written."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"out={out}: {why}: allowed: a folder that can be written") from error


def _together(config: DistillConfig) -> int:
    """Runs one process a GPU; returns the first one's exit code."""
    import torch.multiprocessing as mp

    from mpissd.learn.source import read

    read(config)  # refuses faults before any process starts
    with tempfile.TemporaryDirectory() as place:
        try:
            mp.start_processes(
                _worker, (config, f"{place}/meet", time.monotonic()), nprocs=config.processes
            )
        except mp.ProcessExitedException as error:
            if error.exit_code in (1, 2):
                return int(error.exit_code)
            raise MpissdError(f"distill: a process ended: {error}") from error
    return 0


def _worker(rank: int, config: DistillConfig, place: str, started: float) -> None:
    """Is one process of several; ends with exit code 1 in one line for an error of ours."""
    try:
        code = work(rank, config, place, started)
    except MpissdError as error:
        print(f"mpissd: {error}", flush=True)
        code = error.exit_code
    if code:
        raise SystemExit(code)


def work(rank: int, config: DistillConfig, place: str, started: float) -> int:
    """Samples, trains, saves and evaluates; all of them but the first process only help.

    Returns 1 if the disk or the device fails.
    """
    import torch

    from mpissd.learn.source import read

    source = read(config)
    log = Log(Path(config.out), rank, started, partial(print, flush=True))
    log.begin(config)
    try:
        from mpissd.learn.job import Distillation
        from mpissd.learn.train import join

        gpu = config.device != "cpu" and torch.cuda.is_available()
        group = join(rank, config.processes, place, gpu, config.seconds_evaluating)
        job = Distillation(config, source, log, group, started)
        job.sample()
        code = 0
        for result in job.drafts():
            if not rank:
                code = max(code, _finish(job, result, config))
        group.close()
    except BaseException as error:
        log.end(error)
        raise
    return code


def _finish(job: Distillation, result: Result, config: DistillConfig) -> int:
    """Saves and evaluates a draft; returns 1 if the disk or the device fails."""
    if not result.try_save(result.draft):
        return 1
    deadline = min(job.deadline, time.monotonic() + config.seconds_evaluating)
    try:
        result.evaluate(job.answers(deadline), deadline)
    except (RuntimeError, OSError) as error:
        job.log(f"evaluation stopped: {error}")
        return 1
    return 0


class Log:
    """Shows lines with the seconds since `started` (of time.monotonic()); keeps them in `folder`.

    Of several processes rank 0 logs all lines, the others only their samples. A file that can no
    longer be written (a full disk) is reported once; the work goes on.
    """

    def __init__(
        self, folder: Path, rank: int, started: float, show: Callable[[str], None]
    ) -> None:
        self._path, self._rank, self._started = folder / "log.txt", rank, started
        self._show = show
        self._keeps = True

    def begin(self, config: DistillConfig) -> None:
        """Adds a line with the date and the command; what an earlier command left stays."""
        if not self._rank:
            flags = [f"--{name}={value}" for name, value in said(config).items()]
            now = datetime.now(timezone.utc).isoformat(" ", "seconds")
            self._keep(" ".join([now, "mpissd distill", *flags]))

    def __call__(self, text: str) -> None:
        """Logs a line."""
        if not self._rank or "batch" in text:
            line = self._dated(text)
            self._show(line)
            self._keep(line)

    def end(self, error: BaseException) -> None:
        """Logs the error that ended the work early; the caller reports it to the user."""
        self._keep(self._dated(f"ended: {type(error).__name__}: {error}"))

    def _dated(self, text: str) -> str:
        return f"{time.monotonic() - self._started:7.1f} s  {text}"

    def _keep(self, line: str) -> None:
        """Adds a line in one write, so that lines of several processes stay whole."""
        if not self._keeps:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            self._keeps = False
            self._show(self._dated(f"{self._path}: {error.strerror}: no further lines"))
