"""The messages between a learner's rank and its trainer, and the packages that a trainer needs."""

from __future__ import annotations

import importlib.util
import io

import numpy as np
import pytest

from mpissd.common.errors import ConfigError
from mpissd.online.examples import Example
from mpissd.online.process import check_trainer, receive, send


def test_messages_come_back_and_a_cut_one_is_the_end() -> None:
    rows = np.ones((3, 4), np.int32), np.full((3, 4), -1.5, np.float16)
    example = Example(np.arange(7, dtype=np.int32), np.arange(3, dtype=np.int32), *rows)
    pipe = io.BytesIO()
    for message in (example, (4, b"weights"), {"state": "learning"}):
        send(pipe, message)
    whole = pipe.getvalue()
    pipe = io.BytesIO(whole + whole[:50])
    found = receive(pipe)
    for name in ("tokens", "at", "ids", "logs"):
        assert np.array_equal(getattr(found, name), getattr(example, name)), name
    assert receive(pipe) == (4, b"weights") and receive(pipe) == {"state": "learning"}
    assert receive(pipe) is None


def test_an_interpreter_that_cannot_train_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    lacks = ("torch", "safetensors")
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n in lacks else find(n))
    with pytest.raises(ConfigError, match=r"^learners=1: .* has no safetensors, torch: pip"):
        check_trainer()


def test_a_gpu_that_pytorch_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from mpissd.online import trainer

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert trainer.device_of("auto", 0) == "cpu"
    with pytest.raises(ConfigError, match="learn=device=cuda: PyTorch finds no GPU"):
        trainer.device_of("cuda", 0)
