"""Methods compared at equal K, and each at its own best K, from rows."""

from typing import Any

import pytest

from mpissd.common.row import Row
from mpissd.lab.tables.best import Comparisons, Use, best_use, compare_methods, method_of, render

SAME = {
    "workload": "gemm",
    "backend": "cupy",
    "device_name": "H200",
    "target": "8b",
    "tp": 1,
    "dtype": "float16",
    "batch_size": 1,
}


def row(mode: str, lookahead: int, rate: float, alpha: str = "alpha:0.8", **told: Any) -> Row:
    """A row of 400 rounds; seed 0 by default."""
    drafts = 0 if mode == "ar" else 1
    flat = dict.fromkeys(("mean", "p50", "p90", "p99"), 1e4)
    known = {"num_drafts": drafts, "world_size": 1 + drafts, "seed": 0, "num_rounds": 400}
    known |= {"round_us": flat, "expected_tok_per_s": rate}
    if mode != "ar":
        known |= {"draft": "1b", "acceptance": alpha}
    if mode == "ssd":
        known |= {"hit_law": "p_hit:0.9", "on_late": "finish"}
    known["provenance"] = {"sweep": {"flags": {"fan_out": "uniform:3"} if mode == "ssd" else {}}}
    known |= {"mode": mode, "lookahead": lookahead, "tok_per_s": rate}
    return Row.from_dict(SAME | known | told)


ROWS = [
    row("ar", 0, 300),
    row("ar", 0, 310),
    row("ar", 0, 290),
    *(row("sd", k, rate) for k, rate in ((2, 500), (4, 610), (4, 590), (4, 600), (8, 550))),
    *(row("ssd", k, rate) for k, rate in ((2, 700), (4, 900), (8, 990), (8, 1010), (8, 1000))),
    row("sd", 4, 400, "alpha:0.6"),
]


def bests(found: Comparisons) -> list[Use]:
    """The use of each method at its best K."""
    return [best_use(uses) for uses in found.methods.values()]


def test_each_method_is_compared_at_equal_and_at_its_own_best_lookahead() -> None:
    first, second = compare_methods(ROWS)
    assert list(first.methods) == ["AR", "SD", "SSD fan_out=uniform:3 p_hit:0.9"]
    ar, sd, ssd = bests(first)
    assert (sd.lookahead, sd.tok_per_s) == (4, 600) and first.baseline is ar
    assert (ssd.lookahead, ssd.tok_per_s, len(ssd.rows)) == (8, 1000, 3)
    rates = [[use.tok_per_s for use in uses] for uses in first.methods.values()]
    assert rates == [[300], [500, 600, 550], [700, 900, 1000]]
    assert ssd.spread == pytest.approx(0.02) and ssd.family.gpus == 2
    assert second.setting["acceptance"] == "alpha:0.6"
    assert [use.tok_per_s for use in bests(second)] == [300, 400]  # AR is in both


def test_answers_to_other_prompts_are_not_compared() -> None:
    """Nor with a row of the same prompts and another top_p; rows without `forward` are gemm's."""
    asked = [{"prompts": "a"}, {"prompts": "a"}, {"prompts": "b"}, {"prompts": "a", "top_p": ".5"}]
    modes = ("ar", "sd", "sd", "sd")
    rows = [
        row(mode, 4, 500, workload="text", provenance={"sweep": {"flags": flags}})
        for mode, flags in zip(modes, asked, strict=True)
    ]
    found = compare_methods(rows)
    assert [list(comparison.methods) for comparison in found] == [
        ["AR", "SD"], ["SD"], ["SD"]
    ]  # fmt: skip
    assert len(compare_methods([*ROWS[:4], row("sd", 4, 600, forward="gemm")])) == 1


def test_what_a_method_is_called() -> None:
    assert method_of(row("sd", 4, 1, inline_draft=True)) == "SD inline"
    assert method_of(row("ssd", 4, 1, backup="fast", lookup="suffix", on_late="serve")) == (
        "SSD backup=fast lookup=suffix fan_out=uniform:3 p_hit:0.9 on_late=serve"
    )
    assert method_of(row("ssd", 4, 1, schedule="pearl")).startswith("SSD pearl")
    alone = {"provenance": {"command": ["run", "--mode=ssd", "--fan_out=geometric:24", "--fuse"]}}
    assert method_of(row("ssd", 4, 1, **alone)) == "SSD fan_out=geometric:24 p_hit:0.9"


def test_the_table() -> None:
    found = compare_methods(ROWS)
    lines = render(found).splitlines()
    assert lines[0] == "8b/1b, T=1, H200: acceptance alpha:0.8, batch_size 1"
    assert lines[1].split() == "tok/s K=2 K=4 K=8 best at spread n x AR a GPU".split()
    one = "(no interval: 1 seed)"
    sd = f"SD 500.0 600.0 550.0 600.0 K=4 3.3% 3 2.00 {one} 1.00 {one}"
    assert lines[3].split() == sd.split()
    ssd = f"p_hit:0.9 700.0 900.0 1000.0 1000.0 K=8 2.0% 3 3.33 {one} 1.67 {one}"
    assert lines[4].split()[2:] == ssd.split()
    assert "few seeds and claims no speedup" in lines[-1]


def test_a_lookup_belongs_to_every_draft_and_law() -> None:
    """It has a table of its own only if all rows of drafts have another T."""
    looked_up = {"num_drafts": 0, "world_size": 1, "inline_draft": True, "draft": "lookup"}
    here, there = row("sd", 8, 700, **looked_up), row("sd", 8, 900, tp=2, **looked_up)
    found = compare_methods([*ROWS, here, there])
    assert all({"SD", "SD inline"} <= set(one.methods) for one in found[:2])
    assert found[2].setting["tp"] == 2 and list(found[2].methods) == ["SD inline"]


def test_predictions_choose_k_unless_they_miss_by_far() -> None:
    """No luck of a measured round chooses K."""
    told = [(6, 661, 320), (7, 807, 300)]
    rows = [row("sd", *of, expected_tok_per_s=mean, prediction_error=1.45) for *of, mean in told]
    (found,) = compare_methods(rows)
    assert bests(found)[0].lookahead == 7
    assert "miss these rows by (median) SD 145%" in render([found])
    (found,) = compare_methods([each | {"prediction_error": 0.15} for each in rows])
    assert bests(found)[0].lookahead == 6 and "warning" not in render([found])
