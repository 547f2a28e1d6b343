"""The whole server: OpenAI's client, HTTP, the socket and real ranks, one of which is killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.mpi.harness import Started, needs_mpi
from tests.mpi.test_draft_loss import is_open_mpi_5
from tests.needs import lack, module
from tests.serve.rig import until
from tests.text import tiny
from tests.tiny_pair import TinyPair, tiny_pair

openai = module("openai", "the openai client")
module("uvicorn", "the extra serve")
pytestmark = needs_mpi

PROMPTS = [f"hello number {n}" for n in range(10)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    found = tiny_pair(tmp_path_factory.mktemp("pair"), vocab=len(tiny.tokens()), noise=0.02)
    tiny.write(found.target)
    return found


class Serving:
    """A server's job, and a client of it."""

    def __init__(self, job: Started, log: Path) -> None:
        self.job = job
        until(lambda: log.read_text() or job.process.poll() is not None, 90)
        found = re.match(r"(http://127\.0\.0\.1:\d+)/v1 serves target", log.read_text())
        assert found is not None, log.read_text()
        self.url = found[1]
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def answer(self, prompt: str, count: int = 40) -> Any:
        return self.client.completions.create(
            model="target", prompt=prompt, max_tokens=count, temperature=0
        )

    def ready(self) -> dict[str, Any]:
        found = self.client.get(f"{self.url}/ready", cast_to=object)
        assert isinstance(found, dict)
        return found


@contextmanager
def serving(pair: TinyPair, folder: Path, *flags: str) -> Iterator[Serving]:
    log = folder / "said"
    models = f"--target={pair.target} --draft={pair.draft}"
    line = f"exec launch/serve.sh {models} --port=0 --context=256 {' '.join(flags)} >{log}"
    log.touch()
    with Started(["bash", "-c", line]) as job:
        yield Serving(job, log)


def told(answer: Any) -> tuple[str, int]:
    return answer.choices[0].text, answer.usage.completion_tokens


def test_answers_stay_the_same_in_company_and_without_the_draft(
    pair: TinyPair, tmp_path: Path
) -> None:
    with serving(pair, tmp_path, "--mode=ssd", "--max_running=4") as server:
        alone = [told(server.answer(prompt)) for prompt in PROMPTS]
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(pool.map(server.answer, PROMPTS))
        assert [told(answer) for answer in answers] == alone
        assert sum(answer.usage.speculation["hits"] for answer in answers) > 0
        if not is_open_mpi_5():
            lack("Open MPI 5: it alone keeps survivors")
        os.kill(server.job.rank(1), signal.SIGKILL)
        until(lambda: server.ready()["draft"] == "lost", 30)
        assert [told(server.answer(prompt)) for prompt in PROMPTS] == alone
        server.job.process.send_signal(signal.SIGINT)
        assert server.job.process.wait(20) == 0
