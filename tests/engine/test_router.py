"""The router against its definition, and against prompts that it has not seen."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpissd.common.errors import ConfigError
from mpissd.engine.spec.router import FILE, MOST, SMOOTHING, Router, fit, held_out, load

Prompts = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=4)


@given(Prompts, Prompts, st.lists(st.integers(0, 12), max_size=9))
def test_scores_are_the_smoothed_frequencies(
    first: list[list[int]], second: list[list[int]], asked: list[int]
) -> None:
    router = fit({"a": first, "b": second})
    known = sorted({token for prompt in first + second for token in prompt})
    for row, each in enumerate((first, second)):
        every = [token for prompt in each for token in prompt]
        total = len(every) + SMOOTHING * (len(known) + 1)
        wanted = sum(
            math.log(((every.count(t) if t in known else 0) + SMOOTHING) / total) for t in asked
        )
        assert router.scores(asked)[row] == pytest.approx(wanted, abs=1e-3)


def test_a_prompt_s_first_tokens_decide() -> None:
    router = fit({"a": [[1, 2]], "b": [[3, 4]]})
    assert [router.choose(p) for p in ([1], [4, 4], [9], [])] == [0, 1, 0, 0]
    assert router.choose([1] * MOST + [3] * 10 * MOST) == 0


def test_held_out_prompts_are_judged_without_themselves() -> None:
    """Each prompt has a token of its own: a router that had seen it would know it."""
    alone = {"a": [[1, 100 + n] for n in range(6)], "b": [[1, 200 + n] for n in range(6)]}
    assert held_out(alone, 3) == {"a": {"a": 6, "b": 0}, "b": {"a": 6, "b": 0}}
    told = {"a": [[1, 100 + n] for n in range(6)], "b": [[2, 200 + n] for n in range(6)]}
    assert held_out(told, 3) == {"a": {"a": 6, "b": 0}, "b": {"a": 0, "b": 6}}


def test_a_router_is_what_was_saved(tmp_path: Path) -> None:
    assert load(tmp_path) is None
    router = fit({"chat": [[5, 6]], "code": [[7], [8]]})
    fit({"old": [[1]], "older": [[2]]}).save(tmp_path)
    router.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    again = load(tmp_path)
    assert again is not None and again.tasks == ("chat", "code")
    assert again.scores([5, 7, 9]).tolist() == router.scores([5, 7, 9]).tolist()


@pytest.mark.parametrize("damage", ["cut", "text", "shape"])
def test_a_damaged_router_is_one_line(tmp_path: Path, damage: str) -> None:
    router = fit({"chat": [[5, 6]], "code": [[7]]})
    if damage == "shape":
        router = Router(router.tasks, router.tokens, np.zeros((2, 9), np.float32))
    router.save(tmp_path)
    data = (tmp_path / FILE).read_bytes()
    if damage != "shape":
        (tmp_path / FILE).write_bytes(data[:100] if damage == "cut" else b"no archive")
    with pytest.raises(ConfigError, match="allowed: a router that"):
        load(tmp_path)


def test_one_kind_is_no_choice() -> None:
    for prompts in ({"a": [[1]]}, {"a": [[1]], "b": []}):
        with pytest.raises(ConfigError, match="two tasks or more"):
            fit(prompts)
