"""The ranks of a server: requests that join and leave, and ranks that rest in between. A chat with
real ranks in every mode, and the answers of a run."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.common.rounds import Sampling
from mpissd.lab.show import harmless
from mpissd.serve.protocol import Cancel, PromptTokens, Stats, Submit
from tests.mpi.harness import ALWAYS, ROOT, needs_mpi
from tests.mpi.test_faults import RECOVERING, is_open_mpi_5
from tests.needs import lack
from tests.scripts import python, until
from tests.serve.front import serving
from tests.serve.test_driver import alone as tokens_of
from tests.serve.test_driver import check_scores
from tests.text import tiny
from tests.tiny_pair import TinyPair, tiny_pair

pytestmark = needs_mpi


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    found = tiny_pair(tmp_path_factory.mktemp("pair"), vocab=len(tiny.tokens()), noise=0.02)
    tiny.write(found.target)
    return found


def alone(
    pair: TinyPair, prompt: list[int], count: int, stops: list[int], **told: int
) -> list[int]:
    """The tokens of a job of its own, up to a stop token."""
    found = tokens_of(pair, prompt, count, **told)
    ends = [n for n, token in enumerate(found, 1) if token in stops]
    return found[: ends[0]] if ends else found


def models(pair: TinyPair) -> list[str]:
    return [f"--target={pair.target}", f"--draft={pair.draft}"]


@pytest.mark.parametrize(("mode", "ranks"), [("ar", 2), ("ssd", 3)])
def test_requests_come_and_go(pair: TinyPair, tmp_path: Path, mode: str, ranks: int) -> None:
    rng = np.random.default_rng(0)
    vocab, drafts = len(tiny.tokens()), int(mode != "ar")
    asked = [(n, rng.integers(0, vocab, 5 + n).tolist(), 10 + 9 * (n % 4)) for n in range(9)]
    flags = [*models(pair), f"--mode={mode}", "--max_running=3", "--context=256"]
    flags += [f"--tp={ranks - drafts}", f"--num_drafts={drafts}"]
    with serving(tmp_path, ranks, *flags) as server:
        assert (server.ready.context, server.ready.max_running) == (256, 3)
        server.send(*(Submit(*one) for one in asked[:5]))
        server.ends([0])
        server.send(*(Submit(*one) for one in asked[5:]))
        ends = server.ends(range(9))
        time.sleep(0.5)  # idle: the next request begins another pass
        server.send(Submit(20, [3, 4, 5], 200), Cancel(20), Submit(21, [], 4))
        assert server.ends([21])[21].reason == "refused"
        assert server.ends([20])[20].reason == "cancelled"
        server.send(Submit(22, [3, 4, 5], 200, deadline_s=1e-9))
        assert server.ends([22])[22].reason == "deadline"
        server.send(Submit(23, [3, 4, 5], 8))  # the ranks are still there
        server.send(Submit(24, [3, 4, 5], 8, Sampling(logit_bias=((7, 100.0),))))
        server.send(Submit(25, asked[8][1], 4, Sampling(prompt_logprobs=1)))
        server.ends([23, 24, 25])
        assert server.tokens(24) == [7] * 8
        parts = [one for one in server.heard if isinstance(one, PromptTokens)]
        scores = [each for one in parts for each in one.logprobs]
        assert len(scores) == len(asked[8][1]) - 1
        check_scores(pair, asked[8][1], 1, scores, top=1)
        stops = list(server.ready.stop_ids)
    for n, prompt, count in asked:
        assert server.tokens(n) == alone(pair, prompt, count, stops), n
        assert ends[n].reason in ("length", "stop")
    if mode == "ssd":
        assert sum(end.hits for end in ends.values()) > 0


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_draft_costs_the_speculation_alone(
    pair: TinyPair, tmp_path: Path, signum: signal.Signals
) -> None:
    """Whether the draft is killed or hangs: all tokens are the target's own."""
    ranks = 3
    if not is_open_mpi_5():
        lack("Open MPI 5: it alone keeps survivors")
    flags = [*models(pair), "--mode=ssd", "--max_running=4", "--context=512", "--deadline_s=8"]
    flags += [f"--tp={ranks - 1}", "--num_drafts=1", "--on_draft_loss=ar"]
    asked = [(n, [5 + n, 6, 7], 300) for n in range(3)]
    with serving(tmp_path, ranks, *flags, mpirun=RECOVERING) as server:
        server.send(Submit(9, [1, 2], 8))
        server.ends([9])
        draft = server.job.rank(ranks - 1)
        server.send(*(Submit(*one) for one in asked))
        while len(server.tokens(0)) < 20:
            server.take()
        os.kill(draft, signum)
        ends = server.ends([0, 1, 2])
        server.send(Submit(20, [3, 4], 12, Sampling(0.8)))
        assert server.ends([20])[20].drafted == 0
        stops = list(server.ready.stop_ids)
        until(lambda: server.wait_for(Stats).draft == "lost", 20)
    for n, prompt, count in asked:
        assert server.tokens(n) == alone(pair, prompt, count, stops, context=512), n
    assert sum(end.rounds for end in ends.values()) > 0


def test_a_killed_target_ends_the_job_soon(pair: TinyPair, tmp_path: Path) -> None:
    flags = [*models(pair), "--mode=ssd", "--tp=2"]
    with (
        pytest.raises(AssertionError, match="the lead has left"),
        serving(tmp_path, 3, *flags, "--context=512") as server,
    ):
        target = server.job.rank(1)  # looked up early: the answer continues meanwhile
        server.send(Submit(0, [5, 6, 7], 400))
        while len(server.tokens(0)) < 20:
            server.take()
        os.kill(target, signal.SIGKILL)
        try:
            server.ends([0], 12.0)
        finally:
            server.job.finish()


def answered(pair: TinyPair, folder: Path, asked: Sequence[Sequence[dict[str, str]]]) -> list[str]:
    """The answers of a run of its own, without drafts, each from an empty cache."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"messages": messages}) for messages in asked))
    flags = [f"--target={pair.target}", "--mode=ar", f"--prompts={prompts}", f"--out={folder}"]
    flags += ["--num_tokens=24", f"--batch_size={len(asked)}"]  # no slot is used twice
    done = python("-m", "mpi4py", "-m", "mpissd", "run", *flags)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    lines = (folder / "text" / f"{row['run_id']}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def test_answers_of_a_chat_are_those_of_a_run(pair: TinyPair, tmp_path: Path) -> None:
    lines = ["one", "two", "/mode sd", "three", "/mode ar", "four", "/stats", "/quit"]
    command = ["launch/chat.sh", *models(pair), "--num_tokens=24"]
    told: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, **ALWAYS}, "capture_output": True}
    typed = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(command, input=typed, text=True, timeout=120, **told)
    assert done.returncode == 0, done.stderr
    history: list[dict[str, str]] = []
    for text, mode in (("one", "ssd"), ("two", "ssd"), ("three", "sd"), ("four", "ar")):
        asked = [*history, {"role": "user", "content": text}]
        (answer,) = answered(pair, tmp_path, [asked])
        assert f"{mode}> {text}\n{harmless(answer)}\n" in done.stdout
        history = [*asked, {"role": "assistant", "content": answer}]
    assert "128 of them in the KV cache" in done.stdout
