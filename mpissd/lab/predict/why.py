"""Explains why a result is not at its floor: the parts of the difference, largest first.

The floor of a round (floor_us) is the time to read the target's weights once, or to compute its
products at the device's peak if that takes longer. The time beyond it is split by the ledger's
means (phases_us, which add up to the mean round): the forward above its floor, the wait for drafts
(drafting, the draft's host, the link), and each host phase of the lead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mpissd.common.errors import ConfigError
from mpissd.common.row import READABLE, Row

_NEEDED = ("mode", "round_us", "phases_us", "floor_us", "t_target_s", "inline_draft")
_CLOSES = {
    "send": "a smaller OUTCOME, or one that is packed with fewer copies",
    "commit": "fewer array operations where the lead applies an outcome",
    "broadcast": "fewer or leaner messages to the followers (T − 1 of them)",
    "upload": "laying the tokens out in the buffer that the device reads",
    "launch": "replaying the forward as one captured graph",
    "sample": "a cheaper acceptance rule on the host, or one that runs on the device",
    "record": "less bookkeeping between rounds",
}


class Gap(NamedTuple):
    """Time that a round spends above its floor: µs a round, and its share of the mean round."""

    name: str
    us: float
    share: float
    advice: str  # one sentence on how to close the gap


def gaps(row: Row, count: int = 3) -> list[Gap]:
    """Returns the `count` largest gaps between a row and its floor; null values are left out.

    Raises ConfigError for a row of another schema, or without a key that every row has.
    """
    if row.schema not in READABLE:
        raise ConfigError(f"result of schema {row.schema!r}: this version reads {READABLE}")
    if missing := [key for key in _NEEDED if key not in row]:
        raise ConfigError(f"result row: no {missing[0]!r}: allowed: a row that `run` wrote")
    round_us = (row.round_us or {}).get("mean")
    if not round_us:
        return []
    parts = [*_forward(row), *_drafts(row)]
    lead = (row.phases_us or {}).get("lead") or {}
    for name, closes in _CLOSES.items():
        if name != "launch" or row.backend != "numpy":  # NumPy's forwards run inside the launch
            parts.append((name, lead.get(name, 0.0), closes))
    every = [
        Gap(name, us, us / round_us, advice[:1].upper() + advice[1:] + ".")
        for name, us, advice in parts
        if us > 0
    ]
    return sorted(every, key=lambda gap: -gap.us)[:count]


def _forward(row: Row) -> Iterator[tuple[str, float, str]]:
    """Yields (name, µs a round, how to close it) of the wait for the verification."""
    lead = (row.phases_us or {}).get("lead") or {}
    if "device_wait" not in lead:
        return
    waited = lead["device_wait"] + (lead.get("launch", 0.0) if row.backend == "numpy" else 0.0)
    forward = waited if row.t_target_s is None else min(waited, row.t_target_s * 1e6)
    if row.floor_us is not None:

        def seconds(work: str, rate: str) -> float:
            return float(row[work] / row[rate]) if row.get(work) and row.get(rate) else 0.0

        computed = seconds("floor_flops", "peak_flops_per_s")
        does = "computes" if computed > seconds("floor_bytes", "read_bytes_per_s") else "reads"
        reached = min(1.0, row.floor_us / forward) if forward else 1.0
        ways = [] if row.fuse else ["--fuse"]
        ways += ["--graph"] if row.graph is False and row.backend == "cupy" else []
        ways += ["a faster all-reduce"] if (row.tp or 1) > 1 else []
        ways += ["products that lose less at their boundaries"]
        advice = f"the forward {does} at {reached:.0%} of the measured rate: {', '.join(ways)}"
        yield "verification above its floor", max(0.0, forward - row.floor_us), advice
    yield (
        "waiting beyond the forward",
        waited - forward,
        "a wait that ends sooner (spinning ranks, cores of their own) and followers that launch "
        "with the lead",
    )


def _drafts(row: Row) -> Iterator[tuple[str, float, str]]:
    """Yields the parts of the lead's wait for drafts: draft steps, draft's host, the rest."""
    phases = row.phases_us or {}
    waited, draft = (phases.get("lead") or {}).get("draft_wait"), phases.get("draft") or {}
    if waited is None or row.mode == "ar":
        return
    growth, target, rate = row.t_growth_s, row.t_target_s, row.hit_rate
    late = "shorter growth steps (fewer branches, a smaller draft) and a faster link"
    if growth and target and growth > target:
        late = (
            f"growth takes {growth * 1e3:.2f} ms, the verification {target * 1e3:.2f} ms: a "
            "shorter K, fewer branches or a smaller draft"
        )
    names: tuple[str, ...] = ("commit", "lookup", "send")
    if row.inline_draft:
        advice = "a smaller draft or K, or a GPU for the draft (--mode=ssd hides it)"
        names, between = ("lookup",), "inline hand-over"
        closes = "less host work around the inline draft"
    elif row.mode == "ssd":
        seen = "" if rate is None else f"at a hit rate of {rate:.2f} "
        advice = (
            f"{seen}the misses draft while the target waits: more fan-out, a smaller "
            "--backup_lookahead, or --backup=fast"
        )
        if rate is not None and f"{rate:.2f}" == "1.00":
            advice = late
        between, closes = "link, and growth steps that an outcome waits for", late
    else:
        advice = "drafting while the target verifies (--mode=ssd), or a smaller draft or K"
        between = "link"
        closes = "a faster link (ranks on one node, cores of their own, that spin)"
    if not draft:
        yield "draft wait exposed", waited, advice
        return
    steps = min(waited, draft.get("speculate", 0.0))
    host = min(waited - steps, sum(draft.get(name, 0.0) for name in names))
    yield "drafting exposed", steps, advice
    yield "draft's host work", host, "fewer array operations where the draft answers an outcome"
    yield between, waited - steps - host, closes
