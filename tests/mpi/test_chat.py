"""A chat with real ranks in every mode, and the answers of a run."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpissd.lab.show import harmless
from tests.mpi.harness import ALWAYS, ROOT, needs_mpi
from tests.scripts import python
from tests.text import tiny
from tests.tiny_pair import TinyPair, tiny_pair

pytestmark = needs_mpi

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    found = tiny_pair(tmp_path_factory.mktemp("pair"), vocab=len(tiny.tokens()))
    tiny.write(found.target)
    return found


def models(pair: TinyPair) -> list[str]:
    return [f"--target={pair.target}", f"--draft={pair.draft}", f"--num_tokens={NUM_TOKENS}"]


def answered(pair: TinyPair, folder: Path, asked: Sequence[Sequence[dict[str, str]]]) -> list[str]:
    """The answers of a run of its own, without drafts, each from an empty cache."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"messages": messages}) for messages in asked))
    flags = [*models(pair)[::2], "--mode=ar", f"--prompts={prompts}", f"--out={folder}"]
    flags.append(f"--batch_size={len(asked)}")  # no slot is used twice
    done = python("-m", "mpi4py", "-m", "mpissd", "run", *flags)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    lines = (folder / "text" / f"{row['run_id']}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def test_answers_of_a_chat_are_those_of_a_run(pair: TinyPair, tmp_path: Path) -> None:
    lines = ["one", "two", "/mode sd", "three", "/mode ar", "four", "/stats", "/quit"]
    done = subprocess.run(
        ["launch/chat.sh", *models(pair)],
        input="".join(f"{line}\n" for line in lines),
        cwd=ROOT,
        env={**os.environ, **ALWAYS},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    history: list[dict[str, str]] = []
    for text, mode in (("one", "ssd"), ("two", "ssd"), ("three", "sd"), ("four", "ar")):
        asked = [*history, {"role": "user", "content": text}]
        (answer,) = answered(pair, tmp_path, [asked])
        assert f"{mode}> {text}\n{harmless(answer)}\n" in done.stdout
        history = [*asked, {"role": "assistant", "content": answer}]
    assert "128 of them in the KV cache" in done.stdout
