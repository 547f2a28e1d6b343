"""--on_draft_loss=ar: the targets go on without their draft if the launcher lets them."""

import os
from pathlib import Path

import numpy as np

from mpissd.common.row import Row
from mpissd.lab.gates import violations
from tests.mpi.harness import Job, Started, ended, launch, needs_mpi, start
from tests.needs import lack

pytestmark = needs_mpi

JOB = "--backend=emulated --device=null --pair=toy --rounds=800 --progress=off".split()
RECOVERING = f"{os.environ.get('MPIRUN', 'mpirun').split()[0]} --enable-recovery"
NEEDED = "allowed: on_draft_loss=abort, or mpirun --enable-recovery of Open MPI 5 on one host"


def is_open_mpi_5() -> bool:
    done = ended(Started(["bash", "-c", ". launch/env.sh; $MPIRUN --version"]))
    return "(Open MPI) 5" in done.out


def struck(tmp_path: Path, strike: str, *flags: str) -> Job:
    env = {"STRIKE": strike, "STRUCK": str(tmp_path / "struck"), "MPIRUN": RECOVERING}
    folder = tmp_path / "out"
    told = ["tests.mpi.struck", "run", *JOB, *flags, f"--out={folder}"]
    return ended(start(3, *told, env=env), folder)


def test_a_lost_draft_is_said_and_the_tokens_stay_the_same(tmp_path: Path) -> None:
    if not is_open_mpi_5():
        lack("Open MPI 5: it alone keeps survivors")
    done = struck(tmp_path, "2 kill growth 1500", "--on_draft_loss=ar")
    row, arrays = Row.from_dict(done.row), done.arrays
    assert len(done.lines) == 1 and done.lines[0].startswith("mpissd: rank 2 (")
    assert done.lines[0].endswith("the targets go on with K=0 (--on_draft_loss=ar)")
    lost = row["draft_lost_round"]
    assert 0 < lost < 800 and row["num_rounds"] == 800
    drafted = arrays["sequences"][:, 7]
    assert (drafted[:lost] > 0).all() and not drafted[lost:].any()
    assert row["predicted_tok_per_s"] is None and row["phases_us"]["draft"] is None
    assert row["rank_digests"][2] is None and None not in row["rank_digests"][:2]
    assert not violations(row, arrays)
    forged = row | {"draft_lost_round": lost + 5}
    assert any("backup_lookahead" in line for line in violations(forged, arrays))
    forged = row | {"draft_lost_round": lost - 5}
    assert any("draft_lost_round" in line for line in violations(forged, arrays))
    alone = launch(2, *JOB, "--mode=ar", folder=tmp_path / "ar", direct=True)
    assert row["token_digest"] == alone.row["token_digest"]
    assert np.array_equal(alone.arrays["tokens"], arrays["tokens"][:800])


def test_a_launcher_that_keeps_nobody_is_refused_at_start(tmp_path: Path) -> None:
    done = launch(3, *JOB, "--on_draft_loss=ar", folder=tmp_path, direct=True)
    assert done.code == 2 and len(done.lines) == 1 and done.lines[0].endswith(NEEDED)
