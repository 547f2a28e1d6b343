"""`distill` as a command, on two tiny layers: one process, two, bad input, a full disk."""

import io
import json
import os
import resource
import shutil
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.__main__ import main
from mpissd.engine.model.transformer.sources import open_checkpoint
from tests.needs import module
from tests.text import tiny
from tests.weight_files import CONFIG, random_folder, write_folder

module("torch", "PyTorch")
module("safetensors", "safetensors")
# Scale of the LM head. A sharper random target seldom ends a message: at 6 SMALL's samples have 121
# answered tokens, at 1.5 547. Drafts are counted, trained and judged only on answers.
SHARP = 1.5
SMALL = (
    "--device=cpu --layers=0,1 --vocab=96 --sequences=128 --length=128 --batch=8 --batches=1 "
    "--seconds_sampling=60 --seconds_training=60 --held_out=8 --answer=16 --learning_rate=0.002 "
    "--seed=3"
).split()


def folder(home: Path, **tokenizer: Any) -> Path:
    """A target of four random layers with a tokenizer and a chat template."""
    config = {"num_hidden_layers": 4, "vocab_size": len(tiny.tokens())}
    _, values = random_folder(home / "target", **config)
    values["lm_head.weight"] *= SHARP
    write_folder(home / "target", {**CONFIG, **config}, values)
    lines = [json.dumps({"prompt": text}) for text in ("hello w", "well", "he", "hell", "ll")]
    (home / "asked.jsonl").write_text("\n".join(lines))
    return tiny.write(home / "target", **tokenizer)


def distill(*flags: object) -> tuple[int, str]:
    """Runs `distill` in this process; returns its exit code and its output."""
    with io.StringIO() as out, redirect_stdout(out), redirect_stderr(out):
        code = main(["distill", *map(str, flags)])
        return code, out.getvalue()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("target"))


def report_of(out: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((out / "report.json").read_text())
    return found


def curves_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "curves.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A trained draft's folder, and the command's output."""
    out = tmp_path_factory.mktemp("draft")
    prompts = f"--prompts={target.parent / 'asked.jsonl'}"
    flags = ("--steps=20", "--optimizer=muon", "--head=target", "--held_out=32")
    code, told = distill(f"--target={target}", f"--out={out}", prompts, *SMALL, *flags)
    assert code == 0, told
    return out, told


def test_a_tiny_draft_and_what_is_written_of_it(target: Path, draft: tuple[Path, str]) -> None:
    out, told = draft
    report = report_of(out)
    assert report["steps"] == 20 == curves_of(out)[-1]["step"]
    assert report["evaluation"]["asked"]["answers"] == 5  # type: ignore[index]
    assert f"  {report['sampling_tokens_per_s']} tokens/s together" in told
    found = open_checkpoint(str(out), target=str(target))
    assert found.config.head_vocab == 96 and np.isfinite(found.read("lm_head.weight")).all()
    assert "kept the target's layers 0,1" in (out / "NOTICE").read_text()


def test_a_draft_of_one_kind_of_prompts(target: Path, tmp_path: Path) -> None:
    """Trained on the target's answers to people's prompts instead of its own conversations."""
    training = tmp_path / "training.jsonl"
    texts = [f"{word} {n}" for word in ("hello", "well") for n in range(20)]
    training.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    out = tmp_path / "well"
    again = shutil.copy(training, tmp_path / "again.jsonl")
    alphas = []
    for steps in (1, 100):
        flags = [f"--target={target}", f"--on={training}", f"--out={out}", f"--prompts={again}"]
        code, told = distill(*flags, *SMALL, f"--steps={steps}", "--held_out=0")
        assert code == 0, told
        report = report_of(out)
        alphas.append(report["evaluation"]["again"]["alpha"])  # type: ignore[index]
    assert alphas[1] > alphas[0] + 0.02, alphas
    assert report["sampling_tokens_per_s"] is None, "prompts were read, no conversation sampled"
    assert report["sequences"] == 40 and 0 < report["answered"] <= 40 * 16 / 1e6  # type: ignore[operator]


def test_two_processes_and_several_shapes(target: Path, tmp_path: Path) -> None:
    shapes = "1x8x4x192,2x4x2x96"
    flags = [f"--target={target}", f"--out={tmp_path}", f"--shapes={shapes}", *SMALL]
    assert distill(*flags, "--processes=2", "--steps=3", "--held_out=0", "--parallel=1")[0] == 0
    for shape in shapes.split(","):
        report = report_of(tmp_path / shape)
        assert report["processes"] == 2 and report["sequences"] == 2 * 128
        assert report["steps"] == 3 and report["origin"] == "fresh layers"
        found = open_checkpoint(str(tmp_path / shape), target=str(target))
        assert str(found.config.shape.num_layers) == shape[0] and found.config.masks == 1


def test_too_little_time(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty steps of the whole batch would take 16 s; only --seconds_training is that short."""
    from mpissd.learn.draft import ModelDraft

    sizes, losses = list[int](), ModelDraft.losses

    def slow(self: ModelDraft, samples: Any, rows: int) -> Any:
        sizes.append(len(samples.tokens))
        time.sleep(0.1)
        return losses(self, samples, rows)

    monkeypatch.setattr(ModelDraft, "losses", slow)
    flags = "--batch=64 --seconds_training=1 --held_out=0".split()
    code, told = distill(f"--target={target}", f"--out={tmp_path}", *SMALL, *flags)
    assert code == 0 and max(sizes) == 8, told
    assert 1 <= report_of(tmp_path)["steps"] == len(sizes), sizes  # type: ignore[operator]


BAD: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "no template": ({"chat_template": None}, [], "has no chat template"),
    "no stop token": ({"eos_token": "<|pad|>"}, [], "does not end a message with a stop token"),
    "shape": ({}, ["--shapes=2x3x2x64"], "heads a multiple of KV heads"),
    "layer": ({}, ["--layers=0,9"], "layers=9: allowed: 0 to 3"),
    "width": ({}, ["--shapes=2x1x1x64"], "heads that are 32 wide together"),
    "both": ({}, ["--on={home}/asked.jsonl", "--prompts={home}/asked.jsonl"], "in both"),
    "no prompt": ({}, ["--prompts={home}/none.jsonl"], "holds no prompt"),
    "kinds": ({}, ["--kinds=eagle,hydra"], "kinds=eagle,hydra: allowed: medusa, mlp, eagle"),
    "kinds and shapes": ({}, ["--kinds=mlp", "--shapes=1x8x4x192"], "shapes and kinds: allowed"),
    "parallel and kinds": ({}, ["--parallel=1", "--kinds=mlp"], "parallel and kinds: allowed"),
    "from and kinds": ({}, ["--from_draft=x", "--kinds=mlp"], "from_draft and kinds: allowed"),
    "from and shapes": ({}, ["--from_draft=x", "--shapes=1x8x4x192"], "from_draft and shapes: al"),
    "from": ({}, ["--from_draft={home}/target"], "a draft that distill made and that reads tokens"),
    "masks": ({}, ["--parallel=64"], "parallel=64: allowed: a whole number in [0, 63]"),
    "layers": ({}, ["--layers=1,0"], "layers=1,0: allowed: rising layer numbers"),
    "no folder": ({}, ["--out={home}/none.jsonl/draft"], "is not a folder"),
    "tokenizer": ({}, ["--target={home}/few"], "its weights 50: allowed: the tokenizer of"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, name: str) -> None:
    tokenizer, flags, expected = BAD[name]
    path = folder(tmp_path, **tokenizer)
    (tmp_path / "none.jsonl").write_text("")
    if name == "tokenizer":
        tiny.write(random_folder(tmp_path / "few", vocab_size=50)[0])
    given = [f"--target={path}", f"--out={tmp_path / 'out'}", *SMALL, "--steps=1"]
    code, printed = distill(*given, *(word.format(home=tmp_path) for word in flags))
    lines = [line for line in printed.splitlines() if line.startswith("mpissd: ")]
    assert code == 2 and len(lines) == 1 and expected in lines[0], printed
    assert not list(tmp_path.glob("out/*")), "half written"
    assert " s  " not in printed, "refused before anything is sampled"


def test_full_disks_keep_good_files(target: Path, draft: tuple[Path, str], tmp_path: Path) -> None:
    out = Path(shutil.copytree(draft[0], tmp_path / "draft"))
    good = {path.name: path.read_bytes() for path in sorted(out.iterdir())}
    flags = [f"--target={target}", f"--out={out}", "--save_every=1", "--seconds_training=3"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, limits[1]))  # the weights are larger
    try:
        code, told = distill(*SMALL, *flags)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1 and "Traceback" not in told, told
    assert "not saved; the files of before are kept" in told.splitlines()[-1]
    assert told.count("not saved") > 1, "not while it trained"
    assert {path.name: path.read_bytes() for path in sorted(out.iterdir())} == good


@pytest.mark.parametrize("flags", [["--length=60", "--seed=5"], ["--sequences=16"]], ids=str)
def test_a_target_without_ends_is_refused(target: Path, tmp_path: Path, flags: list[str]) -> None:
    code, printed = distill(f"--target={target}", f"--out={tmp_path}", *SMALL, *flags)
    assert code == 2 and "sampled tokens answer a message" in printed.splitlines()[-1], printed
    assert os.listdir(tmp_path) == []
