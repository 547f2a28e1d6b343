"""Drafts in one forward: their tokens are those of a fresh forward over the committed tokens and
the masks, and greedy answers are the target's own, in random configurations and up to the last
token of the context."""

import random
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Sampling, Speculation
from mpissd.engine.in_process import Loops, in_one_process, open_stepper
from mpissd.engine.job import Serving, resolve
from mpissd.engine.law.tree import Shape
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.round.draft import Drafter
from mpissd.engine.text.grammar import make_grammar
from mpissd.serve.protocol import Submit
from tests.serve.test_driver import Script, ThreeRows, Wild, served
from tests.text import tiny
from tests.text_config import finished, text_config
from tests.tiny_pair import tiny_pair

V = len(tiny.tokens())
MASKS = range(V, V + 7)


class Noted(list[tuple[list[int], list[int]]]):
    """The committed tokens and the drafted ones of each round of answers without grammars."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        start = Drafter.start_round

        def start_round(drafter: Drafter, speculation: Speculation) -> None:
            start(drafter, speculation)
            for of in drafter.batch.sequences:
                if of.served and not of.request.sampling.grammar:
                    self.append((list(of.tokens), list(of.served)))

        patch.setattr(Drafter, "start_round", start_round)

    def check(self, fresh: Stepper, shape: Shape, most: int) -> None:
        """Compares `most` of them, or all, with the marginals of a fresh forward."""
        for tokens, found in self[:: 1 + len(self) // most]:
            after = logits(fresh, [*tokens, *MASKS])[len(tokens) - 1 :]
            ranked = np.argsort(-after, axis=1, kind="stable")
            nodes = slice(1, 1 + len(found))
            assert found == ranked[shape.depths[nodes] - 1, shape.ranks[nodes]].tolist()


def logits(stepper: Stepper, tokens: list[int]) -> Any:
    """The logits after each of these tokens, which the stepper reads at once as a new sequence."""
    stepper.release([0])
    stepper.upload(len(tokens), np.array(tokens, np.int32), trunk_rows(0, 0, len(tokens)))
    stepper.launch()
    return stepper.logits(range(len(tokens))).copy()


SYSTEM = [(7 * n + n * n) % 97 + 3 for n in range(140)]  # two pages of 64 tokens, and some
GRAMMARS = [("regex", "[a-c]{3,30}(hello)?"), ("json", '{"type": "array", "items": {"enum": [1]}}')]


class Answered:
    """Requests, and the target's own answers to them, of which a configuration asks for some."""

    def __init__(self, home: Path, count: int = 24, most: int = 40) -> None:
        self.pair = pair = tiny_pair(home, vocab=V, hidden=32, noise=0.02)
        tiny.write(pair.target)
        dice = random.Random(0)
        self.asked = []
        for n in range(count):
            prompt = [*SYSTEM[: dice.choice([0, 0, 20, 63, 64, 140])], n + 3, dice.randrange(3, 99)]
            told = {"logit_bias": ((dice.randrange(99), 4.0),)} if n % 3 == 1 else {}
            told |= {"presence_penalty": 0.8, "frequency_penalty": 0.4} if n % 4 == 2 else {}
            told |= {"grammar": make_grammar("x", *dice.choice(GRAMMARS))} if n % 5 == 3 else {}
            self.asked.append(Submit(n, prompt, most, Sampling(**told)))
        ar = text_config(pair, mode="ar", batch_size=4)
        turns = [4 * n for n in range(count)]
        self.tokens = self.decoded(ar, Serving(), self.asked, turns).tokens()
        job = replace(in_one_process(replace(ar, mode="sd"))[0], prefill_rows=256)
        self.fresh = open_stepper(job, "numpy", ExitStack(), drafts=True)

    def decoded(
        self, run: Any, serving: Serving, asked: list[Submit], turns: list[int], **more: Any
    ) -> Script:
        mail = Script(*zip(turns, asked, strict=True))
        with Loops(*in_one_process(run, serving)) as loops:
            served(loops, mail, **more)
        return mail

    def tried(self, seed: int) -> Any:
        """Compares a random configuration's answers; returns (drafted, accepted, hits). None: no
        run has the configuration."""
        dice = random.Random(seed)
        mode, lookahead = dice.choice(["sd", "sd", "ssd", "ssd"]), dice.randint(1, 7)
        tree = dice.choice([None, None, dice.randint(2, 15)])
        zeros = ",".join(str(dice.choice([0, 0, 1, 2])) for _ in range(lookahead))
        fan_outs = f"uniform:1 uniform:3 geometric:9 uniform:2/uniform:1 list:{zeros},1".split()
        asked = []
        for one in dice.sample(self.asked, dice.randint(1, 7)):
            limit = dice.choice([None, None, None, *range(lookahead + 1)])
            told = replace(one.sampling, lookahead=limit)
            asked.append(Submit(one.id, one.prompt, dice.choice([1, 9, 40]), told))
        longest = max(len(one.prompt) + one.max_tokens for one in asked)
        flags = {"mode": mode, "lookahead": lookahead, "batch_size": dice.randint(1, 4)}
        flags |= {"context": longest + dice.choice([0, 0, 30]), "fan_out": dice.choice(fan_outs)}
        flags |= {"num_drafts": 1 if mode == "ssd" else dice.randint(0, 1)}
        flags |= {} if tree is None else {"tree": tree}
        try:
            run = text_config(self.pair, parallel_drafting=True, **flags)
            keeps, pool = dice.random() < 0.5, dice.choice([0, 0, longest + 64, longest])
            more: dict[str, Any] = {"times": ThreeRows()} if dice.random() < 0.5 else {}
            more |= {"goodput": Wild(lookahead)} if tree is None and dice.random() < 0.4 else {}
            turns = [dice.randint(0, 30) for _ in asked]
            serving = Serving(kv_tokens=pool, prefix_cache=keeps)
            with pytest.MonkeyPatch.context() as patch:
                noted = Noted(patch)
                found = self.decoded(run, serving, asked, turns, **more)
        except ConfigError as refused:
            assert "fan_out" in str(refused), refused
            return None
        for one in asked:
            own, want = found.tokens().get(one.id, []), self.tokens[one.id][: one.max_tokens]
            assert own == want, (seed, flags, one.id)
        noted.check(self.fresh, in_one_process(run)[0].shape, 6)
        counts = [(end.drafted, end.accepted, end.hits) for end in found.ends().values()]
        return np.sum(counts, axis=0)


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Answered:
    return Answered(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize(
    ("mode", "flags"),
    [
        ("sd", {"num_drafts": 0}),
        ("sd", {"num_drafts": 0, "batch_size": 3, "lookahead": 3}),
        ("sd", {"num_drafts": 0, "tree": 12, "batch_size": 2}),
        ("sd", {"num_drafts": 1, "batch_size": 2, "lookahead": 8}),
        ("ssd", {"fan_out": "uniform:2", "batch_size": 3}),
        ("ssd", {"fan_out": "list:1,0,0,0,0,0,0,0", "batch_size": 4}),
        ("ssd", {"fan_out": "uniform:2", "tree": 12}),
    ],
)
def test_drafts_are_those_of_a_fresh_forward(
    answered: Answered, monkeypatch: pytest.MonkeyPatch, mode: str, flags: dict[str, Any]
) -> None:
    """Up to the last token of a context that ends within a page and beyond one, in every slot."""
    told = {"lookahead": 7, "parallel_drafting": True, "context": 130, "num_tokens": 500, **flags}
    prompts = "1,2,3;" + ",".join(str(n % 97) for n in range(90)) + ";5;60,61,62"
    run = replace(text_config(answered.pair, mode=mode, **told), prompt_ids=prompts)
    noted = Noted(monkeypatch)
    decoder = finished(run)
    own = finished(replace(run, mode="ar", parallel_drafting=False, tree=None, num_drafts=0))
    assert decoder.tokens == own.tokens
    assert max(len(tokens) for tokens, _ in noted) == 129
    noted.check(answered.fresh, decoder.job.shape, 60)
    tokens, _ = noted[-1]
    first = logits(answered.fresh, [*tokens, *MASKS])[: len(tokens)]
    assert np.array_equal(first, logits(answered.fresh, tokens)), "masks change no other row"


def test_what_cannot_draft_in_one_forward_is_refused(answered: Answered) -> None:
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"lookahead": 9}, "lookahead=9 .* draft=draft: allowed: at most 7 . 1, its mask tokens"),
        ({"draft": answered.pair.target}, "draft=target: it has no mask tokens: allowed: a draft"),
        ({"backup_lookahead": 2}, "backup_lookahead=2 .*: allowed: 4, which one forward drafts"),
    ]
    for flags, told in refusals:
        with pytest.raises(ConfigError, match=told):
            run = text_config(answered.pair, mode="sd", parallel_drafting=True, **flags)
            resolve(run, 1, backend="numpy", memory_bytes=None)


def test_misses_have_rows_after_rounds_that_grow_one_branch_or_none(answered: Answered) -> None:
    told = {"lookahead": 7, "batch_size": 4, "fan_out": "list:1,0,0,0,0,0,0,0"}
    run = text_config(answered.pair, mode="ssd", parallel_drafting=True, **told)
    asked, wild = answered.asked[:8], Wild(7)
    found = answered.decoded(run, Serving(), asked, [0] * 8, goodput=wild).tokens()
    assert found == {one.id: answered.tokens[one.id] for one in asked}


@pytest.mark.parametrize("count", [25, pytest.param(500, marks=pytest.mark.long)])
def test_random_configurations_decode_the_target_s_own_tokens(
    answered: Answered, count: int
) -> None:
    counts = [found for seed in range(count) if (found := answered.tried(seed)) is not None]
    drafted, accepted, hits = np.sum(counts, axis=0)
    assert len(counts) > 0.8 * count and accepted > 0.05 * drafted and hits > 0
