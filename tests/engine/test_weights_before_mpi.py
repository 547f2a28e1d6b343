"""Models with weights that cannot run are refused while a job is resolved, before MPI starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.config import parse_flags
from mpissd.common.errors import ConfigError
from mpissd.engine.job import resolve
from mpissd.engine.model.transformer.sources import open_checkpoint
from tests.weight_files import CONFIG, values_of, write_folder


def model(home: Path, name: str, tokens: str = "abc", **changes: Any) -> Path:
    """A folder with random weights, and a tokenizer that lists some tokens."""
    config = {**CONFIG, **changes}
    (home / "alone.json").write_text(json.dumps(config), "utf-8")
    values = values_of(open_checkpoint(str(home / "alone.json")))
    folder = write_folder(home / name, config, values)
    vocab = {token: number for number, token in enumerate(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}), "utf-8")
    return folder


def test_pairs_that_cannot_run(tmp_path: Path) -> None:
    def refused(
        told: str, target: Path, draft: Path, tp: int = 1, memory: int | None = None
    ) -> None:
        flags = {"mode": "sd", "workload": "text", "prompt_ids": "1,2"}
        config = parse_flags({**flags, "target": str(target), "draft": str(draft)})
        with pytest.raises(ConfigError) as error:
            resolve(config, tp, backend="numpy", memory_bytes=memory)
        assert told in str(error.value)

    target, draft = model(tmp_path, "target"), model(tmp_path, "draft", "xyz")
    refused("unequal vocabularies: token 0 is 'a' in target and 'x' in dra", target, draft)
    refused("tp=3 with forward=transformer: allowed: at most its 2 KV heads", target, target, 3)
    memory = "the device has 1.1 GB: use fewer layers (70b@8L) or"
    refused(memory, target, target, memory=1 << 30)
    draft = model(tmp_path, "draft")
    (draft / "model.safetensors").write_bytes(b"short")
    refused("model.safetensors' is damaged", target, draft)
    refused("model.safetensors' is damaged", draft, target)
