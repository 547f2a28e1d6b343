"""Replaying a recording of a pair is the run of the pair, decision by decision."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from mpissd.common.records import RoundRecords
from mpissd.common.rounds import Request, Source
from mpissd.engine.decode.draft import Drafter, DraftPolicy
from mpissd.engine.decode.round import TargetLoop
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.spec.lookup import PromptLookup
from mpissd.engine.workload.gemm import ImposedDraft, ImposedTarget
from mpissd.engine.workload.markov import (
    MarkovLaws,
    MarkovModel,
)
from mpissd.engine.workload.replay.recording import Recording
from mpissd.engine.workload.replay.workload import RecordedDraft, RecordedStream
from mpissd.engine.workload.workers import DraftWorker, TargetWorker
from tests.loop.harness import WAITER, CountingForwards, SteppedSpeculator
from tests.loop.recorded import greedy, ranked, recording_of


def laws_of(seed: int, vocab: int = 12, order: int = 2, divergence: float = 0.35) -> MarkovLaws:
    target = MarkovModel(vocab, order, seed)
    draft = MarkovModel(vocab, order, seed, divergence)
    return MarkovLaws(target, draft, 0.0, seed, prompt_tokens=4)


Script = Callable[[int], int]  # of a round: how many steps growth makes


def stepped(
    target: TargetWorker,
    draft: DraftWorker,
    policy: DraftPolicy,
    requests: list[Request],
    script: Script,
    rounds: int,
) -> RoundRecords:
    """Rounds in one thread."""
    drafter = Drafter(draft, policy, len(requests), WAITER)
    rig = SimpleNamespace(drafter=drafter, draft_forwards=CountingForwards())
    speculator = SteppedSpeculator(rig, script)  # type: ignore[arg-type]
    loop = TargetLoop(target, speculator, None, len(requests), WAITER)
    loop.admit(requests)
    records = RoundRecords(policy.lookahead)
    for _ in range(rounds):
        result = loop.step()
        records.add(0.0, result.speculation, result.outcome)
    return records


def replayed(
    recording: Recording,
    policy: DraftPolicy,
    batch: int,
    script: Script,
    rounds: int,
) -> NDArray[np.int64]:
    K, F = policy.lookahead, policy.fan_outs.widest
    parts = recording.sequences[:batch]
    return stepped(
        TargetWorker(CountingForwards(), ImposedTarget(RecordedStream(recording, batch, K))),
        DraftWorker(CountingForwards(), ImposedDraft(RecordedDraft(recording, batch, K, F))),
        policy,
        [Request(n, first_token=int(part.prompt[-1])) for n, part in enumerate(parts)],
        script,
        rounds,
    ).sequences()


def defined(
    laws: MarkovLaws,
    policy: DraftPolicy,
    rounds: int,
) -> list[list[int]]:
    """One sequence's rounds by the definition: contexts in full, keys in a set, no tables."""
    K, tokens = policy.lookahead, laws.prompt(0)
    keys: dict[tuple[int, int], list[int]] = {}
    outcome, found = (-1, -1), []
    for round_ in range(rounds):
        hit, source = outcome in keys, policy.backup
        if hit:
            source, served = Source.CACHE, greedy(laws.draft, keys[outcome], K)
        elif source == Source.JIT:
            served = greedy(laws.draft, tokens, K)[: policy.backup_lookahead]
        else:
            lookup = PromptLookup(laws.draft.order + 1)
            lookup.follow(tokens)
            copied = lookup.padded(K, laws.draft.likeliest)
            served = copied[: policy.backup_lookahead]
        keys = {}
        fan_out = policy.fan_outs.behind(source)
        for k in range(len(served) + 1):
            after = [*tokens, *served[:k]]
            left = [t for t in ranked(laws.draft, after) if t not in served[k : k + 1]]
            keys |= {(k, t): [*after, t] for t in left[: fan_out[k]]}
        k = 0
        while k < len(served) and served[k] == greedy(laws.target, [*tokens, *served[:k]], 1)[0]:
            k += 1
        bonus = greedy(laws.target, [*tokens, *served[:k]], 1)[0]
        found.append([round_, 0, 0, k, bonus, int(source), int(hit), len(served)])
        tokens, outcome = [*tokens, *served[:k], bonus], (k, bonus)
    return found


@pytest.mark.parametrize("seed", range(15))
def test_a_replay_is_the_definition(seed: int) -> None:
    dice = random.Random(seed)
    vocab, order, K = dice.choice([5, 9, 40]), dice.choice([1, 2]), dice.randint(1, 6)
    laws = laws_of(seed, vocab, order, dice.choice([0.0, 0.2, 0.5, 1.0]))
    lists = [tuple(dice.randint(0, vocab - 2) for _ in range(K + 1)) for _ in range(2)]
    backup = dice.choice([Source.JIT, Source.FAST])
    policy = DraftPolicy(K, FanOuts(*lists), backup, backup_lookahead=dice.randint(1, K))
    rounds = 15
    dealt = [dice.randint(0, K) for _ in range(rounds + 1)]
    recording = recording_of(laws, 1, limit=rounds * (K + 1), K=K, F=vocab - 1)
    found = replayed(recording, policy, 1, dealt.__getitem__, rounds)
    assert found.tolist() == defined(laws, policy, rounds)
