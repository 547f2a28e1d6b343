"""Replaying a recording of a pair is the run of the pair, decision by decision."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpissd.common.records import RoundRecords, outcome_digest
from mpissd.common.rounds import Request, Source
from mpissd.engine import Decoder, RunConfig
from mpissd.engine.decode.controls import Controls
from mpissd.engine.decode.draft import Drafter, DraftPolicy
from mpissd.engine.decode.target import TargetLoop
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.spec.lookup import PromptLookup
from mpissd.engine.workload.gemm.workers import GemmDraftWorker, GemmTargetWorker
from mpissd.engine.workload.markov.draft import MarkovDraftWorker
from mpissd.engine.workload.markov.laws import MarkovLaws
from mpissd.engine.workload.markov.model import MarkovModel
from mpissd.engine.workload.markov.target import MarkovTargetWorker
from mpissd.engine.workload.markov.workload import MarkovWorkload
from mpissd.engine.workload.replay.recording import Recording, save
from mpissd.engine.workload.replay.stream import RecordedDraft, RecordedStream
from mpissd.engine.workload.workers import DraftWorker, TargetWorker
from tests.loop.harness import WAITER, CountingForwards, NoPlans, SteppedSpeculator
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
    {**SSD, "lookahead": 3, "fan_out": "uniform:3", "batch_size": 1},
    {**SSD, "lookahead": 8, "fan_out": "geometric:16", "batch_size": 3, "backup": "fast"},
    {**SSD, "lookahead": 1, "fan_out": "list:2,5", "batch_size": 6, "fan_out_miss": "list:0,1"},
    {**SSD, "lookahead": 5, "fan_out": "uniform:8", "batch_size": 2, "backup_lookahead": 2},
    {**SSD, "lookahead": 4, "fan_out": "tail:2", "batch_size": 3},
    {**SSD, "lookahead": 3, "fan_out": "tail:3", "batch_size": 1, "backup_lookahead": 0},
    {**SSD, "lookahead": 3, "fan_out": "adaptive:8", "batch_size": 2},
    {**SSD, "lookahead": 3, "fan_out": "list:1,0,4,2", "batch_size": 6, "backup_lookahead": 1},
    {**SSD, "lookahead": 5, "fan_out": "geometric:9", "batch_size": 3, "fan_out_miss": "uniform:1"},
    {**SD, "lookahead": 5, "batch_size": 1, "backup": "fast", "backup_lookahead": 3},
    {**SD, "lookahead": 8, "batch_size": 6},
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


Script = Callable[[int], tuple[int, Source]]  # of a round: how far growth comes, and the backup


class Scripted(Controls):
    """Takes the backup of each round from a script."""

    def __init__(self, policy: DraftPolicy, script: Script) -> None:
        super().__init__(policy.fan_outs, policy.backup, policy.lookahead, on_late="serve")
        self._script, self.now = script, 0

    def backup(self, num_misses: int, num_live: int) -> Source:
        return self._script(self.now)[1]


def stepped(
    target: TargetWorker,
    draft: DraftWorker,
    policy: DraftPolicy,
    requests: list[Request],
    script: Script,
    rounds: int,
) -> RoundRecords:
    """Rounds in one thread; all hits of a round have as many tokens."""
    controls = Scripted(policy, script)
    drafter = Drafter(draft, policy, len(requests), WAITER, controls)

    def steps(round_: int) -> int:
        controls.now = round_ + 1
        return script(round_ + 1)[0]

    rig = SimpleNamespace(drafter=drafter, draft_forwards=CountingForwards())
    speculator = SteppedSpeculator(rig, steps)  # type: ignore[arg-type]
    loop = TargetLoop(target, speculator, NoPlans(), len(requests), WAITER)
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
        GemmTargetWorker(CountingForwards(), RecordedStream(recording, batch, K)),
        GemmDraftWorker(CountingForwards(), RecordedDraft(recording, batch, K, F)),
        policy,
        [Request(n, first_token=int(part.prompt[-1])) for n, part in enumerate(parts)],
        script,
        rounds,
    ).sequences()


@pytest.mark.parametrize("seed", range(8))
def test_serving_what_is_ready_replays_sources_and_lengths(seed: int) -> None:
    """A run whose hits come late by chance and whose backups change; then its replay."""
    dice = random.Random(seed)
    K, batch, rounds = 4, 3, 12
    fans = FanOuts((2,) * (K + 1), (1, 2, 0, 3, 1), (1,) * (K + 1))
    policy = DraftPolicy(K, fans, backup_lookahead=dice.choice([2, K]), on_late="serve")
    dealt = [
        (dice.randrange(K + 1), dice.choice([Source.JIT, Source.FAST])) for _ in range(rounds + 1)
    ]
    laws = laws_of(seed)
    run = stepped(
        MarkovTargetWorker(CountingForwards(), laws),
        MarkovDraftWorker(CountingForwards(), laws, K, fans),
        policy,
        laws.requests(0, batch),
        dealt.__getitem__,
        rounds,
    ).sequences()
    assert {Source.CACHE, Source.JIT, Source.FAST} <= set(run[:, 5].tolist())
    assert len(set(run[run[:, 6] == 1, 7].tolist())) > 2, "hits of several lengths"

    def told(round_: int) -> tuple[int, Source]:
        """What the run's rows say of a round: tokens of its hits, the source of its misses."""
        rows = run[run[:, 0] == round_]
        hits, misses = rows[rows[:, 6] == 1], rows[rows[:, 6] == 0]
        steps = int(hits[0, 7]) if len(hits) else 0
        return steps, Source(int(misses[0, 5])) if len(misses) else Source.JIT

    recording = recording_of(laws, batch, limit=rounds * (K + 1), K=K, F=3)
    assert replayed(recording, policy, batch, told, rounds).tolist() == run.tolist()


def defined(
    laws: MarkovLaws,
    policy: DraftPolicy,
    script: Script,
    rounds: int,
) -> list[list[int]]:
    """One sequence's rounds by the definition: contexts in full, keys in a set, no tables."""
    K, tokens = policy.lookahead, laws.prompt(0)
    keys: dict[tuple[int, int], list[int]] = {}
    outcome, found = (-1, -1), []
    for round_ in range(rounds):
        steps, backup = script(round_)
        hit = outcome in keys
        if hit:
            source, served = Source.CACHE, greedy(laws.draft, keys[outcome], K)[:steps]
        elif backup == Source.JIT:
            served = greedy(laws.draft, tokens, K)[: policy.backup_lookahead]
            source = backup
        else:
            lookup = PromptLookup(laws.draft.order + 1)
            lookup.follow(tokens)
            copied = lookup.padded(K, laws.draft.likeliest)
            source, served = backup, copied[: policy.backup_lookahead]
        keys = {}
        fan_out = policy.fan_outs.behind(source)
        for k in range(len(served) + 1):
            behind = [*tokens, *served[:k]]
            left = [t for t in ranked(laws.draft, behind) if t not in served[k : k + 1]]
            keys |= {(k, t): [*behind, t] for t in left[: fan_out[k]]}
        k = 0
        while k < len(served) and served[k] == greedy(laws.target, [*tokens, *served[:k]], 1)[0]:
            k += 1
        bonus = greedy(laws.target, [*tokens, *served[:k]], 1)[0]
        found.append([round_, 0, 0, k, bonus, int(source), int(hit), len(served)])
        tokens, outcome = [*tokens, *served[:k], bonus], (k, bonus)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_a_replay_is_the_definition(seed: int) -> None:
    dice = random.Random(seed)
    vocab, order, K = dice.choice([5, 9, 40]), dice.choice([1, 2]), dice.randint(1, 6)
    laws = laws_of(seed, vocab, order, dice.choice([0.0, 0.2, 0.5, 1.0]))
    lists = [tuple(dice.randint(0, vocab - 2) for _ in range(K + 1)) for _ in range(3)]
    policy = DraftPolicy(K, FanOuts(*lists), backup_lookahead=dice.randint(1, K), on_late="serve")
    rounds = 15
    dealt = [
        (dice.randint(0, K), dice.choice([Source.JIT, Source.FAST])) for _ in range(rounds + 1)
    ]
    recording = recording_of(laws, 1, limit=rounds * (K + 1), K=K, F=vocab - 1)
    found = replayed(recording, policy, 1, dealt.__getitem__, rounds)
    assert found.tolist() == defined(laws, policy, dealt.__getitem__, rounds)


def test_more_may_be_recorded_than_a_run_needs() -> None:
    laws, script = laws_of(3), lambda round_: (2, Source.JIT)
    policy = DraftPolicy(2, FanOuts((2,) * 3, (2,) * 3), backup_lookahead=2)
    wide = recording_of(laws, 2, limit=40, K=8, F=9)
    parts = [
        replace(part, tokens=part.tokens[:-6], rollout=part.rollout[:, :2], top=part.top[:, :3])
        for part in wide.sequences
    ]
    exact = replace(wide, sequences=parts)
    found = [replayed(each, policy, 2, script, 13).tolist() for each in (wide, exact)]
    assert found[0] == found[1]
