"""Compares control by goodput with every fixed way, from idle to saturation, in virtual time.

    python results/serving-control/control.py [--requests=200] [--seeds=0,1,2] [--pair=PAIR] > FILE

A line for each pair, law, rate and seed: tokens a second of request time (from arrival to last
token) of AR on the same T ranks, of every fixed mode and K, of `auto`, and of rivals on as many
GPUs (T + 1): SD with the draft inline on T ranks, on more of them where the model divides, and as
several servers that share the arrivals. With a draft on the target's own GPU, which is the only
one, AR and every fixed K are the rivals. Arrivals are Poisson; all ways see the same arrivals and
the same coins. A ratio stands with its 95% interval: the requests are drawn again, 1,000 times, the
same ones for both ways.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpissd.common.config import RunConfig, parse_flags
from mpissd.lab.load.virtual.server import Arrival, Simulated, simulate
from mpissd.lab.predict.costs import DeviceCosts, HostCosts

Floats = NDArray[np.float64]
Seconds = dict[str, Floats]  # by way
MOST_K = 7
HERE = Path(__file__).parent
LOOKAHEADS = (1, 3, 5, 7)
RESAMPLES = 1000
PAIRS = {
    "70b/1b": (4, (0.2, 1.0, 3.0, 6.0, 9.0, 14.0)),
    "8b/1b": (1, (0.5, 3.0, 8.0, 16.0, 24.0, 36.0)),
    "smollm2": (1, (0.05, 0.2, 0.4, 0.7, 1.0, 1.5)),
    "smollm2 inline": (1, (8.0, 16.0, 32.0, 64.0, 128.0, 256.0)),
}
# SmolLM2 on one core a model, and on one H200: these tell all its seconds, whatever the job.
CPU, INLINE = "smollm2", "smollm2 inline"
ROWS = {CPU: "cpu_rows.json", INLINE: "h200_rows.json"}
# (T, servers) with D = 0
RIVALS = {
    "70b/1b": ((4, 1),),
    "8b/1b": ((1, 1), (2, 1), (1, 2)),
    CPU: ((1, 1), (1, 2)),
    INLINE: (),
}
CHAT = "results/recordings/smollm2-chat.npz"
LAWS = {
    "alpha=.8, power:A=.75,r=1": {"alpha": "0.8", "hit_a": "0.75", "hit_r": "1"},
    "alpha=.6, power:A=.7,r=.35": {"alpha": "0.6", "hit_a": "0.7", "hit_r": "0.35"},
    "recording smollm2-chat": {"workload": "replay", "recording": CHAT},
}


def arrivals(rate: float, count: int, seed: int) -> list[Arrival]:
    """Poisson arrivals; prompts of 20 to 200 tokens, answers of 50 to 250."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    prompts, tokens = rng.integers(20, 201, count).tolist(), rng.integers(50, 251, count).tolist()
    return [Arrival(*one) for one in zip(times, prompts, tokens, strict=True)]


def seconds(done: Simulated) -> Floats:
    """Returns the seconds from arrival to last token of every request."""
    return np.array([one.token_s[-1] - one.at_s for one in done.requests])


def ways(pair: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Names and flags of the fixed ways and of auto."""
    yield "ar", {"mode": "ar"}
    inline = {"mode": "sd", "num_drafts": "0"}
    for k in LOOKAHEADS:
        if pair == INLINE:
            yield f"sd {k}", {**inline, "lookahead": f"{k}"}
            continue
        yield f"sd {k}", {"mode": "sd", "lookahead": f"{k}"}
        yield f"ssd {k}", {"mode": "ssd", "lookahead": f"{k}", "fan_out": "uniform:3"}
    modes = inline if pair == INLINE else {"mode": "ssd", "fan_out": "uniform:3"}
    yield "auto", {**modes, "lookahead": f"{MOST_K}"}


def rivals(pair: str) -> Iterator[tuple[str, int, int, dict[str, str]]]:
    """Name, T, servers and flags of the uses of as many GPUs."""
    for tp, servers in RIVALS[pair]:
        yield f"{servers} x T={tp} ar", tp, servers, {"mode": "ar"}
        for k in LOOKAHEADS:
            inline = {"mode": "sd", "num_drafts": "0", "lookahead": f"{k}"}
            yield f"{servers} x T={tp} inline sd {k}", tp, servers, inline


def config_of(pair: str, law: Mapping[str, str], flags: Mapping[str, str], seed: int) -> RunConfig:
    """Returns the configuration of one way."""
    unread = {"ar": ("alpha", "hit_a", "hit_r"), "sd": ("hit_a", "hit_r"), "ssd": ()}
    rules = {name: text for name, text in law.items() if name not in unread[flags["mode"]]}
    told = {"pair": "8b/1b" if pair in ROWS else pair, "backend": "emulated", "device": "h200"}
    return parse_flags({**told, "batch_size": "32", **rules, **flags, "seed": str(seed)})


def costs(pair: str) -> tuple[DeviceCosts, HostCosts] | None:
    """Returns measured costs of a real pair; None: those of the emulated device."""
    if pair not in ROWS:
        return None
    found = json.loads((HERE / ROWS[pair]).read_text())
    return DeviceCosts.from_dict(found), HostCosts(**found.get("host", {}))


def measured(pair: str, law: Mapping[str, str], asked: list[Arrival], seed: int) -> Seconds:
    """Returns the seconds of every request, in every way and with every rival."""
    found = {}
    for name, flags in ways(pair):
        config = config_of(pair, law, flags, seed)
        found[name] = seconds(
            simulate(config, PAIRS[pair][0], asked, auto=name == "auto", costs=costs(pair))
        )
    for name, tp, servers, flags in rivals(pair):
        config, every = config_of(pair, law, flags, seed), np.zeros(len(asked))
        for n in range(servers):
            every[n::servers] = seconds(simulate(config, tp, asked[n::servers], costs=costs(pair)))
        found[name] = every
    return found


def ratio(auto: Floats, other: Floats) -> list[float]:
    """Returns [speed of auto over another way, low, high]."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(auto), (RESAMPLES, len(auto)))
    again = other[drawn].sum(axis=1) / auto[drawn].sum(axis=1)
    every = other.sum() / auto.sum(), *np.percentile(again, (2.5, 97.5))
    return [round(float(n), 4) for n in every]


def line(pair: str, name: str, rate: float, count: int, seed: int) -> dict[str, object]:
    """Returns one line of the table."""
    asked = arrivals(rate, count, seed)
    every = measured(pair, LAWS[name], asked, seed)
    tokens = sum(one.num_tokens for one in asked)
    speeds = {way: tokens / float(each.sum()) for way, each in every.items()}
    fixed = [way for way, _ in ways(pair) if way != "auto"]
    best = max(fixed, key=speeds.__getitem__)
    rival = max((way for way, *_ in rivals(pair)), key=speeds.__getitem__, default=best)
    return {
        "pair": pair, "tp": PAIRS[pair][0], "law": name, "rate": rate, "requests": count,
        "seed": seed,
        "best": best, "auto_over_best": ratio(every["auto"], every[best]),
        "auto_over_ar": ratio(every["auto"], every["ar"]),
        "rival": rival, "auto_over_rival": ratio(every["auto"], every[rival]),
        "tok_per_request_s": {way: round(speed, 1) for way, speed in speeds.items()},
    }  # fmt: skip


def cases(pairs: Sequence[str]) -> Iterator[tuple[str, str, float]]:
    """Pair, law and rate of every line; a real pair has its recording alone."""
    for pair in pairs:
        for law in LAWS:
            if pair not in ROWS or law.startswith("recording"):
                yield from ((pair, law, rate) for rate in PAIRS[pair][1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--pair", choices=PAIRS, help="this one alone")
    told = parser.parse_args()
    for seed in map(int, told.seeds.split(",")):
        for case in cases([told.pair] if told.pair else list(PAIRS)):
            print(json.dumps(line(*case, told.requests, seed)), flush=True)


if __name__ == "__main__":
    main()
