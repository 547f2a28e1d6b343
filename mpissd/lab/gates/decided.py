"""Gates on decisions: counts, tokens, outcomes, and whether all ranks received the same ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.records import is_first_round, outcome_digest
from mpissd.common.rounds import Source
from mpissd.common.row import READABLE, Row
from mpissd.lab.gates.read import Rounds, differs, number

_ALWAYS = """tp num_drafts world_size batch_size lookahead num_rounds num_tokens wall_s tok_per_s
tok_per_s_per_gpu acceptance_length ledger_closure round_us.mean round_us.p50 round_us.n""".split()
_ENDING = ("replay", "text")  # workloads whose sequences end by themselves
_A_ROW_A_ROUND = "round_s t_target_s lead_ledger_ns draft_ledger_ns draft_rounds".split()


def missing(row: Row, rounds: Rounds) -> Iterator[str]:
    """Reports keys that every row must have but this one lacks, and an unknown schema."""
    if row.schema not in READABLE:
        yield f"schema is {row.schema}, this version judges {READABLE}"
    for path in _ALWAYS:
        if number(row, path) is None:
            yield f"{path} is not a number"


def finite(row: Row, rounds: Rounds) -> Iterator[str]:
    """Reports NaN and infinity; only in draft_rounds NaN is allowed; it means "not measured"."""
    yield from _not_finite("", row)
    for name, values in rounds.items():
        if values.dtype.kind == "f":
            wrong = np.isinf(values) if name == "draft_rounds" else ~np.isfinite(values)
            if wrong.any():
                yield f"{name} holds {values[wrong][0]}, {int(wrong.sum())} of {values.size}"


def _not_finite(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _not_finite(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, (list, tuple)):
        for n, inner in enumerate(value):
            yield from _not_finite(f"{path}[{n}]", inner)
    elif isinstance(value, (float, np.floating)) and not math.isfinite(value):
        yield f"{path} is {value}"


def ranks(row: Row, rounds: Rounds) -> Iterator[str]:
    """Reports a wrong number of ranks, and ranks whose digests of received outcomes differ.

    Only ranks of one target group receive the same ones; a draft has a digest for each group.
    """
    size, groups, learners = int(row.world_size), row.groups or 1, row.learners or 0
    if groups * row.tp + row.num_drafts + learners != size:
        names = "groups · " * (groups > 1), " + learners" * (learners > 0)
        known = groups * row.tp + row.num_drafts + learners
        yield f"world_size is {size}, {names[0]}tp + num_drafts{names[1]} is {known}"
    digests = row.rank_digests
    if digests is None and "rank_digests" in rounds:
        digests = rounds["rank_digests"].tolist()
    if digests is None:
        return
    if len(digests) != groups * (row.tp + row.num_drafts):
        yield f"world_size is {size}, rank_digests has {len(digests)}"
    for group in range(groups):
        yield from _heard_alike(_of_group(digests, group, groups, row.tp))


def _of_group(
    digests: Sequence[int | None], group: int, groups: int, tp: int
) -> list[tuple[int, int]]:
    """Returns (rank, digest) of a group's target ranks, and of each draft for this group."""
    targets = [
        (rank, digests[rank]) for rank in range(group * tp, min(len(digests), (group + 1) * tp))
    ]
    behind = digests[groups * tp + group :: groups]
    drafts = [(groups * tp + n, digest) for n, digest in enumerate(behind)]
    return [(rank, digest) for rank, digest in (*targets, *drafts) if digest is not None]


def _heard_alike(heard: Sequence[tuple[int, int]]) -> Iterator[str]:
    for rank, digest in heard[1:]:
        if digest != heard[0][1]:
            yield f"rank {heard[0][0]} heard {heard[0][1]}, rank {rank} heard {digest}"


def counts(row: Row, rounds: Rounds) -> Iterator[str]:
    """Reports arrays and keys that disagree on the number of rounds."""
    lengths = {name: len(rounds[name]) for name in _A_ROW_A_ROUND if name in rounds}
    if "sequences" in rounds:
        lengths["sequences"] = len(np.unique(rounds["sequences"][:, 0]))
    names = ["round_us.n", "predicted_round_us.n"]
    if row.on_late == "serve" and row.token_limit is not None:
        names.pop()  # drafted lengths depend on timing, and with them the replay's rounds
    numbers = {name: number(row, name) for name in names}
    for name, count in {**lengths, **numbers}.items():
        if count is not None and count != row.num_rounds:
            yield f"num_rounds is {row.num_rounds}, {name} has {count:g}"
    fan_out = row.fan_out
    if fan_out is not None:
        if len(fan_out) != row.lookahead + 1:
            yield f"lookahead is {row.lookahead}, fan_out has {len(fan_out)}"
        yield from differs(row, "branch_budget", sum(fan_out), "Σ fan_out")


def tokens(row: Row, rounds: Rounds) -> Iterator[str]:
    """Reports token counts that contradict each other, and hit rates outside 0 to 1.

    The counts are num_tokens, acceptance_length and accept_histogram.
    """
    histogram = np.asarray(row.accept_histogram, np.int64)
    lookahead, batch, num_rounds = (int(row[k]) for k in ("lookahead", "batch_size", "num_rounds"))
    outcomes = int(histogram.sum())
    if len(histogram) != lookahead + 1 or (histogram < 0).any():
        yield f"accept_histogram is {histogram.tolist()}, lookahead is {lookahead}"
    if not num_rounds <= outcomes <= num_rounds * batch:
        yield f"accept_histogram counts {outcomes}, {num_rounds} rounds of {batch} sequences"
    emitted = int(histogram @ np.arange(1, len(histogram) + 1))
    least, most = _counted(row, rounds, emitted)
    if not least <= row.num_tokens <= most:
        bounds = f"{most}" if least == most else f"{least} to {most}"
        yield f"num_tokens is {row.num_tokens}, accept_histogram gives {bounds}"
    yield from differs(
        row, "acceptance_length", emitted / max(1, outcomes), "accept_histogram", 1e-5
    )
    rate = number(row, "hit_rate")
    if rate is not None and not 0 <= rate <= 1:
        yield f"hit_rate is {rate:g}, allowed: 0 to 1"


def _counted(row: Row, rounds: Rounds, emitted: int) -> tuple[int, int]:
    """Returns the fewest and the most tokens, of those emitted, that can count.

    Tokens beyond a sequence's end or limit do not count: at most K of them, in its last round.
    """
    rows = rounds.get("sequences")
    ids = None if rows is None else np.unique(rows[:, 1], return_inverse=True)[1]
    num_sequences = (row.groups or 1) * row.batch_size if ids is None else len(np.unique(ids))
    least = emitted - num_sequences * row.lookahead
    if "token_limit" not in row or row.stop_token is not None or row.workload in _ENDING:
        return least, emitted
    if row.token_limit is None:
        return emitted, emitted
    if rows is None or ids is None:
        return least, emitted
    exact = int(np.minimum(np.bincount(ids, weights=rows[:, 3] + 1), row.token_limit).sum())
    return exact, exact


def decisions(row: Row, rounds: Rounds) -> Iterator[str]:
    """Reports outcomes that break 0 ≤ k ≤ num_draft ≤ K, impossible hits, and wrong counts."""
    if "sequences" not in rounds:
        return
    rows, lookahead = rounds["sequences"], int(row.lookahead)
    round_, _, _, accepted, _, source, hit, drafted = rows.T
    for n in np.flatnonzero((accepted < 0) | (accepted > drafted) | (drafted > lookahead))[:1]:
        yield (
            f"round {round_[n]} accepted {accepted[n]} of {drafted[n]} drafted tokens, "
            f"lookahead is {lookahead}"
        )
    for n in np.flatnonzero(hit != (source == Source.CACHE))[:1]:
        yield f"round {round_[n]} has hit {hit[n]} and source {source[n]}"
    wanted, asked = number(row, "backup_lookahead"), _asked(row, round_)
    for n in np.flatnonzero(~asked & ((source != Source.NONE) | (drafted > 0)))[:1]:
        yield (
            f"draft_lost_round is {row.draft_lost_round}, round {round_[n]} has {drafted[n]} "
            f"drafted tokens of source {source[n]}"
        )
    missed = asked & (source != Source.CACHE)
    for n in np.flatnonzero(missed & (drafted != wanted))[: wanted is not None]:
        yield f"backup_lookahead is {wanted:g}, round {round_[n]} has {drafted[n]} such tokens"
    prompts = (row.num_prompts or 0) // (row.groups or 1)  # of the first group
    first = min(row.batch_size, prompts or row.batch_size)
    if (begun := int((round_ == 0).sum())) != first:
        yield f"batch_size is {row.batch_size}, round 0 has {begun} sequences"
    seen = np.bincount(accepted.clip(0), minlength=lookahead + 1).tolist()
    if seen != row.accept_histogram:
        yield f"accept_histogram is {row.accept_histogram}, sequences give {seen}"
    if (looked := asked & ~is_first_round(rows)).any():
        yield from differs(row, "hit_rate", float(hit[looked].mean()), "sequences", 1e-5)
    if (digest := outcome_digest(rows)) != row.get("outcome_digest", digest):
        yield f"outcome_digest is {row.outcome_digest}, sequences give {digest}"


def _asked(row: Row, round_: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns [n] whether a draft existed that could be asked in each of these rounds."""
    lost = number(row, "draft_lost_round")
    return np.full(len(round_), True) if lost is None else round_ < lost
