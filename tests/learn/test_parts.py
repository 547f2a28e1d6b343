"""Parts of distil without PyTorch: quantised weights, rounds from ranks, and chat templates."""

import numpy as np
import pytest

from mpissd.engine.model.transformer.checkpoint import BLOCK, dequantize, quantize
from tests.needs import module

module("torch", "PyTorch")

from mpissd.learn.evaluate import rounds_of, summary  # noqa: E402


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


def test_rounds_read_off_ranks_are_those_of_the_rule() -> None:
    # Accepted 0, 0; then rank 3. All four accepted; then rank 1. The end, with one accepted.
    ranks = [0, 0, 3, 0, 0, 0, 0, 1, 0]
    assert list(rounds_of(ranks, 4)) == [(2, 3), (4, 1), (1, None)]
    told = summary([ranks], [0.5] * 9, [])
    assert told["greedy_agreement"] == pytest.approx(7 / 9, abs=1e-4) and told["alpha"] == 0.5
    four = told["by_lookahead"]["4"]
    assert four["tokens_per_round"] == pytest.approx(9 / 3)
    # After the rejection, the third likeliest besides the proposed one: a key from F = 3 on.
    # After all accepted, the second likeliest of all: a key from F = 2 on.
    assert four["hits"] == {"1": 0, "2": 0.5, "4": 1, "8": 1, "16": 1}
