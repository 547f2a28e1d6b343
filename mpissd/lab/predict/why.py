"""Explains why a result is not at its floor: the parts of the difference, largest first.

The floor of a round (floor_us) is the time to read the target's weights once, or to compute its
products at the device's peak if that takes longer. The time beyond it is split by the ledger's
means (phases_us, which add up to the mean round): the forward above its floor, the wait for drafts
(drafting, the draft's host, the link), and each host phase of the lead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Gap:
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
    found = [
        Gap(name, us, us / round_us, advice[:1].upper() + advice[1:] + ".")
        for name, us, advice in _parts(row)
        if us > 0
    ]
    return sorted(found, key=lambda gap: -gap.us)[:count]


def _parts(row: Row) -> Iterator[tuple[str, float, str]]:
    """Yields (name, µs a round, how to close it); they add up to the mean round less its floor."""
    phases = row.phases_us or {}
    lead: Mapping[str, float] = phases.get("lead") or {}
    at_launch = row.backend == "numpy"  # NumPy's forwards run inside the launch
    if "device_wait" in lead:
        waited = lead["device_wait"] + (lead.get("launch", 0.0) if at_launch else 0.0)
        forward = waited if row.t_target_s is None else min(waited, row.t_target_s * 1e6)
        if row.floor_us is not None:
            above = max(0.0, forward - row.floor_us)
            yield "verification above its floor", above, _verify_advice(row, forward)
        yield (
            "waiting beyond the forward",
            waited - forward,
            "a wait that ends sooner (spinning ranks, cores of their own) and followers that "
            "launch with the lead",
        )
    if "draft_wait" in lead and row.mode != "ar":
        yield from _drafts(row, lead["draft_wait"], phases.get("draft") or {})
    for name, closes in _CLOSES.items():
        if not (at_launch and name == "launch"):
            yield name, lead.get(name, 0.0), closes


def _verify_advice(row: Row, forward_us: float) -> str:
    """Returns what the forward is bound by, how close it is to that, and what shortens it."""

    def seconds(work: str, rate: str) -> float:
        return float(row[work] / row[rate]) if row.get(work) and row.get(rate) else 0.0

    computed = seconds("floor_flops", "peak_flops_per_s")
    does = "computes" if computed > seconds("floor_bytes", "read_bytes_per_s") else "reads"
    reached = min(1.0, (row.floor_us or 0.0) / forward_us) if forward_us else 1.0
    ways = [] if row.fuse else ["--fuse"]
    ways += ["--graph"] if row.graph is False and row.backend == "cupy" else []
    ways += ["a faster all-reduce"] if (row.tp or 1) > 1 else []
    ways += ["products that lose less at their boundaries"]
    return f"the forward {does} at {reached:.0%} of the measured rate: {', '.join(ways)}"


def _drafts(
    row: Row, waited: float, draft: Mapping[str, float]
) -> Iterator[tuple[str, float, str]]:
    """Yields the parts of the lead's wait for drafts: draft steps, draft's host, the rest."""
    if row.inline_draft:
        advice = "a smaller draft or K, or a GPU for the draft (--mode=ssd hides it)"
    elif row.mode == "ssd":
        advice = _ssd_advice(row)
    else:
        advice = "drafting while the target verifies (--mode=ssd), or a smaller draft or K"
    if not draft:
        yield "draft wait exposed", waited, advice
        return
    steps = min(waited, draft.get("speculate", 0.0))
    names = ("lookup",) if row.inline_draft else ("commit", "lookup", "send")
    host = min(waited - steps, sum(draft.get(name, 0.0) for name in names))
    yield "drafting exposed", steps, advice
    yield "draft's host work", host, "fewer array operations where the draft answers an outcome"
    between = waited - steps - host
    if row.inline_draft:
        yield "inline hand-over", between, "less host work around the inline draft"
    elif row.mode == "ssd":
        yield "link, and growth steps that an outcome waits for", between, _late_advice(row)
    else:
        yield "link", between, "a faster link (ranks on one node, cores of their own, that spin)"


def _late_advice(row: Row) -> str:
    growth, target = row.t_growth_s, row.t_target_s
    if growth and target and growth > target:
        return (
            f"growth takes {growth * 1e3:.2f} ms, the verification {target * 1e3:.2f} ms: a "
            "shorter K, fewer branches or a smaller draft"
        )
    return "shorter growth steps (fewer branches, a smaller draft) and a faster link"


def _ssd_advice(row: Row) -> str:
    rate = row.hit_rate
    if rate is not None and f"{rate:.2f}" == "1.00":
        return _late_advice(row)
    seen = "" if rate is None else f"at a hit rate of {rate:.2f} "
    return (
        f"{seen}the misses draft while the target waits: more fan-out, a smaller "
        "--backup_lookahead, or --backup=fast"
    )
