"""Sampled text is the same if the device draws it (emulated), however it is drafted."""

import threading
from typing import Any

import numpy as np
import pytest

from mpissd.engine.law import sampling
from mpissd.engine.model.transformer.cupy_ops import draws as cupy_draws
from mpissd.engine.model.transformer.cupy_ops.draws import CupyDraws
from mpissd.engine.model.transformer.numba_ops.ops import Logits, NumbaOps
from tests.text_config import decode
from tests.tiny_pair import TinyPair

pytestmark = pytest.mark.slow  # builds the kernel

PROMPTS = "1,5,9;33,2,96,4;7"
LOCK = threading.Lock()  # draft ranks are threads, and the emulator is one


class CopiedDraws(CupyDraws):
    """Draws from logits of the host, which it copies first."""

    launches = 0

    def __init__(self, gpu: Any, logits: Logits) -> None:
        self._source = logits
        launcher = gpu.launcher(early=False)
        rows = len(logits.scores)
        super().__init__(gpu, launcher, launcher.zeros((rows, logits.width), np.float32))

    def _answers(self, count: int, *options: Any) -> Any:
        with LOCK:
            CopiedDraws.launches += 1
            return super()._answers(count, *options).copy()

    def _copy(self) -> None:
        self._logits[...] = self._source.scores[:, : self._source.width]

    def propose(self, *options: Any) -> Any:
        self._copy()
        return super().propose(*options)

    def judge(self, *options: Any) -> Any:
        self._copy()
        return super().judge(*options)


@pytest.fixture(autouse=True)
def one_warp(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/engine/test_device_draws.py has several; here a row's columns are few."""
    monkeypatch.setattr(cupy_draws, "_THREADS", 32)


FLAGS = {"prompt_ids": PROMPTS, "num_tokens": 8, "temperature": 0.7, "batch_size": 2}


@pytest.mark.parametrize(
    "mode, flags",
    [
        ("ar", {}),
        ("sd", {"num_drafts": 0, "temperature": 1.0, "lookahead": 2}),
        ("ssd", {"fan_out": "uniform:2", "saguaro_c": 0.5, "lookahead": 3}),
        ("sd", {"num_drafts": 0, "top_p": 0.9}),  # judged by the host
        ("sd", {"num_drafts": 0, "backup": "fast"}),  # certain tokens
    ],
    ids=str,
)
def test_the_device_draws_the_hosts_tokens(
    pair: TinyPair, gpu: Any, monkeypatch: pytest.MonkeyPatch, mode: str, flags: dict[str, Any]
) -> None:
    expected = decode(pair, mode, **{**FLAGS, **flags})

    def never(*options: Any, **more: Any) -> Any:
        raise AssertionError("a row was drawn on the host")

    monkeypatch.setattr(NumbaOps, "draws", lambda ops, logits: CopiedDraws(gpu, logits))
    if "top_p" not in flags:
        monkeypatch.setattr(sampling, "weigh", never)
    before = CopiedDraws.launches
    assert decode(pair, mode, **{**FLAGS, **flags}) == expected
    assert CopiedDraws.launches > before
    assert mode == "ar" or "backup" in flags or 0 < expected.accepted < 4  # some of both


def test_wrong_draws_are_found(pair: TinyPair, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The premise of the test above: a wrong draw changes the tokens."""
    expected = decode(pair, "ar", **FLAGS)

    class Hotter(CopiedDraws):
        def _answers(self, count: int, *options: Any) -> Any:
            self._asks["temperature"] *= 3
            return super()._answers(count, *options)

    monkeypatch.setattr(NumbaOps, "draws", lambda ops, logits: Hotter(gpu, logits))
    assert decode(pair, "ar", **FLAGS).tokens != expected.tokens
