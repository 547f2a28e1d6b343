"""The model pair of the markov workload: rows by hashing, equal wherever they are made."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from mpissd.engine.spec.sampling import probabilities
from mpissd.engine.workload.markov import MarkovModel

MODEL = MarkovModel(40, 2, 7, 0.3)


def overlap(a: MarkovModel, b: MarkovModel, contexts: int = 60) -> float:
    """Mean Σ min(p, q), temperature 1."""
    found = []
    for n in range(contexts):
        context = a.context([n % a.vocab, 3 * n % a.vocab, 7 * n % a.vocab])
        p, q = (probabilities(model.logits(context), 1.0) for model in (a, b))
        found.append(np.minimum(p, q).sum())
    return float(np.mean(found))


def test_a_row_is_the_same_in_another_process() -> None:
    code = (
        "from mpissd.engine.workload.markov import MarkovModel as M;"
        "print(M(40, 2, 7, 0.3).logits((3, 5)).tobytes().hex())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == MODEL.logits((3, 5)).tobytes().hex()


def test_divergence_takes_the_draft_away_from_the_target() -> None:
    target = MarkovModel(200, 1, 3)
    alpha = [overlap(target, replace(target, divergence=d)) for d in (0.0, 0.1, 0.3, 0.6, 1.0)]
    assert alpha[0] == pytest.approx(1, abs=1e-12)
    assert alpha == sorted(alpha, reverse=True) and len(set(alpha)) == 5
