"""Judges a draft on answers that the target gave at temperature 0.

One forward of each model over a finished answer decides every round: after a true prefix the
draft's proposals, its keys and the target's verdict are functions of the logits there. A draft on
hidden states takes one chain of steps after each answered position.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from mpissd.learn.draft import Draft, ModelDraft, StateDraft
from mpissd.learn.sample import Samples

LOOKAHEADS = (4, 7)
AT_ONCE = {"cpu": 8, "cuda": 32}  # sequences in a forward


def figures(draft: Draft, samples: Samples, deadline: float) -> dict[str, Any]:
    """Returns a draft's figures on the answers judged before `deadline` (monotonic seconds)."""
    if isinstance(draft, ModelDraft):
        return summary(*judge(draft, samples, deadline))
    medusa = draft.config.kind == "medusa"
    steps = draft.config.shape.num_layers if medusa else max(LOOKAHEADS)
    agrees: list[list[list[bool]]] = []
    overlaps: list[list[float]] = [[] for _ in range(steps)]
    for part in _parts(samples, deadline):
        _judge_chains(draft, part, agrees, overlaps)
    flat = [row for answer in agrees for row in answer]
    by_place = [_mean([row[t] for row in flat if t < len(row)]) for t in range(steps)]
    return {
        "answers": len(agrees),
        "tokens": len(flat),
        "greedy_agreement": by_place[0],
        "alpha": _mean(overlaps[0]),
        "agreement_by_place": by_place,
        "alpha_by_place": [_mean(part) for part in overlaps],
        "by_lookahead": _by_lookahead(agrees, steps),
    }


def summary(
    answers: Sequence[Sequence[bool]], overlaps: Sequence[float], surprises: Sequence[float]
) -> dict[str, Any]:
    """Returns a model's agreement, alpha and tokens a round, from what `judge` returns."""
    longest = max(LOOKAHEADS)
    flat = [agrees for answer in answers for agrees in answer]
    steps = [[answer[n : n + longest] for n in range(len(answer))] for answer in answers]
    return {
        "answers": len(answers),
        "tokens": len(flat),
        "greedy_agreement": _mean(flat),
        "alpha": _mean(overlaps),
        "cross_entropy": _mean(surprises),
        "by_lookahead": _by_lookahead(steps, longest),
    }


def _by_lookahead(answers: Sequence[Sequence[Sequence[bool]]], steps: int) -> dict[str, Any]:
    return {
        str(k): {"tokens_per_round": _mean(n for of in answers for n in chain_rounds(of, k))}
        for k in LOOKAHEADS
        if k <= steps
    }


def judge(
    draft: ModelDraft, samples: Samples, deadline: float
) -> tuple[list[list[bool]], list[float], list[float]]:
    """Returns (agreements, overlaps, surprises) on the answers judged before the deadline, in
    seconds of time.monotonic(): whether the true token is the draft's likeliest, by answer; Σ
    min(p, q) at temperature 1, by token; and −log q of each true token in the draft's vocabulary.
    """
    answers = list[list[bool]]()
    overlaps = list[float]()
    surprises = list[float]()
    models = (draft.target, draft.blocks), (draft.weights, draft.own_blocks)
    with torch.no_grad():
        for part in _parts(samples, deadline):
            tokens = part.tokens.long()
            angles = draft.angles(part.tokens.shape[1])
            before = part.answered[:, 1:]  # the rows whose next token is an answer's
            p, q = (
                blocks.product(blocks.hidden(m, tokens, *angles)[:, :-1][before], m.head).float()
                for m, blocks in models
            )
            places = torch.full((p.shape[1],), -1, device=tokens.device)
            places[draft.head_ids] = torch.arange(len(draft.head_ids), device=tokens.device)
            place = places[tokens[:, 1:][before]]
            mine = q.gather(1, place.clamp(min=0)[:, None])
            agrees = (place >= 0) & ~(q > mine).any(-1)
            overlap = torch.minimum(p.softmax(-1)[:, draft.head_ids], q.softmax(-1)).sum(-1)
            surprise = q.logsumexp(-1) - mine[:, 0]
            answers += [row.tolist() for row in agrees.split(before.sum(-1).tolist())]
            overlaps += overlap.tolist()
            surprises += surprise[place >= 0].tolist()
    return answers, overlaps, surprises


def _parts(samples: Samples, deadline: float) -> Iterator[Samples]:
    size = AT_ONCE[samples.tokens.device.type]
    for start in range(0, len(samples.tokens), size):
        if time.monotonic() > deadline:
            return
        yield samples.take(slice(start, start + size))


def _judge_chains(
    draft: StateDraft, samples: Samples, agrees: list[list[list[bool]]], overlaps: list[list[float]]
) -> None:
    """Appends to `agrees`, by answer and position, whether each drafted step is the true token, and
    to `overlaps`, by step, Σ min(p, q). Steps beyond an answer's end are left out."""
    tokens = samples.tokens.long()
    steps = len(overlaps)
    with torch.no_grad():
        hidden = draft.blocks.hidden(draft.target, tokens, *draft.angles(tokens.shape[1]))
        padded = F.pad(tokens, (0, steps))
        states = F.pad(hidden, (0, 0, 0, steps))
        answered = F.pad(samples.answered, (0, steps + 1))
        agreed = []
        shared = list[Any]()
        for step, mine in enumerate(draft.steps(padded, states, steps)):
            after = slice(step + 1, step + 1 + mine.shape[1])
            is_asked = answered[:, after]
            agree = torch.zeros_like(is_asked)
            logits = draft.logits(mine[is_asked]).float()
            rows = states[:, step : step + mine.shape[1]][is_asked]
            p = draft.blocks.product(rows, draft.target.head).float().softmax(-1)
            agree[is_asked] = draft.head_ids[logits.argmax(-1)] == padded[:, after][is_asked]
            shared.append(torch.minimum(p[:, draft.head_ids], logits.softmax(-1)).sum(-1))
            agreed.append(agree)
        table = torch.stack(agreed, -1)
    for overlap, values in zip(overlaps, shared, strict=True):
        overlap += values.tolist()
    for row, mask in zip(table.tolist(), samples.answered.tolist(), strict=True):
        if places := [n for n, is_answered in enumerate(mask) if is_answered]:
            last = places[-1]
            agrees.append([row[p][: last - p] for p in range(places[0] - 1, last)])


def chain_rounds(answer: Sequence[Sequence[bool]], lookahead: int) -> list[int]:
    """Returns the tokens of each round of an answer. answer: by position, whether each drafted step
    agrees. The last round ends with the answer."""
    rounds = []
    at = 0
    while at < len(answer):
        steps = answer[at][:lookahead]
        k = next((n for n, agrees in enumerate(steps) if not agrees), len(steps))
        rounds.append(min(k + 1, len(answer) - at))
        at += k + 1
    return rounds


def _mean(values: Iterable[float]) -> float | None:
    numbers = [float(value) for value in values]
    return round(sum(numbers) / len(numbers), 4) if numbers else None
