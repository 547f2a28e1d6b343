"""Chained rounds on a GPU: the tokens of the host's own loop."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mpissd.__main__ import main
from mpissd.common.config import RunConfig, parse_flags
from mpissd.common.records import RoundRecords
from mpissd.engine.features.joined_growth import JoiningWorker
from mpissd.engine.law.tree import Shape
from mpissd.engine.model.transformer.device_rounds import DeviceRounds
from mpissd.engine.model.transformer.trees import Size
from mpissd.engine.round.rows import DraftWorker
from mpissd.engine.round.target import TargetLoop
from mpissd.engine.session.rank import Rank
from mpissd.engine.session.session import opened
from tests.gpu.transformer_rig import COPIES, STAGES, check_growing, check_stages, use_megakernel
from tests.text.test_chained import PARALLEL, counting, imposed
from tests.text_config import finished
from tests.tiny_pair import TinyPair, masked_pair, tiny_pair

pytestmark = pytest.mark.gpu
BACKEND = "cupy"
PROMPTS = ";".join(",".join(str((7 * n + j * j) % 97) for j in range(3 + 90 * n)) for n in range(4))


@pytest.fixture(scope="module")
def pair(gpu: None, tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    folder = tmp_path_factory.mktemp("pair")
    return tiny_pair(folder, vocab=97, noise=0.1, heads=4, kv_heads=2, head_dim=32)


@pytest.fixture(scope="module")
def masked(gpu: None, tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return masked_pair(tmp_path_factory.mktemp("masked"), heads=4, kv_heads=2, head_dim=32)


@pytest.fixture(autouse=True, params=["separate kernels", "one kernel"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a forward of few rows."""
    use_megakernel(monkeypatch, is_on=request.param == "one kernel")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    found = Counter[str]()
    monkeypatch.setattr(DeviceRounds, "launch", counting(found))
    return found


def decode(chains: bool = True, rounds: int | None = None, **flags: Any) -> RoundRecords:
    """The rounds of a run on this rank, chained where they can be, or decided by the host."""
    told = {"backend": BACKEND, "progress": "off", "warmup_rounds": 2, **flags}
    config = parse_flags({name: str(value) for name, value in told.items()})
    with opened(config) as session:
        rank = Rank(session)
        is_joined = isinstance(rank.draft, JoiningWorker)
        if not chains:
            rank.device_rounds = None
            if rank.draft is not None:
                worker = rank.draft
                rank.drafts = [DraftWorker(worker.stepper, worker.oracle, worker.placement)]
        is_led = session.topology.num_drafts and rank.target  # the draft's rank grows
        assert not chains or is_led or rank.device_rounds or is_joined
        records = RoundRecords(session.job.lookahead)

        def drive(loop: TargetLoop) -> None:
            scheduler = session.workload.scheduler()
            loop.admit(scheduler.turn().join)
            while scheduler.running and (rounds is None or len(records) < rounds):
                scheduler.step(loop, records)

        rank.run_pass(rank.target, rank.make_drafters(), drive)
        rank.close()
    return records


@pytest.mark.parametrize(
    "flags",
    [
        {}, {"batch_size": 2, "lookahead": 2}, {"tree": 12}, {"tree": 15, "batch_size": 3},
        PARALLEL, {**PARALLEL, "batch_size": 3, "lookahead": 7}, {**PARALLEL, "tree": 15},
        {"backup": "fast", "lookahead": 7}, {"backup": "fast", "batch_size": 3},
    ],
    ids=str,
)  # fmt: skip
def test_text_says_the_same_tokens(
    pair: TinyPair, masked: TinyPair, flags: dict[str, Any], counts: Counter[str]
) -> None:
    of = masked if "parallel_drafting" in flags else pair
    text = {"workload": "text", "num_tokens": 60, "target": of.target}
    text["prompt_ids"] = flags.get("prompt_ids", PROMPTS)
    sd = {"mode": "sd", "num_drafts": 0, "draft": of.draft, **flags}
    alone = decode(chains=False, mode="ar", **text)
    by_host = decode(chains=False, **text | sd)
    assert not counts["rounds"]
    found = decode(**text | sd)
    assert counts["ahead"] > 0.3 * counts["rounds"] > 5
    assert found.sequences().tolist() == by_host.sequences().tolist()
    assert found.tokens() == by_host.tokens()
    for n, tokens in alone.tokens().items():
        assert found.tokens()[n][: len(tokens)] == tokens


def test_ar_is_chained_too(pair: TinyPair, counts: Counter[str]) -> None:
    text = {"workload": "text", "prompt_ids": PROMPTS, "num_tokens": 60, "target": pair.target}
    found = decode(mode="ar", **text)
    assert counts["ahead"] > 0.9 * counts["rounds"] > 100
    assert found.tokens() == decode(chains=False, mode="ar", **text).tokens()


@pytest.mark.parametrize(
    "more",
    [
        {}, {"tree": 15}, {"tree": 9, "batch_size": 1}, {"parallel_drafting": True, "lookahead": 6},
        {"backup": "fast", "acceptance_fast": "alpha:.7"},
    ],
    ids=str,
)  # fmt: skip
def test_imposed_outcomes_stay(counts: Counter[str], gpu: None, more: dict[str, Any]) -> None:
    models = {"target": "llama-3.2-1b@2L", "draft": "llama-3.2-1b@1L"}
    told = {"mode": "sd", "num_drafts": 0, "forward": "transformer", "context": 300}
    told |= {"alpha": 0.7, "batch_size": 2, "num_tokens": 200, **models, **more}
    by_host = decode(chains=False, rounds=60, **told)
    found = decode(rounds=60, **told)
    assert counts["ahead"] > 0.5 * counts["rounds"] > 20
    assert found.sequences().tolist() == by_host.sequences().tolist()


@pytest.mark.parametrize(
    "dynamic",
    [{"tree": 15}, {"tree": 9, "batch_size": 3}, {**PARALLEL, "tree": 15, "lookahead": 6}],
    ids=str,
)
def test_dynamic_trees_say_the_same_tokens(
    pair: TinyPair, masked: TinyPair, dynamic: dict[str, Any], counts: Counter[str]
) -> None:
    """On a CPU another test compares their shapes with an independent search."""
    of = masked if "parallel_drafting" in dynamic else pair
    text = {"workload": "text", "num_tokens": 60, "target": of.target}
    text["prompt_ids"] = dynamic.get("prompt_ids", PROMPTS)
    alone = decode(chains=False, mode="ar", **text)
    sd = {"mode": "sd", "num_drafts": 0, "draft": of.draft, **dynamic}
    sd["tree_shape"] = "dynamic"
    found = decode(**text | sd)
    assert counts["ahead"] > 0.3 * counts["rounds"] > 5
    for n, tokens in alone.tokens().items():
        assert found.tokens()[n][: len(tokens)] == tokens
    on_cpu = decode(**text | sd | {"backend": "numpy"})
    means = [records.sequences()[:, 3].mean() for records in (found, on_cpu)]
    allowed = 0.15 if of is pair else 0.5  # all of K tokens or few are accepted
    assert abs(means[0] - means[1]) < allowed, means


@pytest.mark.parametrize(("tree", "batch_size"), [(4, 1), (15, 3), (31, 1)])
def test_dynamic_trees_are_replayed(
    masked: TinyPair, tree: int, batch_size: int, counts: Counter[str], tmp_path: Path
) -> None:
    """As by the host on a device that computes nothing; random models would draft other trees."""
    made = {"out": tmp_path / "pair.npz", "backend": "numpy", "num_tokens": 60, "lookahead": 6}
    made |= {"target": masked.target, "draft": masked.draft, "fan_out": 7}
    made |= {"prompt_ids": PARALLEL["prompt_ids"]}
    assert main(["pair", *(f"--{name}={value}" for name, value in made.items())]) == 0
    told: dict[str, Any] = {"workload": "replay", "recording": str(made["out"]), "mode": "sd"}
    told |= {"num_drafts": 0, "lookahead": 6, "tree": tree, "tree_shape": "dynamic"}
    told |= {"parallel_drafting": True, "batch_size": batch_size, "num_tokens": 60}
    found = decode(**imposed(tmp_path, vocab=9), **told)
    assert counts["ahead"] > 0.3 * counts["rounds"] > 2
    told |= {"backend": "emulated", "device": "null", "pair": "toy"}
    assert found.sequences().tolist() == finished(RunConfig(**told)).records.sequences().tolist()


def test_a_dynamic_trees_models_may_have_unequal_heads(gpu: None, counts: Counter[str]) -> None:
    text = {"workload": "text", "prompt_ids": "1,2,3", "num_tokens": 12, "context": 64}
    text["target"] = "llama-3.1-8b@1L"
    alone = decode(chains=False, mode="ar", **text).tokens()
    sd = {"mode": "sd", "num_drafts": 0, "draft": "llama-3.2-1b@1L", "tree": 15}
    assert decode(**text, **sd, tree_shape="dynamic").tokens()[0][:12] == alone[0][:12]
    assert counts["ahead"]


@STAGES
def test_every_stage_is_its_twins(
    backend: Any, tree: Shape, dynamic: Size | None, masks: range
) -> None:
    check_stages(backend, tree, dynamic, masks)


@COPIES
def test_a_lookup_is_its_twin(backend: Any, depth: int) -> None:
    check_stages(backend, Shape(range(depth)), None, range(0), copies=True)


def test_every_stage_of_chained_growth_is_its_twins(backend: Any) -> None:
    check_growing(backend)
