"""Result rows of a known model, for the tests of mpissd.lab.tables."""

from __future__ import annotations

from typing import Any

from mpissd.common import theory
from mpissd.common.presets import PAIRS
from mpissd.common.row import Row

STEP_S = 0.004
T1_S = {"8b/1b": 0.016, "70b/1b": 0.150}


def t_target(pair: str, width: int) -> float:
    """Seconds of the known model: M = 1 slow, then a bend, so that no straight line fits."""
    return T1_S[pair] * (1.0 if width == 1 else 0.93 + 0.0006 * width**2)


def sd(pair: str, lookahead: int, *, alpha: float = 0.9, **changed: Any) -> Row:
    """An SD row of the known model, with exact throughput."""
    verify, draft = t_target(pair, lookahead + 1), lookahead * STEP_S
    tokens = theory.expected_tokens(alpha, lookahead)
    weights = theory.accept_probabilities([alpha] * lookahead)
    row = ar(pair) | {
        "mode": "sd",
        "run_id": f"sd-{pair.replace('/', '-')}-{lookahead}-{alpha}",
        "draft": PAIRS[pair][1],
        "lookahead": lookahead,
        "acceptance": f"alpha:{alpha}",
        "tok_per_s": tokens / (verify + draft),
        "accept_histogram": [round(10_000 * w) for w in weights],
        "num_rounds": sum(round(10_000 * w) for w in weights),
        "round_us": round_us(verify + draft),
        "t_target_s": verify,
        "T_SD": draft / verify,
    }
    return row | changed


def round_us(seconds: float) -> dict[str, float]:
    """Rounds that all take as long."""
    return dict.fromkeys(("mean", "p50", "p90", "p99"), seconds * 1e6)


def ar(pair: str, **changed: Any) -> Row:
    row = {
        "schema": 1,
        "run_id": f"ar-{pair.replace('/', '-')}",
        "mode": "ar",
        "backend": "cupy",
        "device_name": "A GPU",
        "dtype": "float16",
        "tp": 1,
        "num_drafts": 0,
        "all_reduce": "solo",
        "graph": True,
        "fuse": False,
        "lm_head": False,
        "context": 0,
        "target": PAIRS[pair][0],
        "draft": None,
        "lookahead": 0,
        "batch_size": 1,
        "acceptance": None,
        "tok_per_s": 1 / t_target(pair, 1),
        "accept_histogram": [1000],
        "num_rounds": 1000,
        "round_us": round_us(t_target(pair, 1)),
        "t_target_s": t_target(pair, 1),
        "T_SD": None,
        "stable": True,
        "provenance": {"command": ["run"], "ranks": [{"device": "A GPU"}]},
    }
    return Row.from_dict(row | changed)
