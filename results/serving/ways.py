"""Compares a server's automatic choice of mode and K (mode=auto) with fixed choices under load.

    python results/serving/ways.py OUT FLAGS…      (of mpissd serve: --target, --draft, …)

All choices ("ways") are measured in turn with one server, the same arrivals and prompts, without
HTTP. OUT gets a line for each load. For each way, the mean time per output token (TPOT), and the
requests a second with a first token within .25 s, are printed relative to the best fixed way.
Environment: RATES, SEEDS, DURATION (seconds of a load), RANKS, VOCAB (random prompts' ids are
below it).
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from mpissd.common.rounds import Sampling
from mpissd.serve.protocol import SOCKET_VARIABLE, End, Line, Ready, Submit, Tokens

NUMBERS = itertools.count(1)  # ids of requests
WAYS = {"ar": ("ar", None), "sd1": ("sd", 1), "sd2": ("sd", 2), "sd4": ("sd", 4)}
WAYS |= {"auto": (None, None), "auto again": (None, None)}


def load(
    line: Line, way: str, rate: float, seed: int, seconds: float, vocab: int
) -> dict[str, float | str]:
    """Sends requests at Poisson arrival times that ask for one way (fixed mode and K, or auto);
    returns the measurements as a line of OUT."""
    random = np.random.default_rng([seed, int(100 * rate)])
    due = []
    mode_k = WAYS[way]
    at = random.exponential() / rate
    while at < seconds:
        prompt = random.integers(3, vocab, random.integers(16, 128)).tolist()
        ask = Submit(
            next(NUMBERS),
            prompt,
            int(random.integers(16, 112)),
            Sampling(mode=mode_k[0], lookahead=mode_k[1]),
        )
        due.append((at, ask))
        at += random.exponential() / rate
    start = time.monotonic()
    arrived = {ask.id: at for at, ask in due}
    waiting = due[::-1]
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    tokens = dict.fromkeys(arrived, 0)
    ends: dict[int, End] = {}
    while len(ends) < len(due):
        now = time.monotonic() - start
        while waiting and waiting[-1][0] <= now:
            line.put(waiting.pop()[1])
        line.flush()
        for message in line.take(min(0.01, max(0.0, waiting[-1][0] - now) if waiting else 0.01)):
            now = time.monotonic() - start
            if isinstance(message, Tokens):
                first.setdefault(message.id, now)
                last[message.id] = now
                tokens[message.id] += len(message.tokens)
            elif isinstance(message, End):
                ends[message.id] = message
        if line.is_closed:
            raise SystemExit("the server has ended")
    wall = time.monotonic() - start
    tpot = np.mean([(last[n] - first[n]) / (tokens[n] - 1) for n in ends])
    good = sum(first[n] - arrived[n] < 0.25 for n in ends) / wall
    counts = {
        n: sum(getattr(e, n) for e in ends.values()) for n in ("drafted", "accepted", "rounds")
    }
    about = {"way": way, "rate": rate, "seed": seed}
    return {**about, "tpot_s": float(tpot), "good_per_s": good, **counts}


def main() -> None:
    """Starts the server, sends all loads, and prints each way's results relative to the best fixed
    way."""
    variables = os.environ.get
    rates = [float(rate) for rate in variables("RATES", "16,32,64,128").split(",")]
    seeds = [int(seed) for seed in variables("SEEDS", "0,1,2").split(",")]
    seconds = float(variables("DURATION", "3"))
    vocab = int(variables("VOCAB", "1000"))
    lines = []
    with socket.socket(socket.AF_UNIX) as listener, tempfile.TemporaryDirectory() as folder:
        listener.bind(f"{folder}/lead")
        listener.listen(1)
        launch = f"{variables('MPIRUN', 'mpirun')} -np {variables('RANKS', '1')}".split()
        serve = [sys.executable, "-m", "mpi4py", "-m", "mpissd", "serve", "--mode=auto"]
        environment = {**os.environ, SOCKET_VARIABLE: f"{folder}/lead"}
        command = [*launch, *serve, *sys.argv[2:]]
        job = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        listener.settimeout(180)
        line = Line(listener.accept()[0])
        while not any(isinstance(message, Ready) for message in line.take(1)):
            pass
        for way in WAYS:  # A first load makes the server compile its programs.
            load(line, way, max(rates) / 4, 99, seconds, vocab)
        for turn, seed in enumerate(seeds):
            for rate in rates:
                for way in [*WAYS][turn:] + [*WAYS][:turn]:
                    lines.append(load(line, way, rate, seed, seconds, vocab))
                    with Path(sys.argv[1]).open("a") as file:
                        file.write(json.dumps(lines[-1]) + "\n")
        line.close()
        job.wait()
    for rate in rates:
        at_rate = [load for load in lines if load["rate"] == rate]
        means = {}
        for way in WAYS:
            loads = [(load["tpot_s"], load["good_per_s"]) for load in at_rate if load["way"] == way]
            means[way] = np.mean(loads, axis=0)
        tpot = min(means[way][0] for way in WAYS if "auto" not in way)
        good = max(means[way][1] for way in WAYS if "auto" not in way)
        shares = (f"{w} {tpot / t:.3f}, {g / max(good, 1e-9):.3f}" for w, (t, g) in means.items())
        best = f"best fixed {1e3 * tpot:.3f} ms, {good:.4g}/s"
        print(f"{rate:g} a second, {best}: {'; '.join(shares)}")


if __name__ == "__main__":
    main()
