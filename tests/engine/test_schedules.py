"""Schedules: the flags they stand for, and that what runs is what their papers describe.

PEARL and AMUSD are simulated here from their own descriptions, with pending tokens and modes and
without rounds of ours; the decoding loops have to commit the same tokens, round for round.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpissd.__main__ import main
from mpissd.cli.configs import PredictConfig
from mpissd.common.config import RunConfig, parse_flags
from mpissd.common.errors import ConfigError
from mpissd.common.flags import parse_into
from mpissd.common.presets import LOOKUP
from mpissd.common.rng import Purpose, uniforms
from mpissd.common.rounds import Source
from mpissd.common.schedules import SCHEDULES, is_tail, tail_list, with_schedule
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.decode.draft import Drafter, DraftPolicy
from mpissd.engine.decode.speculator import InlineSpeculator, Speculator
from mpissd.engine.decode.target import TargetLoop
from mpissd.engine.job import Job, resolve
from mpissd.engine.spec.acceptance import AcceptanceLaw
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.spec.hits import HitLaw
from mpissd.engine.workload.gemm.law import DraftStream, TokenStream
from mpissd.engine.workload.gemm.workers import GemmDraftWorker, GemmTargetWorker
from mpissd.engine.workload.tail import TailWorker
from tests.loop.harness import (
    WAITER,
    CountingForwards,
    NoPlans,
    Scenario,
    SteppedSpeculator,
    drive,
)
from tests.mpi.harness import Together, needs_mpi
from tests.scripts import load

VOCAB = 4096
Rows = NDArray[np.int64]  # [n, 8]: round, id, epoch, k, t*, source, hit, num_draft


# What the names stand for.


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_the_flags_that_it_names(name: str) -> None:
    by_name = parse_flags({"schedule": name, "pair": "toy"})
    by_hand = parse_flags({**SCHEDULES[name], "pair": "toy"})
    assert by_name.schedule == name and by_hand.schedule is None
    assert by_name.digest == by_hand.digest
    assert parse_flags({"schedule": name, **SCHEDULES[name], "pair": "toy"}) == by_name


def test_what_the_user_says_stands_beside_a_schedule() -> None:
    config = parse_flags({"schedule": "pearl", "lookahead": "9", "m": "ssd", "pair": "toy"})
    assert (config.lookahead, config.mode, config.backup_lookahead) == (9, "ssd", 0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"schedule": "perl"}, r"unknown schedule 'perl': did you mean 'pearl'\? allowed: amusd"),
        ({"schedule": "PEARL"}, "unknown schedule 'PEARL'"),
        ({"schedule": "pearl", "mode": "ar"}, "mode=ar with schedule=pearl: allowed: ssd"),
        ({"schedule": "pearl", "on_late": "serve"}, "on_late=serve with schedule=pearl"),
        ({"schedule": "amusd", "fan_out": "uniform:3"}, "fan_out=uniform:3 with schedule=amusd"),
        ({"schedule": "amusd", "num_drafts": "0"}, "num_drafts=0 with schedule=amusd: allowed: 1"),
        ({"schedule": "lookup", "backup": "jit"}, "backup=jit with schedule=lookup: allowed: fast"),
        ({"schedule": "sd-inline", "num_drafts": "1"}, "num_drafts=1 with schedule=sd-inline"),
        (
            {"schedule": "pearl", "fan_out_miss": "uniform:1"},
            "fan_out=tail:1 with both fan_out and fan_out_miss",
        ),
        ({"backup_lookahead": "0", "mode": "sd"}, "backup_lookahead=0 with mode=sd"),
        ({"backup_lookahead": "0"}, "0 with mode=ssd and fan_out=tail:F"),
        ({"draft": "1b", "mode": "sd", "backup": "fast"}, "target: needed"),
    ],
)
def test_contradictions_take_one_line(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_flags(flags)
    assert caught.value.exit_code == 2


def test_the_command_line_refuses_before_mpi(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--schedule=pearl", "--mode=ar"], ["--schedule=sd-inline", "--pair=8b/mtp:9z"]):
        assert main(["run", "--dry_run", *flags]) == 2
        told = capsys.readouterr().err
        assert told.startswith("mpissd: ") and told.count("\n") == 1


def test_a_prediction_wants_the_flags_themselves() -> None:
    """Which flags were said decides what a job's profile keeps."""
    with pytest.raises(ConfigError, match="schedule=lookup with predict: allowed: its flags, mode"):
        parse_into(PredictConfig, {"schedule": "lookup", "profile": "h100"})


def test_a_tail_is_a_list_with_one_entry() -> None:
    assert is_tail(" tail:2") and not is_tail("list:0,1") and not is_tail("tailor:1")
    assert tail_list("tail:2", 3, 1) == "list:0,2,0,0"
    assert tail_list("geometric:9", 3, 1) == "geometric:9"
    assert with_schedule({"mode": "ar"}) == {"mode": "ar"}


# What they resolve to.


def job(**flags: str) -> Job:
    config = parse_flags({"pair": "toy", **flags})
    return resolve(config, 1, backend="numpy", memory_bytes=None)


def test_one_branch_behind_what_was_served() -> None:
    pearl, amusd = job(schedule="pearl", lookahead="3"), job(schedule="amusd", lookahead="3")
    assert pearl.fan_out == amusd.fan_out == (0, 0, 0, 1)
    assert (pearl.fan_out_miss, pearl.backup_lookahead) == ((1, 0, 0, 0), 0)
    assert (amusd.fan_out_miss, amusd.backup_lookahead) == ((0, 1, 0, 0), 1)
    assert pearl.is_tail and pearl.num_lanes == 1 and not job(mode="sd", fan_out="tail:1").is_tail
    assert job(fan_out="tail:5").fan_out == (0, 0, 0, 0, 5) == job(fan_out="tail:5").fan_out_miss


def test_a_lookup_holds_no_draft() -> None:
    for flags in ({"schedule": "lookup"}, {"mode": "sd", "backup": "fast"}):
        found = job(**flags)
        assert found.draft is LOOKUP and found.rank_bytes(2)[1] == 0
    alone = job(mode="ar").rank_bytes(4)[0]
    assert job(schedule="lookup").rank_bytes(4) == (alone, 0) and job(schedule="lookup").inline
    config = parse_flags({"schedule": "lookup", "target": "8b"})  # needs no draft to be named
    assert resolve(config, 2, backend="emulated", memory_bytes=None).draft is LOOKUP


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"pair": "toy-target/lookup", "mode": "sd"}, "draft=lookup with mode=sd, backup=jit"),
        (
            {"pair": "toy-target/lookup"},
            "draft=lookup with mode=ssd.*allowed: mode=sd, backup=fast",
        ),
        ({"pair": "eagle:8b/1b"}, "target=eagle-llama-3.1-8b: a draft's shape"),
        ({"pair": "8b/medusa:8b", "lookahead": "3"}, "lookahead=3 with medusa4-llama-3.1-8b: allo"),
        ({"pair": "8b/medusa:8b", "backup_lookahead": "2"}, "backup_lookahead=2 with medusa4"),
        ({"pair": "8b/medusa:8b", "workload": "markov"}, "medusa4.*workload=markov: allowed: gemm"),
        (
            {"fan_out": "tail:1", "on_late": "auto"},
            "on_late=auto with fan_out=tail:1: allowed: fin",
        ),
        ({"fan_out": "tail:1", "backup": "auto"}, "backup=auto with fan_out=tail:1: allowed: jit"),
        ({"fan_out": "tail:1", "p_hit": "0.5"}, "p_hit=0.5 with fan_out.*every F_k from 1"),
        ({"fan_out": "tail:0"}, "fan_out=tail:0: allowed: tail:F, F from 1 on"),
        ({"fan_out": "tail:x"}, "fan_out=tail:x: allowed: tail:F, F from 1 on"),
        (
            {"fan_out": "tail:1", "workload": "markov", "saguaro_c": "0.5", "temperature": "1"},
            "saguaro_c=0.5 with fan_out=tail:1: allowed: 1",
        ),
    ],
)
def test_what_makes_no_sense_takes_one_line(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job(**flags)


def test_forwards_that_tokens_take() -> None:
    assert job(lookahead="4").num_forwards(4) == 4
    heads = job(pair="8b/medusa:8b", lookahead="4")
    assert [heads.num_forwards(n) for n in (0, 1, 4)] == [0, 1, 1]
    assert job(pair="8b/mlp:8b", lookahead="4").num_forwards(4) == 4
    assert job(mode="ar").num_forwards(3) == 3


# What they do.


@dataclass(frozen=True)
class Setting:
    """One branch behind the tail, alpha in the window and 1 − A behind it."""

    lookahead: int
    alpha: float = 0.8
    hit_a: float = 0.2
    backup_lookahead: int = 0
    on_late: str = "finish"
    seed: int = 3

    def coin(self, purpose: Purpose, sequence: int, position: int) -> float:
        return float(uniforms(self.seed, purpose, sequence, position, 1)[0])

    def is_drafted(self, sequence: int, position: int) -> bool:
        """Whether the draft's token at a position is the target's, within a window."""
        return self.coin(Purpose.ACCEPT, sequence, position) < self.alpha

    def is_foreseen(self, sequence: int, position: int) -> bool:
        """The same of the token behind a window: the draft's first choice has rank 1."""
        return self.coin(Purpose.RANK, sequence, position) >= self.hit_a


def speculator_of(s: Setting, batch: int, steps: Sequence[int]) -> tuple[Speculator, Drafter]:
    law = AcceptanceLaw((s.alpha,) * s.lookahead, "")
    laws = dict.fromkeys((Source.CACHE, Source.JIT, Source.FAST), law)
    stream = DraftStream(s.seed, VOCAB, batch, laws, HitLaw("", None, s.hit_a, 1.0))
    worker = TailWorker(GemmDraftWorker(forwards := CountingForwards(), stream))
    at = [0] * s.lookahead
    fans = FanOuts((*at, 1), tuple(int(k == s.backup_lookahead) for k in range(s.lookahead + 1)))
    policy = DraftPolicy(s.lookahead, fans, Source.JIT, s.backup_lookahead, s.on_late)
    drafter = Drafter(worker, policy, batch, WAITER)
    rig: Any = SimpleNamespace(draft_forwards=forwards, drafter=drafter)
    return SteppedSpeculator(rig, lambda round_: steps[round_ % len(steps)]), drafter


def decode(s: Setting, rounds: int, batch: int = 1, steps: Sequence[int] = (256,)) -> Rows:
    """The loops, with so many growth steps a round before the outcome arrives."""
    stream = TokenStream(s.seed, VOCAB, batch, s.lookahead)
    worker = GemmTargetWorker(CountingForwards(), stream)
    loop = TargetLoop(worker, speculator_of(s, batch, steps)[0], NoPlans(), batch, WAITER)
    records = drive(loop, Scenario(lookahead=s.lookahead, batch=batch, rounds=rounds))
    for sequence, tokens in records.tokens().items():  # lossless: what the target alone emits
        u = uniforms(s.seed, Purpose.TOKEN, sequence, 1, len(tokens))
        assert tokens == [int(x) for x in u * VOCAB]
    return records.sequences()


def of(rows: Rows, sequence: int) -> Rows:
    return rows[rows[:, 1] == sequence]


def pearl(
    gamma: int, rounds: int, drafted: Callable[[int], bool], foreseen: Callable[[int], bool]
) -> list[int]:
    """Tokens that PEARL [2408.11850, algorithm 2] commits in each round, from position 1 on.

    pre-verify: the target finds one token while the draft drafts gamma; if the first of them is it,
    the others are pending. post-verify: the target judges the gamma − 1 that are pending and the
    one that follows them, while the draft drafts on; all of them right: gamma − 1 more are pending.
    """
    committed, position, is_post = [], 1, False
    for _ in range(rounds):
        right = 0
        if is_post:
            while right < gamma - 1 and drafted(position + right):
                right += 1
        judged = gamma - 1 if is_post else 0
        is_post = right == judged and foreseen(position + right)
        count = right + 1  # the next one is right as well, or is replaced
        committed.append(count)
        position += count
    return committed


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("gamma", [2, 3, 5, 9])
def test_pearl_commits_what_pearl_commits_round_for_round(gamma: int, alpha: float) -> None:
    s = Setting(gamma - 1, alpha, 1 - alpha)
    rows = of(decode(s, 300), 0)
    want = pearl(gamma, 300, lambda p: s.is_drafted(0, p), lambda p: s.is_foreseen(0, p))
    assert (rows[:, 3] + 1).tolist() == want
    modes = set(rows[:, 7].tolist())  # one row is verified, or gamma
    assert modes == ({0, gamma - 1} if alpha else {0})


def test_pearl_in_a_batch_is_pearl_of_each_sequence() -> None:
    s = Setting(3)
    rows = decode(s, 100, batch=4)
    for n in range(4):
        coins = (lambda p, n=n: s.is_drafted(n, p)), (lambda p, n=n: s.is_foreseen(n, p))
        assert (of(rows, n)[:, 3] + 1).tolist() == pearl(4, 100, *coins)


def test_a_backup_that_drafts_a_token_first_is_not_pearl() -> None:
    """The negative control: K_b = 1 verifies two rows after a miss."""
    s = Setting(3, backup_lookahead=1)
    rows = decode(s, 100)
    want = pearl(4, 100, lambda p: s.is_drafted(0, p), lambda p: s.is_foreseen(0, p))
    assert (rows[:, 3] + 1).tolist() != want


@pytest.mark.slow
def test_pearl_s_tokens_a_round_by_law() -> None:
    """Both coins of one chance, as at temperature 0: PEARL's chain of modes gives the mean and the
    share of post-verify rounds. Seed 11; each bound is 4 standard errors of block means (40 blocks;
    false alarm about 3e-4)."""
    alpha, gamma, rounds = 0.7, 5, 20000
    rng = np.random.default_rng(11)
    coins = rng.random(gamma * rounds + gamma + 1) < alpha
    tokens = np.array(pearl(gamma, rounds, lambda p: bool(coins[p]), lambda p: bool(coins[p])))
    ours = of(decode(Setting(gamma - 1, alpha, 1 - alpha, seed=11), rounds), 0)
    post = alpha / (alpha + 1 - alpha**gamma)  # pre → post: alpha; post → post: alpha^gamma
    mean = (1 - post) + post * (1 - alpha**gamma) / (1 - alpha)
    for found, want in (
        (tokens, mean),
        (ours[:, 3] + 1, mean),
        ((ours[:, 7] > 0).astype(float), post),
    ):
        blocks = found.reshape(40, -1).mean(axis=1)
        assert abs(blocks.mean() - want) < 4 * blocks.std(ddof=1) / np.sqrt(40)


def amusd(s: Setting, rounds: int, grown: Sequence[int], sequence: int = 0) -> list[list[int]]:
    """[committed, verified] of each round of AMUSD: what was drafted meanwhile is judged next.

    grown: tokens that the draft appends while the target verifies. The draft's own next token has
    to be the target's as well, or it rolls back and drafts one for the target to go on with.
    """
    found, position, pending = [], 1, s.backup_lookahead
    for number in range(rounds):
        right = 0
        while right < pending and s.is_drafted(sequence, position + right):
            right += 1
        goes_on = right == pending and s.is_foreseen(sequence, position + right)
        found.append([right + 1, pending])
        position += right + 1
        more = min(s.lookahead, grown[number % len(grown)])
        pending = more if goes_on else s.backup_lookahead
    return found


@pytest.mark.parametrize("grown", [(2,), (0,), (5, 1, 3), (9, 0, 2, 7)])
@pytest.mark.parametrize("alpha", [0.5, 0.9, 1.0])
def test_amusd_serves_what_is_drafted_and_rolls_back(grown: tuple[int, ...], alpha: float) -> None:
    s = Setting(6, alpha, 1 - alpha, backup_lookahead=1, on_late="serve")
    rows = decode(s, 200, steps=grown)
    assert np.column_stack([rows[:, 3] + 1, rows[:, 7]]).tolist() == amusd(s, 200, grown)


def test_amusd_in_a_batch_of_many_lengths() -> None:
    """Sequences of one round were served 1 token after a miss, and what was grown after a hit."""
    s = Setting(6, backup_lookahead=1, on_late="serve")
    rows = decode(s, 150, batch=3, steps=(4, 2))
    lengths = {tuple(sorted(rows[rows[:, 0] == n, 7].tolist())) for n in range(150)}
    assert len({len(set(found)) for found in lengths}) > 1, "all alike: choose another seed"
    for n in range(3):
        mine = of(rows, n)
        assert np.column_stack([mine[:, 3] + 1, mine[:, 7]]).tolist() == amusd(s, 150, (4, 2), n)


def test_a_list_can_not_say_what_a_tail_says() -> None:
    """Behind fewer than K served tokens a list with F_K alone keeps nothing: every late hit is
    followed by a miss."""
    s = Setting(6, 1.0, 0.0, backup_lookahead=1, on_late="serve")
    assert decode(s, 20, steps=(3,))[2:, 6].all()
    stream = TokenStream(s.seed, VOCAB, 1, s.lookahead)
    speculator, drafter = speculator_of(s, 1, (3,))
    drafter._worker = drafter._worker._worker  # type: ignore[attr-defined]
    loop = TargetLoop(
        GemmTargetWorker(CountingForwards(), stream), speculator, NoPlans(), 1, WAITER
    )
    hits = drive(loop, Scenario(lookahead=s.lookahead, rounds=20)).sequences()[:, 6]
    assert not (hits[1:] & hits[:-1]).any() and hits.any()


def inline(backup: Source, num_tokens: int, lookahead: int = 4) -> tuple[Rows, CountingForwards]:
    """Inline SD over 30 rounds: its rows and the draft's forwards."""
    law = AcceptanceLaw((0.7,) * lookahead, "")
    laws = dict.fromkeys((Source.CACHE, Source.JIT, Source.FAST), law)
    stream = DraftStream(5, VOCAB, 1, laws, HitLaw(""))
    worker = GemmDraftWorker(forwards := CountingForwards(), stream, num_tokens)
    policy = DraftPolicy(lookahead, FanOuts(), backup, lookahead)
    target = GemmTargetWorker(CountingForwards(), TokenStream(5, VOCAB, 1, lookahead))
    speculator = InlineSpeculator(Drafter(worker, policy, 1, WAITER))
    loop = TargetLoop(target, speculator, NoPlans(), 1, WAITER)
    return drive(loop, Scenario(lookahead=lookahead, rounds=30)).sequences(), forwards


def test_a_lookup_launches_nothing() -> None:
    rows, forwards = inline(Source.FAST, 1)
    assert forwards.log == [] and set(rows[:, 7]) == {4}


def test_parallel_heads_draft_all_tokens_in_one_forward() -> None:
    one_by_one, forwards = inline(Source.JIT, 1)
    at_once, heads = inline(Source.JIT, 4)
    assert np.array_equal(one_by_one, at_once)
    assert (len(forwards.log), len(heads.log)) == (120, 30)
    assert {rows for rows, _ in heads.log} == {1}


def test_parallel_heads_grow_in_one_forward() -> None:
    law = AcceptanceLaw((0.7,) * 4, "")
    laws = dict.fromkeys((Source.CACHE, Source.JIT, Source.FAST), law)
    stream = DraftStream(5, VOCAB, 1, laws, HitLaw(""), widest=2)
    worker = GemmDraftWorker(forwards := CountingForwards(), stream, 4)
    drafter = Drafter(worker, DraftPolicy(4, FanOuts((2,) * 5, (2,) * 5), Source.JIT, 4), 1, WAITER)
    rig: Any = SimpleNamespace(draft_forwards=forwards, drafter=drafter)
    target = GemmTargetWorker(CountingForwards(), TokenStream(5, VOCAB, 1, 4))
    speculator = SteppedSpeculator(rig, lambda round_: 9)
    loop = TargetLoop(target, speculator, NoPlans(), 1, WAITER)
    rows = drive(loop, Scenario(lookahead=4, rounds=40)).sequences()
    assert rows[:, 6].any() and set(rows[:, 7]) == {4}
    assert all([rows for rows, _ in grown] == [5, 10] for grown in speculator.grown)  # glue, growth
    drafted = [len(answered) for answered in speculator.answered]
    assert drafted == [1 - hit for hit in rows[:, 6].tolist()]


# Whole jobs.

COMMON = ("--backend=emulated", "--device=null", "--num_tokens=40", "--warmup_rounds=2")


WHOLE = [  # ranks, flags, the draft's name
    (1, ("--schedule=sd-inline", "--pair=8b/1b"), "llama-3.2-1b"),
    (2, ("--schedule=pearl", "--pair=8b/1b", "--hit_a=0.2"), "llama-3.2-1b"),
    (2, ("--schedule=amusd", "--pair=8b/1b", "--hit_a=0.2"), "llama-3.2-1b"),
    (1, ("--schedule=lookup", "--target=8b"), "lookup"),
    (1, ("--schedule=sd-inline", "--pair=8b/eagle:8b", "--lm_head"), "eagle-llama-3.1-8b"),
    (1, ("--schedule=sd-inline", "--pair=8b/medusa:8b"), "medusa4-llama-3.1-8b"),
    (2, ("--mode=ssd", "--pair=8b/mlp3072:8b"), "mlp3072-llama-3.1-8b"),
]
MARKOV = ("--backend=emulated", "--device=null", "--pair=toy", "--workload=markov", "--vocab=12")
MARKOV += ("--num_tokens=40", "--prompt_tokens=20", "--warmup_rounds=2", "--batch_size=3")
LOSSLESS = {"pearl": 2, "amusd": 2, "lookup": 1}  # ranks
RUNS = {" ".join(flags): (np_, (*COMMON, *flags)) for np_, flags, _ in WHOLE}
RUNS |= {name: (np_, (*MARKOV, f"--schedule={name}")) for name, np_ in LOSSLESS.items()}
RUNS["ar"] = (1, (*MARKOV, "--mode=ar"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Together:
    return Together(RUNS, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(("np_", "flags", "draft"), WHOLE, ids=[" ".join(w[1]) for w in WHOLE])
@needs_mpi[0]
@needs_mpi[1]
def test_a_whole_job(runs: Together, np_: int, flags: tuple[str, ...], draft: str) -> None:
    """It passes the gates, says what it was, and emits the tokens that every mode emits."""
    done = runs[" ".join(flags)]
    row = done.row
    told = [flag.partition("=")[2] for flag in flags if flag.startswith("--schedule")]
    assert row["schedule"] == (told[0] if told else None) and row["draft"] == draft
    first = uniforms(0, Purpose.TOKEN, 0, 1, 40) * 128256
    assert done.arrays["tokens"][:40].tolist() == [int(x) for x in first]
    is_lookup, is_heads = draft == "lookup", draft.startswith("medusa")
    assert (row["t_draft_s"] is None) == is_lookup
    is_known = not is_heads and row["schedule"] not in ("pearl", "amusd")
    assert (row["predicted_round_us"] is not None) == is_known
    if row["schedule"] == "pearl":
        assert row["backup_lookahead"] == 0 and set(done.arrays["sequences"][:, 7]) <= {0, 4}
    if is_heads:
        names = json.loads((done.folder / "profiles" / f"{row['run_id']}.json").read_text())
        assert names["config"]["pair"] == "8b/medusa:8b"


@needs_mpi[0]
@needs_mpi[1]
@pytest.mark.parametrize("schedule", LOSSLESS)
def test_a_schedule_is_lossless_on_language_models(runs: Together, schedule: str) -> None:
    """At temperature 0 it emits what AR emits."""
    row = runs[schedule].row
    assert row["token_digest"] == runs["ar"].row["token_digest"] and row["acceptance_length"] > 1


def test_a_run_config_made_by_hand_needs_no_schedule() -> None:
    assert RunConfig(mode="sd", backup="fast", target="8b").is_lookup


# The table.

ROOT = Path(__file__).resolve().parents[2]
STUDIES = [("2", "h200"), ("3", "h100")]


@pytest.fixture(scope="module")
def script() -> Any:
    """The study of schedules as a module."""
    return load("results/emulated-schedules/schedules.py")


def told(gpus: str, device: str) -> argparse.Namespace:
    out = ROOT / "results" / "emulated-schedules"
    return argparse.Namespace(out=out, gpus=int(gpus), device=device, tokens=1000, seed=1)


@pytest.mark.parametrize(("gpus", "device"), STUDIES)
def test_every_line_of_the_table_is_a_run_on_equal_gpus(
    script: Any, gpus: str, device: str
) -> None:
    memory = load_profile(device).memory_bytes
    for target in script.TARGETS:
        for alpha in script.ALPHAS:
            lines = [
                (entry, *script.command(told(gpus, device), target, alpha, entry))
                for entry in script.entries(target, alpha)
            ]
            assert len({tuple(flags) for _, _, *flags in lines}) == len(lines) == 13
            for entry, ranks, *flags in lines:
                parts = [flag[2:].partition("=") for flag in flags]
                config = parse_flags({name: value or "True" for name, _, value in parts})
                tp = int(ranks) - config.drafts
                found = resolve(config, tp, backend="emulated", memory_bytes=memory)
                assert found.world_size == int(ranks) <= int(gpus) and found.tp in (1, 2)
                assert found.world_size == int(gpus) or (gpus == "3" and entry.inline)


def test_k_is_the_best_by_its_formula(script: Any) -> None:
    """On an H200: 17.9 ms a 70B verification at T = 2, 0.93 ms a 1B step with its LM head."""
    by_name = {entry.name: entry for entry in script.entries("70b", 0.8)}
    t = script.forward_s("h200", "70b", 2, 13)
    s = script.forward_s("h200", "1b", 1, 1)
    rates = [(1 - 0.8 ** (k + 1)) / 0.2 / (t + k * s) for k in range(1, 13)]
    assert script.lengths(by_name["sd"], "h200", "70b", 2, 0.8)[0] == 1 + int(np.argmax(rates))
    assert script.lengths(by_name["pearl"], "h200", "70b", 2, 0.8)[0] == 12  # all of it is hidden
    assert script.lengths(by_name["amusd"], "h200", "70b", 2, 0.8)[0] == 14
    k, backup = script.lengths(by_name["ssd, A = 0.75"], "h200", "70b", 2, 0.8)
    assert k == 12 and 1 < backup < 12
    assert script.ranks_for("70b", 3) == script.ranks_for("8b", 2) == 2
    assert script.ranks_for("8b", 1) == 1


@pytest.mark.parametrize(("gpus", "device"), STUDIES)
def test_the_committed_tables_are_what_the_rows_say(script: Any, gpus: str, device: str) -> None:
    page = (ROOT / "docs" / "schedules.md").read_text("utf-8")
    for target in script.TARGETS:
        for alpha in script.ALPHAS:
            text = script.table(told(gpus, device), (target, alpha))
            assert text in page and text.endswith("All emitted the same tokens: yes.")
            assert text.count("\n| ") == 14  # the head, and a line for each
