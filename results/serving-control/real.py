"""Sends arrivals to a real pair's ranks over the lead's socket: what a server does without HTTP.

    . launch/env.sh; python results/serving-control/real.py MODE RATE REQUESTS [flags of serve]

MODE: ar, sd, ssd or auto, with a draft rank each, but for ar. Prompts are five of results/serving's
in a row, in a chat; arrivals are Poisson, the same ones in every mode. Prints a line of JSON:
tokens a second of request time, and the seconds of every request.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mpissd.engine.workload.text.tokenizer import load_tokenizer
from mpissd.serve.protocol import (
    SOCKET_VARIABLE,
    End,
    Ready,
    Stop,
    Submit,
    Tokens,
    pack,
    unpack,
)  # fmt: skip

PROMPTS = Path(__file__).parents[1] / "serving/prompts.jsonl"
START_S, END_S = 120.0, 300.0


def requests(target: str, rate: float, count: int) -> list[tuple[float, Submit]]:
    """Returns when each request arrives, and the request."""
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    tokenizer, rng = load_tokenizer(target), np.random.default_rng(0)
    order = rng.permutation(len(rows)).tolist()
    times = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    found = []
    for n, at_s in enumerate(times):
        five = [rows[order[(n + 7 * k) % len(rows)]] for k in range(5)]
        asked = [{"role": "user", "content": " ".join(one["prompt"] for one in five)}]
        found.append((at_s, Submit(n, tokenizer.chat(asked), five[0]["max_tokens"])))
    return found


class Front:
    """The end of the socket that submits and counts."""

    def __init__(self, asked: Sequence[tuple[float, Submit]]) -> None:
        self._asked, self._began = asked, 0.0
        self.seconds, self.first_s, self.tokens = [0.0] * len(asked), [0.0] * len(asked), 0
        self.ready, self.over, self._left = asyncio.Event(), asyncio.Event(), len(asked)

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Takes what the lead says."""
        self.writer = writer
        while line := await reader.readline():
            message = unpack(line)
            if isinstance(message, Ready):
                self.ready.set()
            elif isinstance(message, Tokens):
                passed = time.monotonic() - self._began - self._asked[message.id][0]
                self.first_s[message.id] = self.first_s[message.id] or passed
                self.seconds[message.id] = passed
                self.tokens += len(message.tokens)
            elif isinstance(message, End):
                self._left -= 1
                self.over.set() if not self._left else None

    async def send(self) -> None:
        """Submits every request when it is due, and waits for the last end."""
        self._began = time.monotonic()
        for at_s, submit in self._asked:
            await asyncio.sleep(max(0.0, self._began + at_s - time.monotonic()))
            self.writer.write(pack(submit))
        await asyncio.wait_for(self.over.wait(), END_S)


async def measured(mode: str, rate: float, count: int, flags: Sequence[str]) -> dict[str, object]:
    """Starts the ranks, sends the load, and returns the line."""
    target = next(flag for flag in flags if flag.startswith("--target=")).partition("=")[2]
    drafts, front = int(mode != "ar"), Front(requests(target, rate, count))
    words = [f"--mode={mode}", f"--drafts={drafts}", "--max_running=32", *flags]
    python = [sys.executable, "-m", "mpi4py", "-m", "mpissd", "serve", *words]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/lead"
        async with await asyncio.start_unix_server(front.hear, path, limit=1 << 24):
            ranks = await asyncio.create_subprocess_exec(
                "mpirun", "-np", str(1 + drafts), *python, env={**os.environ, SOCKET_VARIABLE: path}
            )
            await asyncio.wait_for(front.ready.wait(), START_S)
            await front.send()
            front.writer.write(pack(Stop()))
            await asyncio.wait_for(ranks.wait(), START_S)
    told: dict[str, object] = {
        "mode": mode,
        "flags": list(flags[1:]),
        "rate": rate,
        "tokens": front.tokens,
    }
    told |= {"tok_per_request_s": round(front.tokens / sum(front.seconds), 2)}
    told |= {"first_mean_s": round(sum(front.first_s) / count, 3)}
    return {**told, "seconds": [round(s, 3) for s in front.seconds]}


if __name__ == "__main__":
    mode, rate, count, *flags = sys.argv[1:]
    print(json.dumps(asyncio.run(measured(mode, float(rate), int(count), flags))))
