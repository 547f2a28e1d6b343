"""`distill` as a command, on two tiny layers: one process, two, bad input, a full disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.engine.model.transformer.sources import open_checkpoint
from tests.needs import module
from tests.text import tiny
from tests.weight_files import CONFIG, values_of, write_folder

module("torch", "PyTorch")
module("safetensors", "safetensors")
ROOT = Path(__file__).resolve().parents[2]
# Scale of the LM head. A sharper random target seldom ends a message: at 6 SMALL's samples have 121
# answered tokens, at 1.5 547. Drafts are counted, trained and judged on answers alone.
SHARP = 1.5
SMALL = (
    "--device=cpu --layers=0,1 --vocab=96 --sequences=128 --length=128 --batch=16 --batches=1 "
    "--seconds_sampling=60 --seconds_training=60 --held_out=32 --answer=16 --learning_rate=0.002 "
    "--seed=3"
).split()


def folder(home: Path, **tokenizer: Any) -> Path:
    """A target of four random layers with a tokenizer and a chat template."""
    config = {**CONFIG, "num_hidden_layers": 4, "vocab_size": len(tiny.tokens())}
    (home / "alone.json").write_text(json.dumps(config))
    values = values_of(open_checkpoint(str(home / "alone.json"), 0))
    values["lm_head.weight"] *= SHARP
    write_folder(home / "target", config, values)
    lines = [json.dumps({"prompt": text}) for text in ("hello w", "well", "he", "hell", "ll")]
    (home / "asked.jsonl").write_text("\n".join(lines))
    return tiny.write(home / "target", **tokenizer)


def distill(*flags: object, limit: float = 120, before: str = "") -> tuple[int, str]:
    """Runs `distill`; before: shell commands that come first."""
    return command("distill", *flags, limit=limit, before=before)


def command(*words: object, limit: float = 120, before: str = "") -> tuple[int, str]:
    """Runs a command of mpissd."""
    command = [sys.executable, "-m", "mpissd", *map(str, words)]
    line = f'{before} exec "$@"'
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    told = subprocess.run(
        ["bash", "-c", line, "bash", *command],
        **{"cwd": ROOT, "env": environment, "timeout": limit},  # type: ignore[call-overload]
        capture_output=True,
        text=True,
    )
    return told.returncode, told.stdout + told.stderr


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("target"))


def report_of(out: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((out / "report.json").read_text())
    return found


def timed(told: str) -> list[str]:
    """The lines of the log among those that a command wrote."""
    return [line for line in told.splitlines() if " s  " in line]


def curves_of(out: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "curves.jsonl").read_text().splitlines()]
    return [point for point in found if "held" in point]


def test_a_tiny_draft_improves_and_goes_on_from_its_files(target: Path, tmp_path: Path) -> None:
    out, more = tmp_path / "draft", tmp_path / "more"
    flags = [f"--target={target}", f"--prompts={target.parent / 'asked.jsonl'}", *SMALL]
    code, told = distill(*flags, f"--out={out}", "--steps=5")
    assert code == 0, told
    flags += [f"--start={out}", "--steps=150", "--optimizer=muon"]
    code, told = distill(*flags, f"--out={more}", limit=60)  # seconds, on a shared core too
    assert code == 0, told
    first, last = (curves_of(more)[n]["held"]["tv"] for n in (0, -1))
    assert last < first - 0.005, "no better on conversations that were held out"
    report = report_of(more)
    assert report["evaluation"]["asked"]["answers"] == 5  # type: ignore[index]
    log = (more / "log.txt").read_text().splitlines()
    assert log[1:] == timed(told) and f"--target={target} --out={more} " in log[0]
    assert f"  {report['sampling_tokens_per_s']} tokens/s together" in "\n".join(log)
    draft = open_checkpoint(str(more), target=str(target))
    assert draft.config.head_vocab == 96 and np.isfinite(draft.matrix("lm_head.weight")).all()
    card = (more / "README.md").read_text()
    assert "started as an earlier draft" in card


def test_a_draft_of_one_kind_of_prompts(target: Path, tmp_path: Path) -> None:
    """Trained on the target's answers to people's prompts instead of its own conversations."""
    lessons = tmp_path / "lessons.jsonl"
    texts = [f"{word} {n}" for word in ("hello", "well") for n in range(20)]
    lessons.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    out = tmp_path / "well"
    again = shutil.copy(lessons, tmp_path / "again.jsonl")
    alphas = []
    for steps in (1, 150):
        flags = [f"--target={target}", f"--on={lessons}", f"--out={out}", f"--prompts={again}"]
        code, told = distill(*flags, *SMALL, f"--steps={steps}", "--held_out=0")
        assert code == 0, told
        report = report_of(out)
        alphas.append(report["evaluation"]["again"]["alpha"])  # type: ignore[index]
    assert alphas[1] > alphas[0] + 0.02, alphas
    assert report["sampling_tokens_per_s"] is None, "prompts were read, no conversation sampled"
    assert report["sequences"] == 38 and 0 < report["answered"] <= 40 * 16 / 1e6  # type: ignore[operator]
    assert "answered the prompts of" in (out / "README.md").read_text()


def test_a_head_that_is_the_target_s_replaces_an_earlier_draft_s_own(
    target: Path, tmp_path: Path
) -> None:
    """The later draft's files hold no head, so that it must not be trained with another one."""
    import torch

    from mpissd.learn.config import DistillConfig
    from mpissd.learn.job import Distillation
    from mpissd.learn.source import read
    from mpissd.learn.train import Group

    out = tmp_path / "own"
    code, told = distill(f"--target={target}", f"--out={out}", "--steps=5", *SMALL)
    assert code == 0, told
    config = DistillConfig(target=str(target), start=str(out), head="target", device="cpu")
    job = Distillation(config, read(config), lambda text: None, Group())
    pair, _ = job._start(None)
    assert torch.equal(pair.draft.head, job.target.head[pair.head_ids])
    assert not pair.draft.head.requires_grad


def test_two_processes_and_several_shapes(target: Path, tmp_path: Path) -> None:
    shapes = "1x8x4x192,2x4x2x96"
    flags = [f"--target={target}", f"--out={tmp_path}", "--steps=20", f"--shapes={shapes}"]
    code, told = distill(*flags, *SMALL, "--processes=2", "--length=128,96")
    assert code == 0, told
    for shape in shapes.split(","):
        report = report_of(tmp_path / shape)
        assert report["processes"] == 2 and report["sequences"] == 128 - 4 + 170 - 6
        assert f"{report['sampling_tokens_per_s']} tokens/s together" in told
        assert report["steps"] == 20 and report["origin"] == "fresh layers"
        draft = open_checkpoint(str(tmp_path / shape), target=str(target))
        assert str(draft.config.shape.num_layers) == shape[0]


BAD: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "no template": ({"chat_template": None}, [], "has no chat template"),
    "no stop token": ({"eos_token": "<|pad|>"}, [], "does not end a message with a stop token"),
    "shape": ({}, ["--shapes=2x3x2x64"], "heads a multiple of KV heads"),
    "layer": ({}, ["--layers=0,9"], "layers=9: allowed: 0 to 3"),
    "width": ({}, ["--shapes=2x1x1x64"], "heads that are 32 wide together"),
    "both": ({}, ["--on={home}/asked.jsonl", "--prompts={home}/asked.jsonl"], "in both"),
    "no prompt": ({}, ["--prompts={home}/none.jsonl"], "no prompt: allowed: one or more"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, name: str) -> None:
    tokenizer, flags, expected = BAD[name]
    path = folder(tmp_path, **tokenizer)
    (tmp_path / "none.jsonl").write_text("")
    flags = [*SMALL, "--steps=1", *(each.format(home=tmp_path) for each in flags)]
    code, told = distill(f"--target={path}", f"--out={tmp_path / 'out'}", *flags)
    lines = [line for line in told.splitlines() if line.startswith("mpissd: ")]
    assert code == 2 and "Traceback" not in told, told
    assert len(lines) == 1 and expected.format(home=tmp_path) in lines[0], told
    assert not list(tmp_path.glob("out/*")), "half written"
    assert " s  " not in told, "refused before anything is sampled"


def test_a_tokenizer_of_another_model_and_a_draft_of_another_target_are_refused(
    target: Path, tmp_path: Path
) -> None:
    few = {**CONFIG, "vocab_size": 50}
    (tmp_path / "few.json").write_text(json.dumps(few))
    small = write_folder(
        tmp_path / "few", few, values_of(open_checkpoint(str(tmp_path / "few.json"), 0))
    )
    tiny.write(small)
    code, told = distill(f"--target={small}", f"--out={tmp_path / 'out'}", *SMALL)
    assert code == 2 and f"its tokenizer has {len(tiny.tokens())} tokens, its weights 50" in told
    draft = tmp_path / "draft"
    code, told = distill(f"--target={target}", f"--out={draft}", "--steps=1", *SMALL)
    assert code == 0, told
    changed = json.loads((draft / "config.json").read_text())
    changed["mpissd"]["target_sha256"] = "0" * 64
    (draft / "config.json").write_text(json.dumps(changed))
    code, told = distill(
        f"--target={target}", f"--start={draft}", f"--out={tmp_path / 'o'}", *SMALL
    )
    assert code == 2 and "sha256 000000000000; the target's is" in told
    code, told = distill(
        f"--target={target}", f"--start={target}", f"--out={tmp_path / 'o'}", *SMALL
    )
    assert code == 2 and "a draft that distill wrote" in told


def test_a_full_disk_is_one_line_and_the_last_good_files_stay(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    code, told = distill(f"--target={target}", f"--out={out}", "--steps=1", *SMALL)
    assert code == 0, told
    good = {path.name: path.read_bytes() for path in sorted(out.iterdir())}
    limit = "ulimit -f 16;"  # files of 16 KiB at most: the weights are larger
    flags = [f"--target={target}", f"--out={out}", "--save_every=1", *SMALL]
    code, told = distill(*flags, "--seconds_training=4", before=limit)
    assert code == 1 and "Traceback" not in told, told
    assert "not saved; the files of before are kept" in told.splitlines()[-1]
    assert told.count("not saved") > 1, "not while it trained"
    found = {path.name: path.read_bytes() for path in sorted(out.iterdir())}
    added = found["log.txt"].removeprefix(good["log.txt"]).decode()
    assert added.splitlines()[1:] == timed(told)
    assert {**found, "log.txt": good["log.txt"]} == good


def test_a_folder_that_cannot_be_made_is_one_line(target: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out, why in (("file", "File exists"), ("file/draft", "Not a directory")):
        code, told = distill(f"--target={target}", f"--out={tmp_path / out}", *SMALL)
        assert code == 2 and "Traceback" not in told, told
        line = f"out={tmp_path / out}: {why}: allowed: a folder that can be written"
        assert told.splitlines()[-1] == f"mpissd: {line}", told


def test_an_error_behind_the_samples_stands_in_the_log(target: Path, tmp_path: Path) -> None:
    """The refusal itself is the command's last line; the log says why it ends there."""
    flags = ["--length=48", "--sequences=1"]  # no answer within it
    code, told = distill(f"--target={target}", f"--out={tmp_path}", *SMALL, *flags)
    assert code == 2 and "ended no user's message" in told.splitlines()[-1], told
    assert "ended: ConfigError: length=48: " in (tmp_path / "log.txt").read_text().splitlines()[-1]
