"""The engine in one process: the example of docs/engine.md, and its equality with real ranks."""

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest

import mpissd.engine
from mpissd.common.errors import FaultError, ProtocolError
from mpissd.common.rounds import Outcome, Speculation
from mpissd.engine import Decoder, RunConfig
from mpissd.engine.decode.draft import Drafter

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"
NULL = {"pair": "toy", "backend": "emulated", "device": "null", "batch_size": 2}
METHODS: list[dict[str, Any]] = [
    {"mode": "ar"},
    {"mode": "sd", "num_drafts": 0},
    {"mode": "sd"},
    {"mode": "ssd"},
    {"mode": "ssd", "fan_out": "geometric:12", "backup": "fast"},
]


def decode(rounds: int = 12, **flags: Any) -> Decoder:
    with Decoder(RunConfig(**{**NULL, **flags})) as decoder:
        for _ in range(rounds):
            decoder.step()
        return decoder


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(example.strip().splitlines()) <= 10
    scope: dict[str, Any] = {}
    exec(example, scope)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11
    tokens = scope["decoder"].tokens
    assert lines[-1] == str(tokens) and sorted(tokens) == [0, 1]


@pytest.mark.parametrize("flags", METHODS, ids=str)
def test_its_models_are_freed_with_it(flags: dict[str, Any]) -> None:
    """At once: a program that decodes many configurations holds one pair of models at a time."""
    gc.collect()
    gc.disable()
    try:
        decoder = decode(**flags)
        models = [weakref.ref(one) for one in (decoder.target_stepper, *decoder.draft_steppers)]
        del decoder
        assert [model() for model in models] == [None] * len(models)
    finally:
        gc.enable()


def test_a_draft_that_fails_ends_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(drafter: Drafter, outcome: Outcome) -> Speculation:
        raise ProtocolError("round 0: two epochs")

    with Decoder(RunConfig(**NULL)) as decoder:
        monkeypatch.setattr(Drafter, "answering", fail)
        with pytest.raises(FaultError, match="the draft's thread ended: round 0: two epochs"):
            decoder.step()


def test_the_public_face_has_every_name_it_lists() -> None:
    for name in mpissd.engine.__all__:
        assert getattr(mpissd.engine, name).__name__ == name
        assert f"`{name}`" in PAGE.read_text()
    with pytest.raises(AttributeError, match="no attribute 'Encoder'"):
        _ = mpissd.engine.Encoder
