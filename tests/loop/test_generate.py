"""Text from Python: the tokens of an answer as they are decided."""

from threading import active_count

import pytest

from mpissd.common.errors import ConfigError
from mpissd.engine import generate
from mpissd.engine.decode.in_process import Token
from mpissd.engine.workload.tokenizer import load_tokenizer
from tests.text import tiny
from tests.tiny_pair import TinyPair, tiny_pair


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


def test_every_mode_answers_with_the_same_tokens_and_says_what_drafted_them(
    pair: TinyPair,
) -> None:
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
        (" ", {}, "prompt: is empty"),
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
