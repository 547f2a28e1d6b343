"""Groups, links and plans between real ranks; their checks are in tests/mpi/ranks.py."""

from __future__ import annotations

from tests.mpi.harness import needs_mpi, start

pytestmark = needs_mpi


def test_between_ranks() -> None:
    checks = "group plans link refused topology memory"
    with start(3, "tests.mpi.ranks", *checks.split()) as job:
        code, out, err = job.finish()
        assert (code, out) == (0, "good\n"), err[-2000:]
        assert job.is_gone()


def test_a_long_plan_arrives_while_the_lead_waits_for_its_gpu() -> None:
    without = {"OMPI_MCA_smsc": "^cma", "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
    with start(2, "tests.mpi.ranks", "long_plans", env=without) as job:
        code, out, err = job.finish()
        assert (code, out) == (0, "good\n"), err[-2000:]
