"""Judges a draft on answers that the target gave at temperature 0.

One forward of each model over a finished answer is enough to know every round that could start in
the answer, since draft tokens and their acceptance depend only on the logits after a true prefix. A
draft on hidden states takes a chain of steps after each answered position. A parallel draft
computes mask tokens there, and chains and trees are made of their distributions.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from mpissd.engine.law.acceptance import rounds
from mpissd.engine.model.transformer.trees import CHOICES, accepted, searched
from mpissd.learn.draft import Draft, ModelDraft, StateDraft, following
from mpissd.learn.sample import Samples

LOOKAHEADS = (4, 7)
TREES = (7, 15, 31)  # numbers of nodes of the trees that a parallel draft is judged by
AT_ONCE = {"cpu": 8, "cuda": 32}  # sequences in a forward


def figures(draft: Draft, samples: Samples, deadline: float) -> dict[str, Any]:
    """Returns {name: value} of how well a draft agrees with the target, and of its tokens a round,
    on the answers judged before `deadline` (seconds of time.monotonic())."""
    if isinstance(draft, ModelDraft):
        told = summary(*judge(draft, samples, deadline))
        if draft.masks is not None:
            told["parallel"] = parallel_summary(list(judge_masks(draft, samples, deadline)))
        return told
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
    """Returns {name: value} from what `judge` returns: the share of tokens that are the draft's
    likeliest, the acceptance rate alpha at temperature 1, and tokens a round."""
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
    seconds of time.monotonic(): by answer, whether each token of the answer is the draft's
    likeliest; by token, Σ min(p, q) of the target's and the draft's distributions p and q at
    temperature 1; and −log q of each token that the draft's vocabulary has."""
    answers = list[list[bool]]()
    overlaps = list[float]()
    surprises = list[float]()
    models = (draft.target, draft.blocks), (draft.weights, draft.own_blocks)
    with torch.no_grad():
        for part in _parts(samples, deadline):
            tokens = part.tokens.long()
            angles = draft.angles(part.tokens.shape[1])
            before = part.answered[:, 1:]  # [b, n − 1]: rows whose next token is in an answer
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


Marginals = tuple[NDArray[np.float32], NDArray[np.int64]]


def judge_masks(draft: ModelDraft, samples: Samples, deadline: float) -> Iterator[Marginals]:
    """Runs a parallel draft, which drafts by J mask tokens in one forward, on finished answers.
    Yields two arrays for each answer judged before the deadline, by its n positions and by depth
    (how many mask tokens come before): the draft's largest logits, falling, [n, J + 1, CHOICES];
    and the true token's index among these, [n, J + 1], or −1 if absent."""
    size = len(draft.masks) + 1
    head = draft.weights.head
    with torch.no_grad():
        for part in _parts(samples, deadline):
            tokens = part.tokens.long()
            length = tokens.shape[1]
            before = part.answered[:, 1:]
            counts = before.sum(-1)
            if not (most := int(counts.max())):
                continue
            order = torch.sort(before.int(), descending=True, stable=True).indices
            anchors = order[:, :most]
            is_asked = torch.arange(most, device=tokens.device) < counts[:, None]
            read = draft.weights, tokens, *draft.angles(length)
            hidden = draft.own_blocks.hidden(*read, draft.mask_rows(anchors, length))
            firsts = hidden.gather(1, anchors[..., None].expand(-1, -1, hidden.shape[-1]))
            later = hidden[:, length:].unflatten(1, (most, size - 1))
            states = torch.cat([firsts[:, :, None], later], 2)[is_asked]
            after, lasts = following(part.answered, anchors, size)
            true = F.pad(tokens, (0, size)).gather(1, after.flatten(1)).view_as(after)[is_asked]
            logits = draft.own_blocks.product(states, head).float()
            top = logits.topk(CHOICES)
            is_true = (draft.head_ids[top.indices] == true[..., None]) & lasts[is_asked][..., None]
            ranks = torch.where(is_true.any(-1), is_true.int().argmax(-1), -1)
            both = (t.split(counts.tolist()) for t in (top.values, ranks))
            for pair in zip(*both, strict=True):
                found, of_true = (tensor.cpu().numpy() for tensor in pair)
                if len(found):
                    yield found, of_true


def parallel_summary(answers: Sequence[Marginals]) -> dict[str, Any]:
    """Returns, from what `judge_masks` yields, a parallel draft's greedy agreement by depth, and
    its tokens a round if one forward drafts chains of 1, 2, … tokens, or dynamic trees."""
    depths = range(answers[0][1].shape[1] if answers else 0)
    agrees = [ranks == 0 for _, ranks in answers]
    chains = [part.cumprod(-1).sum(-1) for part in agrees]
    ends = [np.pad(ranks, ((0, 0), (0, 1)), constant_values=-1) for _, ranks in answers]
    trees = [searched(logits, max(TREES)) for logits, _ in answers]
    return {
        "agreement_by_depth": [
            _mean(right for part in agrees for right in part[: max(0, len(part) - depth), depth])
            for depth in depths
        ],
        "chains": {
            str(depth + 1): _mean(n for run in chains for n in _rounds(run.clip(max=depth + 1)))
            for depth in depths
        },
        "trees": {
            str(nodes): _mean(
                n
                for (parents, chosen), true in zip(trees, ends, strict=True)
                for n in _rounds(accepted(parents[:, :nodes], chosen[:, :nodes], true).tolist())
            )
            for nodes in TREES
        },
    }


def _parts(samples: Samples, deadline: float) -> Iterator[Samples]:
    size = AT_ONCE[samples.tokens.device.type]
    for start in range(0, len(samples.tokens), size):
        if time.monotonic() > deadline:
            return
        yield samples.take(slice(start, start + size))


def _judge_chains(
    draft: StateDraft, samples: Samples, agrees: list[list[list[bool]]], overlaps: list[list[float]]
) -> None:
    """Judges a draft on hidden states. Appends to `agrees`, by answer and position, whether each
    drafted token is the answer's; and to `overlaps`, by step, Σ min(p, q) of the target's and the
    draft's distributions. Steps beyond an answer's end are left out."""
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
    """Returns the numbers of tokens of the rounds that decode an answer with chains of `lookahead`
    drafted tokens. answer: for each position, whether each drafted token is the true token."""
    return _rounds([[*at[:lookahead], False].index(False) for at in answer])


def _rounds(runs: Sequence[int]) -> list[int]:
    """Returns what chain_rounds does. runs: how many tokens a round accepts, by its position."""
    return [min(k + 1, len(runs) - start) for start, k in rounds(runs)]


def _mean(values: Iterable[float]) -> float | None:
    numbers = [float(value) for value in values]
    return round(sum(numbers) / len(numbers), 4) if numbers else None
