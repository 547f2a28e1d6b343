"""What `plan` says of what nobody measured: the labels of its choices, and what it leaves out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpissd.__main__ import main
from mpissd.common.config import RunConfig
from mpissd.common.rivals import Family
from mpissd.common.row import Row
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.job import resolve
from mpissd.engine.spec.hits import named_hit_law
from mpissd.lab.predict.advice import Advice, render
from mpissd.lab.predict.advisor import plan
from mpissd.lab.predict.costs import HostCosts
from mpissd.lab.predict.from_row import forecast_row
from mpissd.lab.predict.label import derived_from
from mpissd.lab.predict.places import job_of, runnable, survey
from mpissd.lab.predict.search import Choice

DEFAULT = named_hit_law("smollm2").label

PROBED = str(Path(__file__).resolve().parents[2] / "results/h200-probe/profiles/8b-1b-T1D0.json")
H200 = load_profile("h200")


def advise(gpus: int, **flags: Any) -> tuple[RunConfig, Advice]:
    config = RunConfig(**{"pair": "8b/1b", "alpha": 0.8, "fuse": True, **flags})
    found = survey(config, H200, gpus)
    return config, plan(config, HostCosts(), found.placements, gpus, found.unjudged)


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
        (2, {"batch_size": 32}, {"sd", "lookup", "ssd"}),  # more rows than were probed
        (5, {}, {"sd", "ssd"}),  # host costs of T = 4 beside a draft
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
    config, advice = advise(2, context=context)
    lines = render(advice, "", survey(config, H200, 2), 2).splitlines()
    (line,) = (line for line in lines if "over the best other use of the 2 asked for" in line)
    assert line.endswith("(derived)") == (context > 0) == any("kv_tokens" in x for x in lines)
    extra = advice.extra_gpu
    assert extra is not None and extra.is_derived == bool(advice.to_probe) == (context > 0)
    assert advice.rival is not None
    half = replace(advice, judged=(replace(advice.best, derived=None), *advice.judged[1:]))
    assert bool(half.to_probe) == (context > 0)  # by its rival


def test_host_costs_that_a_probe_lacks_are_those_of_the_device() -> None:
    """A probe of one GPU knows no draft rank: its host took nothing, and SSD gained 5%."""
    config = RunConfig(pair="8b/1b", alpha=0.8, fuse=True, hit_law="power:A=.75,r=1")
    alone = load_profile(PROBED)
    found = survey(config, alone, 2)
    (ssd,) = (c for c in plan(config, HostCosts(), found.placements, 2).judged if c.mode == "ssd")
    assert ssd.tok_per_s == pytest.approx(885.9, rel=0.02)
    assert ssd.derived is not None and "derived from profile h200" in ssd.derived
    assert not found.unjudged


def test_host_costs_that_nobody_knows_make_no_verdict(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig(pair="8b/1b", alpha=0.8, fuse=True)
    other = replace(load_profile(PROBED), device_name="Another GPU")
    found = survey(config, other, 2)
    assert {Family("sd", 1, 1), Family("ssd", 1, 1)} <= set(found.unjudged)
    advice = plan(config, HostCosts(), found.placements, 2, found.unjudged)
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


def test_what_does_not_fit_and_what_is_not_judged_are_said() -> None:
    config, advice = advise(3, pair="70b/8b", batch_size=2)
    text = render(advice, "", survey(config, H200, 3), 3)
    assert "does not fit: SD inline T=1" in text
    config, advice = advise(2)
    text = render(advice, "", survey(config, H200, 2), 2)
    assert "does not fit" not in text


def test_imposed_hits_have_a_price(capfd: pytest.CaptureFixture[str]) -> None:
    flags = ("plan", "--profile=h200", "--pair=8b/1b", "--gpus=2", "--alpha=.8")
    assert main([*flags, "--p_hit=.8"]) == 0
    out = capfd.readouterr().out
    assert "hits imposed: with the " in out and f" branches that {DEFAULT} needs" in out
    assert main([*flags]) == 0
    assert "imposed" not in capfd.readouterr().out


@pytest.mark.parametrize(("most", "fan_out", "is_derived"), [
    (64, "uniform:3", False), (64, "geometric:48", False),
    (4, "uniform:3", False), (4, "geometric:48", True), (0, "uniform:3", True),
])  # fmt: skip
def test_more_candidates_than_were_probed_are_derived(
    most: int, fan_out: str, is_derived: bool
) -> None:
    """Read-outs of up to `most` candidates a row; a profile without any knows of one alone."""
    read_outs = {k: one for k, one in H200.tables.read_outs.items() if k[2] <= most}
    known = replace(H200, tables=replace(H200.tables, read_outs=read_outs))
    config = RunConfig(
        pair="8b/1b", fuse=True, fan_out=fan_out, lm_head=True, mode="ssd", num_drafts=1,
        lookahead=3,
    )  # fmt: skip
    job = resolve(config, 1, backend="emulated", memory_bytes=None)
    label = derived_from(known, known, job) or ""
    assert ("candidates a row" in label) == is_derived, label
