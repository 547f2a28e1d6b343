"""One target, many ways to decode it between real ranks: the same tokens come out.

At temperature 0 they are the target's own, made here from the model alone; at any other, SSD with
hits that are finished and misses that are drafted just in time draws what SD draws.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mpissd.common.records import token_digest
from tests.loop.markov_rig import Pair, greedy
from tests.mpi.harness import Job, Together, needs_mpi

pytestmark = needs_mpi

TOKENS = 24
SHAPES = (
    "--target=gen:layers=2,hidden=96,ffn=96,heads=12 --draft=gen:layers=1,hidden=96,ffn=96,heads=12"
)
BASE = [*SHAPES.split(), *"--backend=emulated --device=null --workload=markov --seed=4".split()]
PAIR = Pair(temperature=0.0, vocab=12, order=2, prompt_tokens=3, seed=4)
MODELS = "--vocab=12 --order=2 --prompt_tokens=3 --lookahead=3 --warmup_rounds=2".split()
MISSES = "--divergence=1 --fan_out=list:0,0,0,1".split()
NATURAL = "--divergence=0.35 --fan_out=list:1,1,1,2/list:2,0,1,1".split()
HITS = "--divergence=0 --fan_out=uniform:1".split()

# name: (ranks, flags): T, b and what is forced, each value of one beside some of the others.
GREEDY: dict[str, tuple[int, list[str]]] = {
    "ar": (1, ["--mode=ar", "--batch_size=3"]),
    "ar, T=3": (3, ["--mode=ar", "--batch_size=8"]),
    "sd": (2, ["--mode=sd", "--batch_size=3", "--divergence=0.35"]),
    "sd inline, T=2": (2, ["--mode=sd", "--num_drafts=0", "--batch_size=8"]),
    "misses": (2, [*MISSES, "--batch_size=1"]),
    "misses, T=2": (3, [*MISSES, "--batch_size=8"]),
    "natural, b=8": (2, [*NATURAL, "--batch_size=8"]),
    "natural, T=3": (4, [*NATURAL, "--batch_size=3"]),
    "natural, fast": (2, [*NATURAL, "--batch_size=3", "--backup=fast"]),
    "hits, T=3": (4, [*HITS, "--batch_size=8"]),
    "hits, T=2": (3, [*HITS, "--batch_size=1"]),
}


AT_ZERO = [*BASE, *MODELS, "--temperature=0"]
DRAWN = [*BASE, *MODELS, "--temperature=0.8", "--batch_size=5", "--rounds=40"]
STOPPED = [*AT_ZERO, "--batch_size=6", "--num_tokens=40", "--stop_token=7"]
RUNS: dict[str, tuple[int, list[str]]] = {
    **{
        name: (np_, [*AT_ZERO, f"--num_tokens={TOKENS}", *flags])
        for name, (np_, flags) in GREEDY.items()
    },
    "drawn by sd": (2, [*DRAWN, "--mode=sd", "--divergence=0.35"]),
    "drawn": (2, [*DRAWN, *NATURAL]),
    "drawn, T=2": (3, [*DRAWN, *NATURAL]),
    **{
        f"{mode} to a stop": (1 if mode == "ar" else 2, [*STOPPED, f"--mode={mode}"])
        for mode in ("ar", "sd", "ssd")
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Together:
    return Together(RUNS, tmp_path_factory.mktemp("runs"))


def emitted(job: Job) -> dict[int, list[int]]:
    """The token ids in the raw arrays."""
    ends = np.cumsum(job.arrays["token_counts"])[:-1]
    return {n: found.tolist() for n, found in enumerate(np.split(job.arrays["tokens"], ends))}


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_decoding_is_the_target_s_own(name: str, runs: Together) -> None:
    job = runs[name]
    want = greedy(replace(PAIR, batch=job.row["batch_size"]), TOKENS)
    assert job.row["token_digest"] == token_digest(want, TOKENS)
    assert {n: tokens[:TOKENS] for n, tokens in emitted(job).items()} == want
    if name.startswith("misses"):
        assert job.row["hit_rate"] == 0
    elif name.startswith("hits"):
        assert job.row["hit_rate"] == 1
    elif name.startswith("natural"):
        assert 0 < job.row["hit_rate"] < 1


def test_ssd_draws_what_sd_draws(runs: Together) -> None:
    sd = runs["drawn by sd"]
    for job in (runs["drawn"], runs["drawn, T=2"]):
        assert 0 < job.row["hit_rate"] < 1
        assert job.row["outcome_digest"] == sd.row["outcome_digest"]
        assert emitted(job) == emitted(sd)


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_a_stop_token_ends_a_sequence(mode: str, runs: Together) -> None:
    """And nothing that came behind it in its round is told."""
    job = runs[f"{mode} to a stop"]
    want = greedy(replace(PAIR, batch=6), 40, stop_token=7)
    assert {7} < {tokens[-1] for tokens in want.values()}, "choose another stop token"
    assert {n: tokens[:40] for n, tokens in emitted(job).items()} == want
    assert job.row["num_tokens"] == sum(len(tokens) for tokens in want.values())
    assert job.row["token_digest"] == token_digest(want, 40)
