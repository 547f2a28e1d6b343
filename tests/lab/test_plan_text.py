"""The text of `plan`: assumptions first, derived times marked, no winner within the error."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mpissd.__main__ import main
from mpissd.common.config import RunConfig
from mpissd.common.rivals import Family
from mpissd.common.row import Row
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.spec.acceptance import named_hit_law
from mpissd.lab.predict.advice import ERROR, gain_text, heading, pays, report
from mpissd.lab.predict.advisor import Advice, plan, replicas
from mpissd.lab.predict.row import forecast_row
from mpissd.lab.predict.search import Choice, job_of, runnable, survey

DEFAULT = named_hit_law("smollm2").label

PROBED = str(Path(__file__).resolve().parents[2] / "results/h200-probe/profiles/8b-1b-T1D0.json")
H200 = load_profile("h200")


@cache
def advise(gpus: int, **flags: Any) -> tuple[RunConfig, Advice]:
    config = RunConfig(**{"pair": "8b/1b", "alpha": 0.8, "fuse": True, **flags})
    found = survey(config, H200, gpus)
    return config, plan(config, found.placements, gpus, found.unjudged)


def lines_of(gpus: int, **flags: Any) -> tuple[Advice, list[str]]:
    """An advice for H200s, and its text."""
    config, advice = advise(gpus, **flags)
    uses = replicas(advice.judged, gpus)
    return advice, report(config, H200, gpus, survey(config, H200, gpus), advice, uses)[0]


def row_of(config: RunConfig, choice: Choice) -> Row:
    """A row as a run of that choice on this device would write it."""
    job = job_of(config, choice)
    names = "mode num_drafts batch_size fuse lm_head context backup acceptance_fast"
    told = {name: getattr(job.config, name) for name in names.split()}
    told |= {"target": job.target.name, "draft": job.draft and job.draft.name, "seed": 0}
    told |= {"workload": "gemm", "device_name": H200.device_name, "num_rounds": 400, "tp": job.tp}
    told |= {"lookahead": job.lookahead, "backup_lookahead": job.backup_lookahead}
    told |= {"fan_out": job.fan_out, "fan_out_miss": job.fan_out_miss}
    told |= {"mode": job.config.mode, "inline_draft": job.inline}
    told |= {"acceptance": job.config.acceptance, "hit_law": job.hit_law.label}
    return Row.from_dict(told)


@pytest.mark.parametrize(
    ("gpus", "flags", "derived"),
    [
        (2, {}, set()),
        (2, {"context": 16384}, {"ar", "sd", "lookup", "ssd"}),  # KV that was not probed
        # more rows of a draft than were probed
        (3, {"pair": "70b/8b", "hit_law": "power:A=.75,r=1", "batch_size": 2}, {"ssd"}),
        (2, {"pair": None, "target": "8b", "draft": "toy-draft"}, {"sd", "ssd"}),
        (
            4,
            {"pair": "70b/1b", "lm_head": True},
            {"ar", "sd", "lookup", "ssd"},
        ),  # a head that was not
    ],
)
def test_a_choice_is_labelled_as_its_row_would_be(
    gpus: int, flags: dict[str, Any], derived: set[str]
) -> None:
    config, advice = advise(gpus, **flags)
    choices = [choice for choice in advice.judged if runnable(config, choice.tp) == config]
    for choice in choices:
        found = forecast_row(row_of(config, choice), H200)
        assert found.reason is None and found.derived == (choice.derived is not None), choice
    assert {choice.mode for choice in choices if choice.derived} == derived


@pytest.mark.parametrize("context", [0, 16384])
def test_a_gain_over_or_of_what_is_derived_says_so(context: int) -> None:
    advice, lines = lines_of(2, context=context)
    (line,) = (line for line in lines if "over the best other use of the 2 asked for" in line)
    assert line.endswith("(derived)") == (context > 0) == any("kv_tokens" in x for x in lines)
    assert advice.rival is not None and bool(advice.to_probe) == (context > 0)
    half = replace(advice, judged=(replace(advice.best, derived=None), *advice.judged[1:]))
    assert bool(half.to_probe) == (context > 0)  # by its rival


def test_host_costs_that_nobody_knows_make_no_verdict(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig(pair="8b/1b", alpha=0.8, fuse=True)
    other = replace(load_profile(PROBED), device_name="Another GPU")
    found = survey(config, other, 2)
    assert {Family("sd", 1, 1), Family("ssd", 1, 1)} <= set(found.unjudged)
    advice = plan(config, found.placements, 2, found.unjudged)
    assert {c.method for c in advice.judged} == {
        ("ar", 0),
        ("sd", 0),
        ("lookup", 0),
    } and advice.rival is None
    file = tmp_path / "other.json"
    file.write_text(Path(PROBED).read_text().replace("NVIDIA H200", "Another GPU"))
    assert main(["plan", f"--profile={file}", "--gpus=2"]) == 0
    first = capfd.readouterr().out.splitlines()[0]
    assert first.startswith("not judged: ") and "no host costs of SSD" in first


def test_imposed_hits_have_a_price(capfd: pytest.CaptureFixture[str]) -> None:
    flags = ("plan", "--profile=h200", "--pair=8b/1b", "--gpus=2", "--alpha=.8")
    assert main([*flags, "--p_hit=.8"]) == 0
    out = capfd.readouterr().out
    assert "hits imposed: with the " in out and f" branches that {DEFAULT} needs" in out


SHIPPED = "measured on SmolLM2-135M-Instruct with the shipped draft"
NONE = "no difference within the predictor's error of 5%"


@pytest.mark.parametrize(
    ("gain", "says"), [(1.003, True), (1 / 1.049, True), (1.051, False), (1 / 1.051, False)]
)
def test_a_gain_within_the_error_is_no_difference(gain: float, says: bool) -> None:
    assert ERROR == 0.05
    assert gain_text(gain) == f"{gain:.3f}×" + f" ({NONE})" * says


def test_every_ratio_names_its_gpus_and_no_words_stand_twice() -> None:
    """SSD is on three of the four GPUs, SD inline on three or on all: a sentence for each."""
    advice, lines = lines_of(4, pair="70b/1b")
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
    assert heading(run, h200, 2) == [f"on 2 × NVIDIA H200, 8b/1b, {terms}"]


def test_a_lookup_does_not_show_that_a_draft_pays() -> None:
    weak, strong = (pays(advise(2, alpha=alpha)[1]) for alpha in (0.5, 0.9))
    assert re.search(r"here\? no: S\S+ .* over lookup T=2 ", weak)
    assert re.search(r"here\? yes: S\S+ .* over lookup T=2 ", strong)
