"""The lines of `plan`: what is assumed comes first, and no winner within the predictor's error."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mpissd.common.config import RunConfig
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.spec.hits import named_hit_law
from mpissd.lab.predict.advice import ERROR, Advice, gain_text, heading, render
from mpissd.lab.predict.advisor import plan
from mpissd.lab.predict.costs import HostCosts
from mpissd.lab.predict.places import survey

SHIPPED = "measured on SmolLM2-135M-Instruct with the shipped draft"
DEFAULT = named_hit_law("smollm2").label

NONE = "no difference within the predictor's error of 5%"


def planned(gpus: int, **flags: Any) -> tuple[Advice, list[str]]:
    """An advice for H200s, and what is said of it."""
    config = RunConfig(**{"pair": "8b/1b", "alpha": 0.8, "fuse": True, **flags})
    found = survey(config, load_profile("h200"), gpus)
    advice = plan(config, HostCosts(), found.placements, gpus, found.unjudged)
    return advice, render(advice, "", found, gpus).splitlines()


@pytest.mark.parametrize(
    ("gain", "says"), [(1.003, True), (1 / 1.049, True), (1.051, False), (1 / 1.051, False)]
)
def test_a_gain_within_the_error_is_no_difference(gain: float, says: bool) -> None:
    assert ERROR == 0.05
    assert gain_text(gain) == f"{gain:.3f}×" + f" ({NONE})" * says


def test_a_plan_declares_no_winner_within_the_error() -> None:
    advice, lines = planned(2, hit_law="smollm2-own")
    assert advice.gain is not None and 1 < advice.gain < 1 + ERROR
    (line,) = (x for x in lines if "over the best other use of the 2 asked for" in x)
    assert line.endswith(f"({NONE})")
    assert lines[1].startswith(" → ")  # the fastest, all the same


def test_every_ratio_names_its_gpus_and_no_words_stand_twice() -> None:
    """SSD is on three of the four GPUs, SD inline on three or on all: a sentence for each."""
    advice, lines = planned(4, pair="70b/1b")
    said = {x.partition(": ")[0].strip(): x.partition(": ")[2] for x in lines if " over " in x}
    assert len(said) == sum(" over " in x for x in lines) == 4
    rate = {(c.mode, c.tp, c.num_drafts): c.tok_per_s for c in advice.judged}
    ssd, sd = "SSD T=2 D=1 (3 GPUs) over the best other use of", "SD inline T=4 (4 GPUs) over the"
    inline, grown, wide = rate["sd", 2, 0], rate["ssd", 2, 1], rate["sd", 4, 0]
    uneven = rate["sd", 3, 0]
    assert said == {
        f"{sd} best other use of the 4 asked for, SSD T=2 D=1": f"{wide / grown:.3f}×",
        f"{ssd} 3, SD inline T=3": f"{gain_text(grown / uneven)} (derived)",
        f"{ssd} the 4 asked for, SD inline T=4": f"{grown / wide:.3f}×",
        "SSD T=2 D=1 (3 GPUs) over one GPU fewer, SD inline T=2": f"{grown / inline:.3f}×; in "
        f"tok/s a GPU: {2 * grown / inline / 3:.3f}×",
    }
    (legend,) = (x for x in lines if "SSD's line:" in x)
    assert re.search(r"--fan_out.*--backup.*K_b", legend)


@pytest.mark.parametrize(
    ("flags", "terms"),
    [
        ({}, f"alpha:0.8, no LM head, context 0, hits as {SHIPPED} ({DEFAULT}):"),
        (
            {"lm_head": True, "context": 4096, "fuse": True, "p_hit": 0.9},
            "alpha:0.8, fused, LM head, context 4096, hits given p_hit:0.9:",
        ),
    ],
)
def test_the_first_line_names_what_is_assumed(flags: dict[str, Any], terms: str) -> None:
    run = RunConfig(pair="8b/1b", alpha=0.8, **flags)
    h200 = load_profile("h200")
    assert heading(run, h200, 2) == f"on 2 × NVIDIA H200, 8b/1b, {terms}"
