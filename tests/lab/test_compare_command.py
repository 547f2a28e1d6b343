"""`compare` takes run ids, files and folders: the rows it selects, its output, its refusals."""

from pathlib import Path
from typing import Any

import pytest

from mpissd.__main__ import main
from tests.common.tables_model import sd, write
from tests.scripts import refused


def at(second: int) -> dict[str, Any]:
    return {"provenance": {"started_at": f"2026-01-01T00:00:{second:02}+00:00"}}


def test_a_name_is_the_last_row_or_an_id(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a" / "runs_2.jsonl", sd("old", **at(1)), sd("late", **at(9)))
    write(tmp_path / "a" / "below" / "runs_3.jsonl", sd("between", **at(5)))
    folder = str(tmp_path / "a")
    for words, run_id in (((folder, folder), "late"), (("between", folder), "between")):
        assert main(["compare", *words, f"--out={folder}"]) == 0
        assert capfd.readouterr().out.startswith(f"   a = {run_id}: ")


def test_a_pair_is_of_one_seed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A sweep measures the seeds of both in its own order; three configurations are ranked."""

    def told(*words: object) -> list[str]:
        assert main(["compare", *map(str, words)]) == 0
        return capfd.readouterr().out.splitlines()

    rows = [
        sd(f"{name}{seed}", seed=seed, token_digest=f"{seed}", fuse=name == "b")
        for seed, name in [(0, "a"), (1, "a"), (2, "a"), (2, "b"), (1, "b")]
    ]
    both, a, b = (tmp_path / name / "runs.jsonl" for name in ("both", "a", "b"))
    write(both, *rows)
    write(a, *rows[:2])
    write(b, *rows[3:])
    for words, seed in (((both.parent,), 2), ((a.parent, b), 1)):
        for name, line in zip("ab", told(*words), strict=False):
            assert line.startswith(f"   {name} = {name}{seed}: ")
    write(both, *rows, sd("c", lookahead=5, seed=2, token_digest="2"))
    assert told(both.parent)[1].split()[:3] == ["tok/s", "K=4", "K=5"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("one", "--show=pair"), "a pair needs two results"),
        (("one", "one", "--show=best"), "b=one with show=best: allowed: with show=pair"),
        (("empty",), "result 'empty': no such row in 'empty'"),
        (("one", "none", "--out=one"), "result 'none': no such row in 'one'"),
    ],
)
def test_what_it_refuses_is_one_line(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("one/runs.jsonl"), sd("a"), sd("b", seed=1))
    Path("empty").mkdir()
    assert message in refused(capfd, "compare", *arguments)
