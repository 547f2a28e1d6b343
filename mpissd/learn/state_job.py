"""Trains one draft that reads hidden states, on the samples of a distillation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from mpissd.learn.config import DistillConfig
from mpissd.learn.group import Group
from mpissd.learn.llama import Blocks, Llama, Tensor
from mpissd.learn.result import Result, rounded
from mpissd.learn.rounds import LOOKAHEADS
from mpissd.learn.sample import Samples
from mpissd.learn.shape import frequent_tokens, state_config, trained
from mpissd.learn.source import Source
from mpissd.learn.state_exam import summary
from mpissd.learn.state_losses import StateLosses
from mpissd.learn.states import StateDraft, fresh
from mpissd.learn.train import Plan, Told, learn


class Making(Protocol):
    """What it needs of a distillation (job.Distillation)."""

    config: DistillConfig
    source: Source
    group: Group
    log: Callable[[str], None]
    device: Any
    target: Llama
    blocks: Blocks
    table: tuple[Tensor, Tensor]
    parts: list[Samples]
    held: Samples
    counts: Tensor

    def facts(self, head_ids: Any, num_layers: int, origin: str) -> dict[str, Any]:
        """Returns what a draft's report says of its making."""


class StateResult(Result):
    """A draft that reads hidden states, its curves and its folder."""

    @property
    def draft(self) -> StateDraft:
        """The draft as it was trained."""
        draft: StateDraft = self.pair
        return draft

    def arrays(self, draft: StateDraft) -> dict[str, Any]:
        return {name: w.float().cpu().numpy() for name, w in draft.weights.items()}

    def trained(self, draft: StateDraft) -> StateResult:
        self.pair = draft
        return self

    def rounded(self) -> StateDraft:
        return self.draft.mapped(rounded)

    def figures(self, pair: Any, asked: Samples, deadline: float) -> dict[str, Any]:
        config = self.architecture
        steps = config.shape.num_layers if config.kind == "medusa" else max(LOOKAHEADS)
        return summary(pair, asked, steps, deadline)


def made(job: Making, kind: str, folder: Path, plan: Plan) -> StateResult:
    """Trains one of heads.STATE_KINDS and returns it; all processes do so together."""
    draft = started(job, kind)
    facts = job.facts(draft.head_ids, draft.config.shape.num_layers, f"a fresh {kind} draft")
    facts |= {"kind": kind, "head": "target", "steps_ahead": job.config.heads}
    result = StateResult(job.config, job.source, draft, draft.config, folder, facts)
    losses = StateLosses(draft, job.config.heads, job.device.type == "cuda")
    told = Told(lambda point: None)
    if not job.group.rank:
        told = _told(result, job.log)
    return result.trained(learn(losses, job.parts, plan, told, held=job.held, group=job.group))


def _told(result: StateResult, log: Callable[[str], None]) -> Told:
    return Told(lambda point: result.point(point, log), lambda draft: result.try_save(draft, log))


def started(job: Making, kind: str) -> StateDraft:
    """Returns an untrained draft over the most frequent tokens, whose head is the target's."""
    config, source = job.config, job.source
    ids = frequent_tokens(job.counts.numpy(), config.vocab, source.stop_ids)
    architecture = state_config(source.checkpoint.config, kind, config.heads, len(ids))
    head_ids = torch.from_numpy(np.asarray(ids, np.int64)).to(job.device)
    states = job.parts[0].states
    assert states is not None, "samples without states"
    scale = float(states.hidden[states.total != 0].float().square().mean().sqrt())
    draft = StateDraft(
        architecture,
        fresh(architecture, config.seed, scale),
        job.target,
        job.target.head[head_ids],
        head_ids,
        job.blocks,
        job.table,
    )
    return draft.mapped(lambda tensor: trained(tensor.to(job.device)))
