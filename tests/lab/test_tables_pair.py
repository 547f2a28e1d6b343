"""Rows and rounds, read strictly; two results compared: refusals, and the output."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mpissd.__main__ import main
from mpissd.common.errors import ConfigError
from mpissd.lab.tables.load import load_rows
from mpissd.lab.tables.pair import check_alike
from tests.common.tables_model import ar, sd, write
from tests.scripts import refused


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
    ],
)
def test_a_bad_line_is_named(
    tmp_path: Path, content: str | bytes, line_number: int, reason: str
) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=re.escape(f"{path}:{line_number}: ") + f".*{reason}"):
        load_rows([path])


def test_a_ratio_of_one_seed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Files count by their last row; one seed has no interval, and two configurations no ratio."""
    write(tmp_path / "a/runs.jsonl", sd("first"), sd("one", tok_per_s=100.0))
    write(tmp_path / "b/runs.jsonl", sd("two", tok_per_s=101.0, world_size=2, fuse=True))
    files = [str(tmp_path / name / "runs.jsonl") for name in "ab"]
    assert main(["compare", *files]) == 0
    out, _ = capfd.readouterr()
    assert "a = one: " in out and "b = two: " in out and "differ in: fuse False → True\n" in out
    assert "b over a: 1.01× (no interval: 1 seed)" in out and "few seeds" in out
    assert "per GPU: 0.5" in out
    write(tmp_path / "b/runs.jsonl", sd("two", fuse=True), sd("three"))
    assert main(["compare", *files]) == 2
    assert "2 configurations: allowed: one, or a run id: two, three\n" in (capfd.readouterr().err)
    write(tmp_path / "a/runs.jsonl", sd("x", tok_per_s=99.0), sd("y", seed=1, tok_per_s=100.0))
    write(
        tmp_path / "b/runs.jsonl", sd("u", fuse=True), sd("v", seed=1, fuse=True, tok_per_s=300.0)
    )
    assert main(["compare", *files]) == 0
    assert "(no interval: 2 seeds)" in capfd.readouterr().out


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


def test_digests_of_other_lengths_or_of_coins_say_nothing() -> None:
    one = sd("one")
    check_alike(one, sd("two", num_rounds=90, token_digest="beef"))
    check_alike(one, ar())
    warm = {"temperature": 1.0}
    check_alike(one | warm, sd("two", token_digest="beef", **warm))
    long = {"token_limit": 100}
    with pytest.raises(ConfigError, match="token_digest"):
        check_alike(one | long, sd("two", num_rounds=90, token_digest="beef", **long))
