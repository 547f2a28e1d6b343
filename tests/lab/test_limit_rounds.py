"""What a run's row and its trace say of the hit path, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.errors import ConfigError
from mpissd.lab.limits.bars import read
from mpissd.lab.limits.rounds import hit_paths, main


def event(rank: int, round_: int, name: str, end: float, tid: int = 0) -> dict[str, Any]:
    place = {"ph": "X", "pid": rank, "tid": tid, "args": {"round": round_}, "name": name}
    return place | {"ts": end - 1.0, "dur": 1.0}


def trace(digest: str = "d") -> dict[str, Any]:
    """Three rounds of two target ranks and a draft, in microseconds; the follower launches last."""
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "tid": 0, "name": "x", "args": {}}]
    for n in range(3):
        start = 1000.0 * n
        events += [event(0, n, "launch", start + 40), event(1, n, "launch", start + 50 + n)]
        events += [event(0, n, "device_wait", start + 990), event(0, n, "sample", start + 1000)]
        events += [event(2, n, "launch", start + 900), event(0, n, "verify", 1e6, tid=1)]
    return {"traceEvents": events, "otherData": {"config_digest": digest}}


def test_a_hit_path_ends_with_the_last_launch() -> None:
    paths = hit_paths(trace(), tp=2)
    assert paths["outcome"] == pytest.approx([51e-6, 52e-6])
    assert paths["over"] == pytest.approx([61e-6, 62e-6])
    assert hit_paths(trace(), tp=1)["outcome"] == pytest.approx([40e-6, 40e-6])


def row(mode: str = "ssd") -> dict[str, Any]:
    return {
        "run_id": "r", "mode": mode, "target": "m", "tp": 2, "lookahead": 7, "stable": True,
        "round_us": {"p50": 1000.0, "p99": 1050.0, "n": 3}, "tok_per_s": 4.0,
        "acceptance_length": 4.0, "hit_rate": 1.0, "t_target_s": 9e-4, "floor_fraction": 0.9,
        "device_us": {"idle": 100.0}, "phases_us": {}, "config_digest": "d",
    }  # fmt: skip


def measured(folder: Path, digest: str, *rows: dict[str, Any]) -> tuple[str, str]:
    (folder / "runs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (folder / "trace.json").write_text(json.dumps(trace(digest)))
    return str(folder), str(folder / "trace.json")


def test_the_last_row_becomes_rows_of_the_bars(tmp_path: Path) -> None:
    main(measured(tmp_path, "d", row() | {"tok_per_s": 1.0}, row()))
    rounds, over, outcome = read(tmp_path)
    assert rounds["p99_over_p50"] == 1.05 and rounds["tok_per_s"] == 4.0
    assert (over["start"], outcome["start"]) == ("over", "outcome")
    assert outcome["p50_s"] == pytest.approx(51.5e-6) and outcome["num_rounds"] == 2


def test_ar_has_no_hit_path(tmp_path: Path) -> None:
    main(measured(tmp_path, "d", row("ar")))
    assert [one["what"] for one in read(tmp_path)] == ["rounds"]


def test_a_trace_of_another_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the trace of r"):
        main(measured(tmp_path, "other", row()))
    with pytest.raises(ConfigError, match="no row"):
        main((str(tmp_path / "nothing"), str(tmp_path / "trace.json")))
