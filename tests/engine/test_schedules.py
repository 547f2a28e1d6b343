"""Drafts inline, lookups and head-sized drafts: their resolved flags, and their runs."""

from dataclasses import replace

import numpy as np
import pytest

from mpissd.common.config import parse_flags
from mpissd.common.errors import ConfigError
from mpissd.common.presets import LOOKUP
from mpissd.common.rng import Purpose, uniforms
from mpissd.engine.job import Job, resolve
from tests.loop.harness import Scenario, run, run_stepped
from tests.mpi.harness import Together, needs_mpi

INLINE = ("--mode=sd", "--num_drafts=0")


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


INLINE_RUN = Scenario("sd", rates=(0.7,) * 4, rounds=30, seed=5, inline=True)


def test_a_lookup_launches_nothing() -> None:
    found = run(replace(INLINE_RUN, backup="fast"))
    assert found.rig.draft_forwards.log == [] and set(found.rows[:, 7]) == {4}


def test_parallel_heads_draft_all_tokens_in_one_forward() -> None:
    one_by_one, at_once = run(INLINE_RUN), run(replace(INLINE_RUN, heads=4))
    assert np.array_equal(one_by_one.rows, at_once.rows)
    forwards, heads = (found.rig.draft_forwards.log for found in (one_by_one, at_once))
    assert (len(forwards), [rows for rows, _ in heads]) == (120, [1] * 30)


def test_parallel_heads_grow_in_one_forward() -> None:
    scenario = replace(INLINE_RUN, mode="ssd", inline=False, fan_out=(2,) * 5, heads=4, rounds=40)
    found, draft = run_stepped(scenario, 9)
    assert found.rows[:, 6].any() and set(found.rows[:, 7]) == {4}
    assert all([rows for rows, _ in grown] == [5, 10] for grown in draft.grown)  # glue, growth
    drafted = [len(answered) for answered in draft.answered]
    assert drafted == [1 - hit for hit in found.rows[:, 6].tolist()]


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
