"""The losses of drafts that read hidden states, over the steps that they draft ahead.

Behind the state that the target computed, each step is judged by the target's distribution there:
divergence first, then mostly total variation, as for other drafts (train.py). The relative error
of the states themselves is added (2401.15077, section 4.2, regresses them too), which costs no LM
head, so that only some rows need one.
"""

from __future__ import annotations

from typing import Any

import torch

from mpissd.learn.llama import Tensor
from mpissd.learn.muon import optimizer_for
from mpissd.learn.pair import distance
from mpissd.learn.sample import Samples, States
from mpissd.learn.states import StateDraft

FADING = 0.8  # weight of a step, of the one before it (2401.10774, section 2.2.1)
ROWS = {"cpu": 256, "cuda": 8192}  # of a step's LM head


class StateLosses:
    """Divergence, total variation, agreement and regression of a draft on batches of samples."""

    def __init__(self, draft: StateDraft, steps: int, compiled: bool) -> None:
        """Takes the draft in training and how many steps it looks ahead."""
        self.draft, self.count = draft, steps
        self.distance: Any = torch.compile(distance, dynamic=False) if compiled else distance

    @property
    def trained(self) -> list[Tensor]:
        """The draft's own weights."""
        return list(self.draft.weights.values())

    def optimizer(self, name: str) -> Any:
        """Returns their optimiser; "muon" is for matrices."""
        return optimizer_for(name, self.trained)

    def batch(self, samples: Samples, num_rows: int) -> Samples:
        """Returns the sequences as they are: the losses choose their rows."""
        return samples

    def proposed(self, batch: Samples) -> Samples:
        """Returns the batch unchanged: later steps are on the draft's own states anyway."""
        return batch

    def copy(self) -> StateDraft:
        """Returns the draft so far, without gradients."""
        return self.draft.mapped(lambda tensor: tensor.detach())

    def of(self, batch: Samples) -> tuple[Tensor, ...]:
        """Returns means over the steps, earlier ones weighing more: divergence, total variation,
        agreement, and the states' relative error."""
        assert batch.states is not None, "samples without states"
        tokens, hidden = batch.tokens.long(), batch.states.hidden
        parts = []
        for step, states in enumerate(self.draft.steps(tokens, hidden, self.count)):
            parts.append(torch.stack(self._step(batch, batch.states, states, step)))
        weights = torch.tensor([FADING**n for n in range(len(parts))], device=tokens.device)
        means = (torch.stack(parts) * weights[:, None]).sum(0) / weights.sum()
        return tuple(means.unbind())

    def _step(self, batch: Samples, found: States, states: Tensor, step: int) -> list[Tensor]:
        """Returns the losses of one step; row p is judged by the target at p + step."""
        draft, width = self.draft, states.shape[1]
        part = slice(step, step + width)
        answered = batch.answered[:, step + 1 : step + 1 + width].flatten().float()
        wanted = found.hidden[:, part].flatten(0, 1).float()
        mine = states.flatten(0, 1)
        error = ((mine - wanted) ** 2).sum(-1) / (wanted**2).sum(-1).clamp(min=1e-6)
        error = (error * answered).sum() / answered.sum().clamp(min=1)
        most = min(ROWS[answered.device.type], len(answered))
        rows = (answered + 0.5 * torch.rand_like(answered)).topk(most).indices
        p_logits = draft.logits(wanted[rows])
        total, best = (each[:, part].flatten()[rows] for each in (found.total, found.best))
        told = p_logits, total, best.long(), draft.logits(mine[rows]), draft.head_ids
        return [*self.distance(*told, answered[rows]), error]
