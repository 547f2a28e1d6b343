"""A lead without ranks: it gives one answer to every request, at a given pace.

As a program it replaces mpirun in tests of `serve`: one process plays the lead. It answers "hello
there" to everything, a round each FAKE_PACE_S seconds and FAKE_RUNNING requests at a time, from
FAKE_LOAD_S seconds on, and once the file FAKE_GATE exists, if it is named. It prints its arguments,
and writes its process id to the file that FAKE_PID names.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpissd.common.rounds import Logprob
from mpissd.engine.text.tokenizer import load_tokenizer
from mpissd.serve.protocol import (
    SOCKET_VARIABLE,
    Cancel,
    End,
    Message,
    PromptTokens,
    Ready,
    Stats,
    Submit,
    Tokens,
    pack,
    unpack,
)


@dataclass
class Script:
    """The lead sends `answer` (token ids) to every request, `burst` of them a round, a round
    lasting pace_s, from when the gate is open. refuses: it refuses instead. dies_after: rounds
    after which it is gone."""

    answer: Sequence[int]
    pace_s: float = 0.0
    burst: int = 2
    max_running: int = 4
    context: int = 400
    stop_ids: Sequence[int] = (1,)
    refuses: bool = False
    gate: Callable[[], bool] = lambda: True
    dies_after: int | None = None
    likeliest: Sequence[tuple[int, float]] = ((20, -0.25), (21, -2.0))
    draft: str = "present"
    submitted: list[Submit] = field(default_factory=list)
    ended: dict[int, str] = field(default_factory=dict)
    rounds: int = 0


class FakeLead:
    """Connects to a front's socket, in a thread of its own, until the front closes it."""

    def __init__(self, path: str, script: Script) -> None:
        self._path, self.script = path, script
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.thread.start()

    async def _run(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(self._path, limit=1 << 24)
        self._room = asyncio.Semaphore(self.script.max_running)
        said = self.script
        about = ("ssd", 1 << 16, "numpy", "a device", "host")
        self._tell(Ready("tiny", said.context, said.stop_ids, said.max_running, *about))
        self._tell(
            Stats(running=1, pages=8, free_pages=7, mode="ssd", lookahead=4, draft=said.draft)
        )
        while line := await reader.readline():
            self._take(unpack(line))
        for task in self._tasks.values():
            task.cancel()
        self._writer.close()

    def _take(self, message: Message) -> None:
        if isinstance(message, Submit):
            self.script.submitted.append(message)
            if self.script.refuses:
                self._tell(End(message.id, "refused", why="refused by the lead"))
                return
            self._tasks[message.id] = asyncio.create_task(self._decode(message))
        elif isinstance(message, Cancel) and message.id not in self.script.ended:
            self._tasks[message.id].cancel()
            self._end(message.id, "cancelled")

    async def _decode(self, asked: Submit) -> None:
        tokens = list(self.script.answer)[: asked.max_tokens]
        if (count := asked.sampling.prompt_logprobs) is not None:
            scores = [Logprob(-0.5 - n, self.script.likeliest[:count]) for n in asked.prompt[1:]]
            self._tell(PromptTokens(asked.id, 1, scores[:1]))
            self._tell(PromptTokens(asked.id, 2, scores[1:]))
        async with self._room:
            while not self.script.gate():
                await asyncio.sleep(0.01)
            for start in range(0, len(tokens), self.script.burst):
                await asyncio.sleep(self.script.pace_s)
                self._round(asked, tokens[start : start + self.script.burst])
        is_stopped = tokens[-1] in self.script.stop_ids
        self._end(asked.id, "stop" if is_stopped else "length")

    def _round(self, asked: Submit, tokens: list[int]) -> None:
        self.script.rounds += 1
        if self.script.rounds == self.script.dies_after:
            self._writer.transport.abort()
            return
        logprobs = None
        if (count := asked.sampling.logprobs) is not None:
            logprobs = [Logprob(-0.25, self.script.likeliest[:count])] * len(tokens)
        self._tell(Tokens(asked.id, tokens, ["cache"] * len(tokens), logprobs))

    def _end(self, number: int, reason: str) -> None:
        self.script.ended[number] = reason
        steps = [1, 1, 2, 0, 0]
        told = {"drafted": 8, "accepted": 5, "hits": 3, "rounds": 4, "cached": 2, "steps": steps}
        self._tell(End(number, reason, **told))

    def _tell(self, message: Message) -> None:
        if not self._writer.is_closing():
            self._writer.write(pack(message))


def main() -> int:
    if "--version" in sys.argv:
        print("mpirun (Open MPI) 5.0.3")
        return 0
    if "die" in os.environ.get("FAKE_WAY", ""):
        print("mpissd: the weights are damaged", file=sys.stderr)
        return 4
    print("started", *sys.argv[1:], flush=True)
    Path(os.environ["FAKE_PID"]).write_text(str(os.getpid()))
    time.sleep(float(os.environ.get("FAKE_LOAD_S", "0")))
    target = next(word for word in sys.argv if word.startswith("--target=")).partition("=")[2]
    answer = [*load_tokenizer(target).encode("hello there"), 1]
    pace_s = float(os.environ.get("FAKE_PACE_S", "0.05"))
    script = Script(answer, pace_s=pace_s, max_running=int(os.environ.get("FAKE_RUNNING", "1")))
    if gate := os.environ.get("FAKE_GATE"):
        script.gate = Path(gate).exists
    fake = FakeLead(os.environ[SOCKET_VARIABLE], script)
    fake.thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
