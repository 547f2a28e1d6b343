"""Greedy text is the same tokens in every mode, however it is drafted, served and batched.

The draft is a disturbed target: it is accepted often, but not always, and the cache hits as often.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mpissd.common.errors import FaultError
from mpissd.engine.workload.text import LogitsTarget
from tests.text.decoded import TOKENS, V, decode
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
