"""Judges a draft that reads hidden states on answers that the target gave at temperature 0.

Behind each answered position one chain of steps decides what a round there would accept: as far as
a chain agrees with the answer, its tokens are the answer's own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from mpissd.learn.evaluate import AT_ONCE
from mpissd.learn.rounds import LOOKAHEADS
from mpissd.learn.sample import Samples
from mpissd.learn.states import StateDraft


def summary(draft: StateDraft, samples: Samples, steps: int, deadline: float) -> dict[str, Any]:
    """Returns the draft's figures: agreement and alpha by place, tokens a round by K.

    steps: how far it drafts. deadline: in seconds of time.monotonic(), after which the answers
    judged so far have to do.
    """
    agrees: list[list[list[bool]]] = []
    overlaps: list[list[float]] = [[] for _ in range(steps)]
    size = AT_ONCE[samples.tokens.device.type]
    for start in range(0, len(samples.tokens), size):
        if time.monotonic() > deadline and agrees:
            break
        _judge(draft, samples.take(slice(start, start + size)), agrees, overlaps)
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
            str(k): {"tokens_per_round": _mean([n for one in agrees for n in rounds_of(one, k)])}
            for k in LOOKAHEADS
            if k <= steps
        },
    }


def _judge(
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
        found = []
        for step, mine in enumerate(draft.steps(padded, states, steps)):
            is_asked = torch.nn.functional.pad(answered, (0, steps + 1))
            is_asked = is_asked[:, step + 1 : step + 1 + mine.shape[1]]
            agree = torch.zeros_like(is_asked)
            logits = draft.logits(mine[is_asked]).float()
            rows = states[:, step : step + mine.shape[1]][is_asked]
            p = draft.blocks.product(rows, draft.target.head).float().softmax(-1)
            true = padded[:, step + 1 : step + 1 + mine.shape[1]][is_asked]
            agree[is_asked] = draft.head_ids[logits.argmax(-1)] == true
            shared = torch.minimum(p[:, draft.head_ids], logits.softmax(-1)).sum(-1)
            overlaps[step] += shared.tolist()
            found.append(agree)
        table = torch.stack(found, -1)
    for row, told in zip(table.tolist(), answered.tolist(), strict=True):
        if places := [n for n, is_answered in enumerate(told) if is_answered]:
            last = places[-1]
            agrees.append([row[p][: last - p] for p in range(places[0] - 1, last)])


def rounds_of(answer: Sequence[Sequence[bool]], lookahead: int) -> list[int]:
    """Returns the tokens of each round of an answer, from what each position's steps agree with.

    The answer's last token ends it, accepted or the target's own.
    """
    found, at = [], 0
    while at < len(answer):
        steps = answer[at][:lookahead]
        k = next((n for n, agrees in enumerate(steps) if not agrees), len(steps))
        found.append(min(k + 1, len(answer) - at))
        at += k + 1
    return found


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
