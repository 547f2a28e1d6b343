"""Rounds that the device decides have the same outcomes as rounds that the host decides."""

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from mpissd.__main__ import main
from mpissd.common.errors import FaultError
from mpissd.engine import Decoder, RunConfig
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.comm.link import DraftEnd
from mpissd.engine.features.device_rounds import DeviceTarget
from mpissd.engine.model.transformer.checkpoint import Checkpoint
from mpissd.engine.model.transformer.device_rounds import DeviceRounds
from mpissd.engine.model.transformer.growing import DeviceGrowth
from mpissd.engine.model.transformer.sources import open_checkpoint
from mpissd.engine.model.transformer.trees import CHOICES, search
from mpissd.lab.measure import run
from mpissd.lab.pair.laws import DYNAMIC, read
from tests import transformer_reference
from tests.text_config import PROMPTS, finished
from tests.tiny_pair import TinyPair, config, masked_pair

TOKENS, PAIR = 40, {"mode": "sd", "num_drafts": 0, "backend": "numpy", "deadline_s": 20.0}
REPLAYS = Path(__file__).parents[2] / "results" / "recordings" / "smollm2-chat.npz"


PARALLEL = {
    "parallel_drafting": True,
    "prompt_ids": ";".join(f"{n},{3 * n % 9},{7 * n % 9}" for n in range(1, 6)),
}


def decode(most: int | None = None, **flags: Any) -> Decoder:
    return finished(RunConfig(**{**PAIR, **flags}), most)


def text(pair: TinyPair, **flags: Any) -> dict[str, Any]:
    if "parallel_drafting" in flags:
        pair = masked_pair(pair.target.parents[1] / "masked")
    models = {"target": str(pair.target), "draft": str(pair.draft)}
    return {"workload": "text", "prompt_ids": PROMPTS, "num_tokens": TOKENS, **models, **flags}


def imposed(folder: Path, vocab: int = 49152) -> dict[str, Any]:
    """Flags of random models whose outcomes are imposed."""
    shape = folder / "config.json"
    told = config(1, vocab=vocab, heads=2, kv_heads=1, hidden=64, head_dim=32)
    shape.write_text(json.dumps(told | {"mpissd": {"masks": 6}}))
    models = dict.fromkeys(("target", "draft"), str(shape))
    return {"forward": "transformer", "context": 20, **models}


def counting(counts: Counter[str]) -> Callable[..., None]:
    """DeviceRounds.launch that counts rounds, and those that began ahead of their outcome."""
    launch = DeviceRounds.launch

    def counted(self: DeviceRounds, round_: int, forced: Any) -> None:
        counts["rounds"] += 1
        counts["ahead"] += bool(self._flying)
        launch(self, round_, forced)

    return counted


@pytest.fixture
def chained(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Chains rounds on the CPU, and counts those that began ahead of their outcome."""
    counts = Counter[str]()
    monkeypatch.setattr(NumpyBackend, "chains", True)
    monkeypatch.setattr(DeviceRounds, "launch", counting(counts))
    return counts


def test_a_row_has_the_time_that_chained_rounds_drafted(
    pair: TinyPair, chained: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    *({**PARALLEL, "lookahead": k, "batch_size": 1 + k % 3} for k in range(1, 8)),
    {**PARALLEL, "tree": 15}, {**PARALLEL, "tree": 12, "lookahead": 6, "batch_size": 3},
    {"mode": "ar", "draft": None}, {"mode": "ar", "draft": None, "batch_size": 3},
    {"backup": "fast"}, {"backup": "fast", "lookahead": 7, "batch_size": 3},
], ids=str)  # fmt: skip
def test_text_has_the_same_rounds(
    pair: TinyPair, flags: dict[str, Any], chained: Counter[str], monkeypatch: pytest.MonkeyPatch
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
    {"workload": "gemm", "num_tokens": 50, "alpha": 0.9, "lookahead": 7, "parallel_drafting": True},
    {"workload": "gemm", "rounds": 90, "alpha": 0.8, "tree": 15, "parallel_drafting": True},
    {"workload": "replay", "recording": str(REPLAYS), "num_tokens": 30, "mode": "ar"},
    {"workload": "gemm", "num_tokens": 30, "alpha": 0.8, "context": 3},
    {"workload": "gemm", "num_tokens": 50, "acceptance_fast": "alpha:.7", "backup": "fast"},
    {"workload": "replay", "recording": str(REPLAYS), "num_tokens": 90, "backup": "fast"},
], ids=str)  # fmt: skip
def test_imposed_outcomes_stay(
    flags: dict[str, Any], chained: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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
    pair: TinyPair, chained: Counter[str], monkeypatch: pytest.MonkeyPatch
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
    {**PARALLEL, "tree": 15}, {**PARALLEL, "tree": 40, "lookahead": 6, "batch_size": 3},
    {**PARALLEL, "tree": 9, "lookahead": 2},
], ids=str)  # fmt: skip
def test_dynamic_trees_are_the_likeliest_nodes(
    pair: TinyPair, flags: dict[str, Any], chained: Counter[str]
) -> None:
    """Tokens are AR's, and each round accepts what an independent search for the tree finds."""
    found = decode(**text(pair, tree_shape="dynamic", **flags))
    assert chained["ahead"] > 0.6 * chained["rounds"] > 5
    told = text(pair, **flags)
    alone = decode(**{**told, "mode": "ar", "draft": None, "parallel_drafting": False})
    draft, levels = open_checkpoint(told["draft"]), min(flags["tree"], flags.get("lookahead", 4))
    rows = found.records.sequences()
    full = np.bincount(rows[:, 0])[rows[:, 0]] == flags.get("batch_size", 1)  # the others: chains
    right = list[bool]()  # two of float32's roundings may differ
    for n, prompt in enumerate(told["prompt_ids"].split(";")):
        answer, given = found.tokens[n], [int(token) for token in prompt.split(",")]
        assert alone.tokens[n][:TOKENS] == answer[:TOKENS]
        at = 0
        for count, is_tree in zip(rows[rows[:, 1] == n][:, 3], full[rows[:, 1] == n], strict=True):
            left = answer[at:]
            if is_tree and len(left) > count and not at % 3:
                read = [*given, *answer[:at]]
                masks = levels - 1 if "parallel_drafting" in flags else 0
                tree = likeliest(draft, read, levels, flags["tree"], masks)
                hits = [tuple(left[:k]) in tree for k in range(1, levels + 1)]
                right.append([*hits, False].index(False) == count)
            at += count + 1
    assert len(right) > 9 and sum(right) >= len(right) - 1


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("tree", [4, 15, 31])
def test_dynamic_trees_are_replayed(
    pair: TinyPair, tree: int, batch_size: int, chained: Counter[str], tmp_path: Path
) -> None:
    """By the device in chained rounds, and by the host where nothing is computed."""
    flags = {**PARALLEL, "lookahead": 6, "tree": tree, "batch_size": batch_size}
    told = text(pair, tree_shape="dynamic", **flags)
    run = decode(**told)
    made = {"out": tmp_path / "pair.npz", "lookahead": 6, "fan_out": 7}
    made |= {name: told[name] for name in ("target", "draft", "prompt_ids", "num_tokens")}
    assert main(["pair", *(f"--{name}={value}" for name, value in made.items())]) == 0
    del flags["prompt_ids"]
    flags |= {"workload": "replay", "recording": str(made["out"]), "tree_shape": "dynamic"}
    chained.clear()
    found = decode(**imposed(tmp_path, vocab=9), **flags)
    assert chained["ahead"] > 0.5 * chained["rounds"] > 2
    by_host = decode(pair="toy", **{**flags, "backend": "emulated", "device": "null"})
    assert (run.records.sequences()[:, 3] > 0).any()
    for replay in (found, by_host):
        assert replay.records.sequences().tolist() == run.records.sequences().tolist()
    (data,) = read(str(made["out"]))
    counts = data.outcomes[6].fast.get(f"{DYNAMIC}{tree}")
    if counts is not None and batch_size == 1:
        accepted = run.records.sequences()[:, 3]
        assert counts.sum(axis=0).tolist() == np.bincount(accepted, minlength=7).tolist()


@pytest.mark.parametrize(("levels", "nodes"), [(2, 40), (3, 64), (4, 15)])
def test_a_parallel_drafts_tree_is_the_likeliest_of_all(levels: int, nodes: int) -> None:
    """Among every product of one candidate a level; equal logits: the first one."""
    rng = np.random.default_rng(nodes)
    logits = -np.sort(-rng.normal(size=(levels, CHOICES)).astype(np.float32))
    logits[:, 2] = logits[:, 1]
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    tokens = rng.permuted(np.tile(np.arange(CHOICES), (levels, 1)), axis=1)
    parents, chosen = np.zeros((2, nodes), np.int32)
    search(logits, tokens, parents, chosen)
    paths = [tuple[int, ...]()]
    for parent, token in zip(parents, chosen, strict=True):
        paths.append((*paths[parent], int(tokens[len(paths[parent])].tolist().index(token))))
    every = [path for k in range(1, levels + 1) for path in product(range(CHOICES), repeat=k)]
    sure = [float(sum(logs[d, rank] for d, rank in enumerate(path))) for path in every]
    cut = sorted(sure, reverse=True)[nodes - 1]
    found = [float(sum(logs[d, rank] for d, rank in enumerate(path))) for path in paths[1:]]
    assert len(set(paths)) == nodes + 1 and min(found) >= cut - 1e-5
    assert all(a >= b - 1e-5 for a, b in pairwise(found))
    assert all((*path[:-1], 1) in paths for path in paths[1:] if path[-1] == 2)


def likeliest(
    draft: Checkpoint, given: list[int], levels: int, nodes: int, masks: int = 0
) -> set[tuple[int, ...]]:
    """The paths of the `nodes` likeliest nodes; 4 of a level are continued by 8 candidates each, of
    a parallel draft all that may be among the likeliest."""
    level, every = {(): 0.0}, dict[tuple[int, ...], float]()
    vocab = draft.config.shape.vocab_size
    logits = cache(lambda read: transformer_reference.logits(draft, read).astype(float))
    for depth in range(levels):
        following = dict[tuple[int, ...], float]()
        for path, sure in level.items():
            read = *given, *(range(vocab, vocab + masks) if masks else path)
            row = logits(read)[depth - levels if masks else -1]
            best = np.argsort(-row, kind="stable")[:8]
            own = row[best] - np.log(np.exp(row[best]).sum())
            following |= {(*path, int(token)): sure + p for token, p in zip(best, own, strict=True)}
        every |= following
        level = dict(sorted(following.items(), key=lambda one: -one[1])[: nodes if masks else 4])
    return {path for path, _ in sorted(every.items(), key=lambda one: -one[1])[:nodes]}
