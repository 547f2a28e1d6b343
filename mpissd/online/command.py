"""`python -m mpissd online`: how fast a draft learns a stream of prompts, replayed offline."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.online.config import OnlineConfig


def online(config: OnlineConfig) -> int:
    """Replays the schedules; prints each point and writes OUT/curves.jsonl. Returns 0."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ConfigError("PyTorch is missing: pip install 'mpissd[distill]'") from error
    gpu = config.device != "cpu" and torch.cuda.is_available()
    if config.device == "cuda" and not gpu:
        raise ConfigError("device=cuda: PyTorch finds no GPU: allowed: auto, cpu")
    if not gpu:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high")
    return _replayed(config, "cuda" if gpu else "cpu")


def _replayed(config: OnlineConfig, device: str) -> int:
    from mpissd.online.answers import Answers
    from mpissd.online.judging import gaps_closed
    from mpissd.online.replay import Replay, parts_of
    from mpissd.online.student import Student

    started = time.monotonic()

    def log(text: str) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {text}", flush=True)

    answers = Answers(config, device, log)
    stages = {name: answers.stage(name, source) for name, source in config.stages.items()}
    parts = parts_of(stages, config.seed)
    how = {"rate": config.rate, "optimizer": config.optimizer}
    student = Student(config.draft, config.target, device=device, exact=config.exact, **how)  # type: ignore[arg-type]
    replay = Replay(student, config)
    weights = "as trained" if config.exact else "as stored"
    points: list[dict[str, Any]] = []
    file = Path(config.out) / "curves.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    about = {"learn_from": config.learn_from, **how, "batch": config.batch, "steps_a_prompt":
             config.steps, "seed": config.seed, "device": device}  # fmt: skip
    for schedule in config.schedules.split(","):
        for point in getattr(replay, schedule)(parts):
            points.append({**point, "about": about, "weights": weights})
            log(json.dumps(point))
            with file.open("a") as lines:
                lines.write(json.dumps(points[-1]) + "\n")
    print(json.dumps({"gap_closed": gaps_closed(points)}))
    return 0
