"""The transformer on a GPU: against the NumPy reference, and bit equality of every row."""

import os
from functools import cache
from typing import Any

import numpy as np
import pytest

from mpissd.common.errors import ConfigError
from mpissd.common.presets import files_of
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.cupy_ops.megakernel import MegakernelOps
from mpissd.engine.model.transformer.cupy_ops.ops import CupyOps
from mpissd.engine.model.transformer.sources import config_of, open_checkpoint
from tests import transformer_reference
from tests.gpu.agreement import relative_error
from tests.gpu.transformer_rig import (
    FAMILIES,
    Rig,
    check_lanes,
    check_rollback,
    check_rows_alone,
    check_tree,
    prompt,
    tiny,
    use_megakernel,
)
from tests.needs import lack
from tests.transformer_reference import ROUNDING, Kept, margins

pytestmark = pytest.mark.gpu
FIRST_CAPABILITY = 8.0
PROMPTS = [
    "What is the capital of France, and why is it famous?",
    "Write a haiku about the sea.",
    "Explain in two sentences what a hash table is.",
    "Give me a recipe for pancakes.",
]


@pytest.fixture(autouse=True)
def capable(backend: Any) -> None:
    """Skips on a GPU that the kernels do not support."""
    if float(backend.info.compute_capability) < FIRST_CAPABILITY:
        lack(f"compute capability {FIRST_CAPABILITY}")


@pytest.fixture(params=["one after another", "early", "whole", "whole, one after another"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether few rows are one kernel, and kernels may start before the one before them ends."""
    chosen = str(request.param)
    monkeypatch.setattr(CupyOps, "early", not chosen.endswith("one after another"))
    use_megakernel(monkeypatch, is_on=chosen.startswith("whole"))
    return chosen


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_is_the_references(backend: Any, family: str, way: str) -> None:
    rig = Rig(backend, tiny(family), capacity=1024)
    tokens = prompt(rig, 300)
    assert relative_error(rig.fill(tokens, 8), rig.reference(tokens)) < 5e-3


def test_layers_at_full_width_are_the_references(backend: Any) -> None:
    where = "llama-3.2-1b@2L"
    checkpoint: Any = Kept(open_checkpoint(where, 1), np.float16)
    rig = Rig(backend, config_of(where), checkpoint=checkpoint.inner, page=None, num_lanes=0)
    tokens = prompt(rig, 12)
    expected = transformer_reference.logits(checkpoint, tokens)
    assert relative_error(rig.fill(tokens, 5), expected) < 5e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_the_same_in_any_forward(backend: Any, family: str, way: str) -> None:
    rig = Rig(backend, tiny(family), max_rows=128, capacity=512, page=256)
    check_rows_alone(rig, 290, [2, 5, 9, 17, 24, 32, 100, 128])


WIDE = ["llama-3.2-1b@2L", "llama-3.1-8b@1L"]


@pytest.mark.parametrize("is_on", [False, True])
@pytest.mark.parametrize("where", WIDE)
def test_a_row_at_full_width_is_the_same_in_any_forward(
    backend: Any, where: str, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 24 rows are one kernel, up to 128 clusters', more those of single blocks."""
    use_megakernel(monkeypatch, is_on=is_on)
    rig = Rig(backend, config_of(where), max_rows=144, num_lanes=0, page=None)
    check_rows_alone(rig, 144, [*range(2, 33, 3), 32, 40, 64, 72, 128, 144])


@pytest.mark.parametrize("where", WIDE)
def test_the_megakernel_has_the_bits_of_separate_kernels(
    backend: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_megakernel(monkeypatch, is_on=True)
    found = []
    for most_rows in (0, 24):
        monkeypatch.setattr(MegakernelOps, "most_rows", most_rows)
        rig = Rig(backend, config_of(where), max_rows=32, num_lanes=0, page=None)
        ops = rig.stack.weights.ops
        assert isinstance(ops, MegakernelOps) and ops._takes(rig.stack.group, 5) == bool(most_rows)
        found.append(rig.fill(prompt(rig, 200), 5))
    assert np.array_equal(*found)


@pytest.mark.parametrize("trunk", [0, 3, 126, 250, 256])
def test_a_lane_is_a_trunk(backend: Any, trunk: int, way: str) -> None:
    rig = Rig(backend, tiny("llama"), max_rows=32, num_lanes=24, capacity=512, page=256)
    check_lanes(rig, trunk, 7)
    check_tree(rig, trunk)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rollback_leaves_nothing(backend: Any, family: str) -> None:
    check_rollback(Rig(backend, tiny(family), capacity=512), 400)


@pytest.mark.parametrize("where, rows", [("llama-3.1-8b", 8), ("llama-3.2-1b", 24)])
def test_long_contexts_at_full_size(backend: Any, where: str, rows: int) -> None:
    """Prefill to 8,000 tokens, then tokens one by one; a verification of them has the same bits."""
    config = config_of(where)
    rig = Rig(backend, config, max_rows=128, capacity=8192, slots=1, num_lanes=0, page=None)
    tokens = prompt(rig, 8000)
    logits = rig.fill(tokens, 128)[-1:]
    alone, grown = [], []
    for step in range(rows):
        grown.append(int(np.argmax(logits[-1])))
        position = len(tokens) + step
        logits = rig.forward(grown[-1:], trunk_rows(0, position, position + 1))
        alone.append(logits[0])
    assert np.isfinite(alone).all()
    at = len(tokens)
    found = rig.forward(grown, trunk_rows(0, at, at + rows))
    assert np.array_equal(found, np.stack(alone))


@cache
def smollm2() -> str:
    """The file of the real model, from the environment or its wheel; skips without one."""
    try:
        return str(files_of(os.environ.get("MPISSD_SMOLLM2", "smollm2")))
    except ConfigError as error:
        lack(str(error))


def test_the_real_models_greedy_tokens(backend: Any, way: str) -> None:
    """Each token is the reference's, or the reference's margin between both is below rounding."""
    from mpissd.engine.text.tokenizer import load_tokenizer

    where, length = smollm2(), 96
    checkpoint: Any = Kept(open_checkpoint(where), np.float16)
    rig = Rig(backend, checkpoint.config, max_rows=128, capacity=512, checkpoint=checkpoint.inner,
              num_lanes=0, page=None)  # fmt: skip
    tokenizer: Any = load_tokenizer(where)
    for text in PROMPTS:
        tokens = list(tokenizer.chat([{"role": "user", "content": text}]))
        start = len(tokens)
        logits = rig.fill(tokens, 128)
        while len(tokens) < start + length:
            tokens.append(int(np.argmax(logits[-1])))
            logits = rig.forward(tokens[-1:], trunk_rows(0, len(tokens) - 1, len(tokens)))
        chosen = tokens[start:]
        found = margins(checkpoint, tokens[:start], chosen)
        assert found.max() <= ROUNDING, tokenizer.decode(chosen)
