"""One Slurm for all tests here; it is removed at the end."""

from collections.abc import Iterator

import pytest

from tests.needs import lack
from tests.slurm.sandbox import Sandbox, why_not


@pytest.fixture(scope="session")
def slurm() -> Iterator[Sandbox]:
    if what := why_not():
        lack(what)
    with Sandbox() as sandbox:
        if not sandbox.ask("srun", "--mpi=pmix", "echo", "there"):
            lack("PMIx for srun (libpmix-dev)")
        yield sandbox
    assert sandbox.left == []
