"""The milestone report's tables: its own arithmetic, and ours on rows of a known model."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from mpissd.common import theory
from mpissd.common.compare import How
from mpissd.common.row import Row
from mpissd.lab.tables.milestone import REPORT, Table, TableRow, make_tables, render
from tests.common.tables_model import (
    LOOKAHEADS,
    STEP_S,
    T1_S,
    ar,
    everything,
    ratio,
    sd,
    t_target,
)

ROOT = Path(__file__).resolve().parents[2]


def table(rows: list[Row], profiles: Any = None, pair: str = "8b/1b") -> Table:
    """The one table of a pair."""
    (found,) = [t for t in make_tables(rows, profiles or {}) if t.pair == pair]
    return found


def line(found: Table, lookahead: int) -> TableRow:
    (row,) = [row for row in found.rows if row.report.lookahead == lookahead]
    return row


def test_the_report_s_formula_on_its_own_table_1() -> None:
    rows = REPORT["8b/1b"]
    assert [f"{row.recomputed:.2f}" for row in rows] == "1.99 2.42 2.58 2.61 2.57 2.48".split()
    ratios = [row.ratio for row in rows]
    assert [f"{r:.3f}" for r in ratios] == "0.940 0.943 0.946 0.948 0.955 0.953".split()
    for row in rows:  # it isn't rounding: ±.005 on both printed numbers
        assert row.theory and row.achieved
        rounding = 0.005 / (1 + row.t_sd) + 0.005 / row.theory
        assert rounding < 0.007 < 1 - row.recomputed / row.theory
        assert row.achieved > row.theory > row.recomputed


@pytest.mark.parametrize("pair", ["8b/1b", "70b/1b"])
def test_a_known_model_is_found_again(pair: str) -> None:
    rows, profiles = everything(pair)
    found = table(rows, profiles, pair)
    for k in LOOKAHEADS:
        row, draft = line(found, k), k * STEP_S
        assert row.t_sd == pytest.approx(draft / t_target(pair, k + 1))
        assert row.t_draft == pytest.approx(draft / t_target(pair, 1))
        assert row.r_k1 and row.r_k1.measured
        assert row.r_k1.value == pytest.approx(ratio(pair, k + 1))
        assert row.r_k and row.r_k.measured == (k in (2, 4, 8))
        if row.r_k.measured:
            assert row.r_k.value == pytest.approx(ratio(pair, k))
        known = theory.expected_tokens(0.9, k) / (ratio(pair, k + 1) + draft / t_target(pair, 1))
        assert row.theory == pytest.approx(known)
        assert row.achieved and row.achieved.speedup == pytest.approx(known)
        assert row.num_rows == 1 and not row.unstable


def test_without_rounds_the_interval_is_that_of_the_drawn_lengths() -> None:
    histogram = [30, 0, 70]  # lengths 1 and 3: mean 2.4, variance .84
    shown = sd("8b/1b", 2, accept_histogram=histogram, num_rounds=100)
    rows = [ar("8b/1b"), shown]
    row = line(table(rows), 2)
    assert row.achieved and row.achieved.how is How.ROWS
    found = row.achieved
    relative = math.log(found.high / found.speedup)
    assert relative == pytest.approx(1.984 * (0.84 / 100) ** 0.5 / 2.4, rel=1e-3)  # t of 99
    assert found.low * found.high == pytest.approx(found.speedup**2)
    assert re.search(r"^  2 .*\d\.\d\d \(\d\.\d\d–\d\.\d\d\) +\d\.\d\d\* \|", render(rows), re.M)


def test_too_few_rounds_are_no_speedup() -> None:
    for count, there in ((19, False), (20, True)):
        rows = [ar("8b/1b"), sd("8b/1b", 2, num_rounds=count)]
        assert (line(table(rows), 2).achieved is not None) == there


def test_repeats_count_by_their_median_and_a_drift_is_marked() -> None:
    rates = [150.0, 100.0, 110.0]
    repeats = [sd("8b/1b", 2, run_id=f"r{n}", tok_per_s=r) for n, r in enumerate(rates)]
    drifting = sd("8b/1b", 4, stable=False)
    found = table([ar("8b/1b"), *repeats, drifting])
    row = line(found, 2)
    assert row.achieved and row.achieved.speedup == pytest.approx(110 * T1_S["8b/1b"])
    assert row.num_rows == 3 and not row.unstable and line(found, 4).unstable
    assert re.search(r"^  4 .*\*!\|", render([ar("8b/1b"), drifting]), re.M)


def test_times_come_from_any_law_but_the_speedup_only_from_the_report_s() -> None:
    other = sd("8b/1b", 2, alpha=0.8)
    row = line(table([ar("8b/1b"), other]), 2)
    assert row.t_sd == other["T_SD"] and row.theory is not None
    assert row.achieved is None and row.num_rows == 0
    both = line(table([ar("8b/1b"), other | {"T_SD": 9.0}, sd("8b/1b", 2)]), 2)
    assert both.t_sd == sd("8b/1b", 2)["T_SD"]
    spelt = line(table([ar("8b/1b"), sd("8b/1b", 2, acceptance="alpha:.9")]), 2)
    assert spelt.achieved


@pytest.mark.parametrize(
    "changed",
    [
        {"device_name": "Another GPU"},
        {"tp": 2},
        {"lm_head": True},
    ],
)
def test_settings_are_never_mixed(changed: dict[str, Any]) -> None:
    rows = [ar("8b/1b", **changed), sd("8b/1b", 2)]
    found = table(rows)
    assert found.setting and found.setting[0] == "A GPU" and not found.has_ar
    assert line(found, 2).achieved is None and line(found, 2).r_k1 is None
    assert "no AR row" in render(rows)
    rows += [ar("8b/1b", run_id="own"), sd("8b/1b", 4, **changed)]
    tables = [t for t in make_tables(rows, {}) if t.pair == "8b/1b"]
    assert len(tables) == 2 and all(t.has_ar for t in tables)
    assert sum(row.achieved is not None for t in tables for row in t.rows) == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"batch_size": 2},
        {"target": "llama-3.1-8b@8L"},
        {"lookahead": 7},
    ],
)
def test_other_rows_are_left_out(changed: dict[str, Any]) -> None:
    rows = [ar("8b/1b"), sd("8b/1b", 2) | changed]
    assert table(rows).setting is None
    assert "Rows read: 2; AR or SD of these pairs at full depth, b = 1 and a K above: 1." in render(
        rows
    )


def test_a_line_of_the_table_to_the_digit() -> None:
    text = render(*everything("8b/1b"))
    (found,) = re.findall(r"^  4 .*$", text.partition("70B/1B")[0], re.M)
    assert found.split() == (
        "4 1.058 1.000 0.940 0.945 2.11 2.11 (2.09–2.12) 1.00* | 0.69 2.57 2.64 2.42 0.943".split()
    )
