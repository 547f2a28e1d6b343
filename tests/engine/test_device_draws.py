"""Tokens drawn by draw.cu on a processor (tests/emulator), against the host's draws; no GPU."""

import threading
from typing import Any

import numpy as np
import pytest

from mpissd.engine.law import sampling
from mpissd.engine.model.forwards import Drafting, Judging
from mpissd.engine.model.transformer.cupy_ops import draws as cupy_draws
from mpissd.engine.model.transformer.cupy_ops.draws import CupyDraws
from mpissd.engine.model.transformer.numba_ops.ops import Logits, NumbaOps
from tests.text_config import decode
from tests.tiny_pair import TinyPair

pytestmark = pytest.mark.slow  # builds the kernel

V, ROWS = 1500, 6  # of 16 warps, the last ones have few columns or none


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two warps have all columns: an emulated thread costs as much as many columns."""
    monkeypatch.setattr(cupy_draws, "_THREADS", 64)


def opened(gpu: Any, seed: int = 0, columns: int = V, spread: float = 2.0) -> tuple[Any, Any]:
    """Draws over random rows, and the rows."""
    rng = np.random.default_rng(seed)
    logits = (spread * rng.standard_normal((ROWS, columns))).astype(np.float32)
    logits[:, 7] = logits[:, 3]  # equals
    launcher = gpu.launcher(early=False)
    return CupyDraws(gpu, launcher, launcher.uploaded(logits, np.float32)), logits


@pytest.mark.parametrize("columns", [9, V])
def test_a_token_of_the_target_is_the_hosts(gpu: Any, columns: int) -> None:
    draws, logits = opened(gpu, columns=columns)
    rng = np.random.default_rng(1)
    for temperature in (0.7, 1.0, 1e-3):
        us = [0.0, 1 - 2.0**-53, *rng.random(ROWS - 2)]
        asked = [Judging(row, temperature, u) for row, u in enumerate(us)]
        probs = [sampling.weigh(logits[row], temperature).probs for row in range(ROWS)]
        expected = [sampling.draw(*pair) for pair in zip(probs, us, strict=True)]
        assert [one.token for one in draws.judge(asked)] == expected


@pytest.mark.parametrize("top, scale", [(0, 1.0), (64, 0.0)])
def test_a_proposal_is_the_hosts(gpu: Any, top: int, scale: float) -> None:
    """The row is rounded as on the host, and both ends compute the probability that was sent."""
    draws, logits = opened(gpu, seed=top)
    us = np.random.default_rng(2).random(ROWS).tolist()
    asked = [Drafting(row, 0.7, u, top) for row, u in enumerate(us)]
    for row, found in enumerate(draws.propose(asked, scale)):
        probs = sampling.weigh(logits[row], 0.7, top, scale).probs
        token, q, kept = sampling.propose(probs, us[row])
        arrived = np.asarray(found.kept)
        assert (found.token, found.q) == (token, pytest.approx(q, rel=1e-7))
        assert arrived == pytest.approx(kept, rel=2e-7, abs=2.0**-51)
        assert sampling.recorded(arrived)[token] == found.q
        assert arrived.astype(np.float64)[::-1].sum() == found.kept.total  # exact in any order
        assert sampling.checked_total(arrived, token, found.q, None) == found.kept.total


@pytest.mark.parametrize("reduced", [False, True])
def test_a_drafted_token_is_judged_as_on_the_host(gpu: Any, reduced: bool) -> None:
    """Accepted, replaced from max(p − q, 0), and certain tokens; a draft may have a reduced
    vocabulary."""
    draws, logits = opened(gpu, seed=4, spread=1.0)
    rng = np.random.default_rng(5)
    ids = np.sort(rng.choice(V, 200, replace=False)).astype(np.int32) if reduced else None
    replaced = 0
    for _ in range(12):
        drafted = (logits[1] + rng.standard_normal(V)).astype(np.float32)
        drafted = drafted if ids is None else drafted[ids]
        entry, q, row = sampling.propose(sampling.weigh(drafted, 0.9).probs, rng.random())
        token = entry if ids is None else int(ids[entry])
        for told in (q, 1.0):
            coin, u = rng.random(2).tolist()
            asked = Judging(1, 0.7, u, token, told, coin)
            (verdict,) = draws.judge([asked], ids)
            if verdict.needs_row:
                kept = draws.keep(row, sampling.checked_total(row, entry, q, None))
                (verdict,) = draws.judge([Judging(1, 0.7, u, token, told, coin, kept)], ids)
            p = sampling.weigh(logits[1], 0.7).probs
            expected = sampling.judge(lambda i: p, [token], [told], lambda i: row, [coin], u, ids)  # noqa: B023
            assert (0 if verdict.is_replaced else 1) == expected[0]
            if verdict.is_replaced:
                replaced += 1
                assert verdict.token == expected[1]
    assert replaced > 5


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
    """However it is drafted, sampled text is the same."""
    monkeypatch.setattr(cupy_draws, "_THREADS", 32)  # a row's columns are few
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
