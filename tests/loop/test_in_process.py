"""The engine in one process: the example of docs/engine.md, its equality with real ranks and over a
transformer's forward, and text from Python."""

import gc
import re
import weakref
from pathlib import Path
from threading import active_count
from typing import Any

import pytest

import mpissd.engine
from mpissd.common.errors import ConfigError, FaultError, ProtocolError
from mpissd.common.records import outcome_digest
from mpissd.common.rounds import Outcome, Speculation
from mpissd.engine import Decoder, RunConfig, generate
from mpissd.engine.in_process import Token
from mpissd.engine.round.draft import Drafter
from mpissd.engine.text.tokenizer import load_tokenizer
from tests.text import tiny
from tests.text_config import finished
from tests.tiny_pair import TinyPair, tiny_pair

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
    return finished(RunConfig(**{**NULL, **flags}), rounds)


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
        monkeypatch.setattr(Drafter, "answer", fail)
        with pytest.raises(FaultError, match="the draft's thread ended: round 0: two epochs"):
            decoder.step()


def test_the_public_face_has_every_name_it_lists() -> None:
    for name in mpissd.engine.__all__:
        assert getattr(mpissd.engine, name).__name__ == name
        assert f"`{name}`" in PAGE.read_text()
    with pytest.raises(AttributeError, match="no attribute 'Encoder'"):
        _ = mpissd.engine.Encoder


CASES: list[tuple[str, dict[str, Any]]] = [
    ("ar", {"batch_size": 1}),
    ("sd", {"num_drafts": 0, "alpha": 0.9, "batch_size": 1}),
    ("ssd", {"batch_size": 3, "context": 70}),
    ("ssd", {"batch_size": 2, "lookahead": 3}),
    ("ssd", {"workload": "markov", "vocab": 20, "temperature": 0.8, "batch_size": 2}),
]


@pytest.mark.parametrize(("mode", "flags"), CASES, ids=lambda told: str(told))
def test_outcomes_do_not_depend_on_the_forward(mode: str, flags: dict[str, Any]) -> None:
    """Of 40 rounds, eight times the tokens after which positions begin again."""
    model = "gen:layers=2,hidden=64,ffn=128,heads=4,kv_heads=2,head_dim=16,vocab=97"
    told = {"mode": mode, "pair": None, "target": model, "draft": model, "backend": "numpy"}
    found = [
        decode(40, **{**told, "forward": forward, **flags}).records.sequences()
        for forward in ("gemm", "transformer")
    ]
    assert outcome_digest(found[0]) == outcome_digest(found[1])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    found = tiny_pair(tmp_path_factory.mktemp("pair"), vocab=len(tiny.tokens()))
    tiny.write(found.target)
    return found


def answer(pair: TinyPair, prompt: object = "hello", **flags: object) -> list[Token]:
    models = {"target": pair.target, "draft": pair.draft, "num_tokens": 24}
    return list(generate(prompt, **{**models, **flags}))  # type: ignore[arg-type]


def said(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


def test_every_mode_answers_with_the_same_tokens_and_says_what_drafted_them(pair: TinyPair) -> None:
    by_mode = {mode: answer(pair, mode=mode) for mode in ("ar", "sd", "ssd")}
    ids = [token.id for token in by_mode["ar"]]
    assert len(ids) == 24
    assert all([token.id for token in tokens] == ids for tokens in by_mode.values())
    assert said(by_mode["ssd"]) == load_tokenizer(str(pair.target)).decode(ids)
    sources = {mode: {token.source for token in tokens} for mode, tokens in by_mode.items()}
    assert sources["ar"] == {"bonus"} and sources["sd"] == {"bonus", "jit"}
    assert {"bonus", "cache"} <= sources["ssd"]
    assert [token.round for token in by_mode["ar"]] == list(range(24))


def test_an_answer_ends_in_front_of_a_stop_string_and_at_a_stop_token(pair: TinyPair) -> None:
    whole = answer(pair, mode="sd")
    text = said(whole)
    stop = text[8:11]
    cut = answer(pair, mode="sd", stop=stop)
    assert said(cut) == text[: text.index(stop)] and len(cut) < len(whole)
    token = whole[10].id
    ended = answer(pair, mode="sd", stop_token=token)
    first = [each.id for each in whole].index(token)
    assert [each.id for each in ended] == [each.id for each in whole[: first + 1]]


def test_a_caller_that_stops_early_leaves_no_thread(pair: TinyPair) -> None:
    before = active_count()
    for _ in generate("hello", target=pair.target, draft=pair.draft, mode="ssd"):
        break
    assert active_count() == before


@pytest.mark.parametrize(
    ("prompt", "flags", "message"),
    [
        ("", {}, "prompt: needs a value"),
        ([], {}, "prompt: is empty"),
        ("x" * 1100, {}, "tokens: allowed: at most"),
        ("hello", {"top_p": 0.5}, "top_p=0.5 with temperature=0"),
        ("hello", {"prompt_ids": "1,2"}, "prompt_ids with generate: allowed: its first argument"),
        ("hello", {"colour": 1}, "unknown flag '--colour'"),
        ("hello", {"backend": "cupy"}, "backend=cupy in one process"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    pair: TinyPair, prompt: object, flags: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        answer(pair, prompt, mode="ar", **flags)
