"""Drafts on hidden states: PyTorch and the engine compute the same, and training helps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.model.forwards import Places
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.sources import config_of, open_checkpoint
from tests.gpu.transformer_rig import state_steppers
from tests.needs import module
from tests.tiny_pair import KINDS, tiny_pair

torch = module("torch", "PyTorch")
module("safetensors", "safetensors")

from mpissd.learn import export  # noqa: E402
from mpissd.learn.config import DistillConfig  # noqa: E402
from mpissd.learn.draft import StateDraft, fresh_states, state_config  # noqa: E402
from mpissd.learn.evaluate import chain_rounds  # noqa: E402
from mpissd.learn.llama import angles, blocks_of, load  # noqa: E402
from mpissd.learn.sample import Sampler, Samples  # noqa: E402
from mpissd.learn.train import learn  # noqa: E402
from tests.learn.test_command import SMALL, distill, folder, report_of  # noqa: E402
from tests.learn.test_training import CONFIG, sampler, samples  # noqa: E402

__all__ = ["sampler", "samples"]  # fixtures

V, HEADS, LENGTH = 96, 3, 30
TOKENS = (np.arange(LENGTH) ** 2 % V).astype(np.int32)


def stored(target: Path, kind: str, home: Path) -> Path:
    """Writes an untrained draft as distill does: int8, the target's own head for even tokens."""
    ids = np.arange(0, V, 2)
    config = state_config(config_of(str(target)), kind, HEADS, len(ids))
    weights = fresh_states(config, 1, 1.3)
    noisy = {n: (w + 0.1 * torch.randn_like(w)).numpy() for n, w in weights.items()}
    export.save(home, config, export.quantized(noisy, ids), {"head": "target"})
    return home


def in_torch(target: Path, draft: Path) -> StateDraft:
    """Reads a stored draft into PyTorch."""
    checkpoint = open_checkpoint(str(draft), target=str(target))
    model = load(open_checkpoint(str(target)), "cpu", torch.float32)
    config, names = checkpoint.config, fresh_states(checkpoint.config, 0, 1.0)
    weights = {name: torch.from_numpy(np.array(checkpoint.read(name))) for name in names}
    ids, blocks = torch.from_numpy(checkpoint.head_ids).long(), blocks_of(config, torch.float32)
    model.head[ids] = torch.from_numpy(checkpoint.read("lm_head.weight"))  # as it is stored
    table = angles(config, LENGTH + HEADS, "cpu")
    return StateDraft(config, weights, model, ids, blocks, table)


class Engine:
    """The engine's two models on one cache of one sequence."""

    def __init__(self, target: Path, draft: Path) -> None:
        told = str(target), str(draft), LENGTH + HEADS
        self.target, self.draft = state_steppers(NumpyBackend(), *told)

    def verify(self, stop: int) -> Any:
        """Computes the target over all positions before `stop`; returns its states after them."""
        self.target.upload(stop, TOKENS[:stop], trunk_rows(0, 0, stop))
        self.target.launch()
        return torch.from_numpy(self.target.stack.states[0, 1 : stop + 1].copy())[None]  # type: ignore[attr-defined]

    def logits(self, tokens: Any, places: Places, heads: int = 1) -> Any:
        self.draft.upload(len(tokens), tokens, places)
        self.draft.launch()
        self.draft.results()
        return self.draft.logits(range(heads * len(tokens)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_computes_what_was_trained(tmp_path: Path, kind: str) -> None:
    target = tiny_pair(tmp_path / "pair", vocab=V).target
    draft = stored(target, kind, tmp_path / "draft")
    engine, module_ = Engine(target, draft), in_torch(target, draft)
    hidden, last = engine.verify(LENGTH), LENGTH - HEADS - 1
    tokens = torch.from_numpy(TOKENS).long()[None]
    found = [module_.logits(s)[0].numpy() for s in module_.steps(tokens, hidden, HEADS)]
    trunk = trunk_rows(0, 0, last + 1)
    if kind == "medusa":
        got = engine.logits(TOKENS[: last + 1], trunk, HEADS).reshape(HEADS, last + 1, -1)
        np.testing.assert_allclose(got, np.stack(found)[:, : last + 1], atol=2e-3, rtol=2e-3)
        return
    got = engine.logits(TOKENS[: last + 1], trunk)
    np.testing.assert_allclose(got, found[0][: last + 1], atol=2e-3, rtol=2e-3)
    for step in range(1, HEADS):
        place = trunk_rows(0, last + step, last + step + 1)
        place = replace(place, trunks=np.array([last], np.int32))
        got = engine.logits(TOKENS[last + step : last + step + 1], place)
        np.testing.assert_allclose(got[0], found[step][last], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_training_brings_it_closer(sampler: Sampler, samples: Samples, kind: str) -> None:
    config, ids = state_config(CONFIG, kind, HEADS, V), torch.arange(V)
    weights = {n: w.requires_grad_(True) for n, w in fresh_states(config, 1, 1.0).items()}
    table = angles(CONFIG, LENGTH + 40, "cpu")
    draft = StateDraft(config, weights, sampler.model, ids, sampler.blocks, table, ahead=HEADS)
    held, others = samples.take(slice(0, 16)), samples.take(slice(16, 64))
    torch.manual_seed(0)
    before = float(draft.losses(held, 0)[1].detach())
    plan = DistillConfig(target="x", steps=40, batch=16, learning_rate=5e-3)
    learn(draft, [others], plan, lambda point: None)
    after = float(draft.losses(held, 0)[1].detach())
    assert after < before - 0.003, "total variation"


def test_three_kinds_are_made_of_the_same_samples(tmp_path: Path) -> None:
    target, out = folder(tmp_path), tmp_path / "out"
    flags = [f"--target={target}", f"--prompts={tmp_path / 'asked.jsonl'}", *SMALL, f"--out={out}"]
    code, told = distill(*flags, "--kinds=" + ",".join(KINDS), "--heads=2", "--steps=2")
    assert code == 0, told
    for kind in KINDS:
        report = report_of(out / kind)
        assert report["kind"] == kind and report["evaluation"]["asked"]["answers"] == 5  # type: ignore[index]
        draft = open_checkpoint(str(out / kind), target=str(target))
        assert draft.config.kind == kind and draft.config.head_vocab == 96
        assert json.loads((out / kind / "config.json").read_text())["mpissd"]["head"] == "target"


def test_a_round_ends_at_the_first_step_that_differs() -> None:
    yes, no = True, False
    answer = [[yes, no, yes], [no, yes, yes], [yes, yes, yes], [yes, yes], [yes], []]
    assert chain_rounds(answer, 3) == [2, 4] and chain_rounds(answer, 1) == [2, 2, 2]
    assert sum(chain_rounds(answer, 2)) == len(answer)
