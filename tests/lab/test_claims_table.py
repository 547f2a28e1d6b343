"""SSD against the strongest other use of its GPUs: which verdicts hold, and the rows they need."""

from typing import Any

from mpissd.common.compare import DRIFT
from mpissd.common.row import Row
from mpissd.lab.tables.best import compare_methods, setting_of
from mpissd.lab.tables.claims import Claim, claims, judged
from mpissd.lab.tables.load import load_rows
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


def rows(uses: Uses = USES, seeds: int = 5, visit: str = "a", **told: Any) -> list[Row]:
    """Every use under every seed: noise of 10% that all methods with drafts share, .1% for AR.

    visit: the GPU that all of these rows ran on.
    """
    found = []
    for (mode, tp, num_drafts), by_k in uses.items():
        for lookahead, rate in by_k.items():
            for seed in range(seeds):
                lucky = LUCK[seed] * (1 + 0.001 * (seed % 2)) if mode != "ar" else 1 + seed / 1000
                row = {
                    "schema": 1, "run_id": f"{visit}{mode}{tp}{num_drafts}-{lookahead}-{seed}",
                    "mode": "sd" if mode == "lookup" else mode, "tp": tp, "num_drafts": num_drafts,
                    "world_size": tp + num_drafts, "workload": "gemm", "backend": "cupy",
                    "device_name": "H200", "target": "llama-3.1-8b", "dtype": "float16",
                    "batch_size": 1, "context": 0, "fuse": True, "lm_head": True,
                    "num_rounds": 400, "lookahead": lookahead, "seed": seed,
                    "tok_per_s": rate * lucky, "expected_tok_per_s": rate, "round_us": FLAT,
                    "token_digest": "f00d", "t_target_s": 0.004 / tp,
                    "t_draft_s": 1e-3 * lookahead,
                    "provenance": {"commit": "1", "ranks": [{"uuid": visit}]},
                }  # fmt: skip
                if mode != "ar":
                    row |= {"draft": "llama-3.2-1b", "acceptance": "alpha:0.8"}
                    row |= {"inline_draft": not num_drafts}
                if mode == "lookup":
                    row |= {"draft": "lookup", "backup": "fast", "acceptance_fast": "alpha:0.3"}
                if mode == "ssd":
                    row |= {"hit_law": "power:A=0.75,r=1.0", "on_late": "finish"}
                found.append(Row.from_dict(row | told))
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
    assert (
        alone.gain is not None
        and 0.01 < alone.gain.p_value < 0.05
        and "no verdict" not in alone.text
    )
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
