"""Random weights: parts of the whole, the device's own parts, and the architectures of presets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpissd.common.errors import ConfigError
from mpissd.common.model_files import WHEELS
from mpissd.common.presets import PRESETS
from mpissd.engine.backend import weights
from mpissd.engine.model.transformer.checkpoint import tensors
from mpissd.engine.model.transformer.config import Llama3Scaling
from mpissd.engine.model.transformer.sources import config_of, open_checkpoint

TINY = "gen:layers=2,hidden=24,ffn=40,heads=4,kv_heads=2,head_dim=6,vocab=50"
SIZES = dict(tensors(config_of(TINY)))


@given(name=st.sampled_from(sorted(SIZES)), data=st.data())
def test_a_part_is_cut_from_the_whole(name: str, data: st.DataObject) -> None:
    checkpoint = open_checkpoint(TINY, seed=3)
    cuts = []
    for size in SIZES[name]:
        start = data.draw(st.integers(0, size - 1))
        cuts.append(slice(start, data.draw(st.integers(start + 1, size))))
    if len(cuts) == 1:
        whole, part = checkpoint.vector(name), checkpoint.vector(name, cuts[0])
    else:
        whole, part = checkpoint.matrix(name), checkpoint.matrix(name, cuts[0], cuts[1])
        spec = checkpoint.random_part(name, cuts[0], cuts[1])
        assert spec is not None
        assert np.array_equal(weights.part(spec).T, part)
    assert whole.shape == SIZES[name] and whole.dtype == np.float32
    assert np.array_equal(part, whole[tuple(cuts)])


def test_tensors_differ_from_each_other_and_between_seeds() -> None:
    seen = {
        open_checkpoint(TINY, seed).matrix(name, slice(0, 2), slice(0, 4)).tobytes()
        for seed in (0, 1)
        for name, size in SIZES.items()
        if len(size) == 2
    }
    assert len(seen) == 2 * sum(len(size) == 2 for size in SIZES.values())


def test_a_tied_head_is_the_embedding_and_depth_changes_no_layer() -> None:
    cut = open_checkpoint("1b@1L")
    assert cut.config.tied and cut.config.shape.num_layers == 1
    part = slice(5, 9), slice(0, 7)
    embedding = cut.matrix("model.embed_tokens.weight", *part)
    assert np.array_equal(cut.matrix("lm_head.weight", *part), embedding)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert np.array_equal(cut.matrix(name, *part), open_checkpoint("1b").matrix(name, *part))


def test_architectures_of_presets() -> None:
    big, small, qwen = config_of("70b"), config_of("1b"), config_of("qwen3-0.6b")
    assert (big.rope_theta, big.rope_scaling, big.tied) == (
        5e5,
        Llama3Scaling(8.0, 1.0, 4.0, 8192),
        False,
    )
    assert small.rope_scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192) and small.tied
    assert (qwen.qk_norm, qwen.norm_eps, qwen.rope_theta) == (True, 1e-6, 1e6)
    assert config_of("65b").rope_theta == 1e4


@pytest.mark.parametrize("name", ["opt-125m", "eagle:8b", "lookup"])
def test_architectures_that_have_no_transformer(name: str) -> None:
    with pytest.raises(ConfigError, match="not supported"):
        config_of(name)


def test_all_gated_presets_have_a_transformer() -> None:
    names = [name for name, shape in PRESETS.items() if shape.gated and name not in WHEELS]
    assert {config_of(name).family for name in names} == {"llama", "qwen3"}
