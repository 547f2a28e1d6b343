"""Drafts that read the target's hidden state lose nothing: Medusa heads, an MLP and an EAGLE layer.

Greedy answers are the target's own bit for bit, sampled ones follow its distribution, and each
forward equals a plain NumPy reading of stack.py's equations.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.errors import ConfigError
from mpissd.engine import RunConfig
from mpissd.engine.in_process import Loops, in_one_process
from mpissd.engine.job import Serving, resolve
from mpissd.engine.model.transformer.checkpoint import EMBEDDING, tensors
from mpissd.engine.model.transformer.sources import config_of
from tests.loop.markov_rig import deviation, joint_law
from tests.loop.text_rig import TextPair
from tests.serve.test_driver import Script, Submit, ThreeRows, all_returned, prompts, served
from tests.serve.test_driver import alone as alone_by_itself
from tests.text_config import V, config, decode, text_config
from tests.tiny_pair import KINDS, TinyPair, state_draft, tiny_pair

TOKENS, HEADS = 60, 5
INLINE = {"mode": "sd", "num_drafts": 0}


@dataclass(frozen=True)
class Family:
    """A target and its drafts by kind."""

    target: Path
    drafts: dict[str, Path]


def family(home: Path, **shape: Any) -> Family:
    target = tiny_pair(home / "pair", **shape).target
    made = {
        kind: state_draft(target, kind, home / kind, layers=HEADS if kind == "medusa" else 1)
        for kind in KINDS
    }
    return Family(target, made)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return family(tmp_path_factory.mktemp("states"), vocab=V)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A vocabulary of four tokens, whose answers are few."""
    shape = {"vocab": 4, "heads": 2, "kv_heads": 1, "hidden": 32}
    return family(tmp_path_factory.mktemp("few"), **shape)


def pair_of(family: Family, kind: str) -> TinyPair:
    return TinyPair(family.target, family.drafts[kind])


@pytest.fixture(scope="module")
def alone(tiny: Family) -> dict[int, list[int]]:
    return decode(tiny, "ar", num_tokens=TOKENS).tokens


@pytest.mark.parametrize("flags", [{}, {"batch_size": 3, "lookahead": 2}])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_the_target_s_own(
    tiny: Family, alone: dict[int, list[int]], kind: str, flags: dict[str, Any]
) -> None:
    found = decode(pair_of(tiny, kind), **INLINE, num_tokens=TOKENS, **flags)
    assert found.tokens == alone and found.accepted > 0.05


@pytest.mark.parametrize("count", [1200, pytest.param(4000, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_answers_follow_the_target(few: Family, kind: str, count: int) -> None:
    """A chi-squared test of the first three tokens of many answers to one prompt.

    1,200 answers show an error of a tenth of the probability (in total variation) at 5 deviations.
    """
    prompt = (1, 0, 2)
    pair = TextPair("sd", vocab=4, lookahead=2, target_where=str(few.target), top_p=0.9)
    law = joint_law(pair, prompt, 3)
    found = decode(
        pair_of(few, kind), **INLINE, temperature=1.0, top_p=0.9, num_tokens=3, lookahead=2,
        prompt_ids=";".join(["1,0,2"] * count), batch_size=40, seed=3,
    )  # fmt: skip
    assert len(found.tokens) == count and deviation(law, found.tokens.values()) < 5
    assert found.accepted > 0.3


@pytest.mark.parametrize(
    ("kind", "flags", "told"),
    [
        ("eagle", {"mode": "ssd"}, "after the verification: allowed: mode=sd, num_drafts=0"),
        ("mlp", {"mode": "sd", "num_drafts": 1}, "with mode=sd, num_drafts=1: it reads the hidden"),
        ("medusa", {**INLINE, "lookahead": HEADS + 1}, f"allowed: at most its {HEADS} heads"),
        ("mlp", {**INLINE, "workload": "gemm", "forward": "transformer"}, "allowed: workload=text"),
    ],
)  # fmt: skip
def test_late_drafts_are_refused(tiny: Family, kind: str, flags: dict[str, Any], told: str) -> None:
    models = {"target": str(tiny.target), "draft": str(tiny.drafts[kind]), "backend": "numpy"}
    text = {"workload": "text", "prompt_ids": "1,2", "num_tokens": 4}
    with pytest.raises(ConfigError, match=told):
        resolve(
            RunConfig(**{**(text if "workload" not in flags else {}), **models, **flags}),
            1, backend="numpy", memory_bytes=None,
        )  # fmt: skip


@pytest.mark.parametrize(("kind", "kv_tokens"), [("mlp", 0), ("medusa", 320), ("eagle", 320)])
def test_a_server_answers_as_jobs_do(tiny: Family, kind: str, kv_tokens: int) -> None:
    """Prompts are stored in rounds of others, and again where pages ran out."""
    pair = pair_of(tiny, kind)
    count = 60 if kv_tokens else 20
    asked = [(n, prompt, count + 7 * (n % 5)) for n, prompt in enumerate(prompts(8))]
    mail = Script(*((2 * n, Submit(n, prompt, count)) for n, prompt, count in asked))
    told = text_config(pair, **INLINE, lookahead=4, batch_size=4)
    with Loops(*in_one_process(told, Serving(kv_tokens=kv_tokens))) as loops:
        driver = served(loops, mail, times=ThreeRows())
    assert all_returned(loops)
    assert (driver.scheduler.num_preempted > 0) == (kv_tokens > 0)
    assert mail.tokens() == {n: alone_by_itself(pair, *what) for n, *what in asked}


@pytest.mark.parametrize(("kind", "forwards"), [("medusa", 1), ("mlp", 4), ("eagle", 4)])
def test_forwards_and_bytes_are_counted(tiny: Family, kind: str, forwards: int) -> None:
    told = config(pair_of(tiny, kind), **INLINE, lookahead=4)
    job = resolve(told, 1, backend="numpy", memory_bytes=None)
    shard = job.draft_shard
    assert shard is not None and job.num_forwards(4) == forwards
    read = dict(tensors(config_of(str(tiny.drafts[kind]), str(tiny.target))))
    unread = EMBEDDING, *(n for n in read if n.startswith("model.layers.4."))  # Medusa's fifth head
    weights = sum(math.prod(size) for name, size in read.items() if name not in unread)
    assert shard.num_params(job.draft_options) == weights
    assert shard.kv_bytes(100, 1) == (100 * 2 * shard.kv_width * 2 if kind == "eagle" else 0)
