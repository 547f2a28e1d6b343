"""Models with weights that cannot run are refused while a job is resolved, before MPI starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.config import parse_flags
from mpissd.common.errors import ConfigError
from mpissd.engine.job import resolve
from mpissd.engine.model.transformer.sources import open_checkpoint
from tests.weight_files import CONFIG, values_of, write_folder, write_gguf

ROOT = Path(__file__).resolve().parents[2]


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


def test_the_command_ends_with_one_line_and_code_2(tmp_path: Path) -> None:
    values = values_of(open_checkpoint(str(model(tmp_path, "whole") / "config.json")))
    path = write_gguf(tmp_path / "cut.gguf", values)
    path.write_bytes(path.read_bytes()[:-999])
    flags = ["--dry_run", "--mode=ar", f"--target={path}", "--forward=transformer"]
    done = subprocess.run(
        [sys.executable, "-m", "mpissd", "run", *flags, f"--out={tmp_path / 'out'}"],
        cwd=ROOT,
        env={**os.environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.count("\n") == 1 and "is cut off before the end of" in done.stderr
    assert not (tmp_path / "out").exists()
