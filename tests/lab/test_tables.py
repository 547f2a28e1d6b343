"""The milestone report's tables: its own arithmetic, and ours on rows of a known model."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.common import theory
from mpissd.common.compare import How, compare_rates
from mpissd.common.config import parse_flags
from mpissd.common.rates import Rate, Rounds
from mpissd.common.row import Row
from mpissd.lab.tables import render
from mpissd.lab.tables.compare import Table, TableRow, make_tables
from mpissd.lab.tables.milestone import REPORT
from tests.common.tables_model import (
    LOOKAHEADS,
    STEP_S,
    T1_S,
    ar,
    everything,
    profile,
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


# --- the report's side


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


def test_the_report_prints_no_speedup_for_70b() -> None:
    assert [row.t_sd for row in REPORT["70b/1b"]] == [0.04, 0.08, 0.12, 0.15, 0.19, 0.23]
    assert all(row.ratio is row.achieved is None for row in REPORT["70b/1b"])
    assert f"{REPORT['70b/1b'][0].recomputed:.2f}" == "2.61"  # 2.71 / 1.04


@pytest.mark.parametrize("name", ["docs/milestone-tables.md", "text"])
def test_the_recomputed_column_is_where_people_look(name: str) -> None:
    text = render([]) if name == "text" else (ROOT / name).read_text().replace(" |", "")
    assert "1.99 2.42 2.58 2.61 2.57 2.48" in text


# --- ours, on rows of a known model


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


def test_the_interpolated_r_lies_on_the_line_between_its_neighbours() -> None:
    found = table(*everything("8b/1b"))
    row = line(found, 6)
    assert row.r_k and not row.r_k.measured
    assert row.r_k.value == pytest.approx((ratio("8b/1b", 5) + ratio("8b/1b", 7)) / 2)


def test_without_profiles_r_comes_from_the_rows() -> None:
    rows, profiles = everything("8b/1b")
    with_tables, without = table(rows, profiles), table(rows)
    for k in LOOKAHEADS:
        left, right = line(with_tables, k), line(without, k)
        assert right.theory == pytest.approx(left.theory)
        assert right.r_k and not right.r_k.measured


def test_nothing_is_extrapolated() -> None:
    row = line(table([sd("8b/1b", 4)], {"sd-8b-1b-4-0.9": profile("8b/1b", 1, 2)}), 4)
    assert row.t_sd is not None
    assert [row.r_k, row.r_k1, row.t_draft, row.theory, row.achieved] == [None] * 5


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


def kept(row: Row, spread: float, seed: int) -> Rounds:
    """Rounds whose tokens and seconds vary independently."""
    rng = np.random.default_rng(seed)
    tokens = rng.choice([1.0, 3.0], row["num_rounds"])
    mean = tokens.mean() / row["tok_per_s"]
    return Rounds(mean * (1 + spread * rng.normal(size=len(tokens))), tokens)


def test_with_rounds_the_interval_is_theirs() -> None:
    first, second = ar("8b/1b"), sd("8b/1b", 2, num_rounds=400)
    rounds = {row["run_id"]: kept(row, 0.1, seed) for seed, row in enumerate([first, second])}
    (found,) = [t for t in make_tables([first, second], {}, rounds) if t.pair == "8b/1b"]
    row = line(found, 2)
    pair = [rounds[r["run_id"]] for r in (first, second)]
    known = compare_rates(*(Rate.of_rounds(r.seconds, r.tokens) for r in pair))
    assert row.achieved and row.achieved.how is How.ROUNDS
    assert row.achieved.speedup == pytest.approx(second["tok_per_s"] / first["tok_per_s"])
    for end in ("low", "high"):
        relative = getattr(row.achieved, end) / row.achieved.speedup
        assert relative == pytest.approx(getattr(known, end) / known.speedup, rel=1e-9)
    text = render([first, second], {}, rounds)
    assert re.search(r"^  2 .*\) +\d\.\d\d  \|", text, re.M)
    only_one = render([first, second], {}, {first["run_id"]: rounds[first["run_id"]]})
    assert re.search(r"^  2 .*\) +\d\.\d\d\* \|", only_one, re.M)


def test_too_few_rounds_are_no_speedup() -> None:
    for count, there in ((19, False), (20, True)):
        rows = [ar("8b/1b"), sd("8b/1b", 2, num_rounds=count)]
        assert (line(table(rows), 2).achieved is not None) == there


def test_an_interval_that_holds_1_is_no_difference() -> None:
    few = {"accept_histogram": [30, 0, 70], "num_rounds": 100}
    slow = sd("8b/1b", 2, tok_per_s=1.01 / T1_S["8b/1b"], **few)
    text = render([ar("8b/1b"), slow])
    assert re.search(r"^  2 .* no difference +–\* \|", text, re.M) and "1.01 (" not in text


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
        {"backend": "emulated"},
        {"tp": 2},
        {"fuse": True},
        {"lm_head": True},
        {"context": 4096},
        {"dtype": "float32"},
        {"graph": False},
        {"all_reduce": "nccl"},
    ],
)
def test_settings_are_never_mixed(changed: dict[str, Any]) -> None:
    rows = [ar("8b/1b", **changed), sd("8b/1b", 2)]
    found = table(rows)
    assert found.setting and found.setting.device_name == "A GPU" and not found.has_ar
    assert line(found, 2).achieved is None and line(found, 2).r_k1 is None
    assert "no AR row" in render(rows)
    rows += [ar("8b/1b", run_id="own"), sd("8b/1b", 4, **changed)]
    tables = [t for t in make_tables(rows, {}) if t.pair == "8b/1b"]
    assert len(tables) == 2 and all(t.has_ar for t in tables)
    assert sum(row.achieved is not None for t in tables for row in t.rows) == 2


def test_inline_and_remote_drafts_are_two_tables_over_one_ar() -> None:
    remote = sd("8b/1b", 2, run_id="d1", num_drafts=1, draft_device_name="A small GPU")
    tables = make_tables([ar("8b/1b"), sd("8b/1b", 2), remote], {})
    inline, other = (t for t in tables if t.pair == "8b/1b")
    assert inline.setting and other.setting and inline.has_ar and other.has_ar
    assert other.setting.draft_device == "A small GPU"
    text = render([ar("8b/1b"), sd("8b/1b", 2), remote])
    assert "draft inline on the lead\n    ranks: SD 1, AR 1" in text
    assert "draft on A small GPU\n    ranks: SD 2, AR 1" in text


@pytest.mark.parametrize(
    "changed",
    [
        {"batch_size": 2},
        {"target": "llama-3.1-8b@8L"},
        {"draft": "llama-3.2-3b"},
        {"lookahead": 7},
        {"mode": "ssd"},
    ],
)
def test_other_rows_are_left_out(changed: dict[str, Any]) -> None:
    rows = [ar("8b/1b"), sd("8b/1b", 2) | changed]
    assert table(rows).setting is None
    assert "Rows read: 2; AR or SD of these pairs at full depth, b = 1 and a K above: 1." in render(
        rows
    )


def test_what_a_run_may_leave_null_is_a_dash() -> None:
    nulls: dict[str, Any] = {"t_target_s": None, "T_SD": None, "stable": None}
    rows = [ar("8b/1b"), sd("8b/1b", 2, **nulls)]
    row = line(table(rows), 2)
    assert row.t_sd is None and row.theory is None and row.achieved is not None
    assert re.search(r"^  2( +–){5} +\d\.\d\d \(\S+\) +–\* \|", render(rows), re.M)


# --- the text


def test_without_rows_the_report_s_side_is_printed_and_what_to_run() -> None:
    text = render([])
    assert re.search(r"^  2( +–){7} +\| +0.36 +2.12 +2.19 +1.99 0.940$", text, re.M)
    assert re.search(r"^ 12( +–){7} +\| +0.23 +– +– +6.06 +–$", text, re.M)
    assert text.count("make run MODE=ar") == 2 and text.count("for k in 2 4 6 8 10 12; do") == 2


def test_a_missing_row_is_a_dash_and_a_line_to_run() -> None:
    rows, profiles = everything("8b/1b")
    text = render([row for row in rows if row["lookahead"] != 6], profiles)
    assert re.search(r"^  6 +– +– +~0\.\d+ +~0\.\d+ +– +– +–  \| +1.02", text, re.M)
    assert "for k in 6; do" in text
    whole = render(*everything("8b/1b"))
    assert "PAIR=8b/1b" not in whole and "PAIR=70b/1b" in whole


def test_a_line_of_the_table_to_the_digit() -> None:
    text = render(*everything("8b/1b"))
    (found,) = re.findall(r"^  4 .*$", text.partition("70B/1B")[0], re.M)
    assert found.split() == (
        "4 1.058 1.000 0.940 0.945 2.11 2.11 (2.09–2.12) 1.00* | 0.69 2.57 2.64 2.42 0.943".split()
    )


def test_every_line_fits_a_terminal_and_the_order_of_rows_is_nothing() -> None:
    rows, profiles = everything("8b/1b")
    name = "NVIDIA A100-SXM4-80GB (emulated)"
    provenance = {"command": ["run", "--device=a100-80"], "ranks": [{"device": name}] * 5}
    other: dict[str, Any] = {
        "device_name": name,
        "backend": "emulated",
        "lm_head": True,
        "tp": 4,
        "fuse": True,
    }
    other |= {"all_reduce": "nccl", "num_drafts": 1, "provenance": provenance}
    rows += [sd("70b/1b", k, **other) for k in (2, 4)]
    text = render(rows, profiles)
    assert max(map(len, text.splitlines())) <= 100
    for seed in range(5):
        random.Random(seed).shuffle(rows)
        assert render(rows, dict(reversed(profiles.items()))) == text


def test_what_to_run_is_what_make_and_mpissd_understand() -> None:
    other: dict[str, Any] = {
        "backend": "cupy",
        "graph": False,
        "fuse": True,
        "context": 4096,
        "tp": 2,
    }
    other |= {"all_reduce": "nccl", "num_drafts": 1}
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    found = re.search(r"^flag_of := (.*)$", makefile, re.M)
    assert found
    flag_of = dict(pair.split(":") for pair in found[1].split())
    commands = re.findall(
        r"make run [^;\n]*", render([sd("70b/1b", 2, **other)]).replace("\\\n", "")
    )
    assert len(commands) == 4
    configs = []
    for command in commands:
        given = dict(re.findall(r"(\w+)=('[^']*'|\S+)", command.replace("$k", "6")))
        given.pop("TP")
        extra = dict(
            w[2:].split("=") if "=" in w else (w[2:], "true")
            for w in given.pop("ARGS", "''")[1:-1].split()
        )
        configs.append(parse_flags({flag_of[name]: v for name, v in given.items()} | extra))
    assert [c.mode for c in configs] == ["ar", "sd", "ar", "sd"]
    filled = configs[3]
    assert (filled.fuse, filled.context, filled.graph, filled.all_reduce) == (
        True,
        4096,
        False,
        "nccl",
    )
    assert (filled.lookahead, filled.alpha, filled.num_drafts, filled.pair) == (6, 0.9, 1, "70b/1b")
