"""Replaying a recording of a pair is the run of the pair, decision by decision."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpissd.common.records import RoundRecords, outcome_digest
from mpissd.common.rounds import Request, Source
from mpissd.engine import Decoder, RunConfig
from mpissd.engine.decode.draft import Drafter, DraftPolicy
from mpissd.engine.decode.round import TargetLoop
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.spec.lookup import PromptLookup
from mpissd.engine.workload.gemm import ImposedDraft, ImposedTarget
from mpissd.engine.workload.markov import (
    MarkovLaws,
    MarkovModel,
    MarkovWorkload,
)
from mpissd.engine.workload.replay.recording import Recording, save
from mpissd.engine.workload.replay.workload import RecordedDraft, RecordedStream
from mpissd.engine.workload.workers import DraftWorker, TargetWorker
from tests.loop.harness import WAITER, CountingForwards, SteppedSpeculator
from tests.loop.recorded import greedy, ranked, recording_of

NULL = {"pair": "toy", "backend": "emulated", "device": "null"}
MODEL = {"vocab": 12, "order": 2, "divergence": 0.35, "prompt_tokens": 4}
STOP, LIMIT, COUNT = 7, 24, 6


def laws_of(seed: int, vocab: int = 12, order: int = 2, divergence: float = 0.35) -> MarkovLaws:
    target = MarkovModel(vocab, order, seed)
    draft = MarkovModel(vocab, order, seed, divergence)
    return MarkovLaws(target, draft, 0.0, seed, prompt_tokens=4)


def decoded(**flags: Any) -> Decoder:
    with Decoder(RunConfig(**{**NULL, **flags})) as decoder:
        while not decoder.is_over:
            decoder.step()
    return decoder


# Values of the method, K, fan-out, backup, its K_b and b, mixed.
SD, SSD = {"mode": "sd"}, {"mode": "ssd"}
COVERING: list[dict[str, Any]] = [
    {**SSD, "lookahead": 8, "fan_out": "geometric:16", "batch_size": 3, "backup": "fast"},
    {**SSD, "lookahead": 1, "fan_out": "list:2,5/list:0,1", "batch_size": 6},
    {**SSD, "lookahead": 5, "fan_out": "uniform:8", "batch_size": 2, "backup_lookahead": 2},
    {**SSD, "lookahead": 5, "fan_out": "geometric:9/uniform:1", "batch_size": 3},
    {**SD, "lookahead": 5, "batch_size": 1, "backup": "fast", "backup_lookahead": 3},
    {**SD, "lookahead": 3, "batch_size": 2, "num_drafts": 0},
    {"mode": "ar", "batch_size": 3},
]


@pytest.mark.parametrize("flags", COVERING, ids=str)
def test_a_replay_has_the_run_s_very_outcomes(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MarkovWorkload, "num_sequences", COUNT)
    seed = COVERING.index(flags)
    run = decoded(workload="markov", **MODEL, stop_token=STOP, num_tokens=LIMIT, seed=seed, **flags)
    path = tmp_path / "pair.npz"
    save(path, recording_of(laws_of(seed), COUNT, limit=LIMIT, stop=STOP))
    found = decoded(workload="replay", recording=str(path), **flags)
    rows = run.records.sequences()
    assert found.records.sequences().tolist() == rows.tolist()
    assert outcome_digest(found.records.sequences()) == outcome_digest(rows)
    cut = {n: tokens[:LIMIT] for n, tokens in run.tokens.items()}
    assert found.tokens == cut and len(cut) == COUNT
    if flags["mode"] == "ssd":
        assert 0 < rows[:, 6].mean() < 1, "all hits or none"


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
