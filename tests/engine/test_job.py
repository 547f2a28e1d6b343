"""A configuration, resolved for T ranks: shapes, models, bytes and row counts. A job that does not
fit into memory is refused with the batch and the context that would. Drafts inline, lookups and
head-sized drafts: their resolved flags, and their runs."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpissd.common.config import RunConfig, parse_flags
from mpissd.common.errors import ConfigError
from mpissd.common.presets import LOOKUP
from mpissd.common.rng import Purpose, uniforms
from mpissd.engine.job import DeviceMemory, Job, Serving, resolve
from tests.loop.harness import CountingForwards, Scenario, run, run_stepped
from tests.mpi.harness import Together, needs_mpi

GB = 10**9
TINY = "gen:layers=1,hidden=8,ffn=8,heads=2"


def job(tp: int = 1, backend: str = "numpy", memory: int | None = None, **flags: Any) -> Job:
    return resolve(RunConfig(**flags), tp, backend=backend, memory_bytes=memory)


def test_the_default_pair_is_the_largest_that_fits() -> None:
    def name(memory: int | None, tp: int = 1, **flags: Any) -> str:
        return job(tp, "cupy", memory, **flags).target.name

    assert name(None) == name(150 * GB) == "llama-3.1-70b"
    assert name(80 * GB) == name(32 * GB) == "llama-3.1-8b"
    assert name(80 * GB, tp=2) == "llama-3.1-70b"
    assert name(10 * GB) == "toy-target"
    assert job(1, "numpy", 150 * GB).target.name == "toy-target"
    with pytest.raises(ConfigError, match="tp=3: no built-in pair divides by 3"):
        name(150 * GB, tp=3)
    with pytest.raises(ConfigError, match=r"tp=3: no built-in pair divides by 3 \(tried toy\)"):
        job(3, mode="ar")


def test_imposed_hits_leave_every_outcome_a_candidate() -> None:
    flags: dict[str, Any] = {"lookahead": 7, "fan_out": "geometric:12"}
    assert 0 in job(**flags, hit_law="power:A=1,r=1").fan_out
    assert min(job(**flags, p_hit=0.9).fan_out) == 1
    assert job(lookahead=1, fan_out="list:0,2", p_hit=0.0).fan_out == (0, 2)
    with pytest.raises(ConfigError, match="every F_k from 1"):
        job(lookahead=1, fan_out="list:0,2", p_hit=0.1)


def test_the_draft_has_a_device_of_its_own() -> None:
    config = RunConfig(pair="8b/1b", mode="sd")
    sizes = {"memory_bytes": 20 * GB, "draft_memory_bytes": 2 * GB}
    with pytest.raises(ConfigError, match=r"llama-3.2-1b needs 1.9 GB"):
        resolve(config, 1, backend="cupy", **sizes)
    on_cpu = replace(config, draft_backend="numpy")
    with pytest.raises(ConfigError, match=r"llama-3.2-1b needs 3.9 GB"):
        resolve(on_cpu, 1, backend="cupy", **sizes)
    inline = RunConfig(pair="8b/1b", mode="sd", num_drafts=0)
    assert resolve(inline, 1, backend="cupy", **sizes).rank_bytes(2)[1] == 0
    target, draft = resolve(config, 1, backend="cupy", memory_bytes=None).rank_bytes(2)
    apart = resolve(on_cpu, 1, backend="cupy", memory_bytes=20 * GB).rank_bytes(2)
    assert apart == (target, 2 * draft)  # float32 weights
    together, none = resolve(inline, 1, backend="cupy", memory_bytes=None).rank_bytes(2)
    assert (together, none) == (target + draft, 0)


def test_a_context_takes_memory() -> None:
    """KV: 131,072 B a token of the 8B, per sequence; the rows of the largest forward also store
    tokens of their own: one for each of 15 rows, and 3 (K = 4) for each of 45 lanes."""
    bare = job(1, "cupy", pair="8b/1b").rank_bytes(2)
    deep = job(1, "cupy", pair="8b/1b", context=1000, batch_size=3).rank_bytes(2)
    assert deep[0] - bare[0] == (3 * 1000 + 15) * 131_072
    assert deep[1] - bare[1] == (3 * 1000 + 45 * 3) * 32_768


TEXT = {"target": "8b", "draft": "1b", "pair": None, "workload": "text", "prompt_ids": "1,2,3"}
INLINE = {"mode": "sd", "num_drafts": 0, "pair": "8b/1b", "forward": "transformer"}


def test_bare_products_compute_a_parallel_draft_s_masks() -> None:
    """As transformers do: K rows a branch, whether or not the model has a KV cache."""
    for forward in ("gemm", "transformer"):
        found = job(pair="8b/1b", backend="emulated", forward=forward, parallel_drafting=True)
        worker = found.workload.draft_worker(CountingForwards())
        assert worker.masks == range(found.draft.vocab_size, found.draft.vocab_size + 3)
        assert found.step_rows == found.lookahead == 4


def job_of(memory: int | None, serving: Serving | None = None, **flags: Any) -> Any:
    config = RunConfig(**{**INLINE, **flags})
    return resolve(config, 1, backend="cupy", memory_bytes=memory, serving=serving)


@pytest.mark.parametrize("flags", [
    {"batch_size": 64, "context": 4096}, {"batch_size": 3, "context": 200_000},
    {"batch_size": 500, "context": 1000, "mode": "ar"},
    {"batch_size": 90, "context": 3000, "num_drafts": 1},
], ids=str)  # fmt: skip
def test_the_numbers_it_names_fit_and_one_more_does_not(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="another pair") as refused:
        job_of(40 * GB, **flags)
    found = re.findall(r"--(batch_size|context)=(\d+)", str(refused.value))
    assert found
    for name, value in found:
        assert job_of(40 * GB, **{**flags, name: int(value)})
        with pytest.raises(ConfigError):
            job_of(40 * GB, **{**flags, name: int(value) + 1})


def test_a_default_context_of_text_is_as_long_as_memory_allows() -> None:
    wide, batch = job_of(None, **TEXT, batch_size=64), 64
    need = sum(wide.rank_bytes(2))
    tight = job_of(need - 5 * GB, **TEXT, batch_size=batch)
    assert 256 <= tight.longest < wide.longest and DeviceMemory(2, need - 5 * GB, None).fits(tight)
    with pytest.raises(ConfigError):
        job_of(need - 5 * GB, **TEXT, batch_size=batch, context=wide.longest)


def test_a_gpu_that_draws_tokens_needs_room_for_their_distributions() -> None:
    """Of K drafted tokens of each sequence, and one of each for the target that rejects."""
    flags = {**TEXT, "batch_size": 4, "lookahead": 5, "context": 512}
    greedy, drawn = job_of(None, **flags), job_of(None, **flags, temperature=0.7)
    more = sum(drawn.rank_bytes(2)) - sum(greedy.rank_bytes(2))
    assert more == (4 + 4 * 5) * 128_256 * 4
    assert drawn.rank_bytes(4) == greedy.rank_bytes(4)
    drawn, greedy = (job_of(None, Serving(samples=samples), **flags) for samples in (True, False))
    assert sum(drawn.rank_bytes(2)) - sum(greedy.rank_bytes(2)) == more, "a server, by default"


ALONE = ("--mode=sd", "--num_drafts=0")


def parsed_job(**flags: str) -> Job:
    config = parse_flags({"pair": "toy", **flags})
    return resolve(config, 1, backend="numpy", memory_bytes=None)


def test_a_lookup_holds_no_draft() -> None:
    lookup = {"mode": "sd", "backup": "fast", "num_drafts": "0"}
    found = parsed_job(**lookup)
    assert found.draft is LOOKUP and found.rank_bytes(2)[1] == 0
    alone = parsed_job(mode="ar").rank_bytes(4)[0]
    assert parsed_job(**lookup).rank_bytes(4) == (alone, 0) and found.inline
    config = parse_flags({**lookup, "target": "8b"})  # needs no draft to be named
    assert resolve(config, 2, backend="emulated", memory_bytes=None).draft is LOOKUP


MEDUSA, EAGLE = {"pair": "8b/medusa:8b"}, {"pair": "eagle:8b/1b"}
GENERATED = {"target": f"{TINY},vocab=9", "mode": "ar", "lm_head": True}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tp": 3}, "num_heads=8 is not divisible by tp=3; allowed for it: 1, 2, 4, 8"),
        ({"tp": 8}, "num_kv_heads=4 is not divisible by tp=8"),
        ({"tp": 2, **GENERATED}, "vocab_size=9 % tp=2"),
        ({"fan_out": "uniform:4096"}, "4096: allowed: 1 to"),
        ({"lookahead": 1, "fan_out": "list:1,4096"}, "a sum from 1 to 4096"),
        ({"target": f"{TINY},vocab=4", "draft": "toy-draft"}, "at most vocab_size - 2 = 2"),
        ({"pair": "toy-target/lookup", "mode": "sd"}, "draft=lookup with mode=sd, backup=jit"),
        ({"pair": "toy-target/lookup"}, "draft=lookup with mode=ssd.*: mode=sd, backup=fast"),
        (EAGLE, "target=eagle-llama-3.1-8b: a draft's shape"),
        ({**MEDUSA, "lookahead": 3}, "lookahead=3 with medusa4-llama-3.1-8b: allo"),
        ({**MEDUSA, "backup_lookahead": 2}, "backup_lookahead=2 with medusa4"),
        ({**MEDUSA, "workload": "markov"}, "medusa4.*workload=markov: allowed: gemm"),
        ({"fuse": True, "forward": "transformer"}, "^fuse with forward=transformer: allowed: f"),
        ({"draft_device": "h100"}, "^draft_device=h100 with backend=numpy: allowed: backend=emul"),
        ({"draft_device": "h100", "draft_backend": "numpy"}, "draft_backend=numpy: allowed: draf"),
        ({"draft_backend": "numpy", "num_drafts": 0, "mode": "sd"}, "^draft_backend=numpy with n"),
        ({"shard_draft": True, "mode": "sd", "num_drafts": 0}, "shard_draft with forward=gemm"),
        ({"shard_draft": True, "mode": "sd", "num_drafts": 1}, "shard_draft=True with num_drafts"),
        ({"draft_backend": "numpy", "mode": "ar"}, "num_drafts=0: allowed: num_drafts=1"),
        ({"draft_backend": "emulated", "workload": "text", "prompt_ids": "1"}, "numpy, cupy"),
    ],
)
def test_what_makes_no_sense_takes_one_line(flags: dict[str, Any], message: str) -> None:
    given = flags if "target" in flags else {"pair": "toy", **flags}
    with pytest.raises(ConfigError, match=message):
        job(**given)


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


COMMON = ("--backend=emulated", "--device=null", "--num_tokens=40", "--warmup_rounds=8")


WHOLE = [  # ranks, flags, the draft's name
    (1, (*ALONE, "--backup=fast", "--target=8b"), "lookup"),
    (1, (*ALONE, "--pair=8b/medusa:8b"), "medusa4-llama-3.1-8b"),
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
    assert (row["predicted_tok_per_s"] is None) == is_heads
