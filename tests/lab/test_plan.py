"""`plan`: its search against exhaustive search and `theory`, its uses of N GPUs, and its text.

Statistical tests fix their seeds and allow five standard errors: false-alarm rate 6e-7 each.
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpissd.__main__ import main
from mpissd.common.config import AUTO_TREE, RunConfig, parse_flags
from mpissd.common.errors import ConfigError
from mpissd.common.rivals import Family
from mpissd.engine.backend.profile import Profile, load_profile
from mpissd.engine.job import resolve
from mpissd.lab.pair.laws import Outcomes, Ranks, Source, measured
from mpissd.lab.predict.advice import level_with, profile_of, verdicts, with_best_tree
from mpissd.lab.predict.advisor import Advice, by_speed, firsts, plan
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.derive import METHODS, host_of
from mpissd.lab.predict.search import FULL, Placement, Space, candidates, runnable, survey, weigh
from mpissd.lab.predict.simulation import expected

HOST = HostCosts(
    lead_send=15e-6, lead_commit=10e-6, lead_launch=10e-6, lead_sample=60e-6, lead_record=7e-6,
    link=40e-6, draft_read=44e-6, draft_commit=12e-6, draft_lookup=4e-6, draft_assemble=21e-6,
    draft_send=7e-6, draft_record=4e-6, glue=5e-5, keys=6e-5, keys_lane=2e-7, step=5e-5, wake=6e-5,
)  # fmt: skip
H200 = load_profile("h200")
PROBED = str(Path(__file__).resolve().parents[2] / "results/h200-probe/profiles/8b-1b-T1D0.json")


def placements(
    config: RunConfig, profile: Profile, gpus: int, host: HostCosts = HOST
) -> list[Placement]:
    """Placements whose hosts cost as much as `host` where the profile has none."""
    hosts = dict.fromkeys(METHODS, host)
    return [replace(p, hosts=p.hosts or hosts) for p in survey(config, profile, gpus).placements]


def advise(gpus: int, device: str = "h200", **flags: Any) -> Advice:
    config = RunConfig(**{"pair": "70b/1b", **flags})
    return plan(config, placements(config, load_profile(device), gpus), gpus)


def random_cell(rnd: random.Random) -> tuple[RunConfig, list[Placement], int]:
    """A machine, a pair, its models, a batch and a number of GPUs on which the pair fits."""
    flags: dict[str, Any] = {
        "pair": rnd.choice(["70b/1b", "70b/8b", "8b/1b", "8b/0.6b", "32b/0.6b", "65b/noft-1.3b"]),
        "batch_size": rnd.choice([1, 1, 2, 4]),
        "alpha": rnd.uniform(0.2, 0.98),
        "acceptance_fast": f"alpha:{rnd.uniform(0, 0.6):.2f}",
        "lm_head": rnd.random() < 0.3,
        "context": rnd.choice([0, 0, 4096]),
    }
    if rnd.random() < 0.3:
        flags["p_hit"] = rnd.uniform(0.1, 0.99)
    else:
        flags["hit_law"] = f"power:A={rnd.uniform(0.3, 1)},r={rnd.uniform(0.4, 1.8)}"
    config, gpus = RunConfig(**flags), rnd.randint(1, 3)
    profile = load_profile(rnd.choice(["h100", "h200", "a100-80"]))
    scale = rnd.uniform(0, 2)
    host = HostCosts(**{name: scale * value for name, value in HOST.to_dict().items()})
    try:
        return config, placements(config, profile, gpus, host), gpus
    except ConfigError:  # too little memory
        return random_cell(rnd)


def shortfall(seed: int) -> float:
    """1 − advised / exhaustive in one random cell."""
    config, places, gpus = random_cell(random.Random(seed))
    advised = plan(config, places, gpus).best
    every = (c for p in places for c in candidates(config, p, gpus, FULL))
    best = by_speed(weigh(every, config, places, quick=True))[:20]
    return 1 - advised.tok_per_s / by_speed(weigh(best, config, places))[0].tok_per_s


@pytest.mark.slow
def test_close_to_exhaustive_search() -> None:
    """Within 2% of every K ≤ 16, uniform:1 … 10, fourteen budgets, every K_b and both backups, on
    every T that divides and fits."""
    assert max(shortfall(seed) for seed in range(3)) < 0.02


def test_what_is_advised_is_what_the_model_expects_of_that_job() -> None:
    """The flags of every choice, run through a job of its own, give the same rate."""
    config = RunConfig(pair="70b/1b", batch_size=2, alpha=0.85)
    profile = load_profile("h100")
    places = placements(config, profile, 4)
    advice = plan(config, places, 4, trees=True)
    every = (c for of in places for c in candidates(config, of, 4, Space((), ()), trees=True))
    branched = by_speed(weigh((c for c in every if c.mode == "ssd"), config, places, quick=True))[0]
    assert branched.tree
    assert {c.method for c in advice.judged} == {
        *(("ar", 0), ("sd", 0), ("lookup", 0), ("sd", 1), ("ssd", 1), ("tree", 0), ("tree", 1))
    }
    shown = firsts(advice.judged, lambda c: c.method)
    for choice in (*shown, *weigh([branched], config, places)):
        laws = {"pair": "70b/1b", "batch_size": "2", "alpha": "0.85"}
        job = resolve(
            parse_flags({**laws, **choice.flags()}), choice.tp, backend="emulated",
            memory_bytes=profile.memory_bytes,
        )  # fmt: skip
        device = DeviceCosts.from_profile(profile, job)
        found = expected(job, device, host_of(profile, job))
        assert found.tok_per_s[0] == pytest.approx(choice.tok_per_s, rel=1e-9)
        assert found.round_s[0] * 1e6 == pytest.approx(choice.round_us, rel=1e-9)


@given(alpha=st.floats(0.02, 0.95), drafts=st.integers(0, 1), levels=st.sampled_from([None, 2, 4]))
@settings(max_examples=6)
def test_auto_is_the_best_tree_or_a_chain(alpha: float, drafts: int, levels: int | None) -> None:
    """Of all trees of up to 16 tokens, by `expected` of their jobs; a chain within 3% stays."""
    profile = load_profile("h200")
    config = RunConfig(
        pair="8b/1b", mode="sd", tree=AUTO_TREE, alpha=alpha, num_drafts=drafts, lm_head=True
    )
    found, chosen = with_best_tree(config, profile, 1, levels)

    def rate(k: int, nodes: int | None) -> float:
        job = resolve(replace(config, tree=nodes, lookahead=k), 1, backend="emulated",
                      memory_bytes=None)  # fmt: skip
        costs = DeviceCosts.from_profile(profile, job), host_of(profile, job)
        return float(expected(job, *costs).tok_per_s[0])

    depths = range(1, 17) if levels is None else [levels]
    chain = max(rate(k, None) for k in depths)
    best = max(rate(k, nodes) for k in depths for nodes in range(k + 1, 17, 2) if k < 9)
    assert chosen["tok_per_s"] == pytest.approx(rate(found.lookahead, found.tree), rel=0.01)
    assert chosen["chain"]["tok_per_s"] == pytest.approx(chain, rel=0.01)
    assert chosen["tok_per_s"] > 0.98 * best / (1.03 if found.tree is None else 1)
    assert found.tree is None or chosen["tok_per_s"] >= 1.03 * chosen["chain"]["tok_per_s"]


def test_auto_names_what_is_missing() -> None:
    """SSD, laws of a recording, a device without a profile, and commands that choose none."""
    config, profile = RunConfig(pair="8b/1b", mode="sd", tree=AUTO_TREE), load_profile("h200")
    with pytest.raises(ConfigError, match="tree=auto with mode=ssd"):
        with_best_tree(replace(config, mode="ssd"), profile, 1)
    with pytest.raises(ConfigError, match="workload=replay: needs laws"):
        with_best_tree(replace(config, workload="replay", recording="a.npz"), profile, 1)
    with pytest.raises(ConfigError, match="no profile of it"):
        profile_of("NVIDIA RTX 9000")
    with pytest.raises(ConfigError, match="only run, sweep and plan"):
        resolve(config, 1, backend="emulated", memory_bytes=None)


def test_memory_and_heads_limit_t() -> None:
    """70B is 137 GB: on 80 GB devices T = 1 doesn't fit; T = 3 and 5 hold unequal shares."""
    config = RunConfig(pair="70b/1b")
    assert [p.tp for p in placements(config, load_profile("h100"), 5)] == [2, 3, 4, 5]
    assert [p.tp for p in placements(config, load_profile("h200"), 5)] == [1, 2, 3, 4, 5]
    on_two = placements(config, load_profile("h100"), 2)
    assert [(p.tp, p.num_drafts) for p in on_two] == [(2, (0,))]  # no third GPU for a draft
    with pytest.raises(ConfigError, match="tp=1 needs"):
        placements(config, load_profile("h100"), 1)
    with pytest.raises(ConfigError, match="gpus=0"):
        placements(config, load_profile("h100"), 0)
    with pytest.raises(ConfigError, match="needs a pair"):
        placements(RunConfig(), load_profile("h100"), 1)


def test_a_slow_backup_for_one_a_fast_one_for_many() -> None:
    """Theorem 17: the round waits for its slowest sequence, so b sequences pay for one miss."""
    flags = {"pair": "8b/1b", "alpha": 0.8, "p_hit": 0.8, "acceptance_fast": "alpha:0"}
    alone, crowd = advise(2, "h100", **flags), advise(2, "h100", **flags, batch_size=16)
    assert (alone.best.mode, alone.best.backup) == ("ssd", "jit")
    assert (crowd.best.mode, crowd.best.backup) == ("ssd", "fast")


def test_needs_a_machine_whose_rounds_take_time() -> None:
    config, null = RunConfig(pair="8b/1b"), load_profile("null")
    with pytest.raises(ConfigError, match="rounds take no time"):
        plan(config, survey(config, null, 2).placements, 2)


@cache
def advised(gpus: int, **flags: Any) -> tuple[RunConfig, Advice]:
    config = RunConfig(**{"pair": "8b/1b", "alpha": 0.8, "fuse": True, **flags})
    found = survey(config, H200, gpus)
    return config, plan(config, found.placements, gpus, found.unjudged)


@pytest.mark.parametrize(
    ("gpus", "flags", "derived"),
    [
        (2, {}, set()),
        (2, {"context": 16384}, {"ar", "sd", "lookup", "ssd"}),  # KV that was not probed
        # more rows of a draft than were probed
        (3, {"pair": "70b/8b", "hit_law": "power:A=.75,r=1", "batch_size": 2}, {"ssd"}),
        (2, {"pair": None, "target": "8b", "draft": "toy-draft"}, {"sd", "ssd"}),
        (4, {"pair": "70b/1b", "lm_head": True}, {"ar", "sd", "lookup", "ssd"}),  # nor was a head
    ],
)
def test_a_choice_is_labelled_where_its_times_are_derived(
    gpus: int, flags: dict[str, Any], derived: set[str]
) -> None:
    config, advice = advised(gpus, **flags)
    choices = [choice for choice in advice.judged if runnable(config, choice.tp) == config]
    assert {choice.mode for choice in choices if choice.derived} == derived


def test_host_costs_that_nobody_knows_make_no_verdict(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig(pair="8b/1b", alpha=0.8, fuse=True)
    other = replace(load_profile(PROBED), device_name="Another GPU")
    found = survey(config, other, 2)
    assert {Family("sd", 1, 1), Family("ssd", 1, 1)} <= set(found.unjudged)
    advice = plan(config, found.placements, 2, found.unjudged)
    assert {c.method for c in advice.judged} == {("ar", 0), ("sd", 0), ("lookup", 0)}
    file = tmp_path / "other.json"
    file.write_text(Path(PROBED).read_text().replace("NVIDIA H200", "Another GPU"))
    assert main(["plan", f"--profile={file}", "--gpus=2"]) == 0
    first = capfd.readouterr().out.splitlines()[0]
    assert first.startswith("not judged: ") and "no host costs of SSD" in first


def pair_of(path: Path, alphas: Sequence[float]) -> str:
    """A file of laws, of prompts with these acceptance rates and 20 rounds each."""
    outcomes = {}
    for k in range(1, 9):
        shares = np.array([[*(a**n * (1 - a) for n in range(k)), a**k] for a in alphas])
        ranks = Ranks(np.tile([70, 20, 10, 6, 3, 1], (len(alphas), 1)), True)
        outcomes[k] = Outcomes(np.rint(20 * shares).astype(np.int64), (ranks, ranks))
    about = {"target_sha256": "t", "draft_sha256": "d", "file": "pair.npz", "temperature": 0}
    path.write_text(json.dumps(measured([Source(about, outcomes)], 4)))
    return str(path)


@pytest.mark.parametrize(
    ("alphas", "answer"),
    [
        ([0.91, 0.89] * 20, "yes: "),
        ([0.39, 0.41] * 20, "no: "),
        ([0.92, 0.9, 0.88], "too few: "),  # alike by chance
        ([0.95, 0.9, 0.2, 0.9, 0.1, 0.9, 0.9, 0.3, 0.8], "too few: "),
    ],
)
def test_a_verdict_has_the_sampling_error_of_its_prompts(
    alphas: list[float], answer: str, tmp_path: Path
) -> None:
    """Against the strongest use without a draft, a lookup over both GPUs."""
    laws = pair_of(tmp_path / "laws.json", alphas)
    config, advice = advised(2, alpha=None, laws=laws, acceptance_fast="alpha:.31")
    lines = verdicts(config, H200, survey(config, H200, 2), advice, {})
    assert lines[0].startswith(f"does this draft pay here? {answer}")
    assert re.search(rf"rounds of {len(alphas)} prompts.* over lookup T=2 ", lines[0])
    gain, low, high = map(float, re.findall(r"([0-9.]+)× \(([0-9.]+)–([0-9.]+)\)", lines[0])[0])
    assert low <= gain <= high and "the answers rest on pair.npz (" in lines[-2]


def test_what_measured_rows_contradict_is_no_arrow() -> None:
    _, advice = advised(2, alpha=0.9)
    ssd, sd = advice.first("ssd"), advice.first("sd")
    assert ssd is not None and sd is not None and ssd == advice.best
    for rate, level in ((900.0, []), (1000.0, [ssd, sd])):
        rates = {Family.of(ssd): 950.0, Family.of(sd): rate}
        rows: Any = {family: SimpleNamespace(tok_per_s=r) for family, r in rates.items()}
        assert level_with(ssd, advice, rows) == level


def test_measured_rows_of_the_case_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--profile=h200", "--pair=8b/1b", "--alpha=.7"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert any(re.search(r"SSD T=1 D=1 .* measured 618\.6 \(-5%; 5 rows\)", line) for line in lines)
    assert json.loads(last)["measured"]["SD inline T=2"] == pytest.approx(625.4, abs=0.1)
    assert main(["plan", "--profile=h200", "--pair=8b/1b", "--alpha=.7", "--trees"]) == 0
    trees = [line for line in capsys.readouterr().out.splitlines() if "tree=" in line]
    assert trees and not any("measured" in line for line in trees)  # those rows are of chains


def test_the_first_line_names_what_is_assumed(capfd: pytest.CaptureFixture[str]) -> None:
    start = "on 2 × NVIDIA H200, 8b/1b, assuming alpha:0.8, "
    flags = ("--profile=h200", "--pair=8b/1b", "--gpus=2", "--alpha=.8", "--p_hit=.8")
    assert main(["plan", *flags, "--context=4096", "--fuse"]) == 0
    assert capfd.readouterr().out.startswith(
        f"{start}fused, LM head, context 4096, hits given p_hit:0.8, lookups alpha:0.3, "
    )
