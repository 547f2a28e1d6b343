"""Digests of weights' files: whole ones, and samples of large ones."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from mpissd.engine.model.transformer import checkpoint
from mpissd.engine.model.transformer.checkpoint import SAMPLED, WHOLE, digest

SIZE, HEAD, BLOCK = 100_000, 4096, 256


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that counts as large, as one of some GB does."""
    monkeypatch.setattr(checkpoint, "LARGEST", SIZE - 1)
    monkeypatch.setattr(checkpoint, "_HEAD", HEAD)
    monkeypatch.setattr(checkpoint, "_SAMPLE", BLOCK)
    path = tmp_path / "model.safetensors"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return path


def changed(path: Path, name: str, data: bytes) -> tuple[str, str]:
    other = path.with_name(name)
    other.write_bytes(data)
    return digest([other])


def test_a_small_file_counts_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    assert digest([path]) == (hashlib.sha256(b"weights").hexdigest(), WHOLE)


def test_a_large_file_counts_by_size_beginning_and_blocks(large: Path) -> None:
    found, covers = digest([large])
    data = large.read_bytes()
    assert covers == SAMPLED and found != hashlib.sha256(data).hexdigest()
    assert changed(large, "same", data) == (found, SAMPLED)
    others = {
        "longer": data + b"\0",
        "header": data[:100] + b"\xff\xff" + data[102:],
        "end": data[:-1] + bytes([data[-1] ^ 1]),
        "one layer in sixty": data[:50_000] + bytes(SIZE // 60) + data[50_000 + SIZE // 60 :],
        "another model": np.random.default_rng(1).bytes(SIZE),
    }
    digests = {name: changed(large, name, told)[0] for name, told in others.items()}
    assert len({found, *digests.values()}) == len(digests) + 1
    between = HEAD + BLOCK  # between the head and the first block: not covered
    assert changed(large, "between", data[:between] + b"\0\0" + data[between + 2 :])[0] == found
