"""The milestone report's tables: its own arithmetic, and ours on rows of a known model."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mpissd.common import theory
from mpissd.common.row import Row
from mpissd.lab.tables.milestone import _COLUMNS, render
from tests.common.tables_model import LOOKAHEADS, STEP_S, ar, everything, ratio, sd, t_target


def line(rows: list[Row], lookahead: int, profiles: Any = None, pair: str = "8b/1b") -> list[str]:
    """Our cells at one K of a pair's table, and their marks after them."""
    text = render(rows, profiles or {})
    part = text[text.index(f"\n\n{pair.upper()}") :].split("\n\n")[1]
    (found,) = re.findall(rf"^ +{lookahead} .*$", part, re.M)
    cells, at = [], 0
    for width in _COLUMNS.values():
        cells.append(found[at : at + width].strip())
        at += width
    return [*cells, found[at : found.index("|")].strip()]


@pytest.mark.parametrize("pair", ["8b/1b", "70b/1b"])
def test_a_known_model_is_found_again(pair: str) -> None:
    rows, profiles = everything(pair)
    for k in LOOKAHEADS:
        _, t_sd, t_draft, r_k, r_k1, speedup, achieved, relative, marks = line(
            rows, k, profiles, pair
        )
        draft = k * STEP_S
        assert float(t_sd) == pytest.approx(draft / t_target(pair, k + 1), abs=6e-4)
        assert float(t_draft) == pytest.approx(draft / t_target(pair, 1), abs=6e-4)
        assert float(r_k1) == pytest.approx(ratio(pair, k + 1), abs=6e-4)
        assert r_k.startswith("~") != (k in (2, 4, 8))
        known = theory.expected_tokens(0.9, k) / (ratio(pair, k + 1) + draft / t_target(pair, 1))
        assert float(speedup) == float(achieved.split()[0]) == pytest.approx(known, abs=6e-3)
        assert relative == "1.00" and marks == "*"


def test_too_few_rounds_are_no_speedup() -> None:
    for count, there in ((19, False), (20, True)):
        rows = [ar("8b/1b"), sd("8b/1b", 2, num_rounds=count)]
        assert (line(rows, 2)[6] != "–") == there


def test_times_come_from_any_law_but_the_speedup_only_from_the_report_s() -> None:
    other, own = sd("8b/1b", 2, alpha=0.8), sd("8b/1b", 2)
    cells = line([ar("8b/1b"), other], 2)
    assert cells[1] == f"{other['T_SD']:.3f}" and cells[5] != "–" and cells[6] == "–"
    both = line([ar("8b/1b"), other | {"T_SD": 9.0}, own], 2)
    assert both[1] == f"{own['T_SD']:.3f}"
    assert line([ar("8b/1b"), own | {"acceptance": "alpha:.9"}], 2)[6] != "–"


@pytest.mark.parametrize("changed", [{"device_name": "Another GPU"}, {"tp": 2}, {"lm_head": True}])
def test_settings_are_never_mixed(changed: dict[str, Any]) -> None:
    rows = [ar("8b/1b", **changed), sd("8b/1b", 2)]
    assert line(rows, 2)[4] == line(rows, 2)[6] == "–" and "no AR row" in render(rows, {})
    rows += [ar("8b/1b", run_id="own"), sd("8b/1b", 4, **changed)]
    text = render(rows, {})
    assert text.count("8B/1B on ") == 2 and "no AR row" not in text


@pytest.mark.parametrize(
    "changed", [{"batch_size": 2}, {"target": "llama-3.1-8b@8L"}, {"lookahead": 7}]
)
def test_other_rows_are_left_out(changed: dict[str, Any]) -> None:
    text = render([ar("8b/1b"), sd("8b/1b", 2) | changed], {})
    assert "8B/1B: no SD row" in text
    assert "Rows read: 2; AR or SD of these pairs at full depth, b = 1 and a K above: 1." in text


def test_a_line_of_the_table_to_the_digit() -> None:
    text = render(*everything("8b/1b"))
    (found,) = re.findall(r"^  4 .*$", text.partition("70B/1B")[0], re.M)
    assert found.split() == (
        "4 1.058 1.000 0.940 0.945 2.11 2.11 (2.09–2.12) 1.00* | 0.69 2.57 2.64 2.42 0.943".split()
    )
