"""Verdicts on made-up passes, what a busy machine is, and which K a run's rivals have."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.common.config import RunConfig
from mpissd.common.real_pairs import DEFAULT_RATES
from mpissd.common.row import Row
from mpissd.lab.measure import beside, calibrate, run
from mpissd.lab.measure.beside import acceptance_rates, pass_of, rival, speed
from mpissd.lab.measure.load import counters, gpu_reasons, reasons
from mpissd.lab.measure.verdict import TimedUse, UseComparison
from mpissd.lab.tables.load import load_rows
from mpissd.lab.tables.uses import Family
from tests.text_config import text_config
from tests.tiny_pair import TinyPair

FAMILIES = [Family(*parts) for parts in (("ssd", 1, 1), ("ar", 1, 0), ("sd", 1, 0), ("ar", 2, 0))]
FAMILIES.append(Family("sd", 2, 0))
VERDICTS = {1.15: "pays", 1.0: "does not pay", 0.95: "does not pay", 0.85: "does not pay"}
MOST_TURNS = 14  # that fit into the time


def compared(
    rates: list[float], seed: int, noise: float, busy: list[str] | None = None, slow: float = 0.0
) -> UseComparison:
    """Uses with these true speeds, measured as `run` does: a turn slows all, and a pass one.

    slow: the share of passes that something slows by 20% in the mean.
    """
    draws, uses = np.random.default_rng(seed), [TimedUse(family, "core", 2) for family in FAMILIES]
    comparison = UseComparison(uses, busy or [], [], 99)
    for turn in range(1, MOST_TURNS + 1):
        shared = draws.normal(0, 2 * noise)
        for use, rate in zip(uses, rates, strict=True):
            lost = draws.exponential(0.2) * (draws.random() < slow)
            use.speeds.append(rate * float(np.exp(shared + draws.normal(0, noise) - lost)))
        if turn >= 4 and not comparison.needed(0.03):
            break
    return comparison


@pytest.mark.parametrize("slow", [0, 0.05])
@pytest.mark.parametrize(("ratio", "verdict"), VERDICTS.items())
def test_quiet_machines_give_one_verdict(ratio: float, verdict: str, slow: float) -> None:
    """200 jobs, of which two rivals tie; none says the opposite, and at most 2 in 100 cannot tell.

    Without trimming, 15 in 100 could not tell a ratio of 1 if single passes are slow.
    """
    rates = [100 * ratio, 70, 70 * ratio, 100, 99.5]
    jobs = [compared(rates, seed, 0.015, slow=slow).answers() for seed in range(200)]
    for question in (0, 1):
        counts = Counter(answers[question].verdict for answers in jobs)
        assert counts.keys() <= {verdict, "cannot tell"} and counts[verdict] >= 196


def test_a_draft_rank_is_judged_by_its_fastest_use() -> None:
    ar, ssd = Family("ar", 2, 0), Family("ssd", 1, 1)
    uses = [TimedUse(ssd, "core", 2, [90.0] * 6), TimedUse(ar, "core", 0, [100.0] * 6)]
    uses.append(TimedUse(ssd, "core", 3, [120.0] * 6, parallel=True))
    (answer,) = UseComparison(uses, num_rounds=20).answers()
    assert (answer.verdict, answer.ratio.mean) == ("pays", pytest.approx(1.2))
    assert answer.use.method == "SSD in one forward K=3"


def test_a_busy_machine_is_named_in_every_sentence() -> None:
    """Whatever other processes do to uses of two cores; only a clear interval is a verdict."""
    jobs = [compared([60, 90, 95, 40, 35], seed, 0.3, ["others"]) for seed in range(200)]
    jobs += [compared([60, 90, 95, 40, 35], seed, 0.02, ["others"]) for seed in range(20)]
    for job in jobs:
        text = " ".join(job.lines())
        assert "The machine is busy, in the worst turn: others." in text
        for answer in job.answers():
            asked = answer.what[0].lower() + answer.what[1:]
            is_told = answer.verdict != "cannot tell"
            unknown = f"Cannot tell while it is busy whether {asked} pays: "
            assert (f"While it is busy, {asked} {answer.verdict}:" if is_told else unknown) in text
            assert not is_told or not 1 / 1.05 < answer.ratio.low < answer.ratio.high < 1.05
    verdicts = Counter(answer.verdict for job in jobs for answer in job.answers())
    assert verdicts["cannot tell"] > 200 and verdicts["does not pay"] >= 20


def test_the_words_of_a_verdict() -> None:
    """The table is sorted, lines have 100 columns, and the JSON has the numbers."""
    uses = [TimedUse(family, "core", family.mode != "ar" and 2) for family in FAMILIES]
    for use, rate in zip(uses, (104, 75, 86, 102, 0), strict=True):
        use.speeds = [rate * (1 + 0.01 * (n % 2)) for n in range(4)]
    uses[-1].refused, uses[-1].speeds = "needs 9.1 GB", []
    comparison = UseComparison(uses, num_rounds=20)
    lines = comparison.lines()
    assert lines[0] == "tok/s in 4 turns (95% interval):"
    assert lines[1] == "  SSD K=2 on 2 cores        104.5 (103.6–105.5)"
    assert [line.split()[0] for line in lines[1:5]] == ["SSD", "AR", "SD", "AR"]
    assert lines[5:] == [
        "  SD inline K=2 on 2 cores  not measured: needs 9.1 GB",
        "→ Speculation on 1 core pays: SD inline K=2 makes 1.15× (1.15–1.15) of AR on 1 core.",
        "→ A core for the draft does not pay: SSD K=2 makes 1.02× (1.02–1.02) of AR on 2 cores, "
        "best of AR",
        "  and SD inline.",
    ]
    assert max(map(len, lines)) <= 100
    told = json.loads(json.dumps(comparison.to_dict()))
    assert [each["verdict"] for each in told["verdicts"]] == ["pays", "does not pay"]
    assert told["uses"][-1]["refused"] and told["uses"][0]["speeds"] == uses[0].speeds
    few = " ".join(replace(comparison, num_rounds=3).lines())
    assert few.count("an answer of fewer than 6 rounds is too short") == few.count("→") == 2
    one_turn = [TimedUse(use.family, "GPU", 2, use.speeds[:1]) for use in uses[:4]]
    copied = [TimedUse(Family(mode, 1, 0), "core", 0, [rate]) for mode, rate in (("lookup", 90.0),
              ("ar", 60.0), ("sd", 40.0))]  # fmt: skip
    (answer,) = UseComparison(copied, num_rounds=20).answers()
    assert (answer.use, answer.ratio.mean) == (copied[0], pytest.approx(1.5))
    lines = UseComparison(one_turn, num_rounds=20).lines()
    assert lines[:2] == ["tok/s in 1 turn:", "  SSD K=2 on 2 GPUs       104.0"]
    (sentence, *_) = lines[5:]
    assert sentence.startswith(
        "→ Cannot tell whether speculation on 1 GPU pays: too few turns to show"
    )


def test_a_load_is_what_others_took_of_the_cores() -> None:
    """Of two ranks on two cores for 10 s, and of one that leaves a core free."""
    rank = {"wall": 10.0, "own": 9.9, "delayed": 0.1, "busy": 20.0, "stolen": 0.0}
    assert reasons([rank, rank], 2) == {}
    assert reasons([{**rank, "own": 6.0, "delayed": 4.0}, {**rank, "own": 6.4}], 2) == {
        "other processes used 38% of its 2 cores": pytest.approx(0.38),
        "its ranks waited 20% of the time for a core": pytest.approx(0.205),
    }
    assert reasons([{**rank, "busy": 19.0}], 2) == {}
    slowed = {**rank, "busy": 10.0, "stolen": 2.0, "throttled": 1.0}
    told = ["the hypervisor took 20% of its core", "a quota stopped it 10% of the time"]
    assert [*reasons([slowed], 2)] == told
    assert reasons([{"wall": 10.0, "own": 3.0}], 2) == {}  # a system that counts nothing else
    before, after = counters(), counters()
    assert before.keys() == after.keys() >= {"wall", "own"}
    assert all(after[name] >= value >= 0 for name, value in before.items())


def test_gpus_are_asked_once_and_unknown_without_an_answer(tmp_path: Path) -> None:
    command = tmp_path / "smi"
    command.write_text(
        '#!/bin/sh\ncase $1 in *gpu=*) echo "GPU-a, Not Active, Active"; echo "GPU-b, Active, '
        'Active";; *) echo "GPU-b, 12"; echo "GPU-a, 13"; echo "GPU-a, 14";; esac\n'
    )
    command.chmod(0o755)
    assert gpu_reasons(["GPU-c"], str(command)) == []
    assert gpu_reasons(["GPU-a"], str(command)) == [
        "a GPU is hot or short of power, and its clock low",
        "another process is on one of its GPUs",
    ]
    assert gpu_reasons(["GPU-a"], str(tmp_path / "none")) == []


def test_rivals_have_the_k_that_is_fastest_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not the flag's default: by the acceptance that the run imposes."""
    asked = []

    def fastest(job: Any, verify_s: Any, draft_s: Any, rates: Any) -> tuple[int, str]:
        asked.append((job.lookahead, min(verify_s.values()) > 0, tuple(rates)))
        return 3, job.config.fan_out

    monkeypatch.setattr(calibrate, "fastest", fastest)
    monkeypatch.setattr(beside, "_LATE_S", 1e9)
    monkeypatch.setattr(run, "disturbances", lambda *_: {"others used 40%": 0.4})
    flags: dict[str, Any] = {"mode": "ar", "backend": "numpy", "alpha": 0.6, "beside": "all"}
    config = RunConfig(**flags, rounds=30, beside_s=0, progress="off", out=str(tmp_path), seed=7)
    assert run.execute(config) == 0
    assert asked == [(4, True, (0.6,) * 10)]
    rows = load_rows([tmp_path / "beside"])  # without those of the warm-up
    assert {row.lookahead for row in rows if row.mode == "sd"} == {3}
    assert sorted({row.seed for row in rows}) == [8, 9, 10]  # a seed a turn: `compare` pairs them
    *told, _, last = capsys.readouterr().out.splitlines()
    assert any(line.startswith("→") for line in told) and "    busy  others used 40%" in told
    told_uses = {use["lookahead"]: use["speeds"] for use in json.loads(last)["beside"]["uses"]}
    for row in rows:  # by the mean of the imposed acceptance, not by its draws
        mean = sum(0.6**k for k in range(row.lookahead + 1))
        rate = row.num_rounds * mean / row.wall_s
        assert rate == pytest.approx(told_uses[row.lookahead][row.seed - 8], rel=1e-4)
    (verdict,) = json.loads(last)["beside"]["verdicts"]
    assert (verdict["use"], verdict["turns"]) == ("SD inline K=3 on 1 core", 3)


def test_bare_products_in_one_forward_are_compared_with_others_of_one_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "fastest", lambda job, *_: (3, job.config.fan_out))
    monkeypatch.setattr(beside, "_LATE_S", 0.0)  # one turn
    flags: dict[str, Any] = {"mode": "sd", "num_drafts": 0, "lookahead": 2, "backend": "numpy"}
    flags |= {"alpha": 0.6, "parallel_drafting": True, "beside": "all", "progress": "off"}
    assert run.execute(RunConfig(**flags, rounds=30, beside_s=0, out=str(tmp_path))) == 0
    rows = load_rows([tmp_path / "beside"])
    assert {row.lookahead for row in rows if row.parallel_drafting} == {2, 3}


def test_a_draft_with_masks_is_also_tried_in_one_forward(
    tmp_path: Path,
    pair: TinyPair,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(beside, "_LATE_S", 0.0)  # one turn
    own: dict[str, Any] = {"beside": "all", "beside_s": 0, "progress": "off", "out": tmp_path}
    text = text_config(pair, mode="sd", num_drafts=0, num_tokens=40, **own)
    assert run.execute(text) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["beside"]["uses"]
    names = [use["name"] for use in told if use["parallel"]]
    assert len(names) == 1 and names[0].startswith("SD inline in one forward K=")
    rows = load_rows([tmp_path / "beside"])
    assert {row.mode for row in rows if row.parallel_drafting} == {"sd"}
    assert len({row.token_digest for row in rows}) == 1


def test_rates_and_lengths_of_passes_follow_the_run() -> None:
    known_row = {"accept_histogram": [10, 0, 30], "tok_per_s": 200.0, "batch_size": 2}
    row = Row.from_dict({**known_row, "num_tokens": 500})
    known = acceptance_rates(row)
    assert known is not None and known[:2] == pytest.approx((30.5 / 41, 30.5 / 31))
    assert len(known) == 10 and acceptance_rates(Row.from_dict({"accept_histogram": [9]})) is None
    slow, text = row | {"tok_per_s": 3.0}, RunConfig(workload="text", num_tokens=20)
    assert pass_of(row, RunConfig(), 2) == pass_of(slow, RunConfig(), 2) == (32, 2)
    assert pass_of(row | {"tok_per_s": 400.0}, RunConfig(), 2) == (50, 2)
    assert pass_of(row, text, 2) == (20, 2)
    assert pass_of(row, text, 25) == (20, 2)  # whole answers of two that decode together
    assert pass_of(row, text, 250) == (20, 24)  # of two tokens each
    assert pass_of(row, replace(text, rounds=9, num_tokens=None), 25) == (100, 2)  # in one second
    shipped = RunConfig(workload="text", pair="smollm2", backend="numpy", lookahead=7)
    assert rival(shipped, "sd").lookahead == 2 and len(DEFAULT_RATES) == 7
    assert rival(RunConfig(lookahead=7, laws="x"), "sd").laws == "x"


def test_a_speed_counts_the_last_round_whole_unless_the_text_ended() -> None:
    """60 tokens in 20 rounds of 4 s, and 2 tokens beyond the limit; the first round took 1 s."""
    text = {"num_prompts": 1, "batch_size": 1, "num_tokens": 60, "token_limit": 60, "wall_s": 5.0}
    text |= {"time_to_first_token_s": 1.0, "accept_histogram": [0, 0, 18, 2]}
    text |= {"acceptance_length": 3.1, "t_prefill_s": 0.5, "tok_per_s": 12.0}
    assert speed(Row.from_dict(text)) == pytest.approx((62 - 3.1) / 4)
    assert speed(Row.from_dict({**text, "token_limit": 90})) == pytest.approx((60 - 3.1) / 4)
    imposed = {**text, "time_to_first_token_s": None, "num_prompts": None}
    assert speed(Row.from_dict(imposed)) == pytest.approx(62 / 5)
