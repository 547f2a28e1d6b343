"""`make submit SERVE=2` under a real Slurm: replicas register, answer, and leave."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from mpissd.serve import replicas as entries
from mpissd.serve.replicas import Entry, ask
from tests.mpi.harness import needs_mpi
from tests.needs import module
from tests.slurm.jobs import ROOT, WAIT_S
from tests.slurm.sandbox import Sandbox, all_processes, wait_until
from tests.text import tiny
from tests.tiny_pair import TinyPair, tiny_pair

module("uvicorn", "the extra serve")
pytestmark = [*needs_mpi, pytest.mark.slurm]
KEY = "open-sesame-of-the-slurm-test"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    found = tiny_pair(tmp_path_factory.mktemp("pair"), vocab=len(tiny.tokens()), noise=0.02)
    tiny.write(found.target)
    return found


@contextmanager
def submitted(slurm: Sandbox, pair: TinyPair, folder: Path) -> Iterator[str]:
    """Submits two replicas; gives the array's number, and cancels its remaining jobs."""
    models = f"--target={pair.target} --draft={pair.draft} --context=512"
    done = subprocess.run(
        [
            "make",
            "submit",
            *f"SERVE=2 MODE=ssd CLUSTER=other PYTHON={sys.executable}".split(),
            f"REGISTER={folder}/replicas",
            f"ARGS={models} --backend=numpy",
            f"SBATCH=--output={folder}/%A_%a.log",
        ],
        cwd=ROOT,
        env={**slurm.env, "MPISSD_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "--ntasks=2 --array=0-1" in done.stdout and KEY not in done.stdout
    number = re.findall(r"Submitted batch job (\d+)", done.stdout)[0]
    try:
        yield number
    finally:
        slurm.ask("scancel", number)


def answer(entry: Entry, count: int) -> dict[str, object]:
    """Asks a replica for a whole answer."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    body = json.dumps({"prompt": "hello", "max_tokens": count}).encode()
    request = Request(f"http://{entry.address}/v1/completions", body, headers)
    with urlopen(request, timeout=WAIT_S) as response:
        found = json.load(response)
    assert isinstance(found, dict)
    return found


def state(slurm: Sandbox, task: str) -> str:
    """STATE EXIT_CODE of a task."""
    told = slurm.ask("scontrol", "show", "job", task)
    found = re.search(r"JobState=(\w+).*?ExitCode=(\d+:\d+)", told, re.S)
    return f"{found[1]} {found[2]}" if found else ""


def processes_that_show(text: str) -> list[str]:
    """The command lines with a text, which every user can read."""
    lines = []
    for pid in all_processes():
        try:
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return [line for line in lines if text in line]


def test_replicas_of_an_array_come_answer_and_go(
    slurm: Sandbox, pair: TinyPair, tmp_path: Path
) -> None:
    folder = tmp_path / "replicas"
    folder.mkdir()

    def there() -> dict[str, Entry]:
        return {each.id.split("-")[2]: each for each in entries.read(folder)}

    def log() -> str:
        return "".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))

    with submitted(slurm, pair, tmp_path) as number:
        wait_until(lambda: len(there()) == 2, "two replicas", WAIT_S)
        zero, one = there()["0"], there()["1"]
        assert zero.id.startswith(f"r-{number}-0-") and zero.port != one.port
        assert [ask(each) for each in (zero, one)] == ["ready", "ready"], log()
        texts = [answer(each, 20)["choices"] for each in (zero, one)]
        assert texts[0] == texts[1]
        assert not processes_that_show(KEY)
        last: list[dict[str, object]] = []
        asked = threading.Thread(target=lambda: last.append(answer(zero, 400)))
        asked.start()
        wait_until(lambda: outstanding(zero) == 1, "a request under way")
        slurm.ask("scancel", "--signal=TERM", "--batch", f"{number}_0")
        wait_until(lambda: [*there()] == ["1"], "one of them to leave")
        asked.join(WAIT_S)
        assert last[0]["usage"]["completion_tokens"] == 400  # type: ignore[index]
        wait_until(lambda: state(slurm, f"{number}_0") == "COMPLETED 0:0", "its end", WAIT_S)
        slurm.ask("scancel", f"{number}_1")
        wait_until(lambda: not there(), "the other one to leave")
        assert list(folder.iterdir()) == []
    wait_until(lambda: not processes_that_show(str(pair.target)), "their last process to end")


def outstanding(entry: Entry) -> float:
    """How many requests a replica has."""
    headers = {"authorization": f"Bearer {KEY}"}
    with urlopen(Request(f"http://{entry.address}/metrics", headers=headers), timeout=10) as page:
        return float(re.findall(r"^mpissd_outstanding (\S+)", page.read().decode(), re.M)[0])
