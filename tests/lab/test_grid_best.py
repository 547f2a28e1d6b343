"""Methods compared at equal K, and each at its own best K, from rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.errors import ConfigError
from mpissd.common.row import Row
from mpissd.lab.sweep.best import compare_methods, method_of
from mpissd.lab.sweep.best_text import render, to_dict
from mpissd.lab.sweep.commands import best
from mpissd.lab.sweep.configs import BestConfig
from mpissd.lab.sweep.uses import verdicts

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
    """A row of 400 rounds; seed 0 unless said, with a luck of 1%."""
    drafts = 0 if mode == "ar" else 1
    flat = dict.fromkeys(("mean", "p50", "p90", "p99"), 1e4)
    known = {"num_drafts": drafts, "world_size": 1 + drafts, "seed": 0, "num_rounds": 400}
    known |= {"round_us": flat, "sampling_sd": 0.01, "expected_tok_per_s": rate}
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


def test_each_method_is_compared_at_equal_and_at_its_own_best_lookahead() -> None:
    first, second = compare_methods(ROWS)
    ar, sd, ssd = first.methods
    assert (ar.name, sd.name) == ("AR", "SD")
    assert ssd.name == "SSD fan_out=uniform:3 p_hit:0.9"
    assert (sd.best.lookahead, sd.best.median) == (4, 600)
    assert (ssd.best.lookahead, ssd.best.median, len(ssd.best.tok_per_s)) == (8, 1000, 3)
    at_equal = [(method.at(4).median, method.at(8).median) for method in (sd, ssd)]  # type: ignore[union-attr]
    assert at_equal == [(600, 550), (900, 1000)]
    assert ar.at(4) is ar.best and sd.at(3) is None
    assert ssd.best.spread == pytest.approx(0.02) and ssd.best.per_gpu == 500
    assert dict(second.setting)["acceptance"] == "alpha:0.6"
    assert [method.best.median for method in second.methods] == [300, 400]  # AR is in both


@pytest.mark.parametrize(
    "other",
    [
        {"device_name": "A100"},
        {"batch_size": 4},
        {"tp": 2},
        {"context": 4096},
        {"forward": "transformer"},
    ],
)
def test_rows_of_another_setting_are_not_compared(other: dict[str, Any]) -> None:
    found = compare_methods([*ROWS[:4], row("ssd", 4, 999, **other)])
    assert [[m.name for m in comparison.methods] for comparison in found] == [
        ["AR", "SD"],
        ["SSD fan_out=uniform:3 p_hit:0.9"],
    ]


def test_answers_to_other_prompts_are_not_compared() -> None:
    """Nor with a row of the same prompts and another top_p; rows without `forward` are gemm's."""
    asked = [{"prompts": "a"}, {"prompts": "a"}, {"prompts": "b"}, {"prompts": "a", "top_p": ".5"}]
    modes = ("ar", "sd", "sd", "sd")
    rows = [
        row(mode, 4, 500, workload="text", provenance={"sweep": {"flags": flags}})
        for mode, flags in zip(modes, asked, strict=True)
    ]
    found = compare_methods(rows)
    assert [[m.name for m in comparison.methods] for comparison in found] == [
        ["AR", "SD"], ["SD"], ["SD"]
    ]  # fmt: skip
    assert len(compare_methods([*ROWS[:4], row("sd", 4, 600, forward="gemm")])) == 1


def of_two_gpus(*others: Row) -> list[Row]:
    """SSD, SD and AR as ROWS have them, and what else ran on two GPUs."""
    here = {"target": "llama-3.1-8b"}
    rows = [r | here for r in ROWS[:-1]]
    return rows + [r | here | {"num_drafts": 0, "world_size": 2} for r in others]


def test_the_best_other_use_is_over_every_t() -> None:
    inline = [row("sd", k, rate, tp=2) for k, rate in ((1, 800), (3, 950))]
    rows = of_two_gpus(row("ar", 0, 525, tp=2), *inline)
    first = next(c for c in compare_methods(rows) if dict(c.setting)["tp"] == 1)
    (verdict,) = verdicts(first, rows)
    best = verdict.others.best
    assert (
        best is not None
        and best.cell.lookahead == 3
        and str(verdict.others.judged[1]) == ("SD T=1 D=1 K=4: 600.0 tok/s")
    )
    assert verdict.gain is not None and verdict.gain.speedup == pytest.approx(1000 / 950)
    assert "best other use of 2 GPUs, SD inline T=2 K=3: 950.0 tok/s" in str(verdict)
    other_t = next(c for c in compare_methods(rows) if dict(c.setting)["tp"] == 2)
    assert verdicts(other_t, rows) == []  # no SSD there


def test_a_use_that_was_not_measured_is_said_and_nothing_is_best() -> None:
    rows = of_two_gpus(row("ar", 0, 525, tp=2))
    first = compare_methods(rows)[0]
    (verdict,) = verdicts(first, rows)
    assert verdict.others.best is None
    assert "fastest measured of 2 GPUs, SD T=1 D=1 K=4" in str(verdict)
    assert ", 1.62–1.71, no claim; its hits are imposed" in str(verdict)
    assert str(verdict).endswith("not measured: SD inline T=2")
    told = verdict.to_dict()
    assert told["best_other_use"] is None and told["over_best"] is None
    assert told["not_measured"] == ["SD inline T=2"]


def test_a_lookup_is_a_rival_where_no_law_decides() -> None:
    """It drafts beside any draft model; under a law its acceptance would be assumed."""
    told = {"workload": "replay", "recording": "a.npz", "acceptance": None, "hit_law": None}
    inline = {"num_drafts": 0, "inline_draft": True, "world_size": 2, "tp": 2}
    looked_up = {**inline, "draft": "lookup", "backup": "fast"}

    def beside(**laws: Any) -> str:
        rows = [row("ssd", 4, 500, **laws), row("sd", 2, 450, **inline, **laws)]
        rows += [row("sd", 8, 700, **looked_up, **laws)]
        comparison = compare_methods(rows)[0]
        assert {"tp": 1, "draft": "1b"}.items() <= dict(comparison.setting).items()
        (verdict,) = verdicts(comparison, rows)
        return str(verdict)

    assert "fastest measured of 2 GPUs, lookup T=2 K=8: 700.0 tok/s" in beside(**told)
    assert "SD inline T=2 K=2: 450.0 tok/s" in beside(hit_law="power:A=0.75,r=1.0")


def test_a_lookup_does_not_stand_for_the_draft_that_was_not_measured() -> None:
    """Its rows are a rival, and have a table of their own where no other row has their T."""
    told: dict[str, Any] = {"workload": "replay", "recording": "a.npz"}
    told |= {"acceptance": None, "hit_law": None}
    two: dict[str, Any] = {"num_drafts": 0, "world_size": 2, "tp": 2}
    looked_up = {**two, "inline_draft": True, "draft": "lookup", "backup": "fast"}
    rows = [row("ssd", 4, 500, **told), row("sd", 4, 300, **told), row("ar", 0, 200, **two, **told)]
    rows += [row("sd", 8, 300, **looked_up, **told)]
    beside, alone = compare_methods(rows)
    (verdict,) = verdicts(beside, rows)
    assert str(verdict).endswith("no claim; not measured: SD inline T=2")
    assert {"tp": 2, "draft": "lookup"}.items() <= dict(alone.setting).items()
    assert [method.name for method in alone.methods] == ["AR", "SD inline backup=fast"]


def test_gpus_of_another_kind_are_no_rivals() -> None:
    rows = of_two_gpus(row("ar", 0, 525, tp=2))
    mixed = rows[3] | {"draft_device_name": "V100", "tok_per_s": 5000.0}
    (verdict,) = verdicts(compare_methods(rows)[0], [*rows, mixed])
    assert verdict.others.fastest is not None and verdict.others.fastest.tok_per_s < 5000


def test_what_a_method_is_called() -> None:
    assert method_of(row("sd", 4, 1, inline_draft=True)) == "SD inline"
    assert method_of(row("ssd", 4, 1, num_drafts=2, backup="fast", on_late="serve")) == (
        "SSD D=2 backup=fast fan_out=uniform:3 p_hit:0.9 on_late=serve"
    )
    assert method_of(row("ssd", 4, 1, schedule="pearl")).startswith("SSD pearl")
    alone = {"provenance": {"command": ["run", "--mode=ssd", "--fan_out=geometric:24", "--fuse"]}}
    assert method_of(row("ssd", 4, 1, **alone)) == "SSD fan_out=geometric:24 p_hit:0.9"


@pytest.mark.parametrize(
    "counts, expected",
    [([2, 2, 2, 2], "uniform:2"), ([4, 3, 3, 3], "geometric:13"), (None, "uniform:3")],
)
def test_a_fan_out_that_no_flag_says_is_the_row_s_own(counts: Any, expected: str) -> None:
    """SmolLM2 takes another one on a CPU than the flag's default."""
    default = row("ssd", 3, 1, fan_out=counts, provenance={"command": ["run", "--pair=smollm2"]})
    assert method_of(default) == f"SSD fan_out={expected} p_hit:0.9"


@pytest.mark.parametrize(
    "other",
    [
        {"backup_lookahead": 2},
        {"backup": "fast"},
        {"backup": "fast", "acceptance_fast": "alpha:0.5"},
    ],
)
def test_what_drafts_a_miss_makes_another_method(other: dict[str, Any]) -> None:
    usual = row("ssd", 4, 900, backup="jit", backup_lookahead=4, acceptance_fast="alpha:0.3")
    names = {
        method_of(usual),
        method_of(usual | other),
        method_of(usual | {"backup": "fast"}),
    }
    assert len(names) == 2 + (other != {"backup": "fast"})


def test_another_draft_device_makes_another_method() -> None:
    own = row("ssd", 4, 900, draft_device_name="H200")
    assert method_of(own) == method_of(row("ssd", 4, 900))
    assert "draft on V100" in method_of(own | {"draft_device_name": "V100"})


def test_graphs_and_single_launches_are_not_repeats() -> None:
    found = compare_methods([row("ssd", 4, 900, graph=True), row("ssd", 4, 500, graph=False)])
    assert [len(one.methods[0].best.tok_per_s) for one in found] == [1, 1]


def test_what_is_no_row_is_not_compared() -> None:
    spoiled = ({"mode": "x"}, {"lookahead": None}, {"tok_per_s": "fast"})
    junk = [*map(Row.from_dict, ({}, {"tok_per_s": 5})), *(ROWS[0] | one for one in spoiled)]
    assert compare_methods([*ROWS, *junk]) == compare_methods(ROWS)


def test_the_table_and_the_json_say_the_same() -> None:
    found = compare_methods(ROWS)
    lines = render(found).splitlines()
    assert lines[0] == "8b/1b, T=1, H200: acceptance alpha:0.8, batch_size 1"
    assert lines[1].split() == "tok/s K=2 K=4 K=8 best at spread n x AR a GPU".split()
    sd = "SD 500.0 600.0 550.0 600.0 K=4 3.3% 3 2.00 (1.95–2.06) no difference (0.97–1.03)"
    assert lines[3].split() == sd.split()
    ssd = "p_hit:0.9 700.0 900.0 1000.0 1000.0 K=8 2.0% 3 3.33 (3.24–3.43) 1.67 (1.62–1.71)"
    assert lines[4].split()[2:] == ssd.split()
    assert "few seeds and claims no speedup" in lines[-1]
    told = json.loads(json.dumps(to_dict(found[0])))["methods"]
    assert (told[2]["best_lookahead"], told[2]["speedup"]) == (8, pytest.approx(1000 / 300))
    assert told[1]["speedup_per_gpu"] is None
    assert told[1]["over_ar_per_gpu"]["verdict"] == "no difference"
    told = told[2]
    assert told["by_lookahead"]["8"] == {"tok_per_s": 1000, "repeats": [990, 1010, 1000]}


def test_the_best_lookahead_is_chosen_by_the_prediction_and_not_by_luck() -> None:
    lucky = [row("sd", 4, 600), row("sd", 8, 640, expected_tok_per_s=590)]
    (found,) = compare_methods(lucky)
    assert found.methods[0].best.lookahead == 4
    unknown = [lucky[0] | {"expected_tok_per_s": None}, lucky[1]]
    assert compare_methods(unknown)[0].methods[0].best.lookahead == 8


def test_predictions_that_miss_by_far_choose_no_k_and_are_named() -> None:
    told = [(6, 661, 320), (7, 807, 300)]
    rows = [row("sd", *of, expected_tok_per_s=mean, prediction_error=1.45) for *of, mean in told]
    (found,) = compare_methods(rows)
    assert found.methods[0].best.lookahead == 7
    warning = next(line for line in render([found]).splitlines() if line.startswith("warning"))
    assert "miss these rows by (median) SD 145%" in warning
    (found,) = compare_methods([each | {"prediction_error": 0.15} for each in rows])
    assert found.methods[0].best.lookahead == 6 and "warning" not in render([found])


def seeded(count: int, num_rounds: int = 400) -> list[Row]:
    """A sweep over seeds, as `seed = 0..4` of a grid makes it: luck of 10%, shared but for 1%."""
    luck = [1.0, 1.1, 0.9, 1.05, 0.95][:count]
    known = {"num_rounds": num_rounds, "sampling_sd": 0.1}
    found = [row("ar", 0, 300 + n % 2, seed=n, **known) for n in range(count)]
    for n, lucky in enumerate(luck):
        found.append(row("sd", 4, 400 * lucky, seed=n, **known))
        found.append(row("ssd", 4, 420 * lucky * (1 + 0.002 * n), seed=n, **known))
    return found


def test_seeds_of_a_grid_are_paired() -> None:
    """A gain of 5% under a luck of 10% is seen, and is a headline from five seeds on."""
    (found,) = compare_methods(seeded(5))
    ar, sd, ssd = (method.best for method in found.methods)
    gain = ssd.over(sd)
    assert gain is not None and gain.is_headline and gain.num_seeds == 5
    assert gain.speedup == pytest.approx(1.0542, abs=1e-3) and 1.05 < gain.low < gain.high < 1.06
    over_ar = ssd.over(ar)
    assert over_ar is not None and over_ar.is_headline and "+" in render([found])
    for poor in (seeded(4), seeded(5, num_rounds=399)):
        (few,) = compare_methods(poor)
        gain = few.methods[2].best.over(few.methods[1].best)
        assert gain is not None and gain.is_real and not gain.is_headline
        assert ")+" not in render([few])
    lone = compare_methods([r for r in seeded(5) if r.seed == 3])[0]
    alone = lone.methods[2].best.over(lone.methods[1].best)
    assert alone is not None and not alone.is_real  # one seed, as independent rows


def test_rows_that_say_too_little_have_no_gain() -> None:
    found = compare_methods([r | {"round_us": None} for r in ROWS[:4]])[0]
    assert "–" in render([found]).splitlines()[3]
    assert to_dict(found)["methods"][1]["over_ar"] is None


def test_without_ar_there_is_no_speedup() -> None:
    (found,) = compare_methods(ROWS[3:6])
    assert found.baseline is None and to_dict(found)["methods"][0]["speedup"] is None
    assert compare_methods([]) == []
    (alone,) = compare_methods(ROWS[:3])
    assert [method.name for method in alone.methods] == ["AR"]


def test_best_reads_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"schema": 1, "run_id": str(n), **row}) for n, row in enumerate(ROWS)]
    (tmp_path / "runs.jsonl").write_text("\n".join(lines) + "\n")
    assert best(BestConfig(str(tmp_path))) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [m["tok_per_s"] for m in told[0]["methods"]] == [300, 600, 1000]
    with pytest.raises(ConfigError, match="cannot be read"):
        best(BestConfig(str(tmp_path / "nothing")))
