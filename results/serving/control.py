"""Compares control by goodput with every fixed way, from idle to saturation, in virtual time.

    python results/serving/control.py [--requests=200] [--seed=0] > control.jsonl

A line for each pair, law and rate: tokens a second of request time (from arrival to last token) of
AR on the same T ranks, of every fixed mode and K, of `auto`, and of SD with the draft inline (T
ranks). Arrivals are Poisson; all ways see the same arrivals and the same coins. A ratio stands with
its 95% interval: the requests are drawn again, 1,000 times, the same ones for both ways.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from mpissd.common.config import parse_flags
from mpissd.serve.simulated import Arrival, Simulated, simulate

Floats = NDArray[np.float64]
Seconds = dict[str, Floats]  # by way
MOST_K = 7
LOOKAHEADS = (1, 3, 5, 7)
RESAMPLES = 1000
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


def seconds(done: Simulated) -> Floats:
    """Returns the seconds from arrival to last token of every request."""
    return np.array([one.token_s[-1] - one.at_s for one in done.requests])


def ways() -> Iterator[tuple[str, dict[str, str]]]:
    """Names and flags of the fixed ways and of auto."""
    yield "ar", {"mode": "ar"}
    for k in LOOKAHEADS:
        yield f"inline sd {k}", {"mode": "sd", "num_drafts": "0", "lookahead": f"{k}"}
        yield f"sd {k}", {"mode": "sd", "lookahead": f"{k}"}
        yield f"ssd {k}", {"mode": "ssd", "lookahead": f"{k}", "fan_out": "uniform:3"}
    yield "auto", {"mode": "ssd", "lookahead": f"{MOST_K}", "fan_out": "uniform:3"}


def measured(pair: str, law: Mapping[str, str], rate: float, count: int, seed: int) -> Seconds:
    """Returns the seconds of every request, in every way."""
    tp, asked = PAIRS[pair][0], arrivals(rate, count, seed)
    found = {}
    for name, flags in ways():
        rules = {} if flags["mode"] == "ar" else dict(law)
        if flags["mode"] != "ssd":
            rules = {k: v for k, v in rules.items() if not k.startswith("hit")}
        told = {"pair": pair, "backend": "emulated", "device": "h200", "batch_size": "32"}
        config = parse_flags({**told, **rules, **flags, "seed": str(seed)})
        found[name] = seconds(simulate(config, tp, asked, auto=name == "auto"))
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
    every = measured(pair, LAWS[name], rate, count, seed)
    tokens = sum(one.num_tokens for one in arrivals(rate, count, seed))
    speeds = {way: tokens / float(each.sum()) for way, each in every.items()}
    fixed = [way for way in speeds if way != "auto" and not way.startswith("inline")]
    best = max(fixed, key=speeds.__getitem__)
    rival = max((way for way in speeds if way.startswith("inline")), key=speeds.__getitem__)
    return {
        "pair": pair, "tp": PAIRS[pair][0], "law": name, "rate": rate, "requests": count,
        "best": best, "auto_over_best": ratio(every["auto"], every[best]),
        "auto_over_ar": ratio(every["auto"], every["ar"]),
        "best_inline": rival, "auto_over_inline": ratio(every["auto"], every[rival]),
        "tok_per_request_s": {way: round(speed, 1) for way, speed in speeds.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    for name in LAWS:
        for pair, (_, rates) in PAIRS.items():
            for rate in rates:
                print(json.dumps(line(pair, name, rate, told.requests, told.seed)), flush=True)


if __name__ == "__main__":
    main()
