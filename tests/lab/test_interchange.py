"""nccl-tests in, tidy tables and vLLM's schedule of K out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mpissd.__main__ import main
from mpissd.cli.exchange import matching
from mpissd.common.errors import ConfigError
from mpissd.common.row import Row
from mpissd.engine.backend.profile import load_profile
from mpissd.lab.interchange.nccl_tests import read
from mpissd.lab.interchange.tidy import tidy, write_tidy
from mpissd.lab.interchange.vllm_schedule import schedule

TABLE = """\
# nccl-tests version 2.17 nccl-headers=22803 nccl-library=22803
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 16384 maxBytes 33554432 step: 2(factor) warmup iters: 1 iters: 20 \
agg iters: 1 validation: 1 graph: 1 unalign: 0
#
# Using devices
#  Rank  0 Group  0 Pid   1320 on  node1 device  0 [0000:0f:00] NVIDIA H200
#  Rank  1 Group  0 Pid   1321 on  node1 device  1 [0000:10:00] NVIDIA H200
#
#                                                              out-of-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time
       16384          8192      half     sum      -1  7.10  2.31  2.31  0  6.60  2.48  2.48  0
     1048576        524288      half     sum      -1  14.20  73.84  73.84  0  13.70  76.54  76.54  0
    33554432      16777216      half     sum      -1  121.3  276.6  276.6  0  120.47  279  279  0
# Out of bounds values : 0 OK
"""
JSON = {
    "version": 3,
    "config": {"nthreads": 1, "ngpus": 1, "graph": 0},
    "devices": [{"rank": 0}, {"rank": 1}, {"rank": 2}, {"rank": 3}],
    "results": [
        {
            "size": size,
            "type": "half",
            "redop": "sum",
            "out_of_place": {"time": us + 1, "nwrong": 0.0},
            "in_place": {"time": us, "nwrong": 0.0},
            "experiment_name": "AllReduce",
        }
        for size, us in ((16384, 10.2), (16384, 10.4), (16384, 10.1), (1 << 20, 17.8))
    ],
}
CSV = """\
name,gpus,size,time,redop,#wrong
AllReduce,2,16384,6.6,sum,0
AllReduce,2,1048576,13.7,sum,0
"""


def saved(tmp_path: Path, text: str, name: str = "nccl.txt") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_the_printed_table(tmp_path: Path) -> None:
    found = read(saved(tmp_path, TABLE))
    assert (found.ranks, found.graph) == (2, True)
    assert found.seconds == pytest.approx({16384: 6.6e-6, 1048576: 13.7e-6, 33554432: 120.47e-6})


def test_json_counts_repeats_by_their_median(tmp_path: Path) -> None:
    found = read(saved(tmp_path, json.dumps(JSON)))
    assert (found.ranks, found.graph) == (4, False)
    assert found.seconds == pytest.approx({16384: 10.2e-6, 1 << 20: 17.8e-6})


def test_csv_and_json_lines(tmp_path: Path) -> None:
    found = read(saved(tmp_path, CSV))
    assert found.ranks == 2 and found.seconds[16384] == pytest.approx(6.6e-6)
    line = {
        "name": "AllReduce",
        "size": 1024,
        "time": 19.2,
        "gpus": 4,
        "redop": "sum",
        "#wrong": "0",
    }
    found = read(saved(tmp_path, json.dumps(line) + "\n" + json.dumps({**line, "size": 2048})))
    assert found.ranks == 4 and list(found.seconds) == [1024, 2048]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no line with a size"),
        ("# nothing\n", "no line with a size"),
        ("{", "no result of nccl-tests"),
        (TABLE.replace("all_reduce_perf", "alltoall_perf"), "not an all-reduce"),
        (TABLE.replace("  sum ", "  max "), "not by sum"),
        (TABLE.replace("2.48  0", "2.48  3"), "3 wrong elements"),
        (TABLE.replace("13.70", "0.000"), "a time of 0.0 s"),
        (CSV + "AllReduce,4,64,1,sum,0\n", "[2, 4] GPUs in one file"),
        ("size,latency\n64,1\n", "time_us"),
        ("size,time\n" + "6" * 200_000, "field larger"),
        ('{"results": [{"size": 1e999, "in_place": {"time": 3}}]}', "infinity"),
        ("[" * 200_000, "no result of nccl-tests"),
    ],
)
def test_what_is_no_all_reduce_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = saved(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        read(path)
    assert reason in str(raised.value) and str(path) in str(raised.value)


def test_the_ceiling_joins_a_profile_that_the_emulated_backend_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "h200-mine.json"
    source = saved(tmp_path, TABLE)
    assert main(["collectives", str(source), "--profile=h200", f"--to={made}"]) == 0
    assert "16 KB 6.6 µs" in capsys.readouterr().out
    profile, before = load_profile(str(made)), load_profile("h200")
    assert profile.name == "h200-mine"
    assert profile.all_reduce_s(2, 16384) == pytest.approx(6.6e-6)
    assert profile.all_reduce_s(2, 1 << 20) == pytest.approx(13.7e-6)
    assert profile.all_reduce_s(4, 16384) == before.all_reduce_s(4, 16384)
    assert profile.tables.all_reduces["nccl-tests", 2, True](33554432) == pytest.approx(120.47e-6)
    assert profile.sources["all_reduce"].startswith("measured: nccl-tests")


def test_what_collectives_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = saved(tmp_path, TABLE, "table.txt")
    source, to = saved(tmp_path, CSV.replace(",gpus", "").replace(",2,", ",")), tmp_path / "x.json"
    for arguments, line in (
        ([], "file: needed"),
        ([str(source), "--profile=h200"], "to: needed"),
        ([str(source), "--profile=h200", f"--to={to}"], "give --ranks"),
        ([str(source), "--profile=h201", f"--to={to}", "--ranks=2"], "did you mean"),
        ([str(source), "--profile=h200", f"--to={tmp_path}/a/b.json", "--ranks=2"], "cannot write"),
        ([str(other), "--profile=h200", f"--to={to}", "--ranks=4"], "measured on 2"),
    ):
        assert main(["collectives", *arguments]) == 2
        assert line in capsys.readouterr().err
    assert not to.exists()


def row(mode: str, lookahead: int, batch: int, rate: float, **more: Any) -> Row:
    line = {
        "schema": 1,
        "mode": mode,
        "schedule": None,
        "lookahead": lookahead,
        "batch_size": batch,
        "tok_per_s": rate,
        "num_drafts": 0,
        "target": "t",
        "draft": "d" if mode != "ar" else None,
        "tp": 1,
        "device_name": "x",
        "backend": "emulated",
        "acceptance": "alpha:0.8" if mode != "ar" else None,
        "lm_head": False,
        "context": 0,
    }
    return Row.from_dict(line | more)


ROWS = [
    row("ar", 0, 1, 100),
    *(row("sd", 5, 1, rate) for rate in (250, 240, 900)),  # the median is 250
    *(row("sd", 3, 1, rate) for rate in (251, 230, 229)),
    row("sd", 3, 8, 500),
    row("sd", 5, 8, 400),
    row("ar", 0, 8, 450),
    row("ar", 0, 64, 900),
    row("sd", 3, 64, 800),
    row("sd", 7, 64, 9999, num_drafts=1),  # not how vLLM drafts
    row("ssd", 7, 64, 9999),
    row("ar", 0, 128, 9999),  # nothing to compare it with
]


def test_the_schedule_takes_the_fastest_k_of_each_batch_size() -> None:
    assert schedule(ROWS) == {
        "num_speculative_tokens": 5,
        "num_speculative_tokens_per_batch_size": {"1-7": 5, "8-63": 3, "64-64": 0},
    }


def test_a_schedule_of_other_things_is_refused() -> None:
    with pytest.raises(ConfigError, match="mode sd"):
        schedule([row("ar", 0, 1, 100), row("ssd", 4, 1, 100)])
    with pytest.raises(ConfigError, match="device_name 'x' and 'y'"):
        schedule([*ROWS, row("sd", 3, 8, 500, device_name="y")])
    apart = [row("sd", 3, 1, 500, num_drafts=1, draft_device_name=name) for name in "xy"]
    with pytest.raises(ConfigError, match="draft_device_name 'x' and 'y'"):
        schedule(apart)


def test_rows_are_chosen_by_what_they_say() -> None:
    rows = [*ROWS, row("sd", 3, 8, 500, device_name="y")]
    assert schedule(matching(rows, "device_name=x")) == schedule(ROWS)
    assert len(matching(rows, "mode=sd; device_name = y;")) == 1
    for where, says in (
        ("device_name", "allowed: key=value"),
        ("device_nam=x", "unknown key of a row 'device_nam': did you mean 'device_name'"),
        ("device_name=z", "no such row is left: allowed: x, y"),
    ):
        with pytest.raises(ConfigError, match=says):
            matching(rows, where)


def test_what_is_no_row_is_not_in_the_schedule() -> None:
    assert schedule([*ROWS, Row.from_dict({"mode": "sd"}), row("sd", 9, 1, None)]) == schedule(ROWS)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_layers '2' and 'None'"):
        schedule([*ROWS, row("sd", 3, 8, 500, num_layers=2)])


def test_tidy_keeps_every_number_and_every_row(tmp_path: Path) -> None:
    rows = [
        {"a": 1.25, "round_us": {"p50": 2.0}, "fan_out": [4, 3]},
        {"a": None, "extra": 'x, "y"'},
    ]
    assert list(tidy(rows).columns) == ["a", "round_us.p50", "fan_out", "extra"]
    path = tmp_path / "rows.csv"
    assert write_tidy(rows, path) == (2, 4)
    back = pd.read_csv(path)
    assert back["round_us.p50"][0] == 2.0 and np.isnan(back["a"][1])
    assert json.loads(back["fan_out"][0]) == [4, 3] and back["extra"][1] == 'x, "y"'


def test_export_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deep").mkdir()
    lines = [json.dumps({**r, "run_id": f"r{i}"}) for i, r in enumerate(ROWS)]
    (tmp_path / "deep" / "runs.jsonl").write_text("\n".join(lines) + "\n")
    to = tmp_path / "rows.csv"
    assert main(["export", str(tmp_path), f"--to={to}"]) == 0
    assert len(pd.read_csv(to)) == len(ROWS)
    to = tmp_path / "vllm.json"
    assert main(["export", str(tmp_path), f"--to={to}"]) == 0
    assert json.loads(to.read_text()) == schedule(ROWS)
    capsys.readouterr()
    for arguments, line in (
        ([str(tmp_path)], "to: needed"),
        ([str(tmp_path), "--to=x.txt"], "allowed: .csv, .parquet, .json"),
        ([str(tmp_path / "none"), "--to=x.csv"], "none"),
        ([str(tmp_path), f"--to={tmp_path}/no/x.csv"], "cannot write"),
    ):
        assert main(["export", *arguments]) == 2
        assert line in capsys.readouterr().err


def test_parquet_where_pyarrow_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.parquet"
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match="needs pyarrow"):
            write_tidy(ROWS, path)
    else:
        write_tidy(ROWS, path)
        assert len(pd.read_parquet(path)) == len(ROWS)
