"""`python -m mpissd distill`: from a target's weights to the folder of its draft."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mpissd.common.errors import ConfigError
from mpissd.learn.config import DistillConfig

if TYPE_CHECKING:
    from mpissd.learn.job import Distillation


def distill(config: DistillConfig) -> int:
    """Makes the draft and prints its figures; returns the exit code."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ConfigError("PyTorch is missing: pip install 'mpissd[distill]'") from error
    from mpissd.learn.job import Distillation

    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: PyTorch finds no GPU: allowed: auto, cpu")
    job = Distillation(config, _log(time.monotonic()))
    job.sample()
    job.train()
    job.save()
    return _evaluated(job)


def _evaluated(job: Distillation) -> int:
    """Evaluates the saved draft; returns 1 if the device fails, which leaves the draft saved."""
    try:
        job.evaluate()
    except RuntimeError as error:
        job.log(f"evaluation stopped: {error}")
        return 1
    return 0


def _log(started: float) -> Any:
    def log(text: str) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {text}", flush=True)

    return log
