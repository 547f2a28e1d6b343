"""The markov draft worker: the outcomes it grows for, and the distributions of its tokens."""

from __future__ import annotations

import numpy as np
import pytest

from mpissd.common.rounds import Outcome, Source, Speculation
from mpissd.engine.spec import sampling
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.markov import MarkovDraft, MarkovLaws, MarkovModel
from mpissd.engine.workload.oracle import SampledRollout
from mpissd.engine.workload.sequence import Batch
from mpissd.engine.workload.workers import DraftWorker
from tests.loop.harness import CountingForwards

K, V = 3, 30
FANS = FanOuts(after_hit=(2, 1, 0, 4), after_miss=(3, 3, 1, 2))
MODEL = MarkovModel(V, 2, 8, 0.4)
LAWS = MarkovLaws(MarkovModel(V, 2, 8), MODEL, 0.8, seed=3, saguaro_c=0.25, prompt_tokens=2)
SERVED = [[7, 1, 4], [22, 9, 9]]


def begun(num_draft: int = K) -> tuple[DraftWorker, Batch, Speculation]:
    """Two sequences that were served their first speculation: one a hit, one not."""
    worker = DraftWorker(CountingForwards(), MarkovDraft(LAWS, K, FANS))
    batch = worker.open_batch(2)
    batch.apply(Outcome.admission(-1, LAWS.requests(0, 2)))
    speculation = Speculation.empty(0, 2, K, sampled=True)
    speculation.rows[:, :3] = [[Source.CACHE, 1, num_draft], [Source.JIT, 0, num_draft]]
    speculation.tokens[:] = SERVED
    batch.serve(speculation)
    return worker, batch, speculation


def after(row: int, k: int) -> list[int]:
    return [*LAWS.prompt(row), *SERVED[row][:k]]


@pytest.mark.parametrize("num_draft", range(K + 1))
def test_candidates_are_the_draft_s_likeliest_but_what_was_served(num_draft: int) -> None:
    """No token was proposed after the last served one, so none is left out there."""
    worker, batch, speculation = begun(num_draft)
    branches = worker.oracle.branches(batch, speculation, FANS)
    want = []
    for row, fans in enumerate((FANS.after_hit, FANS.after_miss)):
        for k in range(num_draft + 1):
            logits = MODEL.logits(MODEL.context(after(row, k)))
            order: list[int] = np.argsort(-logits, kind="stable").tolist()
            if k < num_draft:
                order.remove(SERVED[row][k])
            want += [(row, k, place, token) for place, token in enumerate(order[: fans[k]])]
    rollout = branches.rollout
    columns = (branches.lanes.rows, branches.lanes.k, branches.lanes.place, rollout.first)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == want


def grow(worker: DraftWorker, batch: Batch, rollout: SampledRollout) -> None:
    for _ in range(K):
        worker.launch_step(batch, [rollout])
        worker.collect_step([rollout])


def check_rows(rollout: SampledRollout, starts: list[list[int]], fans: tuple[int, ...]) -> None:
    """Each token is of σ_{F,C} of its context, F the candidates that its place will have."""
    assert rollout.q is not None
    for lane, start in enumerate(starts):
        tokens = rollout.tokens[lane].tolist()
        for place, row in enumerate(rollout.proposals(lane, K)):
            logits = MODEL.logits(MODEL.context([*start, *tokens[:place]]))
            damped = sampling.probabilities(logits, 0.8, fans[place], 0.25)
            assert row.tobytes() == damped.astype(np.float32).tobytes()
            assert rollout.q[lane, place] == sampling.recorded(row)[tokens[place]]
        assert len(rollout.proposals(lane, K)) == K


def test_branches_draw_from_what_a_hit_will_keep() -> None:
    worker, batch, speculation = begun()
    branches = worker.oracle.branches(batch, speculation, FANS)
    rollout = branches.rollout
    assert isinstance(rollout, SampledRollout)
    grow(worker, batch, rollout)
    lanes = zip(
        branches.lanes.rows.tolist(), branches.lanes.k.tolist(), rollout.first.tolist(), strict=True
    )
    starts = [[*after(row, k), token] for row, k, token in lanes]
    check_rows(rollout, starts, FANS.after_hit)
    chosen = [len(starts) - 1, 0, 5]
    kept = [(rollout.tokens[n].tolist(), rollout.proposals(n, K)) for n in chosen]
    rollout.keep(chosen, [1, 0, 1])
    for lane, (tokens, proposals) in enumerate(kept):
        assert rollout.tokens[lane].tolist() == tokens and rollout.proposals(lane, K) == proposals
    check_rows(rollout, [starts[n] for n in chosen], FANS.after_hit)


def test_a_fast_backup_looks_its_tokens_up() -> None:
    """In the sequence's tokens, prompt included; a missing token is the overall likeliest one."""
    worker, batch, _ = begun()
    first, second = LAWS.prompt(0)
    for round_, tokens in enumerate([[first, second, 8], [6, 6, 6], [2, 3, first]]):
        rows = np.array([[0, 0, 0, 2, tokens[2]], [1, 0, 0, 0, 20 + round_]], np.int32)
        speculation = Speculation.empty(round_, 2, K, sampled=True)
        speculation.rows[:, 2], speculation.tokens[0] = (3, 0), (*tokens[:2], 0)
        batch.serve(speculation)
        batch.apply(Outcome(round_, rows))
    rollout = worker.restart(batch, [0, 1], Source.FAST)
    assert rollout.tokens[0].tolist() == [second, 8, 6]
    assert rollout.tokens[1].tolist() == [MODEL.likeliest] * K
    assert rollout.q is not None and (rollout.q == 1).all() and rollout.proposals(0, K) == []
