"""Sends arrivals to a real pair's ranks over the lead's socket: what a server does without HTTP.

    . launch/env.sh; python results/serving-control/real.py MODE RATE REQUESTS [flags of serve]
    . launch/env.sh; python results/serving-control/real.py study FILE MINUTES [RATES] [flags]

MODE: ar, sd, ssd or auto, with a draft rank each, but for ar. Prompts are five of results/serving's
in a row, in a chat; arrivals are Poisson, the same ones in every mode. Prints a line of JSON:
tokens a second of request time, and the seconds of every request.

study: appends to FILE the lines that it lacks, of this commit, of three seeds, six rates and every
way, each of 200 requests of one prompt and 20 tokens, and begins none behind MINUTES; then it
prints a table of the points of which all ways are there: auto over the best fixed way and over AR,
with 95% intervals over requests drawn again. RATES: those of the six that are taken, as 8,6,4.
`elsewhere` is the share of one core that other processes and other guests of the machine (steal)
took meanwhile, by the kernel's ticks, which miss what begins behind one: 0 to .06 with AR alone on
a quiet machine, −.2 to .07 with two ranks, so that others may have taken more from these. A line
above .1 is measured again, and stays in the file.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from control import ratio

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
SEEDS, RATES = (0, 1, 2), (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
WAYS = ("ar", "auto", "sd 3", "ssd 1", "ssd 3")
REQUESTS, TOKENS = 200, 20
DISTURBED = 0.1  # of a core, that others took


def requests(
    target: str, rate: float, count: int, seed: int = 0, prompts: int = 5, most: int = 1 << 20
) -> list[tuple[float, Submit]]:
    """Returns when each request arrives, and the request: so many prompts, `most` tokens."""
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    tokenizer, rng = load_tokenizer(target), np.random.default_rng(seed)
    order = rng.permutation(len(rows)).tolist()
    times = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    found = []
    for n, at_s in enumerate(times):
        five = [rows[order[(n + 7 * k) % len(rows)]] for k in range(prompts)]
        asked = [{"role": "user", "content": " ".join(one["prompt"] for one in five)}]
        found.append((at_s, Submit(n, tokenizer.chat(asked), min(most, five[0]["max_tokens"]))))
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


def cpu_s() -> tuple[float, float]:
    """Returns the CPU seconds of all processes, stolen time included, and of this one and of its
    children that have ended."""
    fields = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _, _, irq, soft, steal = fields
    mine = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    every = user + nice + system + irq + soft + steal
    return every / os.sysconf("SC_CLK_TCK"), sum(one.ru_utime + one.ru_stime for one in mine)


def target_of(flags: Sequence[str]) -> str:
    """Returns the target that these flags of serve name."""
    return next(flag for flag in flags if flag.startswith("--target=")).partition("=")[2]


async def measured(
    mode: str, rate: float, asked: Sequence[tuple[float, Submit]], flags: Sequence[str]
) -> dict[str, object]:
    """Starts the ranks, sends the load, and returns the line."""
    drafts, front, count = int(mode != "ar"), Front(asked), len(asked)
    words = [f"--mode={mode}", f"--drafts={drafts}", "--max_running=32", *flags]
    began, before = time.monotonic(), cpu_s()
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
    every, own = (after - earlier for after, earlier in zip(cpu_s(), before, strict=True))
    told |= {"elsewhere": round((every - own) / (time.monotonic() - began), 3)}
    told |= {"first_mean_s": round(sum(front.first_s) / count, 3)}
    return {**told, "seconds": [round(s, 3) for s in front.seconds]}


def study(path: Path, minutes: float, rates: Sequence[float], flags: Sequence[str]) -> None:
    """Appends the lines that a file lacks, for so long, and prints the table."""
    until = time.monotonic() + 60 * minutes
    path.touch()
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    mine = [one for one in lines if one.get("commit") == commit]
    done = {(one["seed"], one["rate"], one["way"]) for one in quiet(mine)}
    points = ((seed, rate, way) for seed in SEEDS for rate in rates for way in WAYS)
    for seed, rate, way in points:
        if (seed, rate, way) in done or time.monotonic() > until:
            continue
        mode, _, k = way.partition(" ")
        more = [f"--lookahead={k}"] if k else []
        asked = requests(target_of(flags), rate, REQUESTS, seed, prompts=1, most=TOKENS)
        found = asyncio.run(measured(mode, rate, asked, [*flags, *more]))
        mine.append({"seed": seed, "way": way, **found, "commit": commit})
        with path.open("a") as file:
            file.write(json.dumps(mine[-1]) + "\n")
    table(quiet(mine))


def quiet(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the lines of loads that others did not disturb; older ones do not say."""
    return [one for one in lines if one.get("elsewhere", 0.0) <= DISTURBED]


def table(lines: Sequence[dict[str, Any]]) -> None:
    """Prints auto over the best fixed way and over AR, of each point that has every way."""
    for seed, rate in sorted({(one["seed"], one["rate"]) for one in lines}):
        part = [one for one in lines if (one["seed"], one["rate"]) == (seed, rate)]
        by = {one["way"]: np.array(one["seconds"]) for one in part}
        if set(by) < set(WAYS):
            continue
        best = min((way for way in by if way != "auto"), key=lambda way: by[way].sum())
        ratios = [ratio(by["auto"], by[way]) for way in (best, "ar")]
        told = "  ".join(f"{middle:.2f} ({low:.2f}–{high:.2f})" for middle, low, high in ratios)
        print(f"seed {seed}  {rate:g}/s  best {best}  auto over it, over AR: {told}")


if __name__ == "__main__":
    if sys.argv[1] == "study":
        file, minutes, *rest = sys.argv[2:]
        rates = RATES
        if not rest[0].startswith("-"):
            rates, rest = tuple(map(float, rest[0].split(","))), rest[1:]
        study(Path(file), float(minutes), rates, rest)
    else:
        mode, rate, count, *flags = sys.argv[1:]
        asked = requests(target_of(flags), float(rate), int(count))
        print(json.dumps(asyncio.run(measured(mode, float(rate), asked, flags))))
