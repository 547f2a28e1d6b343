"""Rows and rounds, read strictly; two results compared: refusals, the rows selected, the output."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mpissd.__main__ import main
from mpissd.common.errors import ConfigError
from mpissd.common.row import Row, fault_of
from mpissd.lab.tables.load import LeftOut, load_rows
from mpissd.lab.tables.pair import check_alike
from tests.scripts import refused

SHARED = {"workload": "gemm", "seed": 0, "token_digest": "f00d", "num_rounds": 60, "world_size": 1}


def ar(**changed: Any) -> Row:
    row = {
        "schema": 1, "run_id": "ar", "mode": "ar", "backend": "cupy", "device_name": "A GPU",
        "dtype": "float16", "tp": 1, "num_drafts": 0, "all_reduce": "solo", "graph": True,
        "fuse": False, "lm_head": False, "context": 0, "target": "llama-3.1-8b", "draft": None,
        "lookahead": 0, "batch_size": 1, "acceptance": None, "tok_per_s": 62.5,
        "accept_histogram": [1000], "round_us": times(16_000), "t_target_s": 0.016, "T_SD": None,
        "provenance": {"command": ["run"], "ranks": [{"device": "A GPU"}]},
    }  # fmt: skip
    return Row.from_dict(row | SHARED | changed)


def sd(run_id: str, **changed: Any) -> Row:
    """SD at K = 4 and alpha = .9."""
    row = ar() | {
        "mode": "sd", "run_id": run_id, "draft": "llama-3.2-1b", "lookahead": 4,
        "acceptance": "alpha:0.9", "tok_per_s": 131.6, "t_target_s": 0.0151, "T_SD": 1.06,
        "accept_histogram": [1000, 900, 810, 729, 6561], "round_us": times(31_100),
    }  # fmt: skip
    return row | changed


def times(us: float) -> dict[str, float]:
    """Rounds that all take as long."""
    return dict.fromkeys(("mean", "p50", "p90", "p99"), us)


def write(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(dict(row)) + "\n" for row in rows))
    return path


def test_rows_are_found_under_a_folder_and_count_once(tmp_path: Path) -> None:
    rows = [ar(), *(sd(f"{k}", lookahead=k) for k in (2, 4, 6))]
    first = write(tmp_path / "a/b/runs.jsonl", *rows[:3])
    write(tmp_path / "c/runs-more.jsonl", *rows[3:])
    write(tmp_path / "other.jsonl", {"no": "row"})
    assert load_rows([tmp_path, str(first)]) == rows


GOOD = json.dumps(dict(ar()))


@pytest.mark.parametrize(
    ("content", "line_number", "reason"),
    [
        (f"{GOOD}\n{GOOD[:200]}", 2, "cut off"),
        (f"{GOOD}\n{json.dumps(dict(ar(schema=3)))}\n", 2, "schema 3: allowed: 1 or 2"),
        (f"{GOOD}\n" + '{"run_id": "x"}\n', 2, "schema None"),
        (f"{GOOD}\n[1, 2]\n", 2, "a list: allowed: a JSON object"),
        (f"{GOOD}\n{json.dumps(dict(ar(tok_per_s=1.0)))}\n", 2, "another row"),
        (GOOD.encode() + b"\n\n\xff\xfe{}\n", 3, "no JSON"),
        (GOOD.replace("62.5", '"62.5"'), 1, "tok_per_s='62.5': allowed: a number"),
        (GOOD.replace("62.5", "NaN"), 1, "NaN is no number"),
    ],
)
def test_a_bad_line_is_named(
    tmp_path: Path, content: str | bytes, line_number: int, reason: str
) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=re.escape(f"{path}:{line_number}: ") + f".*{reason}"):
        load_rows([path])


STRANGE = ("62.5", "", True, -1, 10**400, [], [None], {}, {"mean": "3"}, "\ud800", "2026-13-45")


@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_a_value_of_another_type_costs_one_row(
    tmp_path: Path, value: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whichever key has it, compare shows the other rows, and counts those that it leaves out."""
    names = [*ar(), "fan_out", "hit_rate", "rank_digests", "phases_us", "configuration"]
    strange = [sd(name) | {name: value} for name in names if name not in ("run_id", "schema")]
    faults = [fault_of(row) for row in strange]
    path = write(tmp_path / "runs.jsonl", ar(), sd("good"), *strange)
    assert main(["compare", f"{path},"]) == 0
    lines = capfd.readouterr().err.splitlines()
    expected = [(n, fault[1]) for n, fault in enumerate(faults, 3) if fault is not None]
    start = f"mpissd: left out 1 row of {path}: line"
    assert lines == [f"{start} {n}: {reason}" for n, reason in expected]
    assert {"tok_per_s", "seed", "world_size"} <= {fault[0] for fault in faults if fault}


def test_rows_with_one_fault_are_counted_in_one_line(tmp_path: Path) -> None:
    rows = [ar(run_id=f"{n}", tok_per_s=str(n)) for n in range(3)]
    path, left_out = write(tmp_path / "runs.jsonl", *rows, ar(tp=None), ar(run_id="x")), LeftOut()
    assert [row.run_id for row in load_rows([path], left_out)] == ["x"]
    assert left_out.lines == [
        f"left out 3 rows of {path}: line 1: tok_per_s='0': allowed: a number",
        f"left out 1 row of {path}: line 4: it has no tp",
    ]


def test_a_ratio_of_one_seed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Files count by their last row; one seed has no interval, and two configurations no ratio."""
    write(tmp_path / "a/runs.jsonl", sd("first"), sd("one", tok_per_s=100.0))
    told = {"world_size": 2, "fuse": True, "prediction_error": -0.45}
    write(tmp_path / "b/runs.jsonl", sd("two", tok_per_s=101.0, **told))
    files = [str(tmp_path / name / "runs.jsonl") for name in "ab"]
    assert main(["compare", *files]) == 0
    out, _ = capfd.readouterr()
    assert "a = one: " in out and "b = two: " in out and "differ in: fuse False → True\n" in out
    assert "b over a: 1.01× (no interval: 1 seed)" in out and "few seeds" in out
    assert "per GPU: 0.5" in out
    assert "! b is -45% off its own prediction" in out and "! a" not in out
    write(tmp_path / "b/runs.jsonl", sd("two", fuse=True), sd("three"))
    assert main(["compare", *files]) == 2
    assert "2 configurations: allowed: one, or a run id: two, three\n" in (capfd.readouterr().err)


REFUSED = [
    ({"token_digest": "beef"}, "token_digest='f00d' and 'beef'"),
    ({"target": "llama-3.1-8b@8L"}, "target='llama-3.1-8b' and 'llama-3.1-8b@8L'"),
    ({"seed": 1}, "seed=0 and 1"),
    ({"backend": "emulated"}, "two measured runs, or two emulated ones"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_means_nothing_is_one_line(
    changed: dict[str, Any], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "runs.jsonl", sd("one"), sd("two", **changed))
    assert message in refused(capfd, "compare", "one", "two", f"--out={tmp_path}")


def test_what_is_not_there_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "runs.jsonl", sd("a"), sd("b", seed=1))
    (empty := tmp_path / "empty").mkdir()
    for words in ((str(empty),), ("a", "none", f"--out={tmp_path}")):
        message = f"result {words[:2][-1]!r}: no such row in "
        assert message in refused(capfd, "compare", *words)


def test_digests_of_other_lengths_or_of_coins_say_nothing() -> None:
    one = sd("one")
    check_alike(one, sd("two", num_rounds=90, token_digest="beef"))
    check_alike(one, ar())
    warm = {"temperature": 1.0}
    check_alike(one | warm, sd("two", token_digest="beef", **warm))
    long = {"token_limit": 100}
    with pytest.raises(ConfigError, match="token_digest"):
        check_alike(one | long, sd("two", num_rounds=90, token_digest="beef", **long))


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
