"""The flags of learners: ranks that train the draft while it drafts (docs/online.md)."""

from __future__ import annotations

from dataclasses import dataclass

from mpissd.common.flags import DRAFTING, Checked, choice, flag, integer, number


@dataclass(frozen=True)
class LearnerFlags(Checked):
    """Flags of learner ranks: how many, what they learn from, and how."""

    learners: int = flag(
        0,
        integer(0, 1),
        "number L of learner ranks, the last ones, which train the draft while it drafts (text)",
        modes=DRAFTING,
        in_digest="said",
    )
    learn_from: str = flag(
        "all",
        choice("rejected", "all"),
        "positions that a learner learns from: where a draft was rejected, or all verified ones",
        modes=DRAFTING,
        in_digest="said",
    )
    learn_rate: float = flag(
        3e-5, number(0, 1), "learning rate of a learner", modes=DRAFTING, in_digest="said"
    )
    learn_batch: int = flag(
        4, integer(1), "sequences of a learner's step", modes=DRAFTING, in_digest="said"
    )
    learn_steps: float = flag(
        1.0,
        number(0.01),
        "steps for each finished sequence, which is seen learn_batch · learn_steps times",
        modes=DRAFTING,
        in_digest="said",
    )
    publish_s: float = flag(
        10.0,
        number(0),
        "shortest time between two versions of the draft, in seconds",
        modes=DRAFTING,
        in_digest="said",
    )
    learn_device: str = flag(
        "auto",
        choice("auto", "cuda", "cpu"),
        "where a learner computes; cuda: the GPU of its place on the host, or the last one",
        modes=DRAFTING,
        in_digest="said",
    )
