#!/usr/bin/env python
"""Sizes pools of one draft, simulated, beside other uses of the GPUs: OUT/pools.jsonl.

    results/pools/sizing.py OUT [--quick]

A row is a use at its own best K, fan-out and backup: AR, SD inline, SSD with a draft each (targets
1), and pools of 2 to 64 targets a draft, for every pair, T, batch and law below. No GPU, no MPI; a
quarter of an hour on one core, the same numbers on every machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from mpissd.common.config import RunConfig
from mpissd.engine.backend.profile import Profile, load_profile
from mpissd.lab.pools.search import fastest, pool_of
from mpissd.lab.pools.theory import by_queueing
from mpissd.lab.predict.advisor import plan
from mpissd.lab.predict.costs import HostCosts
from mpissd.lab.predict.laws import Laws
from mpissd.lab.predict.places import survey
from mpissd.lab.predict.search import Choice, Placement

PROFILES = ("h200", "h100")
TARGETS = (2, 3, 4, 6, 8, 12, 16, 32, 64)
FEW = (2, 4, 8)
PLACES = (("8b/1b", 1), ("8b/1b", 2), ("70b/1b", 1), ("70b/1b", 2), ("70b/1b", 4))  # if it fits
LAWS: tuple[dict[str, Any], ...] = (
    {"alpha": 0.6},
    {"alpha": 0.9},
    {"alpha": 0.8, "hit_law": "smollm2-chat"},
    {"alpha": 0.8, "hit_law": "power:A=0.75,r=1"},
)
ROUNDS = 4000


def rows_of(
    config: RunConfig, profile: Profile, tp: int, counts: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """The rows of one device, pair, T, batch and law; none where they do not fit."""
    found = survey(config, profile, tp + 1)
    if all(place.tp != tp for place in found.placements):
        return
    advice = plan(config, HostCosts(), found.placements, tp + 1, found.unjudged)
    for choice in advice.judged:
        if choice.tp == tp and (choice.mode != "sd" or not choice.num_drafts):
            yield row(config, profile, choice, 1, choice.tok_per_s, {"hit_rate": choice.hit_rate})
    place = next(place for place in found.placements if place.tp == tp)
    for count in counts:
        yield from pool_rows(config, profile, place, count)


def pool_rows(
    config: RunConfig, profile: Profile, place: Placement, count: int
) -> Iterator[dict[str, Any]]:
    """The row of the fastest pool of so many targets."""
    use = fastest(config, profile, place, HostCosts(), Laws.of(config), count, ROUNDS)
    if use is None or use.wait_s is None:
        return
    host = place.host(("ssd", 1), HostCosts())
    sized = by_queueing(pool_of(config, profile, use.choice, host, count))
    more = {"hit_rate": use.hit_rate, "wait_us": use.wait_s * 1e6}
    theory = {"theory_tok_per_s": sized.tok_per_s, "theory_wait_us": sized.wait_s * 1e6}
    yield row(config, profile, use.choice, count, use.tok_per_s, {**more, **theory})


def row(
    config: RunConfig,
    profile: Profile,
    choice: Choice,
    targets: int,
    tok_per_s: float,
    more: dict[str, Any],
) -> dict[str, Any]:
    """A row; its rates are of all targets of one draft together."""
    gpus = targets * choice.tp + choice.num_drafts
    return {
        "schema": 1,
        "device_name": f"{profile.device_name} (emulated)",
        "pair": config.pair,
        "acceptance": config.acceptance_text,
        "hit_law": config.hit_law or "smollm2",
        "mode": choice.mode,
        "tp": choice.tp,
        "num_drafts": choice.num_drafts,
        "batch_size": choice.batch_size,
        "targets": targets,
        "gpus": gpus,
        "lookahead": choice.lookahead,
        "fan_out": choice.fan_out,
        "backup": choice.backup,
        "backup_lookahead": choice.backup_lookahead,
        "tok_per_s": tok_per_s,
        "tok_per_s_per_gpu": tok_per_s / gpus,
        "token_ms": 1e3 * targets * choice.batch_size / tok_per_s,
        **more,
    }


def configs(*, quick: bool) -> Iterator[tuple[str, int, RunConfig, tuple[int, ...]]]:
    """Yields (device, T, configuration, numbers of targets), what the figure needs first."""
    base = RunConfig(alpha=0.8)
    for batch, (device, (pair, tp)) in product(
        (1,) if quick else (1, 8), product(PROFILES, PLACES)
    ):
        counts = FEW if quick else TARGETS
        yield device, tp, replace(base, pair=pair, batch_size=batch), counts
    for (pair, tp), laws in product(() if quick else PLACES, LAWS):
        yield PROFILES[0], tp, replace(base, **{"pair": pair, "alpha": None, **laws}), FEW


def main() -> None:
    """Writes the rows."""
    out, quick = Path(sys.argv[1]), "--quick" in sys.argv[2:]
    out.mkdir(parents=True, exist_ok=True)
    with (out / "pools.jsonl").open("w") as file:
        for device, tp, config, counts in configs(quick=quick):
            for each in rows_of(config, load_profile(device), tp, counts):
                file.write(json.dumps(each) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
