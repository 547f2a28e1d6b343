"""Parallel drafts: mask tokens in training, in files and in the evaluation."""

import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.common.flags import unchecked
from mpissd.engine.model.transformer.checkpoint import MASKS
from mpissd.engine.model.transformer.sources import open_checkpoint
from mpissd.engine.model.transformer.trees import CHOICES
from tests.needs import module

torch = module("torch", "PyTorch")
module("safetensors", "safetensors")

from mpissd.learn.config import DistillConfig  # noqa: E402
from mpissd.learn.draft import ModelDraft, draft_config, first_masks, frequent_tokens, started  # noqa: E402
from mpissd.learn.evaluate import TREES, judge_masks, parallel_summary  # noqa: E402
from mpissd.learn.sample import ANSWER, Sampler, Samples, blank  # noqa: E402
from mpissd.learn.train import learn  # noqa: E402
from tests.learn.test_command import SMALL, curves_of, distill, folder, report_of  # noqa: E402
from tests.learn.test_training import CONFIG, LENGTH, TEMPLATE, sampler  # noqa: E402

__all__ = ["sampler"]  # a fixture

J = 2


@pytest.fixture(scope="module")
def samples(sampler: Sampler) -> Samples:
    """Answers to 64 prompts of one or two tokens, at temperature 0, so that a draft can know them;
    every fourth ends soon, with what a user might write after it."""
    starts = [(1, 5, *range(40, 40 + n % 2 + 1), 50 + n, 2, 7, 1) for n in range(64)]
    given = blank(starts, LENGTH, "cpu")
    written = sampler.write(given, TEMPLATE, ANSWER, (torch.ones(64), torch.zeros(64)), keep=True)
    written.answered[::4, 20:] = False
    return written


def draft_of(sampler: Sampler, samples: Samples, *layers: int, head: int = 96) -> ModelDraft:
    counts = torch.bincount(samples.tokens[samples.answered], minlength=128)
    ids = torch.from_numpy(frequent_tokens(counts.numpy(), head, [])).long()
    config = replace(draft_config(CONFIG, len(layers), head), masks=J)
    weights = started(sampler.model, [sampler.model.layers[n] for n in layers], ids)
    masks = first_masks(sampler.model.embedding, J, 0)
    shared = sampler.model, ids, sampler.blocks, sampler.table
    return ModelDraft(config, weights, *shared, masks=masks, anchors=8)


def plainly(draft: ModelDraft, tokens: list[int]) -> Any:
    """States of one sequence, in which V + j is mask token j and the order alone decides."""
    table = torch.cat([draft.weights.embedding, draft.masks])
    weights = draft.weights._replace(embedding=table)
    with torch.no_grad():
        read = torch.tensor([tokens]), *draft.angles(len(tokens))
        return draft.own_blocks.hidden(weights, *read)[0]


def test_masks_see_their_own_past_and_change_no_row(sampler: Sampler, samples: Samples) -> None:
    draft, tokens = draft_of(sampler, samples, 0, 3), samples.tokens[:3].long()
    anchors = torch.tensor([[4, 9, 9, 30], [0, 1, LENGTH - 1, 2], [7, 8, 6, 5]])
    read = draft.weights, tokens, *draft.angles(LENGTH)
    with torch.no_grad():
        alone = draft.own_blocks.hidden(*read)
        found = draft.own_blocks.hidden(*read, draft.mask_rows(anchors, LENGTH))
    assert torch.allclose(found[:, :LENGTH], alone, atol=1e-5)
    masked = found[:, LENGTH:].unflatten(1, (4, J))
    for row, number in product(range(3), range(4)):
        last = int(anchors[row, number])
        want = plainly(draft, [*tokens[row, : last + 1].tolist(), 128, 129])[-J:]
        assert torch.allclose(masked[row, number], want, atol=1e-4)


def test_the_losses_are_those_of_the_definition(sampler: Sampler, samples: Samples) -> None:
    """Of all rows: total variation at each depth after each answered position."""
    draft, some = draft_of(sampler, samples, 0, 3), samples.take(slice(0, 6))
    draft = replace(draft, anchors=LENGTH)
    sums, counts = np.zeros(J + 1), np.zeros(J + 1)
    for row, at in product(range(6), range(LENGTH - 1)):
        states = plainly(draft, [*some.tokens[row, : at + 1].tolist(), 128, 129])[at:]
        for depth, state in enumerate(states[: LENGTH - 1 - at]):
            if some.answered[row, at + 1 : at + depth + 2].all():
                p = (some.hidden[row, at + depth] @ sampler.model.head.T).softmax(-1)
                q = (state @ draft.weights.head.T).softmax(-1).detach()
                sums[depth] += 1 - float(torch.minimum(p[draft.head_ids], q).sum())
                counts[depth] += 1
    found = draft.losses(some, 6 * LENGTH)
    told = found.told()
    # The rows of a fifth of the masks are left out, those without an answer first.
    assert counts[1:].sum() < 0.8 * 6 * (LENGTH - 1) * J
    np.testing.assert_allclose(told["tv_by_depth"], sums / counts, atol=2e-4)
    shares = counts * 0.85 ** np.arange(J + 1)
    assert told["tv"] == pytest.approx((shares * sums / counts).sum() / shares.sum(), abs=2e-4)
    found.tv.backward()
    assert float(draft.masks.grad.abs().sum(-1).min()) > 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_depth_comes_closer(sampler: Sampler, samples: Samples, optimizer: str) -> None:
    draft, points = draft_of(sampler, samples, 0, 3), list[dict[str, Any]]()
    settings = {"steps": 60, "batch": 16, "learning_rate": 5e-3, "optimizer": optimizer}
    first = draft.losses(samples, 64 * LENGTH).by_depth[0]
    plan = unchecked(DistillConfig, **settings, variation_from=0.3)
    made = learn(draft, [samples], plan, points.append)
    assert (made.losses(samples, 64 * LENGTH).by_depth[0] < first - 0.05).all()
    assert len(points[-1]["agreement_by_depth"]) == J + 1 and not made.masks.requires_grad


def test_the_evaluation_counts_what_rounds_would_accept(sampler: Sampler, samples: Samples) -> None:
    """Against all paths of a level's likeliest tokens, sorted by their products, in each round's
    own forward."""
    draft, some = draft_of(sampler, samples, 0, 1, 2, 3, head=16), samples.take(slice(0, 8))
    learn(draft, [samples], unchecked(DistillConfig, steps=20, batch=16), lambda point: None)
    judged = list(judge_masks(draft, some, time.monotonic() + 60))
    ids, sizes = draft.head_ids.tolist(), [*TREES, *(-k for k in range(1, J + 2))]
    rounds: dict[int, list[int]] = {size: [] for size in sizes}
    for tokens, answered in zip(some.tokens.tolist(), some.answered, strict=True):
        first, *_, last = answered.nonzero()[:, 0].tolist()
        for size in sizes:
            at, stop = first, last + 1
            while at < stop:
                states = plainly(draft, [*tokens[:at], 128, 129])[at - 1 :]
                q = (states @ draft.weights.head.T).softmax(-1).detach().double().numpy()
                k = accepted(q, [ids.index(t) if t in ids else -1 for t in tokens[at:stop]], size)
                rounds[size].append(min(k + 1, stop - at))
                at += k + 1
    told = parallel_summary(judged)
    means = {size: round(float(np.mean(found)), 4) for size, found in rounds.items()}
    assert told["trees"] == {str(size): means[size] for size in TREES}
    assert told["chains"] == {str(k): means[-k] for k in range(1, J + 2)}
    assert told["trees"]["31"] > told["trees"]["7"] > 1.2


def accepted(q: Any, path: list[int], size: int) -> int:
    """Accepted tokens of a chain of −size likeliest tokens, or of a tree of `size` nodes."""
    if size < 0:
        best = q.argmax(-1)[:-size]
        return next((n for n, t in enumerate(best) if path[n : n + 1] != [t]), len(best))
    last = nodes = [(1.0, ())]
    for level in q:
        kept = np.argsort(-level)[:CHOICES]
        shares = level[kept] / level[kept].sum()
        last = [(x * p, (*node, t)) for x, node in last for t, p in zip(kept, shares, strict=True)]
        nodes = nodes + last
    tree = {node for _, node in sorted(nodes, key=lambda each: -each[0])[: size + 1]}
    return sum(tuple(path[:n]) in tree for n in range(1, min(J + 1, len(path)) + 1))


def test_a_parallel_draft_is_made_and_trained_further(tmp_path: Path) -> None:
    target, one, two = folder(tmp_path), tmp_path / "one", tmp_path / "two"
    flags = [f"--target={target}", f"--prompts={tmp_path / 'asked.jsonl'}", *SMALL, "--vocab=64"]
    flags += ["--head=target", "--anchors=8"]
    code, told = distill(*flags, f"--out={one}", "--parallel=2", "--steps=20")
    assert code == 0, told
    first, judged = open_checkpoint(str(one), 0, str(target)), report_of(one)["evaluation"]["asked"]  # type: ignore[index]
    assert first.config.masks == 2 and judged["by_lookahead"]["7"]
    assert len(judged["parallel"]["agreement_by_depth"]) == 3
    tree = judged["parallel"]["trees"]["15"]
    assert f"| tree of 15 | {tree} |" in (one / "README.md").read_text()
    assert len(curves_of(one)[-1]["tv_by_depth"]) == 3
    # Another token set would be the samples' own, and other layers the target's.
    again = f"--from_draft={one}"
    more = "--parallel=3 --steps=1 --learning_rate=1e-9 --seed=9 --processes=2 --head=own".split()
    code, told = distill(*flags, again, f"--out={two}", *more)
    assert code == 0, told
    second = open_checkpoint(str(two), 0, str(target))
    assert np.array_equal(first.head_ids, second.head_ids) and second.shares_head
    assert second.config.masks == 3
    assert np.array_equal(second.read(MASKS)[:2], first.read(MASKS))
    name = "model.layers.1.mlp.up_proj.weight"
    np.testing.assert_allclose(second.read(name), first.read(name), atol=1e-6)
