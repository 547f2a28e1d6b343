"""A learner on a tiny shift: it raises acceptance, and publishes nothing that is worse."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.engine.model.transformer.checkpoint import MASKS, new_version, packed, unpacked
from mpissd.engine.model.transformer.sources import open_checkpoint
from tests.needs import module
from tests.tiny_pair import TinyPair, tiny_pair

module("safetensors.numpy", "safetensors")
torch = module("torch", "PyTorch")

from mpissd.learn.llama import angles, blocks_of, load, mapped, named  # noqa: E402
from mpissd.online.examples import Example, compressed  # noqa: E402
from mpissd.online.process import TrainerProcess  # noqa: E402
from mpissd.online.trainer import Counted, Learner, Student, paired  # noqa: E402

V, LENGTH = 97, 40


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_pair(tmp_path_factory.mktemp("pair"), noise=0.4, scale=3)


def answers(pair: TinyPair, count: int, first: int) -> list[Example]:
    """The target's greedy answers to prompts of three tokens, and its distributions there."""
    checkpoint = open_checkpoint(str(pair.target))
    model = load(checkpoint, "cpu", torch.float32)
    blocks = blocks_of(checkpoint.config, torch.float32)
    table = angles(checkpoint.config, LENGTH, "cpu")
    tokens = torch.tensor([[n % 5, (first + n) % V, 1] for n in range(count)])
    with torch.no_grad():
        for _ in range(LENGTH - 3):
            part = [each[: tokens.shape[1]] for each in table]
            hidden = blocks.hidden(model, tokens, *part)
            logits = blocks.product(hidden, model.head)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    at = np.arange(2, LENGTH - 1, dtype=np.int32)
    found = []
    for row, values in zip(tokens.numpy(), logits.numpy(), strict=True):
        found.append(Example(row.astype(np.int32), at, *compressed(values[at], 32)))
    return found


def student(pair: TinyPair, **told: Any) -> Student:
    torch.manual_seed(0)
    return Student(str(pair.draft), str(pair.target), longest=64, **{"rate": 3e-3, **told})


def agreement(student: Student, examples: Sequence[Example]) -> float:
    right, count = student.right(examples).sum(0)
    return float(right / count)


def test_a_learner_agrees_more_and_more(pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the stream's prompts come again later, as on a shift whose prompts resemble.

    In float32 on every processor: with bfloat16 products a model this small learned too little.
    """
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    learner = Learner(student(pair), batch=6)
    stream = answers(pair, 24, 0)
    before = agreement(learner.student, stream)
    for example in stream * 4:
        learner.add(example)
        while learner.is_due:
            assert learner.learn()
    assert learner.publish() and learner.counts.published == 1
    assert agreement(learner.student, stream) > before + 0.15


def test_a_loss_that_is_no_number_goes_back_to_the_last_version(pair: TinyPair) -> None:
    learner = Learner(student(pair), batch=2)
    good, wrong = answers(pair, 1, 0)[0], answers(pair, 1, 5)[0]
    before = packed(learner.student.arrays())
    learner.add(good)
    assert learner.learn() and packed(learner.student.arrays()) != before
    logs = wrong.logs.copy()
    logs[3] = np.nan
    learner.add(Example(wrong.tokens, wrong.at, wrong.ids, logs))
    assert not learner.learn()
    assert learner.state == "diverged" and learner.counts.diverged == 1
    assert packed(learner.student.arrays()) == before


def hold(learner: Learner, gains: Sequence[float]) -> None:
    """Makes the weights right at so many more of the 100 positions of each held-out sequence."""
    learner.memory.held = [answers_of_nothing()] * len(gains)
    before = np.array([[50, 100]] * len(gains), float)

    def right(weights: Any) -> Counted:
        ahead = [0.0] * len(gains) if weights is learner.in_use else gains
        return before + np.array([[gain, 0] for gain in ahead])

    learner._right = right  # type: ignore[method-assign]


def answers_of_nothing() -> Example:
    empty = np.zeros((0, 1), np.int32)
    return Example(np.zeros(2, np.int32), empty[:, 0], empty, empty.astype(np.float16))


@pytest.mark.parametrize(
    ("gains", "errors"),  # of 8 and 7: gains in hundredths, and how many errors their mean is
    [
        ([2, 0, 2, -1, 2, 0, 2, 0], 1.93),
        ([2, 0, 2, 0, 2, 0, 2, 0], 2.6),
        ([3, 4, 3, 4, 3, 4, 3], 17),
        ([-3, -4, -3, -4, -3, -4, -3, -4], -18.5),
    ],
)
def test_clear_gains_are_published(pair: TinyPair, gains: list[float], errors: float) -> None:
    """Above two errors of eight sequences."""
    learner = Learner(student(pair))
    hold(learner, gains)
    is_enough = len(gains) >= 8
    if is_enough and errors:
        gain, error = paired(*map(learner._right, (learner.student.draft, learner.in_use)))
        assert gain / error == pytest.approx(errors, rel=0.05)
    is_published = learner.publish()
    assert is_published == (errors > 2 if is_enough else None)
    assert learner.counts.published == bool(is_published)
    assert learner.counts.refused == (is_enough and not is_published)
    assert (learner.state == "refused") == (is_enough and not is_published)


@pytest.mark.parametrize("value", [torch.inf, torch.nan, -7e4], ids=str)
def test_weights_that_overflow_are_not_published(pair: TinyPair, value: float) -> None:
    learner = Learner(student(pair))
    hold(learner, gains=[3, 4, 3, 4] * 2)
    with torch.no_grad():
        learner.student.draft.layers[0].down[0, 0] = value
    assert not learner.publish() and learner.state == "diverged"
    assert learner.student.is_finite and learner.counts.published == 0


def test_three_worse_versions_restore_the_last_one(pair: TinyPair) -> None:
    learner = Learner(student(pair))
    for example in answers(pair, 64, 0):
        learner.memory.add(example)
    good = packed(learner.student.arrays())
    worse = mapped(learner.student.copy(), lambda tensor: tensor * -1)
    learner.student.restore(worse)
    for count in (1, 2, 3):
        assert not learner.publish() and learner.state == "refused"
        assert learner.counts.refused == count
        assert (packed(learner.student.arrays()) == good) == (count == 3)


def test_a_step_may_be_of_several_new_sequences(pair: TinyPair) -> None:
    learner, taken = Learner(student(pair), 4, 0.25), [0, 0, 0, 1, 1]
    found = []
    for example in answers(pair, 5, 0):
        learner.add(example)
        while learner.is_due:
            learner.learn()
        found.append(learner.counts.steps)
    assert found == taken


def test_the_arrays_of_a_quantised_draft_are_its_own_again(tmp_path: Path) -> None:
    """int8 and its scales, without the head that the target lends: weights that did not move are
    equal to the old ones, bit for bit."""
    draft = student_of_shipped_kind(tmp_path)
    arrays = unpacked(packed(draft.arrays()))
    assert "lm_head.weight" not in arrays
    version = new_version(draft.source, arrays)
    for name in arrays:
        if name.endswith("proj.weight"):
            assert arrays[name].dtype == np.int8
            assert np.array_equal(version.read(name), draft.source.read(name))


def test_a_quantised_draft_keeps_steps_that_are_smaller_than_those_of_int8(tmp_path: Path) -> None:
    """Their mean, that is, over a matrix; rounding to nearest would undo each one."""
    draft = student_of_shipped_kind(tmp_path)
    name, before = "model.layers.0.mlp.down_proj.weight", draft.copy().layers[0].down
    blocks = before.unflatten(-1, (-1, 32))
    step = blocks.abs().amax(-1, keepdim=True) / 127
    is_largest = blocks.abs() > 126 * step  # these move the step itself
    moved = (0.2 * step * ~is_largest).flatten(-2)
    with torch.no_grad():
        draft.draft.layers[0].down.add_(moved)
    found = torch.from_numpy(new_version(draft.source, draft.arrays()).read(name)) - before
    assert 0.7 < float(found.sum() / moved.sum()) < 1.3
    assert found.abs().max() < 1.01 * step.max()
    with draft.using(draft.draft):  # judged as published
        assert torch.equal(draft.draft.layers[0].down - before, found)
    assert torch.allclose(draft.draft.layers[0].down, before + moved)


def student_of_shipped_kind(tmp_path: Path) -> Student:
    """A student of a draft in int8 with the target's embedding and head."""
    from mpissd.learn import export

    made = tiny_pair(tmp_path, noise=0.4)
    source = open_checkpoint(str(made.draft))
    weights = named(load(source, "cpu", torch.float32), source.config)
    del weights["lm_head.weight"]
    arrays = {name: tensor.numpy() for name, tensor in weights.items()}
    arrays[MASKS] = source.read(MASKS)
    folder = tmp_path / "int8"
    stored = export.quantized(arrays, np.arange(50, dtype=np.int32))
    export.save(folder, source.config, stored, {"head": "target"})
    return Student(str(folder), str(made.target), longest=64)


def test_a_trainer_publishes_rising_versions_and_a_killed_one_is_lost(pair: TinyPair) -> None:
    task = {"draft": str(pair.draft), "target": str(pair.target), "device": "cpu",
            "publish_s": 0.0, "longest": 64, "rate": 1e-3, "local_rank": 0, "batch": 4,
            "steps": 1.0, "threads": 1}  # fmt: skip
    trainer, found = TrainerProcess(task), list[int]()
    until = time.monotonic() + 90
    stream = answers(pair, 12, 0)
    for example in stream * 6:  # of which nine are held out
        trainer.post(example)
    while len(found) < 3 and time.monotonic() < until:
        trainer.post(stream[len(found)])
        time.sleep(0.2)
        if (newest := trainer.take()) is not None:
            found.append(newest[0])
            assert "model.norm.weight" in unpacked(newest[1])
    assert len(found) == 3 and found == sorted(set(found))
    trainer._process.kill()
    trainer._process.wait()
    for example in stream:
        trainer.post(example)  # unread, and post does not block
    report = trainer.stop()
    assert report["state"] == "lost" and report["published"] >= 1
