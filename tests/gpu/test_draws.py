"""Tokens that the device draws are the host's, at a vocabulary of real size; and their cost."""

from typing import Any

import numpy as np
import pytest

from mpissd.engine.law import sampling
from mpissd.engine.model.forwards import Drafting, Judging
from mpissd.engine.model.transformer.cupy_ops.draws import CupyDraws

pytestmark = pytest.mark.gpu
ROWS = 8


def opened(backend: Any, columns: int) -> tuple[CupyDraws, Any]:
    logits = np.random.default_rng(1).standard_normal((ROWS, columns)).astype(np.float32) * 3
    launcher = backend.launcher(early=True)
    return CupyDraws(backend, launcher, launcher.uploaded(logits, np.float32)), logits


@pytest.mark.parametrize("columns, temperature", [(49_152, 0.7), (128_256, 1.0)])
def test_draws_are_the_hosts(backend: Any, columns: int, temperature: float) -> None:
    draws, logits = opened(backend, columns)
    rng = np.random.default_rng(2)
    probs = [sampling.weigh(row, temperature).probs for row in logits]
    for _ in range(20):
        us = rng.random(ROWS).tolist()
        told = draws.judge([Judging(n, temperature, u) for n, u in enumerate(us)])
        assert [one.token for one in told] == list(map(sampling.draw, probs, us))


@pytest.mark.parametrize("top, scale", [(0, 1.0), (5, 0.25), (24, 0.0)])
def test_proposals_and_what_replaces_them_are_the_hosts(
    backend: Any, top: int, scale: float
) -> None:
    draws, logits = opened(backend, 16_384)
    rng = np.random.default_rng(3)
    p = sampling.weigh(logits[0], 0.7).probs
    verdicts = set[int]()
    for _ in range(10):
        us = rng.random(ROWS).tolist()
        found = draws.propose([Drafting(n, 0.9, u, top) for n, u in enumerate(us)], scale)
        for row, (one, u) in enumerate(zip(found, us, strict=True)):
            kept = np.asarray(one.kept)
            probs = sampling.weigh(logits[row], 0.9, top, scale).probs
            assert one.token == sampling.propose(probs, u)[0]
            assert sampling.checked_total(kept, one.token, one.q, None) == one.kept.total
            coin, bonus = rng.random(2).tolist()
            asked = Judging(0, 0.7, bonus, one.token, one.q, coin, one.kept)
            (verdict,) = draws.judge([asked])
            k, token = sampling.judge(
                lambda i: p, [one.token], [one.q], lambda i: kept, [coin], bonus  # noqa: B023
            )  # fmt: skip
            assert verdict.is_replaced == (k == 0) and (k or verdict.token == token)
            verdicts.add(k)
    assert verdicts == {0, 1}
