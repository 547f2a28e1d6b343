"""Text between real ranks: one target's tokens however many ranks share it, draft, or follow.

The target has five KV heads, so two and three ranks have unequal shares of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.mpi.harness import Job, Together, launch, needs_mpi
from tests.tiny_pair import TinyPair, tiny_pair

pytestmark = needs_mpi

V, TOKENS = 97, 40
LENGTHS = (3, 40, 62, 1)  # with the answers they cross pages of 64 positions
PROMPTS = ";".join(
    ",".join(str((5 * n + j * j) % V) for j in range(length)) for n, length in enumerate(LENGTHS)
)
BASE = "--backend=numpy --workload=text --warmup_rounds=2 --deadline_s=40".split()
DRAWN = ["--temperature=0.8", "--top_p=0.9", "--mode=sd"]
SSD = ["--mode=ssd", "--batch_size=3"]

# name: (T, ranks, flags)
WAYS: dict[str, tuple[int, int, list[str]]] = {
    "T=1 ar": (1, 1, ["--mode=ar"]),
    "T=1 ar b=3": (1, 1, ["--mode=ar", "--batch_size=3"]),
    "T=1 inline": (1, 1, ["--mode=sd", "--num_drafts=0", "--batch_size=3"]),
    "T=1 ssd": (1, 2, [*SSD, "--fan_out=uniform:2"]),
    "T=2 ar": (2, 2, ["--mode=ar"]),
    "T=2 inline": (2, 2, ["--mode=sd", "--num_drafts=0", "--lookahead=7"]),
    "T=2 ssd": (2, 3, [*SSD, "--fan_out=geometric:16"]),
    "T=3 ar": (3, 3, ["--mode=ar"]),
    "T=3 sd fast": (3, 3, ["--mode=sd", "--num_drafts=0", "--backup=fast", "--batch_size=3"]),
    "T=3 ssd": (3, 4, [*SSD, "--fan_out=uniform:3", "--backup=fast"]),
}
DRAWS: dict[str, tuple[int, int, list[str]]] = {
    "drawn T=1 sd": (1, 2, DRAWN),
    "drawn T=1 ssd": (1, 2, [*DRAWN[:2], *SSD]),
    "drawn T=2 sd": (2, 2, [*DRAWN, "--num_drafts=0"]),
    "drawn T=2 ssd": (2, 3, [*DRAWN[:2], *SSD]),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    folder = tmp_path_factory.mktemp("pair")
    return tiny_pair(folder, vocab=V, heads=10, kv_heads=5, noise=0.1)


@pytest.fixture(scope="module")
def runs(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    told = [*BASE, f"--target={pair.target}", f"--prompt_ids={PROMPTS}", f"--num_tokens={TOKENS}"]
    runs = {
        name: (ranks, [*told, *flags, *([] if "ar" in name else [f"--draft={pair.draft}"])])
        for name, (_, ranks, flags) in {**WAYS, **DRAWS}.items()
    }
    yield Together(runs, tmp_path_factory.mktemp("runs"))


def answers(job: Job) -> list[dict[str, Any]]:
    path = job.folder / "text" / f"{job.row['run_id']}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def tokens(job: Job) -> list[list[int]]:
    return [answer["tokens"] for answer in answers(job)]


@pytest.mark.parametrize("name", WAYS)
def test_every_way_answers_with_the_same_tokens(name: str, runs: Together) -> None:
    tp, _, flags = WAYS[name]
    job, alone = runs[name], runs[f"T={tp} ar"]
    assert job.row["tp"] == tp and job.row["forward"] == "transformer"
    assert job.row["provenance"]["kernel"] == "numba"
    assert [len(found) for found in tokens(alone)] == [TOKENS] * len(LENGTHS)
    assert tokens(job) == tokens(alone)
    assert job.row["token_digest"] == alone.row["token_digest"]
    assert len(set(job.row["rank_digests"])) == 1
    if "--mode=ssd" in flags:
        assert 0 < job.row["hit_rate"] < 1 and job.row["acceptance_length"] > 1.1


@pytest.mark.parametrize("tp", [1, 2])
def test_ssd_draws_the_text_that_sd_draws(tp: int, runs: Together) -> None:
    """With hits that are finished and misses drafted in time, one seed is one text for one T."""
    sd, ssd = runs[f"drawn T={tp} sd"], runs[f"drawn T={tp} ssd"]
    assert tokens(sd) == tokens(ssd) != tokens(runs[f"T={tp} ar"])
    assert 0 < ssd.row["hit_rate"] < 1
    # The rows of q travel only where the draft is on a rank of its own.
    assert ssd.row["bytes_per_round"] > 4 * V


def test_a_row_says_what_answered(runs: Together, pair: TinyPair) -> None:
    row, lines = runs["T=1 ssd"].row, answers(runs["T=1 ssd"])
    assert row["weights"].keys() == {"target", "draft"}
    assert len(row["weights"]["target"]["sha256"]) == 64
    assert 0 < row["t_prefill_s"] < row["wall_s"]
    assert 0 < row["time_to_first_token_s"] < row["wall_s"]
    assert row["acceptance"] is row["hit_law"] is row["expected_tok_per_s"] is None
    assert row["num_tokens"] == TOKENS * len(LENGTHS) and row["token_limit"] == TOKENS
    for line, length in zip(lines, LENGTHS, strict=True):
        assert len(line["prompt_tokens"]) == length and line["ended"] == "length"
        assert len(line["sources"]) == TOKENS
        assert set(line["sources"]) <= {"bonus", "cache", "jit"}
    named = [source for line in lines for source in line["sources"]]
    assert {"bonus", "cache", "jit"} == set(named)
    arrays = runs["T=1 ssd"].arrays["sequences"]
    assert np.bincount(arrays[:, 5], minlength=3)[1] > 0


@pytest.mark.parametrize("name", [*WAYS, *DRAWS])
def test_a_row_predicts_its_rate_from_its_own_outcomes(name: str, runs: Together) -> None:
    """A lookup without a draft has none; prompts are as measured."""
    row, flags = runs[name].row, {**WAYS, **DRAWS}[name][2]
    if {"--mode=sd", "--backup=fast"} <= set(flags):
        assert row["predicted_tok_per_s"] is row["prediction_error"] is None
        return
    assert row["predicted_round_us"]["n"] == row["num_rounds"]
    wall_s = row["num_rounds"] * row["predicted_round_us"]["mean"] * 1e-6 + row["t_prefill_s"]
    assert row["predicted_tok_per_s"] == pytest.approx(row["num_tokens"] / wall_s, rel=1e-6)
    error = row["tok_per_s"] / row["predicted_tok_per_s"] - 1
    assert row["prediction_error"] == pytest.approx(error, abs=1e-4)


def test_more_ranks_than_kv_heads_are_refused_in_one_line(pair: TinyPair, tmp_path: Path) -> None:
    flags = [*BASE, f"--target={pair.target}", "--prompt_ids=1,2", "--mode=ar"]
    job = launch(6, *flags, folder=tmp_path / "out")
    assert job.code == 2
    said = [line for line in job.err.splitlines() if "KV heads" in line]
    assert len(said) == 1 and "tp=6" in said[0] and "at most its 5 KV heads" in said[0]
    assert not (tmp_path / "out" / "text").exists()
