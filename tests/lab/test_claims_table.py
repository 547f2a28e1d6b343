"""SSD against the strongest other use of its GPUs: which verdicts hold, and the rows they need.
Methods compared at equal K, and each at its own best K, from rows."""

from itertools import product
from typing import Any

import pytest

from mpissd.common.row import Row
from mpissd.lab.tables.best import Comparisons, compare_methods, render
from mpissd.lab.tables.claims import Claim, claims, judged
from mpissd.lab.tables.compare import DRIFT
from mpissd.lab.tables.load import load_rows
from mpissd.lab.tables.uses import Use, best_use, flags_of, method_of, setting_of
from tests.scripts import ROOT

LUCK = (1.0, 1.1, 0.9, 1.05, 0.95)
FLAT = dict.fromkeys(("mean", "p50", "p90", "p99"), 1e4)
Uses = dict[tuple[str, int, int], dict[int, float]]
# (mode, T, D): tok/s at each K. SD inline over both GPUs is the strongest other use.
USES: Uses = {
    ("ar", 1, 0): {0: 300.0},
    ("ar", 2, 0): {0: 520.0},
    ("sd", 1, 0): {4: 400.0},
    ("sd", 2, 0): {2: 690.0, 3: 700.0},
    ("lookup", 2, 0): {8: 640.0},
    ("sd", 1, 1): {4: 600.0},
    ("ssd", 1, 1): {3: 740.0, 4: 770.0},
}


SAME = {
    "workload": "gemm", "backend": "cupy", "device_name": "H200", "target": "llama-3.1-8b", "tp": 1,
    "dtype": "float16", "batch_size": 1, "seed": 0, "num_rounds": 400, "round_us": FLAT,
}  # fmt: skip


def row(mode: str, lookahead: int, rate: float, alpha: str = "alpha:0.8", **told: Any) -> Row:
    """A row of 400 rounds, with one draft rank unless it is AR's; of SSD, hits are imposed."""
    drafts = 0 if mode == "ar" else 1
    known = {"num_drafts": drafts, "world_size": 1 + drafts, "expected_tok_per_s": rate}
    if mode != "ar":
        known |= {"draft": "llama-3.2-1b", "acceptance": alpha}
    if mode == "ssd":
        known |= {"hit_law": "p_hit:0.9", "on_late": "finish"}
    known["provenance"] = {"sweep": {"flags": {"fan_out": "uniform:3"} if mode == "ssd" else {}}}
    known |= {"mode": mode, "lookahead": lookahead, "tok_per_s": rate}
    return Row.from_dict(SAME | known | told)


def rows(uses: Uses = USES, seeds: int = 5, visit: str = "a", **told: Any) -> list[Row]:
    """Every use under every seed: noise of 10% that all methods with drafts share, .1% for AR.

    visit: the GPU that all of these rows ran on.
    """
    found = []
    origin = {"commit": "1", "ranks": [{"uuid": visit}]}
    for (mode, tp, num_drafts), by_k in uses.items():
        more: dict[str, Any] = {"tp": tp, "num_drafts": num_drafts, "world_size": tp + num_drafts}
        if mode != "ar":
            more["inline_draft"] = not num_drafts
        if mode == "lookup":
            more |= {"draft": "lookup", "backup": "fast", "acceptance_fast": "alpha:0.3"}
        if mode == "ssd":
            more["hit_law"] = "power:A=0.75,r=1.0"
        for (lookahead, rate), seed in product(by_k.items(), range(seeds)):
            lucky = LUCK[seed] * (1 + 0.001 * (seed % 2)) if mode != "ar" else 1 + seed / 1000
            more |= {"run_id": f"{visit}{mode}{tp}{num_drafts}-{lookahead}-{seed}", "seed": seed}
            more |= {"expected_tok_per_s": rate, "provenance": origin, **told}
            kind = "sd" if mode == "lookup" else mode
            found.append(row(kind, lookahead, rate * lucky, **more))
    return found


def without(*names: tuple[str, int, int]) -> Uses:
    return {key: of for key, of in USES.items() if key not in names}


def every(found: list[Row]) -> list[Claim]:
    """The claims that `compare` prints below its tables."""
    settings = [comparison.setting for comparison in compare_methods(found)]
    return [claim for of in claims(settings, found) for claim in of]


def one(found: list[Row]) -> Claim:
    (claim,) = every(found)
    return claim


def test_ssd_stands_beside_the_strongest_other_use_and_independent_copies() -> None:
    assert str(one(rows())) == (
        "SSD fan_out=uniform:3 power:A=0.75,r=1.0, SSD T=1 D=1 K=4: 770.0 tok/s, 385.0 a GPU; "
        "strongest other use of 2 GPUs, SD inline T=2 K=3: 700.0 tok/s, SSD over it "
        "1.10× (1.10–1.10); 2 copies of SD inline T=1 K=4: 800.0 tok/s in all"
    )


def test_a_tree_is_a_use_of_its_own() -> None:
    tree = rows({("sd", 2, 0): {3: 750.0}}, tree_nodes=12)
    assert str(one(rows() + tree).other) == "tree T=2 K=3"
    assert str(one(rows(without(("sd", 2, 0))) + tree).unknown[0].family) == "SD inline T=2"


def test_rivals_of_another_visit_give_no_verdict() -> None:
    """Rows of SSD's own visit are needed unless the rival is slower by over 4%, the usual drift."""
    own = rows(without(("sd", 2, 0), ("ar", 2, 0)))
    far = rows({key: USES[key] for key in (("sd", 2, 0), ("ar", 2, 0))}, visit="b")
    text = one(own + far).text
    assert text == "1.20–1.20, no verdict: few visits: SD inline T=2, 700 tok/s on another"
    for rate, is_open in ((640 / (1 + DRIFT) - 1, False), (640 / (1 + DRIFT) + 1, True)):
        other = rows({("sd", 2, 0): {3: rate}, ("ar", 2, 0): {0: 520.0}}, visit="b")
        claim = one(own + other)  # over the lookup of its visit, 640 tok/s
        assert bool(claim.unknown) == is_open and (claim.text == "1.20× (1.20–1.20)") != is_open


def test_what_was_not_measured_is_named() -> None:
    claim = one(rows(without(("sd", 2, 0))))
    assert str(claim.other) == "lookup T=2 K=8"
    assert "no verdict: SD inline T=2 not measured" in claim.text


def test_a_lookup_is_ruled_out_by_what_it_can_reach_at_most() -> None:
    """At acceptance .3 it adds at most 1/.7 tokens a forward: 743 of AR's 520, and 4%."""
    text = one(rows(without(("lookup", 2, 0)))).text
    assert "no verdict: lookup T=2 not measured" in text
    fast = {**without(("lookup", 2, 0)), ("sd", 2, 0): {3: 790.0}, ("ssd", 1, 1): {4: 850.0}}
    assert one(rows(fast)).text == "1.08× (1.08–1.08)"


def test_where_a_recording_decides_each_lookup_is_a_use_of_its_own() -> None:
    """Also one that is newer than the two that a verdict needs."""
    told = {"workload": "replay", "recording": "a.npz", "acceptance": None, "hit_law": None}
    found = [r | told for r in rows()]

    def claim() -> Claim:
        known = next(s for s in map(setting_of, found) if s["tp"] == 1 and s["draft"])
        (judgement,) = judged(known, found)
        return judgement

    assert [str(use.family) for use in claim().unknown] == ["suffix T=2"]
    for kind, rate in (("suffix", 900.0), ("trie", 950.0)):
        found += [r | told | {"lookup": kind} for r in rows({("lookup", 2, 0): {8: rate}})]
        assert not claim().unknown and str(claim().other) == f"{kind} T=2 K=8"
        assert claim().other.method.endswith(f"lookup={kind}")


def test_a_loss_to_a_measured_use_holds_whatever_else_was_not_measured() -> None:
    slow = {**without(("lookup", 2, 0)), ("ssd", 1, 1): {4: 350.0}}
    assert one(rows(slow)).text.startswith("loses, at most 0.50× (0.50–0.50): lookup T=2 not")


def test_verdicts_of_a_table_are_corrected_together() -> None:
    """One line of p = .01 holds on its own, and not among four that show nothing."""
    noise = (0.02, 0.05, 0.08, 0.03, 0.07)

    def line(alpha: float, gain: float) -> list[Row]:
        wide = {**USES, ("ssd", 1, 1): {4: 700.0 * gain}}
        told = [r | {"run_id": f"{alpha}{r.run_id}"} for r in rows(wide)]
        told = [r | {"acceptance": f"alpha:{alpha}"} if r.mode != "ar" else r for r in told]
        return [
            r | {"tok_per_s": r.tok_per_s * (1 + noise[r.seed] * (r.mode == "ssd"))} for r in told
        ]

    alone = one(line(0.8, 1.0))
    assert alone.gain is not None and 0.01 < alone.gain.p_value < 0.05
    assert "no verdict" not in alone.text
    many = every([r for a in (0.8, 0.6, 0.65, 0.7, 0.75) for r in line(a, 1 - 0.048 * (a != 0.8))])
    held = next(claim for claim in many if claim.setting["acceptance"] == "alpha:0.8")
    assert held.text.endswith("no verdict after Holm's correction")


def test_predictions_choose_ssd_s_k_and_no_weak_rival() -> None:
    """A lucky row does not choose K; a wrong prediction does not hide the strongest rival."""
    lucky = rows({**USES, ("ssd", 1, 1): {3: 790.0, 4: 770.0}})
    told = [r | {"expected_tok_per_s": 700.0 + r.lookahead * (r.mode == "ssd")} for r in lucky]
    assert one(told).ssd.lookahead == 4
    wrong = rows({**USES, ("sd", 2, 0): {2: 690.0, 3: 770.0}})
    by_k = {2: {"expected_tok_per_s": 900.0}, 3: {"expected_tok_per_s": 600.0}}
    found = one(
        [r | by_k.get(r.lookahead, {}) if (r.mode, r.tp) == ("sd", 2) else r for r in wrong]
    )
    assert found.other is not None and found.other.lookahead == 3


def test_imposed_hits_claim_nothing() -> None:
    """They cost no branches, so their line says so, and they count in no other's."""
    imposed = [
        row | {"run_id": f"{row.run_id}-p", "hit_law": "p_hit:0.9", "tok_per_s": 950.0}
        for row in rows()
        if row.mode == "ssd"
    ]
    told = [str(claim) for claim in every([*rows(), *imposed])]
    assert len(told) == 2 and str(one(rows())) in told
    assert sum("cost no branches" in line for line in told) == 1


def test_the_study_s_claims_are_made_of_its_rows() -> None:
    study = (ROOT / "docs/study.md").read_text()
    told = [claim.text for claim in every(load_rows([ROOT / "results/two-gpus/h100.jsonl"]))]
    for bounds in ("1.07× (1.001–1.15)", "1.12× (1.09–1.14)"):
        assert bounds in told and bounds in study


ROWS = [
    *(row("ar", 0, rate) for rate in (300, 310, 290)),
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
    assert lines[0] == "llama-3.1-8b/llama-3.2-1b, T=1, H200: acceptance alpha:0.8, batch_size 1"
    assert lines[1].split() == "tok/s K=2 K=4 K=8 best at predicted spread n x AR a GPU".split()
    one = "(no interval: 1 seed)"
    sd = f"SD 500.0 600.0 550.0 600.0 K=4 600.0 3.3% 3 2.00 {one} 1.00 {one}"
    assert lines[3].split() == sd.split()
    ssd = f"p_hit:0.9 700.0 900.0 1000.0 1000.0 K=8 1000.0 2.0% 3 3.33 {one} 1.67 {one}"
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


def test_the_best_of_a_table_is_what_was_measured_best() -> None:
    """One run has no spread; its prediction is in its line; a core is not called a GPU."""
    rows = [row("ar", 0, 300, backend="numpy")]
    rows += [
        row("sd", k, rate, backend="numpy", expected_tok_per_s=mean, prediction_error=error)
        for k, rate, mean, error in ((2, 436, 500, 0.1), (6, 562, 480, 0.2), (8, 246, 446, -0.45))
    ]
    (found,) = compare_methods(rows)
    text = render([found])
    head, _, sd = text.splitlines()[1:4]
    assert head.split()[-2:] == ["a", "core"] and " GPU" not in text
    assert sd.split()[1:9] == "436.0 562.0 !246.0 562.0 K=6 480.0 – 1".split()
    line = "! SD K=8: 1 of 1 runs are off their own predictions by over a third; one made 246.0"
    assert f"{line}, predicted 447.3" in text


def test_a_long_hit_law_stands_in_the_title() -> None:
    """Its 60 characters would be a column of each line."""
    law = "power:A=0.5068/0.1737,r=0.6233/0.9954,floor=0.0968/0.0215"
    (found,) = compare_methods([row("ssd", 4, 500, hit_law=law), row("ssd", 4, 600)])
    head, _, imposed, drawn = render([found]).splitlines()[:4]
    assert head.endswith(f", hits {law}") and drawn.startswith("SSD fan_out=uniform:3   ")
    assert imposed.startswith("SSD fan_out=uniform:3 p_hit:0.9 ")


def test_a_rival_measured_beside_has_the_flags_of_its_command() -> None:
    origin = {"sweep": {"beside": "AR T=1"}, "command": ["run", "--fan_out=uniform:3"]}
    row = Row.from_dict({"provenance": origin})
    assert flags_of(row) == {"fan_out": "uniform:3"}
