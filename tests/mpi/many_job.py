"""The program that harness.Together starts under mpirun: runs, one after the other in one world.

python -m mpi4py -m tests.mpi.many_job FOLDER…      FOLDER/flags.json lists the flags of a run

Rank 0 writes FOLDER/told.json: [exit code, stdout, stderr]. A run that raises ends the job.
"""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from mpi4py import MPI

from mpissd.cli import arguments as cli
from mpissd.common.config import RunConfig
from mpissd.lab.measure.run import execute


def run(folder: Path) -> None:
    command = cli.parse(["run", *json.loads((folder / "flags.json").read_text())])
    assert command is not None and isinstance(command.config, RunConfig)
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = execute(command.config)
    if MPI.COMM_WORLD.rank == 0:
        (folder / "told.json").write_text(json.dumps([code, out.getvalue(), err.getvalue()]))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run(Path(name))
