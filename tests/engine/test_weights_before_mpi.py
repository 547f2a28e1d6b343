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
from mpissd.engine.job import Job, resolve
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


def job(tp: int, target: Path, draft: Path | str, memory: int | None = None, **flags: str) -> Job:
    told = {"mode": "sd", "workload": "text", "prompt_ids": "1,2", **flags}
    config = parse_flags({**told, "target": str(target), "draft": str(draft)})
    return resolve(config, tp, backend="numpy", memory_bytes=memory)


def refused(*args: Any, told: str, **flags: Any) -> None:
    with pytest.raises(ConfigError) as error:
        job(*args, **flags)
    assert told in str(error.value)


def test_pairs_that_cannot_run(tmp_path: Path) -> None:
    target, draft = model(tmp_path, "target"), model(tmp_path, "draft", "xyz")
    refused(1, target, draft, told="unequal vocabularies: token 0 is 'a' in target and 'x' in dra")
    refused(
        3, target, target, told="tp=3 with forward=transformer: allowed: at most its 2 KV heads"
    )
    refused(
        1,
        target,
        target,
        memory=1 << 30,
        told="the device has 1.1 GB: use fewer layers (70b@8L) or",
    )
    draft = model(tmp_path, "draft")
    (draft / "model.safetensors").write_bytes(b"short")
    refused(1, target, draft, told="model.safetensors' is damaged")
    refused(1, draft, target, told="model.safetensors' is damaged")
    mixture = {**CONFIG, "model_type": "mixtral", "num_local_experts": 8}
    (draft / "config.json").write_text(json.dumps(mixture), "utf-8")
    refused(1, target, draft, told="num_local_experts says mixture-of-experts")


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
