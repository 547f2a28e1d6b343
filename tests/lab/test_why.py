"""The gaps between a row and its floor: named, sized, largest first; null stays out."""

from __future__ import annotations

import copy

import pytest

from mpissd.common.errors import ConfigError
from mpissd.common.row import Row
from mpissd.lab.predict.why import gaps

# Rows as `run` writes them on an emulated H100, 8B/1B, K = 4; only what `gaps` reads.
SD = Row.from_dict({
    "schema": 1, "mode": "sd", "backend": "emulated", "tp": 1, "num_drafts": 1,
    "inline_draft": False, "fuse": False, "graph": False, "on_late": None, "hit_rate": None,
    "round_us": {"mean": 11217.0, "p50": 11183.3, "n": 200},
    "phases_us": {
        "lead": {"send": 15.7, "commit": 11.9, "draft_wait": 5351.5, "broadcast": 1.5,
                 "launch": 17.0, "device_wait": 5736.1, "sample": 68.6, "record": 14.7},
        "draft": {"wait": 5953.8, "commit": 14.1, "lookup": 2.3, "speculate": 5230.9, "send": 13.4,
                  "glue": 0.0, "keys": 0.0, "grow": 0.0, "record": 3.6},
    },
    "t_target_s": 0.0056937, "t_draft_s": 0.0051698, "t_growth_s": None, "floor_us": 4451.666,
})  # fmt: skip
SSD = copy.deepcopy(SD) | {
    "mode": "ssd", "on_late": "finish", "hit_rate": 0.75377, "t_growth_s": 0.0065643,
    "round_us": {"mean": 8351.9, "p50": 6691.0, "n": 200},
    "phases_us": {
        "lead": {"send": 16.1, "commit": 11.6, "draft_wait": 2449.5, "broadcast": 1.0,
                 "launch": 13.7, "device_wait": 5778.3, "sample": 65.5, "record": 16.2},
        "draft": {"wait": 84.3, "commit": 12.7, "lookup": 4.0, "speculate": 1399.9, "send": 8.2,
                  "glue": 1314.8, "keys": 86.8, "grow": 5445.7, "record": 3.5},
    },
}  # fmt: skip
INLINE = copy.deepcopy(SD) | {
    "num_drafts": 0, "inline_draft": True, "round_us": {"mean": 11050.3},
    "phases_us": {
        "lead": {"send": 4.0, "commit": 8.8, "draft_wait": 5231.3, "broadcast": 1.1, "launch": 14.6,
                 "device_wait": 5745.4, "sample": 34.2, "record": 10.9},
        "draft": {"wait": 0.0, "commit": 5830.8, "lookup": 1.6, "speculate": 5217.2, "send": 0.0,
                  "glue": 0.0, "keys": 0.0, "grow": 0.0, "record": 3.2},
    },
}  # fmt: skip
AR = copy.deepcopy(SD) | {
    "mode": "ar", "num_drafts": 0, "t_draft_s": None, "round_us": {"mean": 5787.0},
    "phases_us": {
        "lead": {"send": 2.4, "commit": 6.5, "draft_wait": 2.2, "broadcast": 0.6, "launch": 6.4,
                 "device_wait": 5739.9, "sample": 22.2, "record": 6.8},
        "draft": None,
    },
}  # fmt: skip
ROWS = {"sd": SD, "ssd": SSD, "inline": INLINE, "ar": AR}


def named(row: Row, count: int = 3) -> dict[str, float]:
    return {gap.name: gap.us for gap in gaps(row, count)}


def test_three_largest_of_each_mode() -> None:
    above = 5693.7 - 4451.666
    assert named(SD) == pytest.approx({
        "drafting exposed": 5230.9, "verification above its floor": above, "link": 90.8,
    })  # fmt: skip
    assert named(SSD) == pytest.approx({
        "drafting exposed": 1399.9, "verification above its floor": above,
        "link, and growth steps that an outcome waits for": 2449.5 - 1399.9 - 24.9,
    })  # fmt: skip
    assert named(INLINE) == pytest.approx({
        "drafting exposed": 5217.2, "verification above its floor": above,
        "waiting beyond the forward": 5745.4 - 5693.7,
    })  # fmt: skip
    assert named(AR) == pytest.approx({
        "verification above its floor": above, "waiting beyond the forward": 5739.9 - 5693.7,
        "sample": 22.2,
    })  # fmt: skip


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_all_gaps_together_are_the_round_less_its_floor(row: Row) -> None:
    found = gaps(row, count=99)
    mean, lead = row.round_us["mean"], row.phases_us["lead"] or {}
    unused = lead["draft_wait"] if row.mode == "ar" else 0.0
    assert row.floor_us is not None
    assert sum(gap.us for gap in found) == pytest.approx(mean - row.floor_us - unused, abs=0.5)
    assert [gap.us for gap in found] == sorted((gap.us for gap in found), reverse=True)
    for gap in found:
        assert gap.us > 0 and gap.share == gap.us / mean
        assert gap.advice[0].isupper() and gap.advice.endswith(".") and "\n" not in gap.advice


def test_what_is_null_is_left_out() -> None:
    assert "verification above its floor" not in named(SD | {"floor_us": None}, 99)
    blind = named(SD | {"t_target_s": None}, 99)
    assert blind["verification above its floor"] == pytest.approx(5736.1 - 4451.666)
    assert "waiting beyond the forward" not in blind
    without = copy.deepcopy(SD)
    without["phases_us"]["draft"] = None
    assert named(without)["draft wait exposed"] == 5351.5
    assert gaps(SD | {"phases_us": None}) == []
    assert gaps(SD | {"round_us": {"mean": None}}) == []
    assert gaps(SSD | {"hit_rate": None, "t_growth_s": None})


def test_other_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="schema 3: this version reads"):
        gaps(SD | {"schema": 3})
    with pytest.raises(ConfigError, match="'floor_us'"):
        gaps(Row.from_dict({key: value for key, value in SD.items() if key != "floor_us"}))
