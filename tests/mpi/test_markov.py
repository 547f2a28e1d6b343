"""The markov workload between real ranks: its law by χ², its tokens at temperature 0.

Every χ² is refused where a lossless run would exceed it once in a million; seeds are fixed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import chdtri

from mpissd.engine.workload.markov import MarkovLaws, MarkovModel
from tests.loop.markov_rig import conditionals
from tests.mpi.harness import needs_mpi, start

pytestmark = needs_mpi

COUNT, LENGTH, SEED = 4000, 4, 11
ONE_IN_A_MILLION = 1e-6  # the chance that a lossless run exceeds its bound
LEAST = 10  # expected in a cell; smaller ones are taken together

NULL = "--backend=emulated --device=null --pair=toy --workload=markov".split()
SAMPLED = [*NULL, "--temperature=1", "--batch_size=64", f"--seed={SEED}"]
SMALL = "--vocab=8 --order=1 --divergence=0.4 --lookahead=3 --fan_out=list:1,1,2,2".split()
ODD = "--vocab=9 --order=1 --divergence=0.4 --lookahead=2 --fan_out=list:2,1,2".split()
SERVED = [flag for flag in SAMPLED if not flag.startswith(("--device", "--pair"))]
# name: (ranks, flags, sources that must have served: 0 none, 1 cached, 2 just in time, 3 fast)
CASES: dict[str, tuple[int, list[str], str]] = {
    "hits and misses": (2, [*SAMPLED, *SMALL, "--mode=ssd"], "12"),
    "T=2": (3, [*SAMPLED, *ODD, "--mode=ssd"], "12"),
    "T=2, fast": (3, [*SAMPLED, *ODD, "--mode=ssd", "--backup=fast"], "13"),
    "C=0.5": (2, [*SAMPLED, *SMALL, "--mode=ssd", "--saguaro_c=0.5"], "12"),
    "inline": (1, [*SAMPLED, *SMALL, "--mode=sd", "--num_drafts=0"], "2"),
    "ar, T=2": (2, [*SAMPLED, "--vocab=9", "--order=1", "--mode=ar"], "0"),
}


@cache
def sample(name: str, bias: str = "none") -> dict[str, Any]:
    """What tests.mpi.markov_job found."""
    np_, flags, _ = CASES[name]
    with start(np_, "tests.mpi.markov_job", str(COUNT), str(LENGTH), bias, *flags) as job:
        code, out, err = job.finish()
    assert code == 0, err[-2000:]
    found = json.loads(out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def laws_of(flags: Sequence[str]) -> MarkovLaws:
    told = dict(flag[2:].split("=", 1) for flag in flags)
    vocab, order = int(told["vocab"]), int(told["order"])
    model = MarkovModel(vocab, order, SEED)
    return MarkovLaws(model, model, 1.0, SEED)


def chi_square(groups: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> tuple[float, float]:
    """(Σ (seen − expected)²/expected, what it may be), over groups of (seen, expected) cells."""
    value, free = 0.0, 0
    for seen, expected in groups:
        order = np.argsort(-expected)
        large = int((expected >= LEAST).sum())
        kept, rest = order[:large], order[large:]
        cells = [(seen[n], expected[n]) for n in kept]
        if expected[rest].sum() >= LEAST:
            cells.append((seen[rest].sum(), expected[rest].sum()))
        elif cells and len(rest):
            last = cells.pop()
            cells.append((last[0] + seen[rest].sum(), last[1] + expected[rest].sum()))
        value += sum((a - b) ** 2 / b for a, b in cells)
        free += max(0, len(cells) - 1)
    return float(value), float(chdtri(free, ONE_IN_A_MILLION))


def first_pairs(
    tokens: NDArray[Any], laws: MarkovLaws, temperature: float
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """The first two tokens behind each prompt: V groups of V² cells."""
    prompts = np.array([laws.prompt(n)[-1] for n in range(len(tokens))])
    p = np.array([conditionals(laws.target, temperature, [n]) for n in range(laws.vocab)])
    groups = []
    for prompt in range(laws.vocab):
        pairs = tokens[prompts == prompt, :2]
        seen = np.bincount(pairs[:, 0] * laws.vocab + pairs[:, 1], minlength=laws.vocab**2)
        groups.append((seen, len(pairs) * (p[prompt][:, None] * p).ravel()))
    return groups


def followers(
    tokens: NDArray[Any], laws: MarkovLaws, temperature: float
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """What follows each token, from the third on: V groups of V cells."""
    groups = []
    before, after = tokens[:, 1:-1].ravel(), tokens[:, 2:].ravel()
    for token in range(laws.vocab):
        seen = np.bincount(after[before == token], minlength=laws.vocab)
        groups.append((seen, seen.sum() * conditionals(laws.target, temperature, [token])))
    return groups


def ratios_of(name: str, found: dict[str, Any], temperature: float = 1.0) -> list[float]:
    """Each χ² over its bound."""
    tokens, laws = np.array(found["tokens"]), laws_of(CASES[name][1])
    assert tokens.shape == (COUNT, LENGTH)
    return [
        value / bound
        for value, bound in (
            chi_square(groups(tokens, laws, temperature)) for groups in (first_pairs, followers)
        )
    ]


@pytest.mark.parametrize(
    "name",
    [
        *("hits and misses", "T=2, fast", "inline", "ar, T=2"),
        pytest.param("T=2", marks=pytest.mark.long),
    ],
)
def test_what_is_emitted_has_the_target_s_law(name: str) -> None:
    found = sample(name)
    ratios = ratios_of(name, found)
    print(f"{name}: χ²/bound {ratios}, hits {found['hit_rate']:.2f}, {found['served']}")
    assert {served[0] for served in found["served"]} == set(CASES[name][2])
    if "1" in CASES[name][2]:
        assert 0.2 < found["hit_rate"] < 0.98
    assert max(ratios) < 1


def test_the_power_of_the_tests() -> None:
    """Both refuse the law of a temperature that is a fifth higher."""
    found = sample("hits and misses")
    laws = laws_of(CASES["hits and misses"][1])
    gap = [
        abs(conditionals(laws.target, 1.2, [n]) - conditionals(laws.target, 1.0, [n])).sum() / 2
        for n in range(laws.vocab)
    ]
    ratios = ratios_of("hits and misses", found, temperature=1.2)
    print(f"temperature 1.2: total variation {np.mean(gap):.3f} a token, χ²/bound {ratios}")
    assert min(ratios) > 1


@pytest.mark.parametrize("bias", ["residual", "lenient"])
def test_a_verification_that_errs_is_refused(bias: str) -> None:
    ratios = ratios_of("hits and misses", sample("hits and misses", bias))
    print(f"{bias}: χ²/bound {ratios}")
    assert min(ratios) > 1
