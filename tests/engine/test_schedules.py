"""Drafts inline, lookups and head-sized drafts: their resolved flags, and their runs."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpissd.common.config import parse_flags
from mpissd.common.errors import ConfigError
from mpissd.common.presets import LOOKUP
from mpissd.common.rng import Purpose, uniforms
from mpissd.common.rounds import Source
from mpissd.engine.decode.draft import Drafter, DraftPolicy
from mpissd.engine.decode.round import TargetLoop
from mpissd.engine.decode.speculator import InlineSpeculator
from mpissd.engine.job import Job, resolve
from mpissd.engine.spec.acceptance import AcceptanceLaw, HitLaw
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.gemm import DraftStream, ImposedDraft, ImposedTarget, TokenStream
from mpissd.engine.workload.workers import DraftWorker, TargetWorker
from tests.loop.harness import (
    WAITER,
    CountingForwards,
    SteppedSpeculator,
    drive,
    requests,
)
from tests.mpi.harness import Together, needs_mpi

VOCAB = 4096
INLINE = ("--mode=sd", "--num_drafts=0")
Rows = NDArray[np.int64]  # [n, 8]: round, id, epoch, k, t*, source, hit, num_draft


# Their resolved flags.


def job(**flags: str) -> Job:
    config = parse_flags({"pair": "toy", **flags})
    return resolve(config, 1, backend="numpy", memory_bytes=None)


def test_a_lookup_holds_no_draft() -> None:
    lookup = {"mode": "sd", "backup": "fast", "num_drafts": "0"}
    found = job(**lookup)
    assert found.draft is LOOKUP and found.rank_bytes(2)[1] == 0
    alone = job(mode="ar").rank_bytes(4)[0]
    assert job(**lookup).rank_bytes(4) == (alone, 0) and found.inline
    config = parse_flags({**lookup, "target": "8b"})  # needs no draft to be named
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
    ],
)
def test_what_makes_no_sense_takes_one_line(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job(**flags)


# Their runs.


def inline(backup: Source, num_tokens: int, lookahead: int = 4) -> tuple[Rows, CountingForwards]:
    """Inline SD over 30 rounds: its rows and the draft's forwards."""
    law = AcceptanceLaw((0.7,) * lookahead, "")
    laws = dict.fromkeys((Source.CACHE, Source.JIT, Source.FAST), law)
    stream = DraftStream(5, VOCAB, 1, laws, HitLaw(""))
    worker = DraftWorker(forwards := CountingForwards(), ImposedDraft(stream, num_tokens))
    policy = DraftPolicy(lookahead, FanOuts(), backup, lookahead)
    target = TargetWorker(CountingForwards(), ImposedTarget(TokenStream(5, VOCAB, 1, lookahead)))
    speculator = InlineSpeculator(Drafter(worker, policy, 1, WAITER))
    loop = TargetLoop(target, speculator, None, 1, WAITER)
    return drive(loop, requests(1), lookahead, rounds=30).sequences(), forwards


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
    worker = DraftWorker(forwards := CountingForwards(), ImposedDraft(stream, 4))
    drafter = Drafter(worker, DraftPolicy(4, FanOuts((2,) * 5, (2,) * 5), Source.JIT, 4), 1, WAITER)
    rig: Any = SimpleNamespace(draft_forwards=forwards, drafter=drafter)
    target = TargetWorker(CountingForwards(), ImposedTarget(TokenStream(5, VOCAB, 1, 4)))
    speculator = SteppedSpeculator(rig, lambda round_: 9)
    loop = TargetLoop(target, speculator, None, 1, WAITER)
    rows = drive(loop, requests(1), 4, rounds=40).sequences()
    assert rows[:, 6].any() and set(rows[:, 7]) == {4}
    assert all([rows for rows, _ in grown] == [5, 10] for grown in speculator.grown)  # glue, growth
    drafted = [len(answered) for answered in speculator.answered]
    assert drafted == [1 - hit for hit in rows[:, 6].tolist()]


# Whole jobs.

COMMON = ("--backend=emulated", "--device=null", "--num_tokens=40", "--warmup_rounds=8")


WHOLE = [  # ranks, flags, the draft's name
    (1, (*INLINE, "--backup=fast", "--target=8b"), "lookup"),
    (1, (*INLINE, "--pair=8b/medusa:8b"), "medusa4-llama-3.1-8b"),
    (2, ("--mode=ssd", "--pair=8b/mlp3072:8b"), "mlp3072-llama-3.1-8b"),
]
RUNS = {" ".join(flags): (np_, (*COMMON, *flags)) for np_, flags, _ in WHOLE}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Together:
    return Together(RUNS, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(("np_", "flags", "draft"), WHOLE, ids=[" ".join(w[1]) for w in WHOLE])
@needs_mpi[0]
@needs_mpi[1]
def test_a_whole_job(runs: Together, np_: int, flags: tuple[str, ...], draft: str) -> None:
    """It passes the gates, names its draft, and emits the tokens that every mode emits."""
    done = runs[" ".join(flags)]
    row = done.row
    assert row["draft"] == draft
    first = uniforms(0, Purpose.TOKEN, 0, 1, 40) * 128256
    assert done.arrays["tokens"][:40].tolist() == [int(x) for x in first]
    is_lookup, is_heads = draft == "lookup", draft.startswith("medusa")
    assert (row["t_draft_s"] is None) == is_lookup
    assert (row["predicted_round_us"] is None) == is_heads
    if is_heads:
        names = json.loads((done.folder / "profiles" / f"{row['run_id']}.json").read_text())
        assert names["config"]["pair"] == "8b/medusa:8b"
