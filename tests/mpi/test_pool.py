"""Target groups that share drafts, between real ranks: exact, in one row, gone when one dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.mpi.harness import Together, launch, needs_mpi
from tests.mpi.strike import Strike, run
from tests.tiny_pair import tiny_pair

pytestmark = needs_mpi

V = 97
NULL = "--backend=emulated --device=null --pair=toy --warmup_rounds=2 --seed=3".split()
NUMPY = "--backend=numpy --pair=toy --warmup_rounds=2 --seed=3".split()
MARKOV = [*NULL, "--workload=markov", "--vocab=12", "--order=2", "--prompt_tokens=3"]
PROMPTS = ";".join(
    ",".join(str((5 * n + j * j) % V) for j in range(length))
    for n, length in enumerate((3, 40, 62, 1))
)
# name: (flags, and the ways to run them by (ranks, groups, batch, more flags)), the first one alone
Way = tuple[int, int, int, list[str]]
JOBS: dict[str, tuple[list[str], list[Way]]] = {
    "gemm": ([*NULL, "--rounds=40"], [(2, 1, 4, []), (3, 2, 2, []), (5, 4, 1, [])]),
    "T=2": ([*NUMPY, "--rounds=12"], [(3, 1, 2, []), (5, 2, 1, [])]),
    "sd": ([*NULL, "--rounds=40", "--mode=sd"], [(2, 1, 2, []), (3, 2, 1, [])]),
    "markov": ([*MARKOV, "--rounds=30"], [(2, 1, 2, []), (3, 2, 1, [])]),
    "drawn": ([*MARKOV, "--rounds=30", "--temperature=1"], [(2, 1, 2, []), (3, 2, 1, [])]),
}
TEXT = f"--backend=numpy --workload=text --prompt_ids={PROMPTS} --num_tokens=24 --warmup_rounds=2"
TEXTS = {"text": "--temperature=0", "drawn text": "--temperature=0.8"}
TEXT_WAYS: list[Way] = [(2, 1, 4, []), (3, 2, 1, []), (5, 4, 1, [])]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Together:
    pair = tiny_pair(tmp_path_factory.mktemp("pair"), vocab=V, heads=4, kv_heads=2, noise=0.1)
    models = [f"--target={pair.target}", f"--draft={pair.draft}", "--fan_out=uniform:2"]
    for name, temperature in TEXTS.items():
        JOBS[name] = [*TEXT.split(), temperature, *models], TEXT_WAYS
    told = {
        f"{name} {groups}": (ranks, [*flags, f"--batch_size={batch}", *_groups(groups), *more])
        for name, (flags, ways) in JOBS.items()
        for ranks, groups, batch, more in ways
    }
    return Together(told, tmp_path_factory.mktemp("runs"))


def _groups(groups: int) -> list[str]:
    return [f"--groups={groups}"] * (groups > 1)


def decided(job: Any) -> dict[int, list[list[int]]]:
    """By sequence: (k, t*, source, hit, num_draft) of its rounds."""
    rows = job.arrays["sequences"]
    return {int(one): rows[rows[:, 1] == one][:, 3:].tolist() for one in np.unique(rows[:, 1])}


@pytest.mark.parametrize("name", [*JOBS, *TEXTS])
def test_groups_decide_what_one_batch_of_them_decides(name: str, runs: Together) -> None:
    ways = JOBS[name][1]
    alone = runs[f"{name} 1"]
    for ranks, groups, batch, _ in ways[1:]:
        job = runs[f"{name} {groups}"]
        assert decided(job) == decided(alone)
        assert job.row["token_digest"] == alone.row["token_digest"]
        assert job.row["hit_rate"] == alone.row["hit_rate"]
        assert (job.row["world_size"], job.row["groups"]) == (ranks, groups)
        assert job.row["batch_size"] == batch
        check_row(job.row)


def check_row(row: dict[str, Any]) -> None:
    """What a row says of its groups adds up to what it says of the job."""
    each, groups = row["per_group"], row["groups"]
    assert len(each) == groups
    for key in ("num_rounds", "num_tokens"):
        assert sum(group[key] for group in each) == row[key]
    assert max(group["wall_s"] for group in each) == row["wall_s"]
    assert sum(group["tok_per_s"] for group in each) >= 0.99 * row["tok_per_s"]
    assert row["tok_per_s_per_gpu"] == pytest.approx(row["tok_per_s"] / row["world_size"], rel=1e-3)
    assert row["draft_wait_us"]["n"] == row["num_rounds"]
    assert row["phases_us"]["lead"]["draft_wait"] == pytest.approx(
        row["draft_wait_us"]["mean"], rel=1e-3
    )
    for key in ("predicted_tok_per_s", "prediction_error", "expected_tok_per_s", "sampling_error"):
        assert row[key] is None, key
    pool = row["pool"]
    assert pool["forwards"] > 0 and 1 <= pool["seats"] <= groups and 0 <= pool["busy"] <= 1.01
    assert len(row["rank_digests"]) == groups * (row["tp"] + row["num_drafts"])
    assert len(row["provenance"]["ranks"]) == row["world_size"]


def test_one_group_says_nothing_of_others(runs: Together) -> None:
    row = runs["gemm 1"].row
    assert row["groups"] == 1 and row["per_group"] is row["pool"] is None
    assert row["draft_wait_us"]["n"] == row["num_rounds"]


def test_answers_of_all_groups_are_in_one_file(runs: Together) -> None:
    texts = [runs[f"text {groups}"] for groups in (1, 2, 4)]
    files = [(job.folder / "text" / f"{job.row['run_id']}.jsonl").read_text() for job in texts]
    assert len(files[0].splitlines()) == 4 and files[0] == files[1] == files[2]


@pytest.mark.parametrize(
    "strike",
    [
        Strike(0, "kill", "verify", 300),
        Strike(1, "kill", "verify", 300),
        Strike(1, "raise", "warm-up", 1),
        Strike(2, "kill", "growth", 300),
        Strike(1, "_exit", "gather", 1),
    ],
    ids=str,
)
def test_a_group_or_a_draft_that_dies_ends_the_job(strike: Strike) -> None:
    """Rank 1 is the lead of the second group, rank 2 the draft."""
    seen = run(strike, "--groups=2")
    assert not seen.wrong, f"{seen.line}\n{seen.err[-2000:]}"


def test_ranks_that_do_not_divide_are_refused_in_one_line(tmp_path: Path) -> None:
    job = launch(4, *NULL, "--groups=2", folder=tmp_path / "out")
    assert job.code == 2 and "do not divide into 2 groups" in job.err
