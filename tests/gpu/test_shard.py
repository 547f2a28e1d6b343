"""Models over real ranks, on the CPU and on a device made of host memory."""

import pytest

from tests.mpi.harness import ended, needs_mpi, start

pytestmark = needs_mpi


@pytest.mark.parametrize(
    ("backend", "choices", "models"),
    [("host", "staged,auto", "toy-draft"), ("numpy", "auto", "toy-draft,five,three")],
)
def test_two_ranks_give_what_one_gives(backend: str, choices: str, models: str) -> None:
    flags = f"--backend={backend} --all_reduce={choices} --models={models} --tokens=12"
    done = ended(start(2, "tests.gpu.mpi_shard_check", *flags.split()))
    assert done.code == 0, done.out + done.err
    assert "passed" in done.out.splitlines() and "pass  " in done.out


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_chain_rounds_to_the_outcomes_of_the_host(ranks: int) -> None:
    done = ended(start(ranks, "tests.gpu.mpi_chained_check", "numpy"))
    assert done.code == 0, done.out + done.err
    assert "passed" in done.out.splitlines()
    assert done.out.count("pass  ") == (22 if ranks == 2 else 16)


def test_a_logit_of_any_rank_that_is_not_finite_ends_the_job() -> None:
    done = ended(start(2, "tests.gpu.mpi_chained_check", "numpy", "spoilt"))
    assert done.code != 0 and "FaultError: target: a logit is not finite" in done.err
