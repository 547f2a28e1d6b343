"""Judges a draft on answers that the target gave at temperature 0.

One forward of each model over a finished answer decides every round: behind a true prefix the
draft's proposals, its keys and the target's verdict are functions of the logits there.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from mpissd.learn.pair import Pair
from mpissd.learn.rounds import Judged
from mpissd.learn.sample import Samples

AT_ONCE = {"cpu": 8, "cuda": 32}  # sequences in a forward


def judge(pair: Pair, samples: Samples, deadline: float) -> Judged:
    """Returns the draft's ranks on the answers; those judged before the deadline.

    deadline: in seconds of time.monotonic().
    """
    judged = Judged()
    size = AT_ONCE[samples.tokens.device.type]
    for start in range(0, len(samples.tokens), size):
        if time.monotonic() > deadline and judged.ranks:
            break
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
