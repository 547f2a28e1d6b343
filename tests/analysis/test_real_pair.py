"""SSD under a real pair's hits, from a row's own waits: by hand, and by the closed model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.real_pair import REAL, beside, sentence
from mpissd.common.real_pairs import DEFAULT, NAMED, REAL_PAIRS, hit_rate, under_real_pairs
from mpissd.common.row import Row
from mpissd.engine.job import resolve
from mpissd.lab.predict import jobfile
from mpissd.lab.predict.from_row import config_of_row, job_of_row
from mpissd.lab.predict.simulation import expected
from mpissd.lab.tables import load_rows

RESULTS = Path(__file__).parents[2] / "results"


def row(**values: Any) -> Row:
    """K = 2, alpha .5, F = 2: the assumed law hits 1 − .75/2 = .625 of the outcomes; a round is
    3000 µs, and its wait 100 behind a hit and 500 behind a miss."""
    wait = 0.625 * 100 + 0.375 * 500
    line = {
        "mode": "ssd", "hit_law": "power:A=0.75,r=1.0", "acceptance": "alpha:0.5", "lookahead": 2,
        "fan_out": [2, 2, 2], "backup": "jit", "backup_lookahead": 2, "on_late": "finish",
        "t_draft_s": 500e-6, "hit_rate": 0.625, "batch_size": 1, "tok_per_s": 500.0,
        "round_us": {"mean": 3000.0 + wait}, "phases_us": {"lead": {"draft_wait": wait}},
    }  # fmt: skip
    return Row.from_dict(line | values)


def test_by_hand() -> None:
    """Three of four outcomes follow a rejection; at F = 2 the shipped draft hits more than .625."""
    hits = 0.75 * (1 - 0.0968 - 0.5068 * 2**-0.6233)
    hits += 0.25 * (1 - 0.0215 - 0.1737 * 2**-0.9954)
    assert hit_rate([0.5, 0.5], [2, 2, 2], DEFAULT) == pytest.approx(hits)
    shorter = 3000 + hits * 100 + (1 - hits) * 500
    found = under_real_pairs(row())["real_smollm2"]
    assert found == pytest.approx(500 * row()["round_us"]["mean"] / shorter)
    assert found > 500


def test_a_law_without_a_floor_by_hand() -> None:
    hits = 0.75 * (1 - 0.777 * 2**-0.21) + 0.25 * (1 - 0.316 * 2**-0.32)
    assert hit_rate([0.5, 0.5], [2, 2, 2], REAL_PAIRS["smollm2-chat"]) == pytest.approx(hits)
    longer = 3000 + hits * 100 + (1 - hits) * 500
    found = under_real_pairs(row(), REAL_PAIRS)["real_smollm2-chat"]
    assert found == pytest.approx(500 * row()["round_us"]["mean"] / longer)
    assert found < 500


@pytest.mark.parametrize(
    "values",
    [{"mode": "sd"}, {"hit_law": "p_hit:0.9"}, {"hit_law": "power:A=0.75,r=0.5"},
     {"acceptance": "rates:.9,.8"}, {"backup": "fast"}, {"backup_lookahead": 1},
     {"on_late": "serve"}, {"t_draft_s": None}, {"t_draft_s": 1e-4}, {"phases_us": None}],
)  # fmt: skip
def test_rows_that_cannot_tell(values: dict[str, Any]) -> None:
    assert under_real_pairs(row(**values)) == dict.fromkeys(REAL)


def test_it_is_what_the_closed_model_says() -> None:
    """The share of tok/s that each law leaves, within 1% over the committed H200 rows whose job's
    profile is kept."""
    checked = 0
    for found in load_rows([RESULTS / "h200-sweep"]):
        path = RESULTS / "h200-sweep" / "profiles" / f"{found['run_id']}.json"
        shares = under_real_pairs(found, NAMED) if path.exists() else {}
        if None in (profile := jobfile.load(str(path)) if shares else None, *shares.values()):
            continue
        assert profile is not None
        costs, tp = (profile.device, profile.host), int(found["tp"])
        before = expected(job_of_row(found), *costs).tok_per_s[0]
        for name in NAMED:
            config = dataclasses.replace(config_of_row(found), hit_law=name)
            job = resolve(config, tp, backend="emulated", memory_bytes=None)
            share = expected(job, *costs).tok_per_s[0] / before
            assert shares[f"real_{name}"] / found["tok_per_s"] == pytest.approx(share, rel=0.01)
            checked += 1
    assert checked > 40


def test_a_caption_says_it_and_a_finding_repeats_it() -> None:
    rows = pd.DataFrame([{**row(), **under_real_pairs(row())}])
    told = sentence(rows)
    assert "assumed" in told and "SmolLM2-135M-Instruct" in told and "the shipped draft" in told
    assert "HumanEval and chat prompts" in told
    share = rows["real_smollm2"].iloc[0] / 500
    assert f"{share:.2f}×" in told
    assert beside(f"Measured. {told}. 3 rows.") == f" {told}."
    assert beside("Measured. 3 rows.") == ""
    assert sentence(rows.assign(**dict.fromkeys(REAL, float("nan")))) == ""
