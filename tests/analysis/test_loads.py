"""Figures of loads: from rows that a test makes, whose speedups are known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.__main__ import main
from analysis.build import Drawn, Skipped, draw, jobs_of
from analysis.figures import FIGURES
from analysis.load import Data, load
from analysis.loads import speedup
from analysis.style import rendered
from mpissd.lab.load.arrivals import Load, poisson
from mpissd.lab.load.command import keep
from mpissd.lab.load.served import Served, arrays, row_of

DEVICE = "NVIDIA H100 80GB SXM (emulated)"
# By mode, drafts and replicas: how many times as fast as AR at rate 1, and at rate 4.
USES = {
    ("ar", 0, 1): (1, 1),
    ("ssd", 1, 1): (2, 1.25),
    ("sd", 0, 1): (1.5, 1.2),
    ("ar", 0, 2): (1, 2),
}
NAMES = sorted(name for name, spec in FIGURES.items() if spec.of == "loads")
COUNT = 60


def written(folder: Path) -> Path:
    for (mode, drafts, replicas), gains in USES.items():
        for rate, gain in zip((1.0, 2.0, 4.0), (gains[0], gains[0], gains[1]), strict=True):
            random = np.random.default_rng(7)
            served = []
            for at in poisson(rate, 1, COUNT, seed=0):
                whole = float(random.uniform(1, 3)) * rate / gain
                served.append(Served(at, 200, whole / 10, whole, 50, 20))
            about = {"mode": mode, "tp": 2, "num_drafts": drafts, "replicas": replicas}
            about |= {"world_size": (2 + drafts) * replicas, "device_name": DEVICE}
            about |= {
                "max_running": 16,
                "backend": "emulated",
                "draft": "small" if drafts else None,
            }
            named = {"load_id": f"{mode}{drafts}{replicas}-{rate}", "server": "x", "model": "big"}
            named |= {"prompts": "p", "seed": 0, "provenance": {"host": "h"}}
            row = row_of(Load(rate, 1, "poisson", ()), served, (1.0, 0.05), about, named)
            keep(str(folder), row, arrays(served))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return load([written(tmp_path_factory.mktemp("loads"))])


def drawn(data: Data, name: str) -> Drawn:
    (item,) = draw(data, name)
    assert isinstance(item, Drawn), item
    assert rendered(item.poster, "png").startswith(b"\x89PNG")
    return item


def test_the_speedups_are_those_of_the_rows(data: Data) -> None:
    numbers = drawn(data, "load_speedup").poster.table()
    found = {(p["series"], p["x"]): (p["low"], p["y"], p["high"]) for _, p in numbers.iterrows()}
    assert set(numbers["series"]) == {"SSD 2+1", "SD inline 2", "AR 2 × 2"}
    for series, rate, gain in (
        ("SSD 2+1", 1, 2),
        ("SSD 2+1", 4, 1.25),
        ("SD inline 2", 2, 1.5),
        ("AR 2 × 2", 4, 2),
    ):
        low, value, high = found[series, rate]
        assert value == pytest.approx(gain)
        assert low == pytest.approx(gain) == high  # every request gained alike


def test_an_interval_covers_a_known_gain() -> None:
    """Of 40 pairs of noisy loads, about two intervals in forty may miss."""
    missed = 0
    for seed in range(40):
        random = np.random.default_rng(seed)
        base = random.gamma(4, 1, 200)
        other = base / 1.3 * random.lognormal(0, 0.3, 200) / np.exp(0.3**2 / 2)
        rows = [pd.DataFrame([{"seed": 0, "latencies": each}]) for each in (base, other)]
        gain = speedup(*rows)
        assert gain is not None
        missed += not gain[1] <= 1.3 <= gain[2]
    assert missed <= 6


def test_loads_of_other_arrivals_are_not_compared(data: Data) -> None:
    rows = data.loads[data.loads["rate"] == 1]
    ar, ssd = rows[rows["method"] == "AR"], rows[rows["method"] == "SSD"]
    assert speedup(ar, ssd) is not None
    assert speedup(ar, ssd.assign(seed=1)) is None


def test_times_goodput_and_frontier(data: Data) -> None:
    times = drawn(data, "load_times").poster.table()
    one = times[(times["series"] == "SSD 2+1") & (times["x"] == 1)]
    row = data.loads[(data.loads["method"] == "SSD") & (data.loads["rate"] == 1)].iloc[0]
    assert list(one["y"]) == pytest.approx([1e3 * row["ttft_p50"], 1e3 * row["tpot_p50"]])
    goodput = drawn(data, "load_goodput").poster.table()
    for _, point in goodput.iterrows():
        rows = data.loads[data.loads["use"] == point["series"]]
        assert point["x"] == rows["gpus"].iloc[0] and point["y"] == rows["goodput_per_s"].max()
    frontier = drawn(data, "load_frontier").poster.table()
    assert len(frontier) == len(USES) * 3


@pytest.mark.parametrize("name", NAMES)
def test_captions_say_what_is_shown(data: Data, name: str) -> None:
    item = drawn(data, name)
    caption = item.poster.caption
    assert (
        "NVIDIA H100 80GB SXM (EMULATED" in caption
        and f"{COUNT} requests a point, Poisson arrivals" in caption
    )
    assert "none refused" in caption
    if name == "load_goodput":
        assert "1000 ms to the first token, 50 each further" in caption


def test_the_command_line_has_them(data: Data, tmp_path: Path) -> None:
    assert {name for _, name in jobs_of(data)} == set(NAMES)  # there are no runs
    folder = data.loads["folder"].iloc[0]
    given = ["load_speedup", f"--results={folder}", f"--out={tmp_path}", "--formats=png"]
    assert main(given) == 0
    assert list(tmp_path.rglob("load_speedup.png"))


def test_a_load_that_cannot_be_used_is_noted(tmp_path: Path) -> None:
    folder = written(tmp_path)
    file = folder / "loads.jsonl"
    lines = file.read_text().splitlines()
    first = json.loads(lines[0])
    broken = [json.dumps({**first, "load_id": "gone"}), json.dumps({**first, "tp": None}), '{"a"']
    file.write_text("\n".join([*lines, *broken]))
    found = load([folder])
    assert len(found.loads) == len(lines)
    notes = "\n".join(found.notes.lines)
    assert "it has no tp" in notes and "gone.npz" in notes and "cut off" in notes


def test_loads_that_came_at_once_are_a_frontier_by_sequences(data: Data) -> None:
    once = data.loads.assign(rate=float("nan"), max_running=(4 * data.loads["rate"]).astype(int))
    both = pd.concat([data.loads, once.assign(load_id=once["load_id"] + "-once")])
    mixed = Data(data.rows, (), data.notes, both)
    numbers = drawn(mixed, "load_frontier").poster.table()
    below = numbers[numbers["panel"].str.endswith("all at once")]
    assert len(numbers) == 2 * len(below) == 2 * len(USES) * 3
    assert set(below["max_running"]) == {4, 8, 16}
    speedups = drawn(mixed, "load_speedup").poster.table()  # over rates alone
    assert speedups.equals(drawn(data, "load_speedup").poster.table())


def test_too_few_rates_are_skipped(data: Data) -> None:
    one = Data(data.rows, (), data.notes, data.loads[data.loads["rate"] == 1])
    for name in ("load_speedup", "load_times", "load_frontier"):
        (item,) = draw(one, name)
        assert isinstance(item, Skipped) and "rates" in item.why
