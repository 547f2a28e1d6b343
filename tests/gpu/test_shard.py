"""Models over two real ranks, on the CPU and on a device made of host memory."""

from __future__ import annotations

import pytest

from tests.mpi.harness import ended, needs_mpi, start

pytestmark = needs_mpi


@pytest.mark.parametrize(
    ("backend", "choices", "models"),
    [
        ("host", "staged,device,auto", "toy-draft"),
        ("numpy", "auto", "toy-draft,five,three"),
    ],
)
def test_two_ranks_give_what_one_gives(backend: str, choices: str, models: str) -> None:
    flags = f"--backend={backend} --all_reduce={choices} --models={models} --tokens=12"
    done = ended(start(2, "tests.gpu.mpi_shard_check", *flags.split()))
    assert done.code == 0, done.out + done.err
    assert done.out.rstrip().endswith("passed") and "pass  " in done.out
