"""Parts of distil without PyTorch: quantised weights, rounds from ranks, and chat templates."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mpissd.common.errors import ConfigError
from mpissd.engine.model.transformer.checkpoint import BLOCK, dequantize, quantize
from tests.needs import module

module("torch", "PyTorch")

from mpissd.learn.evaluate import rounds_of, summary  # noqa: E402
from mpissd.learn.source import Openings, TemplateParts, template_parts  # noqa: E402


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


class Letters:
    """A tokenizer of one id a letter, with a template of two ids around each message."""

    stop_ids, vocab_size = frozenset({9}), 300

    def __init__(self, end: int = 9) -> None:
        self.end = end

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def chat(self, messages: Sequence[Any]) -> list[int]:
        found = [1]
        for message in messages:
            role = 2 if message["role"] == "user" else 3
            found += [role, *self.encode(message["content"]), self.end, 8]
        return [*found, 3]


def test_a_template_is_read_off_short_conversations() -> None:
    parts = TemplateParts(before=(1, 2), between=(8, 3), again=(8, 2), end=9)
    assert template_parts(Letters()) == parts
    with pytest.raises(ConfigError, match="stop token"):
        template_parts(Letters(end=7))


def test_messages_begin_with_an_opening_or_with_nothing() -> None:
    openings, choose = Openings(Letters()), random.Random(1)
    drawn = [Letters().decode(openings.draw(choose)) for _ in range(300)]
    assert any(text.startswith("Explain") for text in drawn) and "" in drawn
    assert not any("|" in text for text in drawn)
