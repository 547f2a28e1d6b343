"""The model pair of the markov workload: rows by hashing, equal wherever they are made."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpissd.common.errors import ConfigError
from mpissd.engine.spec.sampling import probabilities
from mpissd.engine.workload.markov import SHARPNESS, MarkovLaws, MarkovModel

MODEL = MarkovModel(40, 2, 7, 0.3)


def overlap(a: MarkovModel, b: MarkovModel, contexts: int = 60) -> float:
    """Mean Σ min(p, q), temperature 1."""
    found = []
    for n in range(contexts):
        context = a.context([n % a.vocab, 3 * n % a.vocab, 7 * n % a.vocab])
        p, q = (probabilities(model.logits(context), 1.0) for model in (a, b))
        found.append(np.minimum(p, q).sum())
    return float(np.mean(found))


@given(
    st.integers(2, 300),
    st.integers(1, 3),
    st.integers(0, 2**64 - 1),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.data(),
)
def test_a_slice_of_a_row_is_the_row_s(
    vocab: int, order: int, seed: int, divergence: float, data: st.DataObject
) -> None:
    """Bit for bit: target ranks make a share each."""
    model = MarkovModel(vocab, order, seed, divergence)
    context = model.context(data.draw(st.lists(st.integers(0, vocab - 1), max_size=4)))
    start = data.draw(st.integers(0, vocab))
    stop = data.draw(st.integers(start, vocab))
    row = model.logits(context)
    assert row.shape == (vocab,) and row.dtype == np.float32 and (row >= 0).all()
    assert model.logits(context, start, stop).tobytes() == row[start:stop].tobytes()


def test_a_row_is_the_same_in_another_process() -> None:
    code = (
        "from mpissd.engine.workload.markov import MarkovModel as M;"
        "print(M(40, 2, 7, 0.3).logits((3, 5)).tobytes().hex())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == MODEL.logits((3, 5)).tobytes().hex()


def test_nobody_can_change_a_row() -> None:
    with pytest.raises(ValueError, match="read-only"):
        MODEL.logits((1, 2))[0] = 1.0


def test_a_row_depends_on_everything_that_names_it() -> None:
    row = MODEL.logits((1, 2)).tobytes()
    others = [
        MODEL.logits((2, 1)),
        MODEL.logits((1, 3)),
        MODEL.logits((-1, 2)),
        replace(MODEL, seed=8).logits((1, 2)),
        replace(MODEL, divergence=0.31).logits((1, 2)),
        replace(MODEL, order=1).logits((2,)),
    ]
    assert len({row, *(other.tobytes() for other in others)}) == 7
    assert MarkovModel(40, 2, 7, 0.3).logits((1, 2)).tobytes() == row


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_context_is_the_last_tokens(order: int) -> None:
    model = MarkovModel(10, order, 0)
    assert model.context([4, 5, 6, 7]) == (4, 5, 6, 7)[-order:]
    assert model.context([]) == (-1,) * order
    assert model.context([9]) == (*(-1,) * (order - 1), 9)


def test_divergence_goes_from_the_target_to_a_stranger() -> None:
    target = MarkovModel(200, 1, 3)
    drafts = [replace(target, divergence=d) for d in (0.0, 0.1, 0.3, 0.6, 1.0)]
    alpha = [overlap(target, draft) for draft in drafts]
    assert alpha[0] == pytest.approx(1, abs=1e-12)
    assert alpha == sorted(alpha, reverse=True) and len(set(alpha)) == 5
    strangers = overlap(target, MarkovModel(200, 1, 4))
    assert alpha[-1] == pytest.approx(strangers, abs=0.1)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_probabilities_fall_by_a_power_of_the_rank(temperature: float) -> None:
    """Over ranks 10 … 1000 of 20000, of 30 rows: the spacings of exponentials make it exact."""
    model, ranks = MarkovModel(20000, 1, 0), np.array([10, 100, 1000])
    logs = [
        np.log(np.sort(probabilities(model.logits((n,)), temperature))[::-1][ranks - 1])
        for n in range(30)
    ]
    slope = np.diff(np.mean(logs, axis=0)) / np.log(10)
    assert slope == pytest.approx([-SHARPNESS / temperature] * 2, rel=0.05)


@pytest.mark.parametrize("vocab", [2, 50000])
def test_the_smallest_and_the_largest_vocabulary(vocab: int) -> None:
    row = MarkovModel(vocab, 3, 1, 0.5).logits((0, 1, vocab - 1))
    assert row.shape == (vocab,) and np.isfinite(row).all() and len(set(row.tolist())) > 1


def test_what_is_kept_of_the_rows_is_bounded() -> None:
    """64 MB a model: 335 rows of 50000, made again equal when they are asked for again."""
    model = MarkovModel(50000, 1, 2)
    first = model.logits((0,)).tobytes()
    held = [model.logits((n,)) for n in range(400)]
    again = model.logits((0,))
    assert again is not held[0] and again.tobytes() == first


def test_the_likeliest_token_has_the_largest_mean() -> None:
    model = MarkovModel(12, 1, 5)
    rows = [probabilities(model.logits((n % 12,)), 1.0) for n in range(64)]
    assert model.likeliest == int(np.argmax(np.mean(rows, axis=0)))


def test_prompts_are_uniform_and_of_their_length() -> None:
    laws = MarkovLaws(MODEL, MODEL, 1.0, seed=4, prompt_tokens=5)
    prompts = [laws.prompt(n) for n in range(400)]
    assert {len(prompt) for prompt in prompts} == {5}
    counts = np.bincount(np.ravel(prompts), minlength=40)
    assert len(counts) == 40 and ((counts - 50) ** 2 / 50).sum() < 95  # χ², 39 degrees: 1.6e-6
    assert laws.prompt(3) == prompts[3] != prompts[4]
    assert [(r.request_id, r.first_token) for r in laws.requests(7, 2)] == [
        (7, prompts[7][-1]),
        (8, prompts[8][-1]),
    ]


def test_vocabularies_that_differ_are_refused() -> None:
    other = replace(MODEL, vocab=41)
    with pytest.raises(ConfigError, match="vocabularies of 40 and 41 tokens: allowed: one"):
        MarkovLaws(MODEL, other, 1.0, seed=0)
