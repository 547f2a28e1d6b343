"""Parts of distil without PyTorch: quantised weights, rounds of answers, and chat templates."""

import numpy as np
import pytest

from mpissd.engine.model.transformer.checkpoint import BLOCK, dequantize, quantize
from tests.needs import module

module("torch", "PyTorch")

from mpissd.learn.evaluate import summary  # noqa: E402


def test_dithering_keeps_weights_on_the_grid_and_others_on_average() -> None:
    """Also with the largest dither, which float32 would round up to 1 next to a whole number."""
    made = np.random.default_rng(0).standard_normal((7, 96)).astype(np.float32)
    matrix, scales = quantize(made)
    highest = np.full(made.shape, np.nextafter(np.float32(1), 0), np.float32)
    again, same = quantize(dequantize(matrix, scales), highest)
    assert np.array_equal(again, matrix) and np.array_equal(same, scales)
    draws = np.random.default_rng(1)
    found = [quantize(made, draws.random(made.shape, np.float32)) for _ in range(400)]
    mean = np.mean([dequantize(*each) for each in found], axis=0)
    steps = np.repeat(scales.astype(np.float32), BLOCK, axis=1)
    largest = np.abs(matrix) == 127
    assert np.abs((mean - made) / steps)[~largest].max() < 0.13  # 5 sigma


def test_rounds_read_off_agreements_are_those_of_the_rule() -> None:
    """Two are accepted, and the next not. All four are. The end, with one accepted."""
    agrees = [rank == 0 for rank in (0, 0, 3, 0, 0, 0, 0, 1, 0)]
    told = summary([agrees], [0.5] * 9, [])
    assert told["greedy_agreement"] == pytest.approx(7 / 9, abs=1e-4) and told["alpha"] == 0.5
    assert told["by_lookahead"]["4"]["tokens_per_round"] == pytest.approx(9 / 3)
