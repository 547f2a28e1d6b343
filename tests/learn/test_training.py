"""A whole distillation at the smallest size: samples and training."""

import time
from typing import Any

import numpy as np
import pytest

from mpissd.common.flags import unchecked
from mpissd.common.presets import ModelShape
from mpissd.engine.model.transformer.checkpoint import (
    BLOCK,
    dequantize,
    quantize,
    random_checkpoint,
)
from mpissd.engine.model.transformer.config import TransformerConfig
from tests.needs import module

module("safetensors.numpy", "safetensors")
torch = module("torch", "PyTorch")

from mpissd.learn.config import DistillConfig, form_of  # noqa: E402
from mpissd.learn.draft import ModelDraft, draft_config, frequent_tokens, fresh_layers, started  # noqa: E402
from mpissd.learn.evaluate import judge, summary  # noqa: E402
from mpissd.learn.llama import angles, blocks_of, load  # noqa: E402
from mpissd.learn.sample import ANSWER, USER, Sampler, Samples, blank  # noqa: E402
from mpissd.learn.source import TemplateParts  # noqa: E402
from mpissd.learn.train import learn  # noqa: E402

LENGTH, END = 40, 2
SHAPE = ModelShape("tiny", 4, 64, 4, 2, 16, 96, True, 128)
CONFIG = TransformerConfig(SHAPE, "llama", tied=True)
TEMPLATE = TemplateParts(before=(1, 5), between=(7, 1), again=(8,), end=END)


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    torch.manual_seed(0)
    target = load(random_checkpoint(CONFIG, 0), "cpu", torch.float32)
    blocks = blocks_of(CONFIG, torch.float32)
    return Sampler(target, blocks, angles(CONFIG, LENGTH + 2, "cpu"), False)


@pytest.fixture(scope="module")
def samples(sampler: Sampler) -> Samples:
    given = blank([(*TEMPLATE.before, 11), *[TEMPLATE.before] * 63], LENGTH, "cpu")
    return sampler.write(given, TEMPLATE, USER, (torch.ones(64), torch.ones(64)), keep=True)


def draft_of(sampler: Sampler, shape: str = "") -> ModelDraft:
    """A draft of the target's layers 0 and 3, or of a fresh shape."""
    ids = torch.from_numpy(frequent_tokens(np.arange(128, dtype=np.int32), 96, [END])).long()
    config = draft_config(CONFIG, form_of(shape) if shape else 2, len(ids))
    layers = [sampler.model.layers[n] for n in (0, 3)]
    weights = started(sampler.model, fresh_layers(config, "cpu", 0) if shape else layers, ids)
    return ModelDraft(config, weights, sampler.model, ids, sampler.blocks, sampler.table)


def test_a_conversation_follows_the_template(samples: Samples) -> None:
    rows, turns = samples.tokens.tolist(), 0
    assert rows[0][:3] == [1, 5, 11]
    for row, answered in zip(rows, samples.answered.tolist(), strict=True):
        at, is_user = 2, True
        while END in row[at:]:
            end = row.index(END, at)
            assert set(answered[at : end + 1]) == {not is_user}
            template = list(TEMPLATE.between if is_user else TEMPLATE.again)
            at, is_user = end + 1 + len(template), not is_user
            assert row[end + 1 : at] == template[: max(0, LENGTH - end - 1)]
            assert not any(answered[end + 1 : at])
            turns += 1
        assert all(flag is not is_user for flag in answered[at:])
    assert turns > 10  # the template was met


def test_at_temperature_0_each_answer_is_the_likeliest_of_a_whole_forward(sampler: Sampler) -> None:
    given = blank([(1, 5, 40, 2, 7, 1), (1, 5, 41, 42, 2, 7, 1)], 20, "cpu")
    cold = torch.zeros(2)
    found = sampler.write(given, TEMPLATE, ANSWER, (cold, cold))
    cos, sin = (part[:20] for part in sampler.table)
    hidden = sampler.blocks.hidden(sampler.model, found.tokens.long(), cos, sin)
    likeliest = sampler.blocks.product(hidden, sampler.model.head).argmax(-1)
    mask = found.answered[:, 1:]
    assert mask.sum() >= 20
    assert torch.equal(found.tokens[:, 1:][mask].long(), likeliest[:, :-1][mask])


def test_the_kept_states_are_those_of_a_whole_forward(sampler: Sampler, samples: Samples) -> None:
    """Training on them is training on the target, without its forward."""
    draft, some, found = draft_of(sampler), samples.take(slice(0, 8)), []
    for each in (some, some._replace(hidden=None)):
        torch.manual_seed(1)  # of the rows that are drawn
        found.append(draft.losses(each, 60))
    kept, anew = found
    assert all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(kept[:3], anew[:3], strict=True))
    best = sampler.pick(torch.tensor([[0.0, 2.0, 1.0]]), torch.zeros(1))
    assert best[0].item() == best[2].item() == 1


@pytest.mark.parametrize("shape", ["", "2x6x3x64"])
def test_training_raises_agreement(sampler: Sampler, samples: Samples, shape: str) -> None:
    draft, points, copies = draft_of(sampler, shape), list[dict[str, Any]](), list[ModelDraft]()
    before = summary(*judge(draft, samples, time.monotonic() + 60))
    settings = {"steps": 100, "batch": 16, "learning_rate": 5e-3, "save_every": 1e-3}
    plan = unchecked(DistillConfig, **settings)
    trained = learn(draft, [samples], plan, points.append, save=copies.append)
    after = summary(*judge(trained, samples, time.monotonic() + 60))
    assert after["alpha"] > before["alpha"] + 0.05
    assert after["cross_entropy"] < before["cross_entropy"]
    assert points[-1]["step"] == 100
    assert points[-1]["tv"] < 1 - before["alpha"]
    assert len(copies) > 3 and not copies[0].weights.head.requires_grad


def test_dithering_keeps_weights_on_the_grid_and_others_on_average() -> None:
    """Also with the largest dither, which float32 would round up to 1 next to a whole number."""
    made = np.random.default_rng(0).standard_normal((7, 96)).astype(np.float32)
    matrix, scales = quantize(made)
    highest = np.full(made.shape, np.nextafter(np.float32(1), 0), np.float32)
    again, same = quantize(dequantize(matrix, scales), highest)
    assert np.array_equal(again, matrix) and np.array_equal(same, scales)
    draws = np.random.default_rng(1)
    found = [quantize(made, draws.random(made.shape, np.float32)) for _ in range(400)]
    mean = np.mean([dequantize(*each) for each in found], axis=0)
    steps = np.repeat(scales.astype(np.float32), BLOCK, axis=1)
    largest = np.abs(matrix) == 127
    assert np.abs((mean - made) / steps)[~largest].max() < 0.13  # 5 sigma


def test_rounds_read_off_agreements_are_those_of_the_rule() -> None:
    """Two are accepted, and the next not. All four are. The end, with one accepted."""
    agrees = [rank == 0 for rank in (0, 0, 3, 0, 0, 0, 0, 1, 0)]
    told = summary([agrees], [0.5] * 9, [])
    assert told["greedy_agreement"] == pytest.approx(7 / 9, abs=1e-4) and told["alpha"] == 0.5
    assert told["by_lookahead"]["4"]["tokens_per_round"] == pytest.approx(9 / 3)
