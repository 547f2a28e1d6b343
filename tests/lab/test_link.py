"""`plan --link`: rounds, sampled tokens and all-reduces over a link, by hand."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mpissd.__main__ import main
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.job import Job, resolve
from mpissd.lab.plan.candidates import survey, weigh
from mpissd.lab.plan.plan import plan
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.link import LINKS, Link, parse_link
from mpissd.lab.predict.simulation import expected
from mpissd.lab.tables.uses import Family
from tests.lab.test_plan import pair_of
from tests.lab.test_predict_loops import HOST

MS = 1e-3
FAST = 1e30  # bytes/s of a link whose messages take their latency only


def job_of(mode: str = "ssd", **flags: Any) -> Job:
    values = {"pair": "8b/1b", "backend": "emulated", "mode": mode, "lookahead": 2, "alpha": 0.8}
    return resolve(RunConfig(**{**values, **flags}), 1, backend="emulated", memory_bytes=None)


def round_s(job: Job, verify_s: float, step_s: float, link: Link | None, host: HostCosts) -> float:
    device = DeviceCosts.from_points({1: verify_s}, {1: step_s})
    return float(expected(job, device, host, link).round_s[0])


@pytest.mark.parametrize(
    ("cache", "v", "g", "r", "cycle"),
    [  # ms: max(v + R, g) by the draft's cache
        ("draft", 12, 9, 0, 12),
        ("draft", 12, 9, 2, 14),
        ("draft", 12, 15, 2, 15),
        ("draft", 12, 15, 5, 17),
        # max(v, g, (v + g + R) / 2) by the lead's: after branches that come late the next do not
        ("lead", 12, 9, 0, 12),
        ("lead", 12, 9, 2, 12),
        ("lead", 12, 9, 5, 13),
        ("lead", 12, 15, 2, 15),
        ("lead", 12, 15, 5, 16),
    ],
)
def test_a_hit_takes_what_the_closed_form_says(
    cache: str, v: float, g: float, r: float, cycle: float
) -> None:
    job = job_of(p_hit=1.0, fan_out="uniform:2", cache=cache)
    link = Link("wire", r / 2 * MS, FAST)
    found = round_s(job, v * MS, g / 3 * MS, link, HostCosts())  # glue and two steps
    assert found == pytest.approx(cycle * MS, rel=1e-9)


@pytest.mark.parametrize("cache", ["lead", "draft"])
def test_a_link_adds_its_latency_and_bytes_to_the_messages_of_one_host(cache: str) -> None:
    """Headers of 13 numbers; an outcome of 2 · 5, a speculation of 3 + K, of 4 bytes each."""
    job = job_of(p_hit=1.0, fan_out="uniform:2", cache=cache)
    link = Link("wire", 1 * MS, 1e6)
    out_s = link.latency_s + 4 * (13 + 10) / 1e6
    back_s = link.latency_s + 4 * (13 + 5) / 1e6
    longer = round_s(job, 5 * MS, 1 * MS, link, HOST) - round_s(job, 5 * MS, 1 * MS, None, HOST)
    if cache == "draft":
        assert longer == pytest.approx(out_s + back_s, rel=1e-9)
    else:  # 6 branches of 4 + 3 + K numbers come late, so that every second round is one of asking
        assert link.latency_s + 4 * (13 + 6 * 9) / 1e6 > 1 * MS
        assert 0 < longer < out_s + back_s


def test_distributions_of_sampled_tokens_come_before_the_target_judges(tmp_path: Path) -> None:
    """K · V · 4 bytes after the tokens: 2 · 128,256 · 4 over 10 GbE take .82 ms. A token's q takes
    8 bytes of the speculation."""
    vocab = 128_256
    laws = pair_of(tmp_path / "laws.json", [0.8] * 8)
    drawn = tmp_path / "drawn.json"
    drawn.write_text(Path(laws).read_text().replace('"temperature": 0', '"temperature": 0.7'))
    link = Link("wire", 0.0, 1.25e9)
    sent_s = 2 * vocab * 4 / 1.25e9
    for verify_s in (0.2 * MS, 2 * MS):
        jobs = [job_of("sd", alpha=None, laws=str(path)) for path in (laws, drawn)]
        waits = [round_s(job, verify_s, 1 * MS, link, HostCosts()) for job in jobs]
        later_s = 2 * 8 / 1.25e9 + max(0.0, sent_s - verify_s)
        assert waits[1] - waits[0] == pytest.approx(later_s, abs=1e-12)


@pytest.mark.parametrize("cache", ["lead", "draft", None])
def test_a_longer_link_is_no_faster(cache: str | None) -> None:
    job = job_of(lookahead=4, cache=cache) if cache else job_of("sd")
    device = DeviceCosts.from_points({1: 5 * MS}, {1: 1 * MS})
    rates = [
        expected(job, device, HOST, parse_link(f"{us}us:1.25", 2)).tok_per_s[0]
        for us in (0, 1, 20, 100, 300, 1000, 3000, 10000)
    ]
    assert all(far <= near * (1 + 1e-12) for near, far in pairwise(rates))
    assert rates[0] > rates[-1]


RUN = RunConfig(pair="8b/1b", alpha=0.8, forward="transformer", context=512)
H200 = load_profile("h200")


def test_target_ranks_over_a_link_pay_two_all_reduces_a_layer() -> None:
    """8B at T=2 of one row: 32 layers, 8,192 bytes each, and the two of the LM head."""
    near, far = (survey(RUN, H200, 2, link) for link in (None, LINKS["10g"]))
    verify = [float(of.shardings[1].device.verify(1)) for of in (near, far)]
    crossing_s = 18e-6 + 8192 / 1.25e9 - H200.all_reduce_s(2, 8192)
    assert verify[1] - verify[0] == pytest.approx((2 * 32 + 2) * crossing_s, rel=1e-9)
    for use in ("ar", "sd"):
        host = [of.shardings[1].host(use, 0) for of in (near, far)]
        assert host[1].follower - host[0].follower == pytest.approx(18e-6)
    assert near.shardings[0].device == far.shardings[0].device  # T=1 is on one host


def test_over_ten_gigabits_the_second_gpu_of_8b_is_no_target_rank() -> None:
    far = plan(survey(RUN, H200, 2, LINKS["10g"]))
    rates = {choice.family: choice.tok_per_s for choice in far.judged}
    for mode in ("sd", "lookup"):
        assert rates[Family(mode, 2, 0)] < rates[Family(mode, 1, 0)]
    assert rates[Family("ssd", 1, 1)] > rates[Family("sd", 1, 0)]
    assert all("10g" in str(c.derived) for c in far.judged if c.gpus == 2)
    local = [weigh(far.judged, survey(RUN, H200, 2, LINKS[name])) for name in ("nvlink", "shm")]
    assert local[0] == local[1]  # an H200's all-reduces were measured over NVLink


@pytest.mark.parametrize(
    "text", ["11g", "5:1", "5us", "5us:0", "-5us:1", "nanus:1", "5us:1e3", "5ms:1"]
)
def test_other_links_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^link={text}: allowed: shm, .*500us:1.2"):
        parse_link(text, 2)
    assert parse_link("500us:1.2", 2) == Link("500us:1.2", 500e-6, 1.2e9)


def test_the_advice_names_its_link_and_one_host(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--profile=h200", "--pair=8b/1b", "--alpha=.8", "--trees=false"]
    assert main([*flags, "--link=10g", "--gpus=2", "--measured=none"]) == 0
    out = capsys.readouterr().out
    assert "Over 10g (18 µs, 1.25 GB/s) or on one host: SSD on 1 + 1 " in out
    assert "--host FIRST:1,SECOND:1" in out
    found = json.loads(out.splitlines()[-1])
    assert found["link"]["latency_s"] == 18e-6
    far = {
        str(Family(choice["mode"], choice["tp"], choice["num_drafts"])): choice["tok_per_s"]
        for choice in found["judged"]
        if choice["tp"] + choice["num_drafts"] == 2
    }
    assert far.keys() == found["one_host"].keys()
    assert all(rate < found["one_host"][name] for name, rate in far.items())
    for refused in ("--gpus=1", "--mode=ar"):
        assert main([*flags[:4], "--link=10g", refused]) == 2
        assert "link=10g with 1 rank: allowed: with 2 or more" in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["--mode=ssd --tp=1", "--mode=ar --tp=2"])
def test_a_prediction_names_its_link_and_one_host(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = []
    for link in ([], ["--link=900us:1.2"]):
        assert main(["plan", "--profile=h200", *link, *flags.split()]) == 0
        out = capsys.readouterr().out
        rates.append(json.loads(out.splitlines()[-1])["expected_tok_per_s"])
    assert "(on one host)" in out and "(over 900us:1.2 (900 µs, 1.2 GB/s))" in out
    assert json.loads(out.splitlines()[-1])["one_host"] == rates[0] > rates[1]
