"""Trees decode the target's own tokens: whatever their shape, from texts, laws and recordings."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Source
from mpissd.engine import Decoder, RunConfig
from mpissd.engine import job as jobs
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.law.fanout import key_chances
from mpissd.engine.law.tree import Shape
from mpissd.lab.measure.beside import rival
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.simulation import expected
from tests.text_config import finished
from tests.tiny_pair import TinyPair, tiny_pair

NULL = {"pair": "toy", "backend": "emulated", "device": "null", "num_drafts": 0}
REPLAY = {"workload": "replay", "recording": "results/recordings/smollm2-chat.npz"}
NARROW = {**REPLAY, "recording": "results/recordings/smollm2-chat-350.npz"}  # 4 candidates
LANES = {"mode": "ssd", "pair": "toy", "forward": "transformer"}
COUNT = 90  # tokens of a sequence: a page has 64


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_pair(tmp_path_factory.mktemp("pair"), hidden=32, heads=2, kv_heads=1, vocab=19)


def decode(pair: TinyPair, **flags: Any) -> tuple[dict[int, list[int]], Any]:
    """The tokens, and the rounds that they took (RoundRecords.sequences)."""
    folders = {"target": str(pair.target), "draft": str(pair.draft), "workload": "text"}
    config = RunConfig(**{**folders, "backend": "numpy", "num_tokens": COUNT, **flags})
    decoder = finished(config)
    return {n: of[:COUNT] for n, of in decoder.tokens.items()}, decoder.records.sequences()


TREES = st.lists(st.integers(0, 14), min_size=1, max_size=15).map(
    lambda of: Shape([min(number, n) for n, number in enumerate(sorted(of))])
)


@settings(max_examples=8)
@given(
    tree=TREES,
    batch=st.integers(1, 3),
    drafts=st.integers(0, 1),
    chains=st.booleans(),
    fans=st.integers(1, 4),
)
def test_any_tree_decodes_as_the_target_alone(
    pair: TinyPair, tree: Shape, batch: int, drafts: int, chains: bool, fans: int
) -> None:
    """And with branches it accepts what it accepts without: the keys and values of each are its
    own."""
    told: dict[str, Any] = {"prompt_ids": "1,2,3;4,5;6,7,8;9", "batch_size": batch}
    tokens, rounds = decode(pair, mode="ar", **told)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "best_shape", lambda *_: tree)
        patch.setattr(NumpyBackend, "chains", chains)
        told |= {"lookahead": tree.depth, "tree": 1}
        found = decode(pair, mode="sd", num_drafts=drafts, **told)
        branched = decode(pair, mode="ssd", fan_out=f"uniform:{fans}", **told)
    assert found[0] == branched[0] == tokens and len(found[1]) < len(rounds)
    assert (found[1][:, :5] == branched[1][:, :5]).all() and branched[1][:, 6].any()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("flags", [{"alpha": 0.5}, {"forward": "transformer"}, REPLAY])
def test_imposed_tokens_are_accepted_by_their_laws(flags: dict[str, Any], batch: int) -> None:
    told = {**NULL, "batch_size": batch, **flags}
    found = []
    trees = {"tree": 12}, {"mode": "ssd", "num_drafts": 1, "fan_out": "uniform:4", "tree": 12}
    ways = {"mode": "ar", **trees[0]}, {"mode": "sd"}, *({"mode": "sd", **tree} for tree in trees)
    for more in ways:
        found.append(finished(RunConfig(**{**told, **more, "rounds": 2000}), 300))
    ar, chain, tree, branched = (decoder.tokens[0] for decoder in found)
    assert ar == chain[: len(ar)] == tree[: len(ar)] and tree == branched
    accepted = [float(of.records.sequences()[:, 3].mean()) for of in found]
    assert accepted[2] > 1.1 * accepted[1] and accepted[2] == accepted[3]
    own, hits = found[3].job, found[3].records.sequences()[batch:, 6].mean()
    chances = key_chances(own.shape, own.acceptance[Source.JIT].hazards, own.hit_law, 20)
    wanted = sum(of[count] for of, count in zip(chances, own.fan_out, strict=True))
    assert "recording" in flags or abs(hits - wanted) < 0.08
    job = found[2].job
    assert [rival(job.config, mode).tree for mode in ("ar", "sd")] == [None, job.config.tree]
    assert "recording" in flags or abs(np.cumprod(job.rates(Source.JIT)).sum() - accepted[2]) < 0.25
    costs = DeviceCosts.from_points({1: 0.004, 64: 0.005}, {1: 0.001, 64: 0.002}), HostCosts()
    assert expected(own, *costs).hit_rate[0] == pytest.approx(wanted, abs=0.01)


@pytest.mark.parametrize("flags", [{"tree": 1, "alpha": 0.7}, {"tree": 8, "alpha": 0}], ids=str)
def test_a_tree_may_have_fewer_levels_than_k(flags: dict[str, Any]) -> None:
    for more in ({"mode": "sd"}, {"mode": "ssd", "num_drafts": 1}):
        with Decoder(RunConfig(**{**NULL, **more, **flags, "rounds": 20})) as decoder:
            assert decoder.job.lookahead < decoder.job.config.lookahead and decoder.step()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"draft": "eagle:8b", "target": "8b"}, "tree=8 with draft=eagle:8b: allowed: a draft mod"),
        ({"mode": "ssd", "num_drafts": 1, "backup_lookahead": 2}, "mode=ssd: keys .* allowed: 4"),
        (
            {**LANES, "fan_out": "uniform:60", "tree": 200, "lookahead": 9},
            "fan_out uniform:60 with tree=200: [0-9]+ lanes a sequence: allowed: at most 2048",
        ),
        ({"mode": "ssd", "num_drafts": 1, "p_hit": 0.9}, "p_hit=0.9 with tree=8 and mode=ssd"),
        ({"backup": "fast"}, "tree=8 with backup=fast: allowed: backup=jit"),
        ({**NARROW, "tree": 99}, "children of a node with recording=.*at most 5"),
        ({"workload": "markov", "vocab": 4, "lookahead": 1}, "8 children .* at most vocab=4"),
        ({"workload": "markov", "vocab": 50000, "batch_size": 999, "temperature": 1}, "8 dr.*GB"),
    ],
)
def test_what_cannot_be_a_tree_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config = RunConfig(**{"mode": "sd", "tree": 8, **flags})
        jobs.resolve(config, 1, backend="emulated", memory_bytes=None)
