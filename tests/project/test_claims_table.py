"""README's table of claims: which speedups it makes, of which rows, and that it makes no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.figures.equal import _places
from mpissd.__main__ import main
from mpissd.common.errors import ConfigError
from mpissd.common.row import Row
from mpissd.lab.sweep.best import compare_methods
from mpissd.lab.sweep.claims import Claim, claims, render, rewritten
from mpissd.lab.sweep.uses import verdicts
from mpissd.lab.tables import Pair, load_rows
from tests.project.claims_in_text import intervals, unbacked

ROOT = Path(__file__).resolve().parents[2]
LUCK = (1.0, 1.1, 0.9, 1.05, 0.95)
FLAT = dict.fromkeys(("mean", "p50", "p90", "p99"), 1e4)
# (mode, T, D): tok/s at each K. SD inline over both GPUs is the strongest other use.
USES = {
    ("ar", 1, 0): {0: 300.0},
    ("ar", 2, 0): {0: 520.0},
    ("sd", 1, 0): {4: 400.0},
    ("sd", 2, 0): {2: 690.0, 3: 700.0},
    ("sd", 1, 1): {4: 600.0},
    ("ssd", 1, 1): {3: 740.0, 4: 770.0},
}


def rows(
    uses: dict[tuple[str, int, int], dict[int, float]] = USES, seeds: int = 5, **told: Any
) -> list[Row]:
    """Every use under every seed: a luck of 10% that all who draft share, of AR .1%."""
    found = []
    for (mode, tp, num_drafts), by_k in uses.items():
        for lookahead, rate in by_k.items():
            for seed in range(seeds):
                lucky = LUCK[seed] * (1 + 0.001 * (seed % 2)) if mode != "ar" else 1 + seed / 1000
                row = {
                    "schema": 1, "run_id": f"{mode}{tp}{num_drafts}-{lookahead}-{seed}",
                    "mode": mode, "tp": tp, "num_drafts": num_drafts, "world_size": tp + num_drafts,
                    "workload": "gemm", "backend": "cupy", "device_name": "H200",
                    "target": "llama-3.1-8b", "dtype": "float16", "batch_size": 1, "context": 0,
                    "fuse": True, "lm_head": True, "num_rounds": 400, "lookahead": lookahead,
                    "seed": seed, "tok_per_s": rate * lucky, "expected_tok_per_s": rate,
                    "round_us": FLAT, "sampling_sd": 0.1, "token_digest": "f00d",
                }  # fmt: skip
                if mode != "ar":
                    row |= {"draft": "llama-3.2-1b", "acceptance": "alpha:0.8"}
                    row |= {"inline_draft": not num_drafts}
                if mode == "ssd":
                    row |= {"hit_law": "power:A=0.75,r=1.0", "on_late": "finish"}
                found.append(Row.from_dict(row | told))
    return found


def one(found: list[Row]) -> Claim:
    (claim,) = claims(found)
    return claim


def lines(found: list[Row]) -> list[str]:
    return [line for line in render(claims(found)).splitlines() if line.startswith("| 0")]


def test_ssd_stands_beside_the_best_other_use_of_its_gpus() -> None:
    assert lines(rows()) == [
        "| 0.8 | yes | T=1 D=1 K=4 | 770 | SD inline T=2 K=3 | 700 | 1.10× (1.10–1.10) |"
    ]
    head = render(claims(rows())).splitlines()[0]
    assert "2 × H200 (float16, fused, context 0, batch 1)" in head
    assert "hits by power:A=0.75,r=1.0, assumed. 5 seeds × 400 rounds" in head


def test_a_slower_visit_of_the_rival_does_not_make_ssd_faster() -> None:
    """SD inline at K = 3 was measured twice: at 700, and on a slower machine at 640 tok/s."""
    first, again = rows(), rows({("sd", 2, 0): {3: 640.0}})
    visits = [row | {"provenance": {"sweep": {"id": "first", "flags": {}}}} for row in first]
    again_sweep = {"sweep": {"id": "again", "flags": {}}}
    visits += [
        row | {"provenance": again_sweep, "run_id": f"{row['run_id']}-again"} for row in again
    ]
    assert one(visits).gain.interval == one(first).gain.interval == "1.10–1.10"
    assert one(visits).other.cell.median == 700.0
    few = [row for row in visits if row.run_id.endswith("again") or row.seed or row.mode != "sd"]
    assert one(few).gain.low > 1.1, "four seeds of a visit are no rival of their own"


def test_rows_of_single_runs_are_of_no_sweep() -> None:
    runs = [row | {"provenance": {"sweep": None}} for row in rows()]
    assert one(runs).text == one(rows()).text


def test_both_heads_and_every_alpha_are_lines() -> None:
    found = rows()
    for alpha, head in ((0.6, True), (0.6, False), (0.8, False)):
        for row in rows(lm_head=head):
            told = {"run_id": f"{row['run_id']}{alpha}{head}"}
            if row["mode"] != "ar":
                told["acceptance"] = f"alpha:{alpha}"
            found.append(Row.from_dict(row | told))
    starts = [line.split(" | ")[:2] for line in lines(found)]
    assert starts == [["| 0.6", "yes"], ["| 0.8", "yes"], ["| 0.6", "no"], ["| 0.8", "no"]]


def test_what_is_not_faster_is_not_claimed() -> None:
    noisy = [
        r | {"tok_per_s": r.tok_per_s * (1 + 0.02 * (r.seed - 2) * (r.mode == "ssd"))}
        for r in rows({**USES, ("ssd", 1, 1): {4: 707.0}})
    ]
    assert "no difference" in lines(noisy)[0]
    slower = lines(rows({**USES, ("ssd", 1, 1): {4: 350.0}}))[0]
    assert "| 0.50× (0.50–0.50) |" in slower


@pytest.mark.parametrize("poor", [{"seeds": 4}, {"num_rounds": 399}], ids=str)
def test_few_seeds_and_short_rows_claim_nothing(poor: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="from 5 seeds of 400 rounds on"):
        claims(rows(**poor))


def test_a_lucky_row_does_not_choose_its_lookahead() -> None:
    """K = 3 has the better rows, K = 4 the better prediction."""
    lucky = rows({**USES, ("ssd", 1, 1): {3: 790.0, 4: 770.0}})
    told = [
        row | {"expected_tok_per_s": 700.0 + row.lookahead} if row.mode == "ssd" else row
        for row in lucky
    ]
    assert one(told).verdict.ssd.cell.lookahead == 4


def test_a_wrong_prediction_does_not_choose_a_weak_rival() -> None:
    """The predictor takes K = 2 of SD inline for its best; measured, K = 3 equals SSD."""
    wrong = rows({**USES, ("sd", 2, 0): {2: 690.0, 3: 770.0}})
    told = {2: {"expected_tok_per_s": 900.0}, 3: {"expected_tok_per_s": 600.0}}
    found = one([r | told[r.lookahead] if (r.mode, r.tp) == ("sd", 2) else r for r in wrong])
    assert found.verdict.gain is not None and found.verdict.gain.low > 1.1  # by the named use
    assert found.other.cell.lookahead == 3 and not found.gain.is_real


def test_a_use_that_was_not_measured_is_named() -> None:
    without = {key: of for key, of in USES.items() if key != ("sd", 2, 0)}
    (line,) = lines(rows(without))
    assert "fastest measured: SD T=1 D=1 K=4" in line and "×" not in line
    assert "1.28–1.28, no claim: SD inline T=2 not measured" in line


def test_a_use_of_few_seeds_says_how_many_there_are() -> None:
    found = [row for row in rows() if (row.mode, row.tp, row.seed) != ("sd", 2, 4)]
    (line,) = lines(found)
    assert line.endswith("| 1.28–1.28, no claim: SD inline T=2: 4 seeds of 5 |")
    assert _places([one(found)])[1:] == ["SD inline T=2 has 4 seeds of 5"]  # of a figure
    short = [row | {"num_rounds": 399} if (row.mode, row.tp) == ("sd", 2) else row for row in found]
    assert "no claim: SD inline T=2 not measured" in lines(short)[0]


def test_a_slower_ssd_is_set_beside_the_strongest_use_too() -> None:
    """The predictor names SD T=1 D=1, which SSD loses to by 5%; measured, SD inline is faster."""
    wrong = rows({**USES, ("ssd", 1, 1): {4: 570.0}})
    slow = {"expected_tok_per_s": 500.0}
    found = one([row | slow if (row.mode, row.tp) == ("sd", 2) else row for row in wrong])
    assert found.verdict.gain is not None and 0.9 < found.verdict.gain.high < 1
    assert (found.other.tp, found.other.cell.lookahead) == (2, 3)
    assert found.gain.speedup == pytest.approx(570 / 700, rel=0.01)


def test_imposed_hits_claim_nothing() -> None:
    """They cost no branches, so their rows neither make a line nor stand in another's."""
    imposed = [
        row | {"run_id": f"{row.run_id}-p", "hit_law": "p_hit:0.9", "tok_per_s": 950.0}
        for row in rows()
        if row.mode == "ssd"
    ]
    assert lines([*rows(), *imposed]) == lines(rows())
    with pytest.raises(ConfigError, match="no SSD beside"):
        claims([r for r in [*rows(), *imposed] if r.hit_law != "power:A=0.75,r=1.0"])
    found = compare_methods([*rows(), *imposed])
    told = [str(verdict) for one in found for verdict in verdicts(one, [*rows(), *imposed])]
    assert len(told) == 2 and sum("cost no branches" in line for line in told) == 1


def test_a_text_is_made_anew_and_a_changed_number_is_found() -> None:
    text = "Before.\n\n<!-- claims a,b -->\nold\n<!-- /claims -->\n\nAfter 1.5×.\n"
    asked = []

    def read(name: str) -> list[Row]:
        asked.append(name)
        return rows()

    fresh = rewritten(text, read)
    assert asked == ["a,b"] and "old" not in fresh and "1.10× (1.10–1.10)" in fresh
    assert rewritten(fresh, read) == fresh
    forged = fresh.replace("1.10×", "1.20×")
    assert rewritten(forged, read) != forged
    assert unbacked(fresh) == ["After 1.5×."]
    with pytest.raises(ConfigError, match="<!-- claims"):
        rewritten("no table", read)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("SSD gives 1.3 times as much.", 1),
        ("SSD gives 1.32× of SD, and .96× at b = 16.", 1),
        ("SSD gives 1.32× (1.25–1.39) of SD.", 0),
        ("SSD gives 1.3 times (1.2–1.4) as much; alone .66× of it.", 1),
        ("By the formulas it gives 1.64× at most. The forecast is 1.2 times that.", 0),
        ("4 times a day, 3 times.", 0),
        ("| a | 1.3× |\n| b | 1.2× (1.1–1.3) |", 1),
        ("SSD is 35% faster.", 1),
        ("SSD reaches 1.5x of SD, 2× of AR.", 1),
        ("SSD doubles the tok/s of AR. It is twice as fast as AR, three parts faster.", 2),
        ("SSD is 3 times faster than AR.", 1),
        ("SSD is 1.35–1.45 of SD: 40% ahead of SD.", 1),
        ("On emulated H100s SSD is 35% faster. One seed says 1.2×, one run 20% faster.", 0),
        ("A round of 95% intervals is no slower. On 2 × NVIDIA H200.", 0),
        ("```\nmpissd why  # 35% faster\n```\n", 0),
    ],
)
def test_a_ratio_without_its_interval_is_found(text: str, count: int) -> None:
    assert len(unbacked(text)) == count


def test_an_interval_that_no_rows_have_is_found() -> None:
    known = intervals(rows())
    assert "1.10–1.10" in known
    assert unbacked("SSD gives 1.10× (1.10–1.10) of SD.", known) == []
    for invented in ("SSD gives 1.32× (1.25–1.39) of SD.", "SSD lies within 1.25–1.39 of SD."):
        assert unbacked(invented, known) == [invented]
    assert unbacked("SSD gives 1.25–1.39 (few seeds) of SD.", known) == []


def test_the_command_prints_and_writes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = ROOT / "results" / "h200-pairs"
    assert main(["claims", str(folder)]) == 0
    printed = capfd.readouterr().out
    assert "SSD over it" in printed
    file = tmp_path / "page.md"
    file.write_text(f"<!-- claims {folder} -->\n<!-- /claims -->\n")
    assert main(["claims", f"--into={file}"]) == 0
    assert file.read_text() == f"<!-- claims {folder} -->\n{printed}<!-- /claims -->\n"
    for wrong in ([f"--into={tmp_path}/none"], [str(folder), f"--into={file}"]):
        assert main(["claims", *wrong]) == 2
        assert capfd.readouterr().err.count("\n") == 1


def test_the_committed_claims_are_those_of_compare() -> None:
    """Each line over the H200 rows, by the command `compare` on one seed's two rows."""
    every = load_rows([ROOT / "results" / "h200-pairs"])
    found = claims(every)
    assert len(found) >= 10 and {c.setting["lm_head"] for c in found} == {True, False}
    for claim in found:
        a, b = (side.cell.rows[0] for side in (claim.other, claim.verdict.ssd))
        b = next(r for r in claim.verdict.ssd.cell.rows if r["seed"] == a["seed"])
        told = Pair.of(a, b, {}, others=every).comparison
        assert (told.low, told.high) == pytest.approx((claim.gain.low, claim.gain.high))
        assert told.is_headline and told.is_real == ("×" in claim.gain.claim)


@pytest.mark.parametrize("page", ["README.md", "docs/measured.md"])
def test_a_table_of_a_page_is_that_of_its_rows(page: str) -> None:
    """Every number is computed again."""
    text = (ROOT / page).read_text()
    again = rewritten(text, lambda told: load_rows([ROOT / name for name in told.split(",")]))
    assert again == text, f"python -m mpissd claims --into={page}"


def test_no_page_claims_more_than_rows_say() -> None:
    """No gain stands without an interval, no interval without rows; performance.md is a log."""
    studies = "h200-pairs", "h200-70b", "h200-plan", "two-gpus"
    rows = load_rows([ROOT / "results" / name for name in studies])
    known = intervals(rows) | {claim.gain.interval for claim in claims(rows)}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    told = {p.name: unbacked(p.read_text(), known) for p in pages if p.name != "performance.md"}
    assert {name: of for name, of in told.items() if of} == {} and len(told) > 12


def test_a_block_may_keep_the_rows_with_the_head_alone() -> None:
    folder = ROOT / "results" / "h200-pairs"
    text = "<!-- claims results lm_head -->\n<!-- /claims -->\n"
    found = rewritten(text, lambda _: load_rows([folder]))
    assert "| yes |" in found and "| no |" not in found


def test_a_block_may_keep_the_rows_under_a_real_pairs_hits_alone() -> None:
    both = [ROOT / "results" / name for name in ("h200-pairs", "two-gpus")]
    found = rewritten("<!-- claims results real -->\n<!-- /claims -->\n", lambda _: load_rows(both))
    assert "assumed" not in found and found.count("SSD over it") == 1
    assert found.count("| yes |") == 4 and found.count("| no |") == 3
