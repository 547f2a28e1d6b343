"""Groups, links and plans between real ranks; what they check is in tests/mpi/ranks.py."""

from __future__ import annotations

import pytest

from tests.mpi.harness import needs_mpi, start

pytestmark = needs_mpi


@pytest.mark.parametrize(
    ("checks", "num_ranks"),
    [
        ("group transformer", 2),
        ("group", 4),
        ("missing_rank", 2),
        ("group transformer plans link refused topology target_groups", 3),
        ("target_groups", 5),
    ],
)
def test_between_ranks(checks: str, num_ranks: int) -> None:
    with start(num_ranks, "tests.mpi.ranks", *checks.split()) as job:
        code, out, err = job.finish()
        assert (code, out) == (0, "good\n"), err[-2000:]
        assert job.is_gone()


def test_a_long_plan_arrives_while_the_lead_waits_for_its_gpu() -> None:
    without = {"OMPI_MCA_smsc": "^cma", "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
    with start(2, "tests.mpi.ranks", "long_plans", env=without) as job:
        code, out, err = job.finish()
        assert (code, out) == (0, "good\n"), err[-2000:]
