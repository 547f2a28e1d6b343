"""Random weights as a hash of (key, row, column): any part equals the same part of the whole."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpissd.engine.model.transformer.checkpoint import tensors
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
    whole, part = checkpoint.read(name), checkpoint.read(name, *cuts)
    if len(cuts) == 2:
        spec = checkpoint.part(name, *cuts).recipe()
        assert spec is not None
        assert np.array_equal(spec.values().T, part)
    assert whole.shape == SIZES[name] and whole.dtype == np.float32
    assert np.array_equal(part, whole[tuple(cuts)])


def test_a_tied_head_is_the_embedding_and_depth_changes_no_layer() -> None:
    cut = open_checkpoint("1b@1L")
    assert cut.config.tied and cut.config.shape.num_layers == 1
    part = slice(5, 9), slice(0, 7)
    embedding = cut.read("model.embed_tokens.weight", *part)
    assert np.array_equal(cut.read("lm_head.weight", *part), embedding)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert np.array_equal(cut.read(name, *part), open_checkpoint("1b").read(name, *part))
