"""Strange homes, paths, locales and hosts: the real command ends with a row, or with one line."""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.mpi.harness import Started, needs_mpi
from tests.needs import lack, missing
from tests.scripts import ROOT

pytestmark = needs_mpi

RUN = "--mode=ssd --pair=toy --backend=emulated --device=null --rounds=3".split()
START = '\nexec launch/local.sh 2 "$@"'
READ_ONLY = 'mount --bind "$PWD" "$PWD" && mount -o remount,bind,ro "$PWD" && cd "$PWD"'
PLACES = {  # what bash does first, and what the line says; "": a row
    "odd names": ('cd "$odd/checkout"; export TMPDIR=$odd', ""),
    "no home, no stdin": ("unset HOME; export LC_ALL=C; exec <&-", ""),
    "a read-only home": ('export HOME=/proc LC_ALL=tr OMP_NUM_THREADS=999; trap "" HUP', ""),
    "no such TMPDIR": ('export TMPDIR="$odd/none"', ""),
    "a host's name": ("hostname gpu-7.a-b.example.org", ""),
    "a checkout that is read-only": (READ_ONLY, ""),
    "rows into it": (f'{READ_ONLY}; set -- "${{@:1:5}}"', "mpissd: out='out': "),
    "a full TMPDIR": ('mount -t tmpfs -o size=64k none "$odd"; export TMPDIR=$odd', "TMPDIR="),
    "a read-only TMPDIR": ("export TMPDIR=/proc", "TMPDIR=/proc: not writable"),
}  # fmt: skip


@pytest.mark.parametrize(("place", "line"), PLACES.values(), ids=PLACES)
def test_a_run_in_a_strange_place(place: str, line: str, tmp_path: Path) -> None:
    odd = tmp_path / "a b'c\"d é"
    odd.mkdir()
    (odd / "checkout").symlink_to(ROOT)
    out = tmp_path / ("é ' rows" if "odd" in place else "rows")
    command = ["bash", "-c", place + START, "x", *RUN, f"--out={out}"]
    if "mount" in place or "hostname" in place:
        if os.geteuid() != 0 or missing("unshare"):
            lack("root and unshare, for mounts and a hostname")
        command = ["unshare", "--mount", "--uts", *command]
    with Started(command, {"odd": str(odd)}) as started:
        code, _, err = started.finish()
    if line:
        assert code == 2 and err.startswith(line) and err.count("\n") == 1, err
    else:
        assert code == 0, err
        assert (out / "runs.jsonl").read_text().count("\n") == 1


def test_two_jobs_in_one_folder_at_once(tmp_path: Path) -> None:
    words = ["launch/local.sh", "2", *RUN, "--rounds=200", f"--out={tmp_path}"]
    with ExitStack() as held:
        started = [held.enter_context(Started(words)) for _ in range(2)]
        assert [job.finish()[0] for job in started] == [0, 0]
    assert (tmp_path / "runs.jsonl").read_text().count("\n") == 2
    assert len(list((tmp_path / "rounds").iterdir())) == 2
