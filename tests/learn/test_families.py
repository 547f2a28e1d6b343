"""Targets of each architecture: the forward in PyTorch, and the drafts that are made of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.engine.model.transformer.checkpoint import random_checkpoint
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.sources import open_checkpoint
from tests.gpu.transformer_rig import tiny
from tests.needs import module
from tests.transformer_reference import logits
from tests.weight_files import random_folder

module("safetensors.numpy", "safetensors")
torch = module("torch", "PyTorch")

from mpissd.learn import export  # noqa: E402
from mpissd.learn.config import form_of  # noqa: E402
from mpissd.learn.draft import ModelDraft, draft_config, fresh_layers, started, state_config  # noqa: E402
from mpissd.learn.job import rounded  # noqa: E402
from mpissd.learn.llama import Llama, angles, blocks_of, load, mapped, named  # noqa: E402
from mpissd.learn.sample import Samples  # noqa: E402

TOKENS = [3, 17, 4, 4, 41, 8, 29, 30, 2, 11]


def torch_logits(model: Llama, config: TransformerConfig) -> Any:
    cos, sin = angles(config, len(TOKENS), "cpu")
    blocks = blocks_of(config, torch.float32)
    with torch.no_grad():
        hidden = blocks.hidden(model, torch.tensor([TOKENS]), cos, sin)
        return blocks.product(hidden, model.head)[0].numpy()


@pytest.mark.parametrize("family", ["llama", "smollm2", "qwen2", "qwen3"])
def test_the_forward_is_that_of_the_oracle(family: str) -> None:
    source = random_checkpoint(tiny(family), 0)
    found = torch_logits(load(source, "cpu", torch.float32), source.config)
    assert np.abs(found - logits(source, TOKENS)).max() < 1e-4


def target_of(home: Path, family: str) -> Path:
    return random_folder(home / "target", model_type=family, num_hidden_layers=3)[0]


@pytest.mark.parametrize(
    ("family", "optimizer"), [("llama", "adamw"), ("qwen2", "adamw"), ("qwen3", "muon")]
)
def test_a_draft_of_layers_trains_and_reloads(family: str, optimizer: str, tmp_path: Path) -> None:
    """Every tensor of it is trained, biases and the norms of q and k included."""
    where = target_of(tmp_path, family)
    source = open_checkpoint(str(where))
    target, ids = load(source, "cpu", torch.float32), np.arange(2, 42, dtype=np.int32)
    config = draft_config(source.config, 2, len(ids))
    head_ids, blocks = torch.from_numpy(ids).long(), blocks_of(source.config, torch.float32)
    table = angles(source.config, len(TOKENS), "cpu")
    draft = started(target, [target.layers[0], target.layers[2]], head_ids)
    before = {name: tensor.detach().clone() for name, tensor in named(draft, config).items()}
    learner = ModelDraft(config, draft, target, head_ids, blocks, table)
    tokens = torch.tensor([TOKENS])
    samples = Samples(tokens.int(), torch.ones_like(tokens).bool())
    steps, losses = learner.optimizer(optimizer), []
    for _ in range(30):
        loss = learner.losses(samples, len(TOKENS))[0]
        for tensor in learner.trained:
            tensor.grad = None
        loss.backward()
        steps.step(1e-2)
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.1
    arrays = {name: tensor.detach() for name, tensor in named(draft, config).items()}
    assert all(not torch.equal(before[name], tensor) for name, tensor in arrays.items())
    assert any(name.endswith("q_proj.bias") for name in arrays) == (family == "qwen2")
    assert any(name.endswith("k_norm.weight") for name in arrays) == (family == "qwen3")
    stored = export.quantized({name: t.numpy() for name, t in arrays.items()}, ids)
    export.save(tmp_path / "draft", config, stored, {"target": "target"})
    found = open_checkpoint(str(tmp_path / "draft"), target=str(where))
    assert found.config.family == family and found.config.qkv_bias == (family == "qwen2")
    expected = torch_logits(mapped(draft, lambda t: rounded(t.detach())), config)
    assert np.abs(logits(found, TOKENS) - expected).max() < 1e-4


def test_fresh_drafts_are_llamas_whatever_the_target_is(tmp_path: Path) -> None:
    source = open_checkpoint(str(target_of(tmp_path, "qwen2")))
    ids = torch.arange(40)
    own = draft_config(source.config, form_of("1x4x2x64"), len(ids))
    target, layers = load(source, "cpu", torch.float32), fresh_layers(own, "cpu", 0)
    assert np.isfinite(torch_logits(started(target, layers, ids), own)).all()
    for config in (own, state_config(source.config, "eagle", 4, len(ids))):
        assert config.family == "llama" and not (config.qkv_bias or config.qk_norm)
        assert config.norm_eps == source.config.norm_eps
