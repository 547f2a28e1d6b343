"""`plan`'s advice on shared drafts: equal copies of every use on N GPUs, and the gain of pools.

A pool trades a later token for a GPU that others use: with a draft of its own a sequence is faster;
SD inline shares no draft. So no single ratio decides whether it pays. The uses that are best in
tok/s or time a token (the Pareto frontier) are listed, and each pool among them is compared with
the strongest other use whose tokens arrive no later, and with the most tok/s of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mpissd.lab.pools.search import Use
from mpissd.lab.predict.advice import gain_text, gpus_text


@dataclass(frozen=True)
class Gain:
    """A pool compared with other uses of the same N GPUs; a field is None without such a use.

    in_time: among the uses whose sequences get their tokens no later, the one with most tok/s.
    most: the use with the most tok/s of all. each: SSD with a draft for every target, at the same
    T.
    """

    pool: Use
    in_time: Use | None
    most: Use | None
    each: Use | None

    @property
    def is_derived(self) -> bool:
        """Whether any of the uses rests on derived instead of measured times."""
        uses = self.pool, self.in_time, self.most, self.each
        return any(use is not None and use.choice.derived for use in uses)

    def over(self, other: Use | None) -> float | None:
        """Returns the pool's tok/s over another use's."""
        return None if other is None else self.pool.tok_per_s / other.tok_per_s

    def to_dict(self) -> dict[str, Any]:
        """Returns the entries of a plan's JSON."""
        return {
            "pool": to_dict(self.pool),
            **{
                name: None if use is None else {**to_dict(use), "gain": self.over(use)}
                for name, use in (
                    ("in_time", self.in_time),
                    ("most", self.most),
                    ("each", self.each),
                )
            },
        }


def frontier(uses: Sequence[Use]) -> list[Use]:
    """Returns the Pareto frontier of tok/s and time a token, most tok/s first."""
    kept: list[Use] = []
    for use in sorted(uses, key=lambda u: (-u.tok_per_s, u.token_s, u.gpus)):
        if not kept or use.token_s < kept[-1].token_s:
            kept.append(use)
    return kept


def gain_of(pool: Use, uses: Sequence[Use]) -> Gain:
    """Compares a pool with the uses that share no draft."""
    others = sorted((u for u in uses if not u.is_pool), key=lambda u: -u.tok_per_s)
    in_time = (u for u in others if u.token_s <= pool.token_s)
    each = (u for u in others if u.choice.mode == "ssd" and u.choice.tp == pool.choice.tp)
    return Gain(pool, next(in_time, None), next(iter(others), None), next(each, None))


def best_pool(uses: Sequence[Use]) -> Use | None:
    """Returns the pool of the frontier with the largest gain over `in_time`; None without one."""
    gains = [gain_of(use, uses) for use in frontier(uses) if use.is_pool]
    known = [gain for gain in gains if gain.in_time is not None]
    best = max(known or gains, key=lambda gain: gain.over(gain.in_time) or 0.0, default=None)
    return None if best is None else best.pool


def most(uses: Sequence[Use]) -> Use | None:
    """Returns the use of all GPUs with the most tok/s, of equal ones the one that is soonest."""
    return next(iter(frontier(uses)), None)


def most_lines(use: Use | None, gpus: int) -> list[str]:
    """Returns the line that names the most tok/s of N GPUs; none without a use, or of one GPU."""
    if use is None or gpus == 1:
        return []
    targets, mark = use.targets * use.copies, " (derived)" * bool(use.choice.derived)
    each = f", {use.tok_per_s / targets:.1f} for each of {targets} targets" * (targets > 1)
    return [f"most tok/s of all {gpus_text(gpus)}: {use}, {use.tok_per_s:.1f} tok/s{each}{mark}"]


def lines(uses: Sequence[Use], gpus: int) -> list[str]:
    """Returns the lines of a plan; none without a pool."""
    if not any(use.is_pool for use in uses):
        return []
    best = frontier(uses)
    batch = best[0].choice.batch_size
    each = f"{batch} sequence{'s' * (batch > 1)}"
    text = [
        f"equal copies on {gpus} GPUs, {each} a target, all that no other beats in both, from the "
        "most tok/s to the earliest tokens:"
    ]
    text += [_line(use, gpus) for use in best]
    gains = [gain_of(use, uses) for use in best if use.is_pool]
    if not gains:
        return [*text, "no pool is among them: a draft that targets share does not pay here"]
    return text + [_over(gain) for gain in gains]


def _line(use: Use, gpus: int) -> str:
    choice = use.choice
    how = "" if choice.mode == "ar" else f"  K={choice.lookahead}"
    if choice.fan_out is not None:
        how += f" {choice.fan_out} {choice.backup} K_b={choice.backup_lookahead}"
    idle = gpus - use.gpus
    rate = f"{use.tok_per_s:9.1f} tok/s {use.tok_per_s / gpus:8.1f} a GPU"
    wait = f"  ({idle} idle)" * bool(idle)
    return f"  {use!s:22}{rate} {use.token_s * 1e3:7.2f} ms a token{how}{wait}"


def _over(gain: Gain) -> str:
    parts = []
    if gain.in_time is not None:
        ratio = gain_text(gain.pool.tok_per_s / gain.in_time.tok_per_s)
        parts.append(f"the most with tokens no later, {gain.in_time}: {ratio}")
    if gain.most is not None and gain.most is not gain.in_time:
        ratio = gain_text(gain.pool.tok_per_s / gain.most.tok_per_s)
        later = gain.most.token_s / gain.pool.token_s
        parts.append(f"the most, {gain.most}, {later:.2f}× later: {ratio}")
    if gain.each is not None and gain.each is not gain.in_time:
        ratio = gain_text(gain.pool.tok_per_s / gain.each.tok_per_s)
        parts.append(f"a draft each, {gain.each}: {ratio}")
    mark = " (derived)" * gain.is_derived
    return f"{gain.pool} over {'; over '.join(parts)}{mark}"


def to_dict(use: Use) -> dict[str, Any]:
    """Returns a use as JSON; its choice is one target's."""
    return {
        **asdict(use.choice),
        "targets": use.targets,
        "copies": use.copies,
        "gpus": use.gpus,
        "tok_per_s": use.tok_per_s,
        "token_ms": use.token_s * 1e3,
        "hit_rate": use.hit_rate,
        "wait_us": None if use.wait_s is None else use.wait_s * 1e6,
    }


def summary(uses: Sequence[Use]) -> dict[str, Any] | None:
    """Returns a plan's JSON: the uses on the frontier, and the gains of its pools; None without
    pools."""
    if not any(use.is_pool for use in uses):
        return None
    best = frontier(uses)
    gains = [gain_of(use, uses).to_dict() for use in best if use.is_pool]
    return {"frontier": [to_dict(use) for use in best], "gains": gains}
