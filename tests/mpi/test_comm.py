"""Groups, links and plans between real ranks; what they check is in tests/mpi/ranks.py."""

from __future__ import annotations

import pytest

from tests.mpi.harness import needs_mpi, start

pytestmark = needs_mpi


@pytest.mark.parametrize(
    ("check", "num_ranks"),
    [
        ("group", 2),
        ("group", 3),
        ("group", 4),
        ("missing_rank", 2),
        ("plans", 3),
        ("link", 3),
        ("refused", 3),
        ("topology", 3),
    ],
)
def test_between_ranks(check: str, num_ranks: int) -> None:
    with start(num_ranks, "tests.mpi.ranks", check) as job:
        code, out, err = job.finish()
        assert (code, out) == (0, "good\n"), err[-2000:]
        assert job.is_gone()
