"""A learner's data from the target: distributions, sequences, the buffer, and its messages."""

import importlib.util

import numpy as np
import pytest

from mpissd.common.errors import ConfigError
from mpissd.engine.features.learning import ExamplePart, read_parts, write_parts
from mpissd.online.examples import HELD, Collector, Example, Memory, compressed
from mpissd.online.process import check_trainer

V = 20


def part(
    request: int, start: int, tokens: list[int], at: list[int], *, prompt: int = 2, epoch: int = 0
) -> ExamplePart:
    """The logits of position n are largest at token n."""
    ints = (np.array(values, np.int32) for values in (tokens, at))
    logits = np.eye(V, dtype=np.float32)[at] * 9
    return ExamplePart((request, epoch), start, prompt, next(ints), next(ints), logits)


def sent(*parts: ExamplePart) -> list[ExamplePart]:
    """The parts as they arrive."""
    return read_parts(write_parts(parts))


def example(size: int, rows: int = 2) -> Example:
    return Example(
        np.arange(size, dtype=np.int32), np.arange(rows, dtype=np.int32),
        np.ones((rows, 4), np.int32), np.full((rows, 4), -1.5, np.float16),
    )  # fmt: skip


def test_the_likeliest_tokens_are_kept_with_their_log_probabilities() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (5, V)).astype(np.float32)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    ids, logs = compressed(logits, 6)
    assert ids.shape == logs.shape == (5, 6)
    for row, (some, told) in enumerate(zip(ids, logs, strict=True)):
        best = np.argsort(-exact[row], kind="stable")[:6]
        assert some.tolist() == best.tolist()
        assert np.allclose(told, exact[row][best], atol=0.01)
    assert compressed(logits, 100)[0].shape == (5, V)


def test_parts_survive_their_message_bit_for_bit() -> None:
    told = [part(3, 0, [4, 5, 6], [1, 2]), part(9, 7, [1], [7], epoch=2)]
    first, second = sent(*told)
    assert (first.name, first.start, first.prompt) == ((3, 0), 0, 2)
    assert first.tokens.tolist() == [4, 5, 6] and first.at.tolist() == [1, 2]
    assert first.logits.shape == (2, V) and first.logits[1, 2] == 9
    assert (second.name, second.start, len(second.logits)) == ((9, 2), 7, 1)


def test_a_sequence_is_joined_of_its_rounds_and_given_when_it_leaves() -> None:
    collector = Collector(kept=3)
    assert collector.add(sent(part(1, 0, [7, 8, 3], [1]), part(2, 0, [7, 8, 9], [1]))) == []
    assert collector.add(sent(part(1, 3, [4, 5], [2, 3]), part(2, 3, [1], [2]))) == []
    (ended,) = collector.add(sent(part(2, 4, [2], [3])))
    assert ended.tokens.tolist() == [7, 8, 3, 4, 5] and ended.at.tolist() == [1, 2, 3]
    assert ended.ids[:, 0].tolist() == [1, 2, 3] and ended.logs.dtype == np.float16
    (rest,) = collector.rest()
    assert rest.at.tolist() == [1, 2, 3] and collector.dropped == 0 and not collector.rest()


def test_what_stands_behind_a_stop_token_is_dropped() -> None:
    collector = Collector([5])
    collector.add(sent(part(1, 0, [5, 8, 3, 5, 9], [1, 2, 3])))  # a prompt may hold one
    (ended,) = collector.rest()
    assert ended.tokens.tolist() == [5, 8, 3, 5] and ended.at.tolist() == [1, 2]


def test_a_sequence_of_which_a_round_is_missing_is_dropped() -> None:
    collector = Collector()
    collector.add(sent(part(1, 0, [7, 8, 3], [1])))
    collector.add(sent(part(1, 5, [4], [4])))
    collector.add(sent(part(1, 6, [4], [5])))
    assert collector.dropped == 2
    assert not collector.rest()


def test_the_buffer_holds_some_sequences_out_and_forgets_the_oldest() -> None:
    memory = Memory(10, held=2)
    kept = [memory.add(example(n)) for n in range(1, 41)]
    assert kept.count(False) == 40 // HELD and not memory.add(example(3, rows=0))
    assert [len(one.tokens) for one in memory.held] == [32, 40]
    assert [len(one.tokens) for one in memory.trained] == [*range(29, 32), *range(33, 40)]
    batch = memory.batch(4, newest=2)
    assert [len(one.tokens) for one in batch[:2]] == [38, 39] and len(batch) == 4
    assert len({len(one.tokens) for one in batch}) == 4
    assert len(Memory(3).batch(4)) == 0


def test_an_interpreter_that_cannot_train_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    lacks = ("torch", "safetensors")
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n in lacks else find(n))
    with pytest.raises(ConfigError, match=r"^learners=1: .* has no safetensors, torch: pip"):
        check_trainer()


def test_a_gpu_that_pytorch_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from mpissd.online import trainer

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert trainer.device_of("auto", 0) == "cpu"
    with pytest.raises(ConfigError, match="learn=device=cuda: PyTorch finds no GPU"):
        trainer.device_of("cuda", 0)
