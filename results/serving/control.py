"""Compares control by goodput with every fixed way, from idle to saturation, in virtual time.

    python results/serving/control.py [--seeds=3] [--requests=200] > control.jsonl

A line for each pair, law and rate: tokens a second of request time (from arrival to last token) of
AR on the same T ranks, of every fixed mode and K, of `auto`, and of the best use of the target
alone with the draft inline (T ranks). Arrivals are Poisson; all ways see the same arrivals and the
same coins. `ratio` has its 95% interval over seeds (Student's t of the paired logarithms).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping

import numpy as np

from mpissd.common.config import parse_flags
from mpissd.serve.simulated import Arrival, Simulated, simulate

MOST_K = 7
LOOKAHEADS = (1, 2, 3, 5, 7)
T_95 = {1: math.nan, 2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # by the number of seeds
PAIRS = {
    "70b/1b": (4, (0.2, 1.0, 3.0, 6.0, 9.0, 14.0)),
    "8b/1b": (1, (0.5, 3.0, 8.0, 16.0, 24.0, 36.0)),
}
LAWS = {
    "alpha=.8, power:A=1,r=1": {"alpha": "0.8"},
    "alpha=.6, hit_a=.7, hit_r=.35": {"alpha": "0.6", "hit_a": "0.7", "hit_r": "0.35"},
}


def arrivals(rate: float, count: int, seed: int) -> list[Arrival]:
    """Poisson arrivals; prompts of 20 to 200 tokens, answers of 50 to 250."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    prompts, tokens = rng.integers(20, 201, count).tolist(), rng.integers(50, 251, count).tolist()
    return [Arrival(*one) for one in zip(times, prompts, tokens, strict=True)]


def speed(done: Simulated) -> float:
    """Tokens a second of request time."""
    tokens = sum(len(one.token_s) for one in done.requests)
    return tokens / sum(one.token_s[-1] - one.at_s for one in done.requests)


def ways() -> Iterator[tuple[str, dict[str, str]]]:
    """Names and flags of the fixed ways and of auto."""
    yield "ar", {"mode": "ar"}
    for k in LOOKAHEADS:
        yield f"inline sd {k}", {"mode": "sd", "num_drafts": "0", "lookahead": f"{k}"}
        yield f"sd {k}", {"mode": "sd", "lookahead": f"{k}"}
        yield f"ssd {k}", {"mode": "ssd", "lookahead": f"{k}", "fan_out": "uniform:3"}
    yield "auto", {"mode": "ssd", "lookahead": f"{MOST_K}", "fan_out": "uniform:3"}


def measured(
    pair: str, law: Mapping[str, str], rate: float, count: int, seed: int
) -> dict[str, float]:
    """Returns the speed of every way with one seed."""
    tp, asked = PAIRS[pair][0], arrivals(rate, count, seed)
    found = {}
    for name, flags in ways():
        rules = {} if flags["mode"] == "ar" else dict(law)
        if flags["mode"] != "ssd":
            rules = {k: v for k, v in rules.items() if not k.startswith("hit")}
        told = {"pair": pair, "backend": "emulated", "device": "h200", "batch_size": "32"}
        config = parse_flags({**told, **rules, **flags, "seed": str(seed)})
        found[name] = speed(simulate(config, tp, asked, auto=name == "auto"))
    return found


def ratio(auto: list[float], other: list[float]) -> list[float]:
    """Returns [mean, low, high] of auto over another way, over seeds."""
    logs = np.log(np.array(auto) / np.array(other))
    error = T_95[len(logs)] * logs.std(ddof=1) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    return [round(float(np.exp(logs.mean() + n * error)), 4) for n in (0, -1, 1)]


def line(pair: str, name: str, rate: float, count: int, seeds: int) -> dict[str, object]:
    """Returns one line of the table."""
    every = [measured(pair, LAWS[name], rate, count, seed) for seed in range(seeds)]
    by_way = {way: [one[way] for one in every] for way in every[0]}
    means = {way: float(np.mean(values)) for way, values in by_way.items()}
    fixed = [way for way in means if way != "auto" and not way.startswith("inline")]
    best = max(fixed, key=means.__getitem__)
    rival = max((way for way in means if way.startswith("inline")), key=means.__getitem__)
    return {
        "pair": pair, "tp": PAIRS[pair][0], "law": name, "rate": rate, "requests": count,
        "best": best, "auto_over_best": ratio(by_way["auto"], by_way[best]),
        "auto_over_ar": ratio(by_way["auto"], by_way["ar"]),
        "best_inline": rival, "auto_over_inline": ratio(by_way["auto"], by_way[rival]),
        "tok_per_request_s": {way: round(mean, 1) for way, mean in means.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200)
    told = parser.parse_args()
    for pair, (_, rates) in PAIRS.items():
        for name in LAWS:
            for rate in rates:
                print(json.dumps(line(pair, name, rate, told.requests, told.seeds)), flush=True)


if __name__ == "__main__":
    main()
