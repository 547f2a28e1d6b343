"""Answers to grammars: each meets its own, and every mode gives the same tokens."""

import json
import os
import random
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from mpissd.__main__ import main
from mpissd.common.config import parse_flags
from mpissd.common.rounds import Sampling
from mpissd.engine.in_process import Loops, in_one_process
from mpissd.engine.job import Serving
from mpissd.engine.text.grammar import make_grammar
from mpissd.engine.text.tokenizer import Tokenizer, load_tokenizer
from mpissd.serve.protocol import Submit
from tests.needs import module
from tests.serve.test_driver import Script, served
from tests.text import tiny
from tests.text_config import finished
from tests.tiny_pair import KINDS, TinyPair, state_draft, tiny_pair

module("llguidance", "grammars")
COUNT = int(os.environ.get("MPISSD_GRAMMARS", "50"))
CONTEXT, MOST, SLOTS = 224, 200, 6
MODES: dict[str, dict[str, Any]] = {
    "ar": {"mode": "ar"},
    "inline": {"mode": "sd", "num_drafts": 0},
    "inline tree": {"mode": "sd", "num_drafts": 0, "tree": 7},
    "ssd": {"mode": "ssd", "fan_out": "uniform:2"},
    "ssd, fast backup": {"mode": "ssd", "fan_out": "uniform:2", "backup": "fast"},
    "branches of trees": {"mode": "ssd", "fan_out": "uniform:2", "tree": 7},
    "parallel inline tree": {"mode": "sd", "num_drafts": 0, "tree": 7, "parallel_drafting": True},
    "parallel ssd": {"mode": "ssd", "fan_out": "uniform:2", "parallel_drafting": True},
}
Asked = tuple[str, Any]  # make_grammar's kind and value


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """The draft knows two of three tokens, and no stop token."""
    vocab = len(tiny.tokens())
    known = [n for n in range(vocab) if n % 3 != 1]
    made = tiny_pair(tmp_path_factory.mktemp("narrow"), vocab=vocab, head_ids=known)
    tiny.write(made.target)
    return made


def schema_of(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose answers are short; every kind nests, down to depth 2."""
    kinds = ["integer", "boolean", "null", "enum", "string"]
    nested = ["array", "anyOf", "object", "object"]
    kind = rng.choice((nested, kinds + nested, kinds)[depth])
    if kind == "integer":
        low = rng.randint(-200, 200)
        return {"type": kind, "minimum": low, "maximum": low + rng.randint(0, 3000)}
    if kind == "string":
        return {"type": kind, "maxLength": rng.randint(0, 4)}
    if kind == "enum":
        texts = ["hello", "hell", 'a"b', "wörld", "<|s|>", "a<|e|>"]
        return {kind: rng.sample([*texts, 7, -1.5, None, True], 3)}
    if kind == "array":
        most = rng.randint(0, 3)
        return {"type": kind, "items": schema_of(rng, depth + 1), "maxItems": most}
    if kind == "anyOf":
        return {kind: [schema_of(rng, depth + 1) for _ in range(2)]}
    if kind == "object":
        names = rng.sample(["a", "hello", "wörld", 'q"', "line\n"], rng.randint(0, 4))
        return {
            "type": kind, "properties": {name: schema_of(rng, depth + 1) for name in names},
            "required": [name for name in names if rng.random() < 0.7],
            "additionalProperties": False,
        }  # fmt: skip
    return {"type": kind}


def meets(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is valid, by the definitions of the keywords of schema_of."""
    if "anyOf" in schema:
        return any(meets(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return any(value == each and type(value) is type(each) for each in schema["enum"])
    kind = schema["type"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "array":
        is_short = isinstance(value, list) and len(value) <= schema["maxItems"]
        return is_short and all(meets(each, schema["items"]) for each in value)
    if kind == "object":
        known = schema["properties"]
        is_whole = isinstance(value, dict) and set(schema["required"]) <= value.keys() <= set(known)
        return is_whole and all(meets(value[name], known[name]) for name in value)
    return value is None if kind == "null" else isinstance(value, bool)


def is_met(asked: Asked, text: str) -> bool:
    kind, value = asked
    if kind == "json":
        return meets(json.loads(text), json.loads(value))
    return text in value if kind == "choice" else re.fullmatch(value, text) is not None


@lru_cache(maxsize=1)
def requests(count: int) -> list[tuple[Submit, Asked | None]]:
    """Requests to random schemas, a few other grammars, and none; some are sampled."""
    rng, made = random.Random(count), list[tuple[Submit, Asked | None]]()
    for n in range(count):
        asked: Asked | None = ("json", json.dumps(schema_of(rng)))
        if n % 7 == 5:
            regex = rng.choice(["[a-c]{3}(hello)?", "(ab|c)d*e{2}|x", r"[xy]<\|s\|>z", "é?"])
            choice = "choice", ["yes", "<|pad|>", "hello (all) | wörld"]
            asked = rng.choice([None, ("regex", regex), choice])
        grammar = "" if asked is None else make_grammar("x", *asked)
        prompt = [rng.randrange(3, len(tiny.tokens())) for _ in range(rng.randint(1, 20))]
        is_long = asked is not None and asked[0] != "regex"
        told = Sampling(float(n % 4 == 3), rng.choice([1.0, 0.8]), grammar=grammar)
        made.append((Submit(n, prompt, MOST if is_long else 40, told), asked))
    return made


def answers(
    pair: TinyPair, asked: list[Submit], serving: Serving, *, forces: bool = True, **flags: Any
) -> Script:
    told = {"target": pair.target, "draft": pair.draft, "backend": "numpy", "workload": "text"}
    told |= {"prompt": "x", "context": CONTEXT, "batch_size": SLOTS, "lookahead": 4, **flags}
    config = parse_flags({name: str(value) for name, value in told.items()})
    mail = Script(*((n, one) for n, one in enumerate(asked)))
    with Loops(*in_one_process(config, serving)) as loops:
        loops.worker.oracle._grammars.forces &= forces
        mail.watched = [served(loops, mail).scheduler.num_preempted]
    return mail


@pytest.fixture(scope="module")
def expected(pair: TinyPair) -> dict[int, list[int]]:
    asked = [one for one, _ in requests(COUNT)]
    return answers(pair, asked, Serving(), forces=False, mode="ar").tokens()


@pytest.mark.parametrize("mode", MODES)
def test_every_answer_meets_its_grammar_and_all_modes_are_equal(
    pair: TinyPair, words: Tokenizer, expected: dict[int, list[int]], mode: str
) -> None:
    found = answers(pair, [one for one, _ in requests(COUNT)], Serving(), **MODES[mode])
    tokens, ends, counts = found.tokens(), found.ends(), [0, 0]
    assert sum(end.forced for end in ends.values()) > 4 * COUNT
    for one, asked in requests(COUNT):
        assert one.sampling.temperature or tokens[one.id] == expected[one.id]
        if asked is not None:
            end, text = ends[one.id], words.decode(tokens[one.id])
            assert end.reason == "stop" and is_met(asked, text), (asked, text)
            counts = [counts[0] + end.accepted, counts[1] + end.drafted]
    assert counts[0] >= 0.2 * counts[1], "the draft drafts what can be accepted"


@pytest.mark.parametrize("mode", ["ssd", "inline tree"])
def test_a_preempted_answer_and_a_narrow_draft_meet_theirs(narrow: TinyPair, mode: str) -> None:
    item = {"enum": ["hello", "hell", "x y"]}
    schema = json.dumps({"type": "array", "items": item, "minItems": 16, "maxItems": 18})
    grammar, words = make_grammar("x", "json", schema), load_tokenizer(str(narrow.target))
    asked = [Submit(n, [n + 5] * (n + 1), MOST, Sampling(grammar=grammar)) for n in range(5)]
    found = answers(narrow, asked, Serving(kv_tokens=CONTEXT), **MODES[mode])
    assert found.watched[0] > 0 or mode != "ssd", "some are preempted"
    assert found.tokens() == answers(narrow, asked, Serving(), mode="ar").tokens()
    for tokens in found.tokens().values():
        assert 16 <= len(json.loads(words.decode(tokens))) <= 18


def test_a_preempted_answer_ends_at_the_same_limit(pair: TinyPair) -> None:
    """A preempted answer's tokens were read at once, and met a limit that others do not meet."""
    grammar = make_grammar("x", "regex", r"([a-z]{1,20} ?){1,30}\.")
    asked = [Submit(n, [n + 5] * 20, 160, Sampling(grammar=grammar)) for n in range(SLOTS)]
    found = answers(pair, asked, Serving(kv_tokens=CONTEXT), **MODES["ssd"])
    assert found.watched[0] > 0, "some are preempted"
    assert found.tokens() == answers(pair, asked, Serving(), forces=False, mode="ar").tokens()


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_on_hidden_states_meets_grammars(
    pair: TinyPair, expected: dict[int, list[int]], tmp_path: Path, kind: str
) -> None:
    draft = state_draft(pair.target, kind, tmp_path, layers=4 if kind == "medusa" else 1)
    asked = [one for one, _ in requests(COUNT)][:12]
    found = answers(replace(pair, draft=draft), asked, Serving(), **MODES["inline"])
    tokens, ends = found.tokens(), found.ends().values()
    assert all(one.sampling.temperature or tokens[one.id] == expected[one.id] for one in asked)
    assert sum(end.accepted for end in ends) > 0.5 * sum(end.drafted for end in ends)


def test_run_takes_a_grammar_from_its_flag(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "s.json"
    where.write_text(json.dumps({"enum": ["hello", 7]}))
    for flag, allowed in (("choice:yes|no", ("yes", "no")), (str(where), ('"hello"', "7"))):
        flags = {"target": pair.target, "draft": pair.draft, "backend": "numpy", "context": 99}
        told = {"workload": "text", "prompt": "hello", "mode": "sd", **flags, "grammar": flag}
        config = parse_flags({name: str(value) for name, value in told.items()})
        (tokens,) = finished(config).tokens.values()
        assert load_tokenizer(str(pair.target)).decode(tokens) in allowed
    asked = [f"--{name}={value}" for name, value in flags.items()]
    for wrong, said in (("regex:(a", "unclosed group"), ("nowhere.json", "allowed: json, regex:")):
        assert main(["run", "--workload=text", "--prompt=x", *asked, f"--grammar={wrong}"]) == 2
        assert said in capsys.readouterr().err
