"""Rounds that the device decides have the same outcomes as rounds that the host decides."""

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from mpissd.common.errors import FaultError
from mpissd.engine import Decoder, RunConfig
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.comm.link import DraftEnd
from mpissd.engine.features.device_rounds import DeviceTarget
from mpissd.engine.model.transformer.checkpoint import Checkpoint
from mpissd.engine.model.transformer.device_rounds import DeviceRounds
from mpissd.engine.model.transformer.growing import DeviceGrowth
from mpissd.engine.model.transformer.sources import open_checkpoint
from mpissd.lab.measure import run
from tests import transformer_reference
from tests.text_config import PROMPTS, finished
from tests.tiny_pair import TinyPair, config

TOKENS, PAIR = 40, {"mode": "sd", "num_drafts": 0, "backend": "numpy", "deadline_s": 20.0}
REPLAYS = Path(__file__).parents[2] / "results" / "recordings" / "smollm2-chat.npz"


def decode(most: int | None = None, **flags: Any) -> Decoder:
    return finished(RunConfig(**{**PAIR, **flags}), most)


def text(pair: TinyPair, **flags: Any) -> dict[str, Any]:
    models = {"target": str(pair.target), "draft": str(pair.draft)}
    return {"workload": "text", "prompt_ids": PROMPTS, "num_tokens": TOKENS, **models, **flags}


def imposed(folder: Path) -> dict[str, Any]:
    """Flags of random models whose outcomes are imposed."""
    shape = folder / "config.json"
    shape.write_text(json.dumps(config(1, vocab=49152, heads=2, kv_heads=1, hidden=32)))
    models = dict.fromkeys(("target", "draft"), str(shape))
    return {"forward": "transformer", "context": 20, **models}


@pytest.fixture
def chained(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Chains rounds on the CPU, and counts those that began ahead of their outcome."""
    counts = {"rounds": 0, "ahead": 0}
    launch = DeviceRounds.launch

    def counted(self: DeviceRounds, round_: int, forced: Any) -> None:
        counts["rounds"] += 1
        counts["ahead"] += bool(self._flying)
        launch(self, round_, forced)

    monkeypatch.setattr(NumpyBackend, "chains", True)
    monkeypatch.setattr(DeviceRounds, "launch", counted)
    return counts


def test_a_row_has_the_time_that_chained_rounds_drafted(
    pair: TinyPair, chained: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is measured in every round, and no calibrated forward replaces it.

    Rounds are chained only on GPUs, so that the gates do not expect it of a CPU's.
    """
    monkeypatch.setattr(run, "violations", lambda row, rounds: [])
    monkeypatch.setattr(DeviceRounds, "draft_s", lambda self, round_: 1 + round_)
    told = text(pair, out=str(tmp_path), lookahead=3, progress="off")
    assert run.execute(RunConfig(**{**PAIR, **told})) == 0
    (row,) = map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines())
    assert chained["ahead"] and row["t_draft_s"] >= 1
    rounds = np.load(tmp_path / "rounds" / f"{row['run_id']}.npz")
    table = dict(zip(rounds["draft_columns"], rounds["draft_rounds"].T, strict=True))
    assert (table["t_draft_s"] == 1 + table["round"]).all()


@pytest.mark.parametrize("flags", [
    {}, {"lookahead": 1}, {"lookahead": 7}, {"batch_size": 3, "lookahead": 2}, {"batch_size": 5},
    {"tree": 15}, {"tree": 15, "batch_size": 3, "lookahead": 2},
    {"mode": "ar", "draft": None}, {"mode": "ar", "draft": None, "batch_size": 3},
], ids=str)  # fmt: skip
def test_text_has_the_same_rounds(
    pair: TinyPair, flags: dict[str, Any], chained: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = decode(**text(pair, **flags))
    assert chained["ahead"] > 0.6 * chained["rounds"] > 5
    monkeypatch.setattr(NumpyBackend, "chains", False)
    expected = decode(**text(pair, **flags))
    assert found.tokens == expected.tokens
    assert found.records.sequences().tolist() == expected.records.sequences().tolist()


@pytest.mark.parametrize("flags", [
    {"workload": "replay", "recording": str(REPLAYS), "num_tokens": 30, "batch_size": 8},
    {"workload": "gemm", "rounds": 90, "alpha": 0.6, "batch_size": 2},
    {"workload": "gemm", "num_tokens": 50, "alpha": 0.9, "lookahead": 7},
    {"workload": "replay", "recording": str(REPLAYS), "num_tokens": 30, "batch_size": 8, "tree": 9},
    {"workload": "gemm", "num_tokens": 50, "alpha": 0.6, "tree": 15},
    {"workload": "replay", "recording": str(REPLAYS), "num_tokens": 30, "mode": "ar"},
    {"workload": "gemm", "num_tokens": 30, "alpha": 0.8, "context": 3},
], ids=str)  # fmt: skip
def test_imposed_outcomes_stay(
    flags: dict[str, Any],
    chained: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    told, rounds = {**imposed(tmp_path), **flags}, 24
    found = decode(rounds, **told).records.sequences()
    assert 0 < chained["ahead"] < chained["rounds"] > 5
    monkeypatch.setattr(NumpyBackend, "chains", False)
    assert found.tolist() == decode(rounds, **told).records.sequences().tolist()


@pytest.mark.parametrize("flags", [
    {}, {"lookahead": 1}, {"lookahead": 5, "fan_out": "geometric:9"},
    {"batch_size": 3, "fan_out": "list:3,1,0", "lookahead": 2},
    {"workload": "replay", "recording": str(REPLAYS), "batch_size": 2, "draft": None},
    {"workload": "gemm", "alpha": 0.7, "lookahead": 3, "draft": None},
], ids=str)  # fmt: skip
def test_chained_growth_has_the_rounds_of_stepwise_growth(
    pair: TinyPair, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether an outcome arrives before, amid or after the steps that were launched ahead."""
    told = text(pair, mode="ssd", num_drafts=1, **flags)
    if "draft" in flags:
        told |= {"prompt_ids": None, **imposed(tmp_path)}
    expected = decode(40, **told)
    left, launch, dice = list[int](), DeviceGrowth.launch, Random(0)

    def counted(self: DeviceGrowth) -> None:
        launch(self)
        left.append(self.left)

    monkeypatch.setattr(NumpyBackend, "chains", True)
    monkeypatch.setattr(DeviceGrowth, "launch", counted)
    monkeypatch.setattr(DraftEnd, "outcome_arrived", lambda self: dice.random() < 0.3)
    found = decode(40, **told)
    assert len(left) > 20 and (max(left) == 2 or told.get("lookahead") == 1)
    assert found.tokens == expected.tokens
    assert found.records.sequences().tolist() == expected.records.sequences().tolist()


def test_a_logit_that_is_not_finite_is_a_fault(
    pair: TinyPair, chained: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = DeviceTarget.launch

    def spoilt(self: DeviceTarget) -> None:
        memory = self._forwards._target.weights.head.pieces[0][2]
        memory[...] = 0x7F807F80  # infinity in bfloat16
        launch(self)

    monkeypatch.setattr(DeviceTarget, "launch", spoilt)
    with pytest.raises(FaultError, match="not finite"), np.errstate(all="ignore"):
        decode(**text(pair))


@pytest.mark.parametrize("flags", [
    {"tree": 15}, {"tree": 4, "lookahead": 1},
    {"tree": 64, "batch_size": 3}, {"tree": 9, "lookahead": 6, "batch_size": 2},
    {"tree": 3, "lookahead": 16, "batch_size": 4},
], ids=str)  # fmt: skip
def test_dynamic_trees_are_the_likeliest_nodes(
    pair: TinyPair, flags: dict[str, Any], chained: dict[str, int]
) -> None:
    """Tokens are AR's, and each round accepts what an independent search for the tree finds."""
    found = decode(**text(pair, tree_shape="dynamic", **flags))
    assert chained["ahead"] > 0.6 * chained["rounds"] > 5
    alone = decode(**text(pair, mode="ar", draft=None))
    draft, levels = open_checkpoint(str(pair.draft)), min(flags["tree"], flags.get("lookahead", 4))
    rows = found.records.sequences()
    full = np.bincount(rows[:, 0])[rows[:, 0]] == flags.get("batch_size", 1)  # the others: chains
    right = list[bool]()  # two of float32's roundings may differ
    for n, prompt in enumerate(PROMPTS.split(";")):
        answer, given = found.tokens[n], [int(token) for token in prompt.split(",")]
        assert alone.tokens[n][:TOKENS] == answer[:TOKENS]
        at = 0
        for count, is_tree in zip(rows[rows[:, 1] == n][:, 3], full[rows[:, 1] == n], strict=True):
            left = answer[at:]
            if is_tree and len(left) > count and not at % 3:
                tree = likeliest(draft, [*given, *answer[:at]], levels, flags["tree"])
                hits = [tuple(left[:k]) in tree for k in range(1, levels + 1)]
                right.append([*hits, False].index(False) == count)
            at += count + 1
    assert len(right) > 9 and sum(right) >= len(right) - 1


def likeliest(draft: Checkpoint, given: list[int], levels: int, nodes: int) -> set[tuple[int, ...]]:
    """The paths of the `nodes` likeliest nodes; 4 of a level are continued by 8 candidates each."""
    level, every = {(): 0.0}, dict[tuple[int, ...], float]()
    for _ in range(levels):
        following = dict[tuple[int, ...], float]()
        for path, sure in level.items():
            logits = transformer_reference.logits(draft, [*given, *path])[-1].astype(float)
            best = np.argsort(-logits, kind="stable")[:8]
            own = logits[best] - np.log(np.exp(logits[best]).sum())
            following |= {(*path, int(token)): sure + p for token, p in zip(best, own, strict=True)}
        every |= following
        level = dict(sorted(following.items(), key=lambda one: -one[1])[:4])
    return {path for path, _ in sorted(every.items(), key=lambda one: -one[1])[:nodes]}
