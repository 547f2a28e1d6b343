"""Messages between real ranks, many and long; their checks are in tests/mpi/ranks.py."""

from tests.mpi.harness import Started, ended, needs_mpi, start

pytestmark = needs_mpi


def passes(started: Started) -> None:
    done = ended(started)
    assert (done.code, done.out) == (0, "good\n"), done.err[-2000:]


def test_messages_leak_no_memory() -> None:
    passes(start(3, "tests.mpi.ranks", "memory"))


def test_a_long_plan_arrives_while_the_lead_waits_for_its_gpu() -> None:
    without = {"OMPI_MCA_smsc": "^cma", "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
    passes(start(2, "tests.mpi.ranks", "long_plans", env=without))
