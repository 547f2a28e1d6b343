"""Rows and rounds, read strictly; two results compared: refusals, and the output."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.__main__ import main
from mpissd.common.errors import ConfigError
from mpissd.lab.tables.load import load_rounds, load_rows
from mpissd.lab.tables.pair import check_alike
from tests.common.tables_model import ar, sd, write


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
        (GOOD.encode() + b"\n\n\xff\xfe{}\n", 3, "not UTF-8"),
    ],
)
def test_a_bad_line_is_named(
    tmp_path: Path, content: str | bytes, line_number: int, reason: str
) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=re.escape(f"{path}:{line_number}: ") + f".*{reason}"):
        load_rows([path])


def write_rounds(folder: Path, run_id: str, seconds: Any, accepted: Any) -> None:
    """One sequence; accepted: k of each round."""
    count = len(seconds)
    columns = [np.arange(count), np.zeros(count), np.zeros(count), accepted]
    sequences = np.column_stack([*columns, *np.zeros((4, count))]).astype(np.int64)
    (folder / "rounds").mkdir(parents=True, exist_ok=True)
    np.savez(folder / "rounds" / f"{run_id}.npz", round_s=seconds, sequences=sequences)


def interval(out: str) -> list[float]:
    """The speedup and its bounds."""
    (line,) = (line for line in out.splitlines() if "b over a: " in line)
    return [float(number) for number in re.findall(r"\d\.\d+", line)]


def test_a_speedup_of_rounds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """B's rounds emit two tokens where A's emit one, and take as long."""
    rng = np.random.default_rng(3)
    write(
        tmp_path / "runs.jsonl", sd("slow", tok_per_s=100.0), sd("fast", tok_per_s=200.0, fuse=True)
    )
    write_rounds(tmp_path, "slow", rng.normal(0.01, 1e-4, 60), np.zeros(60))
    write_rounds(tmp_path, "fast", rng.normal(0.01, 1e-4, 60), np.ones(60))
    assert main(["compare", "slow", "fast", f"--out={tmp_path}"]) == 0
    out, err = capfd.readouterr()
    gain, low, high = interval(out)
    assert err == "" and "per GPU" not in out
    assert gain == pytest.approx(2, rel=0.005) and 1.98 < low < 2 < high < 2.02
    assert "blocks of the tokens that both emitted" in out and "few seeds" in out
    assert "differ in: fuse False → True\n" in out
    assert main(["compare", "--b=slow", "fast", f"--out={tmp_path}"]) == 0
    assert interval(capfd.readouterr().out)[0] == pytest.approx(1 / gain, rel=0.005)


def test_no_difference_is_no_number(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Files count by their last row; the text has no bare number."""
    few = {"accept_histogram": [30, 0, 30]}
    write(tmp_path / "a/runs.jsonl", sd("first"), sd("one", tok_per_s=100.0, **few))
    write(tmp_path / "b/runs.jsonl", sd("two", tok_per_s=101.0, world_size=2, **few))
    files = [str(tmp_path / name / "runs.jsonl") for name in "ab"]
    assert main(["compare", *files]) == 0
    out, _ = capfd.readouterr()
    low, high = interval(out)
    assert "a = one: " in out and "b = two: " in out and low < 1 < high
    assert "b over a: no difference (95% interval 0." in out and "1.01" not in out
    assert "by their rows" in out and "per GPU: 0.5" in out


REFUSED = [
    ({"token_digest": "beef"}, "token_digest='f00d' and 'beef'"),
    ({"target": "llama-3.1-8b@8L"}, "target='llama-3.1-8b' and 'llama-3.1-8b@8L'"),
    ({"seed": 1}, "seed=0 and 1"),
    ({"backend": "emulated"}, "two measured runs, or two emulated ones"),
    ({"num_rounds": 19}, "19 rounds"),
    ({"tok_per_s": None}, "no interval"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_means_nothing_is_one_line(
    changed: dict[str, Any], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "runs.jsonl", sd("one"), sd("two", **changed))
    assert main(["compare", "one", "two", f"--out={tmp_path}"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("mpissd: ") and err.count("\n") == 1 and message in err


def test_digests_of_other_lengths_or_of_coins_say_nothing() -> None:
    one = sd("one")
    check_alike(one, sd("two", num_rounds=90, token_digest="beef"))
    check_alike(one, ar())
    warm = {"temperature": 1.0}
    check_alike(one | warm, sd("two", token_digest="beef", **warm))
    long = {"token_limit": 100}
    with pytest.raises(ConfigError, match="token_digest"):
        check_alike(one | long, sd("two", num_rounds=90, token_digest="beef", **long))


def test_tokens_beyond_the_limit_do_not_count(tmp_path: Path) -> None:
    write(tmp_path / "runs.jsonl", sd("one", num_rounds=4))
    write_rounds(tmp_path, "one", [0.1, 0.2, 0.1, 0.1], [2, 3, 4, 0])
    limited = sd("one", num_rounds=4, token_limit=9)
    for row, tokens in ((sd("one", num_rounds=4), [3, 4, 5, 1]), (limited, [3, 4, 2, 0])):
        found = load_rounds([tmp_path], [row])["one"]
        assert found.tokens.tolist() == tokens and found.seconds.tolist() == [0.1, 0.2, 0.1, 0.1]


def test_rounds_of_another_run_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "runs.jsonl", sd("one"))
    assert load_rounds([tmp_path], [sd("one")]) == {}
    write_rounds(tmp_path, "one", np.full(59, 0.1), np.zeros(59))
    with pytest.raises(ConfigError, match=r"one\.npz: 59 rounds, the row has 60"):
        load_rounds([tmp_path], [sd("one")])
    path = tmp_path / "rounds" / "one.npz"
    np.savez(path, round_s=np.zeros(60))
    with pytest.raises(ConfigError, match=r"one\.npz: no rounds of a run"):
        load_rounds([tmp_path], [sd("one")])
    for junk in (b"", b"junk", b"PK\x03\x04"):
        path.write_bytes(junk)
        with pytest.raises(ConfigError, match=r"one\.npz: no rounds of a run"):
            load_rounds([tmp_path], [sd("one")])
