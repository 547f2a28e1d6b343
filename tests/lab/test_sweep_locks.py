"""A sweep skips the work that another sweep has claimed, until that process is gone."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from mpissd.lab.sweep.locks import Claims
from tests.needs import needs_linux

pytestmark = needs_linux
CLAIM = (
    "import sys, pathlib; from mpissd.lab.sweep.locks import Claims;"
    "claims = Claims(pathlib.Path(sys.argv[1]));"
    "print([claims.take(name) for name in sys.argv[2:]], flush=True); sys.stdin.read()"
)


def other(folder: Path, *names: str) -> tuple[subprocess.Popen[str], str]:
    """Another process that claims `names`, and its result."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(folder), *names], stdin=pipe, stdout=pipe, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_a_claim_is_its_process_and_goes_with_it(tmp_path: Path) -> None:
    with closing(Claims(tmp_path)) as mine:
        assert mine.take("a") and mine.take("b") and mine.take("a")
        first, told = other(tmp_path, "a", "c", "b")
        assert told == "[False, True, False]"
        assert not mine.take("c")
        first.kill()
        first.communicate()
        assert mine.take("c")
    last, told = other(tmp_path, "a", "b", "c")
    last.communicate()
    assert told == "[True, True, True]"


def test_where_nothing_can_be_locked_everything_may_be_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    with closing(Claims(tmp_path / "none")) as homeless:
        assert homeless.take("a")
    with closing(Claims(tmp_path)) as mine, closing(Claims(tmp_path)) as another:
        assert mine.take("a") and not another.take("a")
        monkeypatch.setattr("mpissd.lab.sweep.locks.fcntl.fcntl", refused)
        assert another.take("a")
