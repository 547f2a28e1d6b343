"""`pair` records a pair's decisions at temperature 0: here two tiny models with real caches."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mpissd.__main__ import main
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stepper import ModelSource
from mpissd.engine.workload.replay import Recording, load
from mpissd.lab.pair.record import Model
from tests.tiny_pair import TinyPair, tiny_pair

VOCAB, LIMIT, K, F, STOP = 50, 45, 4, 6, 16
PROMPTS = [list(range(5, 9)), [7], [n * 11 % VOCAB for n in range(40)], [3, 3, 9], [48, 2]]
IDS = ";".join(",".join(map(str, prompt)) for prompt in PROMPTS)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_pair(tmp_path_factory.mktemp("pair"), vocab=VOCAB, noise=0.1, scale=3.0)


def command(folders: TinyPair, out: Path, /, **flags: Any) -> int:
    told = {
        "target": folders.target,
        "draft": folders.draft,
        "prompt_ids": IDS,
        "num_tokens": LIMIT,
        "lookahead": K,
        "fan_out": F,
        "stop_token": STOP,
        "batch_size": 3,
        "out": out,
        **flags,
    }
    return main(["pair", *(f"--{name}={value}" for name, value in told.items() if value != "")])


@pytest.fixture(scope="module")
def recording(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    path = tmp_path_factory.mktemp("recording") / "new" / "pair.npz"
    assert command(pair, path, licence="none needed") == 0
    return load(str(path))


def model_of(folder: Path, top_k: int) -> Model:
    options = ForwardOptions(lm_head=True, capacity=128, top_k=top_k)
    source = ModelSource(str(folder))
    return Model(NumpyBackend(), source, options, rows=5, slots=1, seed=0)


def likeliest(model: Model, tokens: Sequence[int]) -> list[int]:
    """Of one sequence, read from its first token."""
    found: list[int] = model.read(0, list(tokens), len(tokens) - 1)[0].tolist()
    model.release([0])
    return found


def greedy(model: Model, tokens: Sequence[int], count: int) -> list[int]:
    found = list(tokens)
    for _ in range(count):
        found.append(likeliest(model, found)[0])
    return found[len(tokens) :]


def test_answers_are_the_target_s_greedy_tokens(recording: Recording, pair: TinyPair) -> None:
    target = model_of(pair.target, 1)
    for prompt, part in zip(PROMPTS, recording.sequences, strict=True):
        assert part.prompt.tolist() == prompt
        tokens = greedy(target, prompt, LIMIT + K)
        stopped = STOP in tokens[:LIMIT]
        end = tokens.index(STOP) + 1 if stopped else LIMIT
        assert (part.end, part.stopped) == (end, stopped)
        assert part.tokens.tolist() == tokens[: end + K]
    assert {part.stopped for part in recording.sequences} == {True, False}, "another stop token"


def test_a_draft_is_asked_behind_every_prefix(recording: Recording, pair: TinyPair) -> None:
    """Lanes that grow together give the same tokens as each prefix on its own."""
    draft, agreed = model_of(pair.draft, F + 1), 0
    for part in recording.sequences:
        for c in range(0, part.end, 3):
            prefix = [*part.prompt.tolist(), *part.tokens[:c].tolist()]
            assert part.rollout[c].tolist() == greedy(draft, prefix, K)
            assert part.top[c].tolist() == likeliest(draft, prefix)
            agreed += int(part.rollout[c][0] == part.tokens[c])
    assert agreed > 3


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"out": ""}, "out: needed"),
        ({"prompt_ids": ""}, "recording a pair needs prompts"),
        ({"draft": ""}, "one pair to record"),
        ({"pair": "toy"}, "one pair to record"),
        ({"prompt_ids": "1,50"}, r"token 50: allowed: 0\.\.49"),
        ({"fan_out": "64"}, "fan_out=64"),
        ({"draft": "nowhere"}, "nowhere"),
        ({"sources": "a.npz"}, "sources with a pair"),
        ({"num_tokens": "1000"}, "allowed: at most"),
    ],
    ids=str,
)
def test_what_cannot_be_recorded_is_refused(
    flags: dict[str, str],
    reason: str,
    pair: TinyPair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(pair, tmp_path / "pair.npz", **flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(reason, line), line
    assert not list(tmp_path.iterdir())
