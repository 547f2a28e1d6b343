"""Judges a draft on answers that the target gave at temperature 0.

One forward of each model over a finished answer decides every round: after a true prefix the
draft's proposals, its keys and the target's verdict are functions of the logits there. A draft on
hidden states takes one chain of steps after each answered position.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from mpissd.learn.pair import Pair
from mpissd.learn.sample import OutOfTime, Samples, until
from mpissd.learn.states import StateDraft

FAN_OUTS = (1, 2, 4, 8, 16)
LOOKAHEADS = (4, 7)


@dataclass
class Judged:
    """Ranks and overlaps of each answer: one array a sequence.

    ranks: how many tokens the draft finds likelier than the true one; the size of the whole
    vocabulary for one that it cannot name. overlaps: sum of min(p, q) at temperature 1. surprises:
    −log q of each true token that the draft can name, in nats.
    """

    ranks: list[list[int]] = field(default_factory=list)
    overlaps: list[float] = field(default_factory=list)
    surprises: list[float] = field(default_factory=list)


def figures(draft: Pair | StateDraft, samples: Samples, deadline: float) -> dict[str, Any]:
    """Returns a draft's figures on answers: of those judged before `deadline`, in seconds of
    time.monotonic()."""
    if isinstance(draft, Pair):
        return summary(judge(draft, samples, deadline))
    steps = draft.config.shape.num_layers if draft.config.kind == "medusa" else max(LOOKAHEADS)
    return chain_summary(draft, samples, steps, deadline)


def summary(judged: Judged) -> dict[str, Any]:
    """Returns the draft's figures: agreement, alpha, tokens a round, hits and misses."""
    ranks = [rank for answer in judged.ranks for rank in answer]
    by_lookahead = {str(k): _rounds(judged.ranks, k) for k in LOOKAHEADS}
    return {
        "answers": len(judged.ranks),
        "tokens": len(ranks),
        "greedy_agreement": _mean(rank == 0 for rank in ranks),
        "alpha": _mean(judged.overlaps),
        "cross_entropy": _mean(judged.surprises),
        "by_lookahead": by_lookahead,
    }


def _rounds(answers: Sequence[Sequence[int]], lookahead: int) -> dict[str, Any]:
    """Returns tokens a round and hit rates of rounds that serve `lookahead` tokens."""
    found = [outcome for ranks in answers for outcome in rounds_of(ranks, lookahead)]
    ended = [outcome for outcome in found if outcome[1] is not None]
    after = {
        "rejection": [rank - 1 for k, rank in ended if k < lookahead and rank is not None],
        "all_accepted": [rank for k, rank in ended if k == lookahead and rank is not None],
    }
    told: dict[str, Any] = {"tokens_per_round": _mean(k + (r is not None) for k, r in found)}
    both = [rank for ranks in after.values() for rank in ranks]
    told["hits"] = {str(f): _mean(rank < f for rank in both) for f in FAN_OUTS}
    for name, ranks in after.items():
        told[f"misses_{name}"] = {str(f): _mean(rank >= f for rank in ranks) for f in FAN_OUTS}
    return told


def rounds_of(ranks: Sequence[int], lookahead: int) -> Iterator[tuple[int, int | None]]:
    """Yields (accepted tokens, rank of the target's own token) of each round of an answer.

    The rank is None if the answer ends with an accepted token. After a rejection it counts the
    proposed token too, which is no key: subtract 1.
    """
    at = 0
    while at < len(ranks):
        accepted = 0
        while accepted < lookahead and at + accepted < len(ranks) and not ranks[at + accepted]:
            accepted += 1
        at += accepted
        yield accepted, ranks[at] if at < len(ranks) else None
        at += 1


AT_ONCE = {"cpu": 8, "cuda": 32}  # sequences in a forward


def judge(pair: Pair, samples: Samples, deadline: float) -> Judged:
    """Returns the draft's ranks on the answers; those judged before the deadline.

    deadline: in seconds of time.monotonic().
    """
    judged = Judged()
    size = AT_ONCE[samples.tokens.device.type]
    with suppress(OutOfTime), until(deadline):
        for start in range(0, len(samples.tokens), size):
            part = slice(start, start + size)
            _judge_some(pair, samples.tokens[part].long(), samples.answered[part], judged)
    return judged


def _judge_some(pair: Pair, tokens: Any, answered: Any, judged: Judged) -> None:
    angles = pair.angles(tokens.shape[1])
    models = (pair.target, pair.blocks), (pair.draft, pair.draft_blocks)
    with torch.no_grad():
        before = answered[:, 1:]  # the rows whose next token is an answer's
        p, q = (
            blocks.product(blocks.hidden(m, tokens, *angles)[:, :-1][before], m.head).float()
            for m, blocks in models
        )
        true = tokens[:, 1:][before]
        places = torch.full((p.shape[1],), -1, device=tokens.device)
        places[pair.head_ids] = torch.arange(len(pair.head_ids), device=tokens.device)
        place = places[true]
        mine = q.gather(1, place.clamp(min=0)[:, None])
        ranks = torch.where(place < 0, p.shape[1], (q > mine).sum(-1))
        overlap = torch.minimum(p.softmax(-1)[:, pair.head_ids], q.softmax(-1)).sum(-1)
        surprise = q.logsumexp(-1) - mine[:, 0]
    sizes = before.sum(-1).tolist()
    judged.ranks += [part.tolist() for part in ranks.split(sizes)]
    judged.overlaps += overlap.tolist()
    judged.surprises += surprise[place >= 0].tolist()


def chain_summary(
    draft: StateDraft, samples: Samples, steps: int, deadline: float
) -> dict[str, Any]:
    """Returns the figures of a draft on hidden states: by place, and tokens a round by K.

    steps: how far it drafts. deadline: in seconds of time.monotonic(), after which the answers
    judged so far have to do.
    """
    agrees: list[list[list[bool]]] = []
    overlaps: list[list[float]] = [[] for _ in range(steps)]
    size = AT_ONCE[samples.tokens.device.type]
    with suppress(OutOfTime), until(deadline):
        for start in range(0, len(samples.tokens), size):
            _judge_chains(draft, samples.take(slice(start, start + size)), agrees, overlaps)
    flat = [row for answer in agrees for row in answer]
    by_place = [_mean([row[t] for row in flat if t < len(row)]) for t in range(steps)]
    return {
        "answers": len(agrees),
        "tokens": len(flat),
        "greedy_agreement": by_place[0],
        "alpha": _mean(overlaps[0]),
        "agreement_by_place": by_place,
        "alpha_by_place": [_mean(part) for part in overlaps],
        "by_lookahead": {
            str(k): {"tokens_per_round": _mean([n for one in agrees for n in chain_rounds(one, k)])}
            for k in LOOKAHEADS
            if k <= steps
        },
    }


def _judge_chains(
    draft: StateDraft, samples: Samples, agrees: list[list[list[bool]]], overlaps: list[list[float]]
) -> None:
    """Adds, by answer and position, whether each step there agrees; and overlaps by step.

    A row stops with the answer: the last positions have fewer steps.
    """
    tokens, answered, steps = samples.tokens.long(), samples.answered, len(overlaps)
    angles = [part[: tokens.shape[1]] for part in draft.table]
    with torch.no_grad():
        hidden = draft.blocks.hidden(draft.target, tokens, *angles)
        padded = torch.nn.functional.pad(tokens, (0, steps))
        states = torch.nn.functional.pad(hidden, (0, 0, 0, steps))
        found, shared = [], list[Any]()
        for step, mine in enumerate(draft.steps(padded, states, steps)):
            is_asked = torch.nn.functional.pad(answered, (0, steps + 1))
            is_asked = is_asked[:, step + 1 : step + 1 + mine.shape[1]]
            agree = torch.zeros_like(is_asked)
            logits = draft.logits(mine[is_asked]).float()
            rows = states[:, step : step + mine.shape[1]][is_asked]
            p = draft.blocks.product(rows, draft.target.head).float().softmax(-1)
            true = padded[:, step + 1 : step + 1 + mine.shape[1]][is_asked]
            agree[is_asked] = draft.head_ids[logits.argmax(-1)] == true
            shared.append(torch.minimum(p[:, draft.head_ids], logits.softmax(-1)).sum(-1))
            found.append(agree)
        table = torch.stack(found, -1)
    for step, each in enumerate(shared):
        overlaps[step] += each.tolist()
    for row, told in zip(table.tolist(), answered.tolist(), strict=True):
        if places := [n for n, is_answered in enumerate(told) if is_answered]:
            last = places[-1]
            agrees.append([row[p][: last - p] for p in range(places[0] - 1, last)])


def chain_rounds(answer: Sequence[Sequence[bool]], lookahead: int) -> list[int]:
    """Returns the tokens of each round of an answer, from the agreement of each position's steps.

    The answer's last token ends it, accepted or the target's own.
    """
    found, at = [], 0
    while at < len(answer):
        steps = answer[at][:lookahead]
        k = next((n for n, agrees in enumerate(steps) if not agrees), len(steps))
        found.append(min(k + 1, len(answer) - at))
        at += k + 1
    return found


def _mean(values: Iterable[float]) -> float | None:
    numbers = [float(value) for value in values]
    return round(sum(numbers) / len(numbers), 4) if numbers else None
