"""A draft that verifies looked-up tokens while it drafts: the same tokens, in fewer forwards."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from mpissd.common.errors import ConfigError
from mpissd.common.records import outcome_digest
from mpissd.engine import Decoder, RunConfig
from mpissd.engine.decode.draft_rows import DraftRows
from mpissd.engine.workload.rollout import Guesses
from mpissd.engine.workload.text.draft import TextDraftWorker
from tests.tiny_pair import TinyPair, tiny_pair

V, K, TOKENS = 97, 6, 60
# Of these lengths answers cross pages, and one is a phrase said over and over.
PROMPTS = ";".join(
    ",".join(str((7 * n + (j % 9) * j) % V) for j in range(length))
    for n, length in enumerate((5, 40, 61, 1))
)


class Found(NamedTuple):
    tokens: dict[int, list[int]]
    digest: str
    forwards: int  # of the draft, while misses were answered
    offered: int
    accepted: int


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_pair(tmp_path_factory.mktemp("pair"), vocab=V, noise=0.05, scale=2.0)


def config(pair: TinyPair, **flags: Any) -> RunConfig:
    told: dict[str, Any] = {
        "workload": "text", "target": str(pair.target), "draft": str(pair.draft),
        "prompt_ids": PROMPTS, "num_tokens": TOKENS, "backend": "numpy", "deadline_s": 20.0,
        "lookahead": K,
    }  # fmt: skip
    return RunConfig(**{**told, **flags})


def decode(pair: TinyPair, **flags: Any) -> Found:
    counted = np.zeros(3, np.int64)
    close = DraftRows.close

    def watched(self: DraftRows, round_: int) -> None:
        if self.num_jit:
            counted[:] += self.forwards, self.guessed, self.guessed_right
        close(self, round_)

    with pytest.MonkeyPatch.context() as patch, Decoder(config(pair, **flags)) as decoder:
        patch.setattr(DraftRows, "close", watched)
        while not decoder.is_over:
            decoder.step()
        rows, tokens = decoder.records.sequences(), decoder.tokens
    forwards, offered, accepted = counted.tolist()
    return Found(tokens, outcome_digest(rows), forwards, offered, accepted)


@pytest.mark.parametrize("kind", ["prompt", "suffix"])
@pytest.mark.parametrize(
    "flags",
    [
        {"mode": "sd", "num_drafts": 0},
        {"mode": "sd", "num_drafts": 0, "batch_size": 3},
        {"mode": "sd", "num_drafts": 2, "batch_size": 3},
        {"mode": "sd", "num_drafts": 0, "temperature": 0.3},
        {"mode": "sd", "num_drafts": 1, "temperature": 1.0, "top_p": 0.9, "batch_size": 2},
        {"mode": "ssd", "fan_out": "uniform:2", "batch_size": 3},
        {"mode": "ssd", "fan_out": "uniform:3", "temperature": 0.5, "saguaro_c": 0.4},
        {"mode": "ssd", "fan_out": "uniform:2", "backup_lookahead": 3, "batch_size": 2},
    ],
    ids=lambda flags: "-".join(map(str, flags.values())),
)
def test_every_outcome_is_that_of_single_steps(
    pair: TinyPair, flags: dict[str, Any], kind: str
) -> None:
    """The same drafted tokens, sampled ones too, whose draws do not depend on guesses."""
    alone, found = decode(pair, **flags), decode(pair, draft_lookup=kind, **flags)
    print(f"{alone.forwards} forwards, {found.forwards} with {found.accepted}/{found.offered}")
    assert (found.digest, found.tokens) == (alone.digest, alone.tokens)
    assert 0 < found.accepted < found.offered and alone.offered == 0
    if flags["mode"] == "sd":  # SSD's hits take as many forwards as their growth was late
        assert found.forwards < alone.forwards


def test_one_sequence_takes_a_forward_less_for_each_token_that_was_guessed(pair: TinyPair) -> None:
    sd = {"mode": "sd", "num_drafts": 0}
    alone, found = decode(pair, **sd), decode(pair, draft_lookup="suffix", **sd)
    assert alone.forwards % K == 0 and found.forwards == alone.forwards - found.accepted


@pytest.mark.parametrize("flags", [{"num_drafts": 0}, {"num_drafts": 1, "batch_size": 3}])
def test_a_draft_that_forgets_what_it_stored_is_found(
    pair: TinyPair, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the digests above rest on: a wrong guess is no part of the cache."""
    alone = decode(pair, mode="sd", **flags)
    verify = TextDraftWorker._verify

    def shifted(self: TextDraftWorker, rollout: Any, guesses: Guesses, *rest: Any) -> None:
        before = guesses.grown.copy()
        verify(self, rollout, guesses, *rest)
        chains = np.array([len(chain) for chain in guesses.chains])
        short = guesses.grown - before < chains  # a guess was wrong
        rollout.places.first[short] += 1

    monkeypatch.setattr(TextDraftWorker, "_verify", shifted)
    assert decode(pair, mode="sd", draft_lookup="suffix", **flags).digest != alone.digest


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"mode": "ar"}, "draft_lookup=suffix with mode=ar"),
        ({"mode": "sd", "backup": "fast"}, "draft_lookup=suffix with mode=sd, backup=fast"),
        ({"workload": "markov"}, "draft_lookup=suffix with workload=markov"),
    ],
)
def test_it_is_refused_where_no_model_drafts(flags: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        RunConfig(**{"workload": "text", "draft_lookup": "suffix", **flags})
