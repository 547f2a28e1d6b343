"""A third workload: it needs only this file and one call of `register`.

Its target counts upward from token to token; its draft counts, too, and is wrong before every
multiple of five.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpissd.common import workloads
from mpissd.common.config import RunConfig, parse_flags
from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Ints, Request, Source, Speculation
from mpissd.engine.job import resolve
from mpissd.engine.law.acceptance import count_accepted
from mpissd.engine.law.fanout import FanOuts, lanes_of
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.oracle.logits import LogitsDraft, TextWorkload
from mpissd.engine.oracle.workload import Workload
from mpissd.engine.round.branches import Branches
from mpissd.engine.round.oracle import DraftOracle, Proposals, TargetOracle
from mpissd.engine.round.sequence import Batch
from mpissd.lab.predict.simulation import is_predictable
from tests.text_config import config as text_config
from tests.text_config import finished
from tests.tiny_pair import TinyPair

V = 101


class CountingTarget(TargetOracle):
    """The token after t is t + 1."""

    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        ahead = np.arange(1, speculation.tokens.shape[1] + 2, dtype=np.int32)
        true = (batch.last_tokens[:, None] + ahead) % V
        accepted = count_accepted(speculation.tokens, true, speculation.num_draft)
        return accepted, true[np.arange(len(batch)), accepted]


class CountingDraft(DraftOracle):
    """Drafts t + 1 after t, or t + 2 if t + 1 is a multiple of five."""

    def branches(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        rows, ks, places, first = [], [], [], []
        for row, source in enumerate(speculation.source.tolist()):
            served = speculation.tokens[row, : speculation.num_draft[row]].tolist()
            trunk = [int(batch.last_tokens[row]), *served]
            for k, place in zip(*lanes_of(fan_outs.behind(source)), strict=True):
                if k > len(served):
                    continue
                shift = int(k < len(served) and served[k] == (trunk[k] + 1) % V)
                token = (trunk[k] + 1 + shift + place) % V
                rows.append(row), ks.append(k), places.append(place), first.append(token)
        nodes, ranks, tokens = np.array([ks, places, first], np.int32)
        grown = np.zeros((len(tokens), self.lookahead), np.int32)
        return batch.grown_ahead(np.array(rows, np.int64), nodes, ranks, tokens, grown)

    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Branches:
        return batch.restarted(rows, np.zeros((len(rows), self.lookahead), np.int32))

    def collect(self, grown: Sequence[Branches], first_row: int) -> None:
        for branches in grown:
            following = (branches.inputs + 1) % V
            branches.append((following + (following % 5 == 0)) % V)


class Counting(Workload):
    vocab = V
    law = "the target counts upward"

    def target_oracle(self, stepper: Forwards) -> TargetOracle:
        return CountingTarget()

    def draft_oracle(self, stepper: Forwards) -> CountingDraft:
        return CountingDraft(self.job.lookahead)

    def requests(self, first_id: int, count: int) -> list[Request]:
        return [Request(first_id + n, first_token=n) for n in range(count)]


class StoryDraft(LogitsDraft):
    """Counts its steps."""

    steps = 0

    def collect(self, grown: Sequence[Branches], first_row: int) -> None:
        StoryDraft.steps += 1
        super().collect(grown, first_row)


class Story(TextWorkload):
    draft_class = StoryDraft


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "_KNOWN", dict(workloads._KNOWN))
    workloads.register("counting", f"{__name__}:Counting", "vocab")


def config_of(mode: str, **flags: Any) -> RunConfig:
    machine = {"pair": "toy", "backend": "emulated", "device": "null"}
    return RunConfig(mode=mode, vocab=V, **{"workload": "counting", **machine, **flags})


@pytest.mark.parametrize(("mode", "drafts"), [("ar", 0), ("sd", 0), ("sd", 1), ("ssd", 1)])
def test_it_decodes_in_every_mode(mode: str, drafts: int) -> None:
    decoder = finished(config_of(mode, num_drafts=drafts, batch_size=3), 25)
    for id_, tokens in decoder.tokens.items():
        assert tokens == [(id_ + n) % V for n in range(1, len(tokens) + 1)]
    rows = decoder.records.sequences()
    accepted, later = rows[:, 3], rows[:, 0] > 0
    assert accepted.max() == (0 if mode == "ar" else decoder.job.lookahead)
    assert rows[later, 6].all() == (mode == "ssd")  # its draft foresees every bonus token


def test_the_rest_of_the_program_takes_it_as_it_is() -> None:
    job = resolve(config_of("ssd"), 1, backend="emulated", memory_bytes=None)
    workload = job.workload
    assert isinstance(workload, Counting) and not is_predictable(job)
    assert workload.row_fields() == {}
    assert parse_flags({"workload": "counting", "vocab": "9"}).vocab == 9
    with pytest.raises(ConfigError, match=r"alpha=0.5 .*counting: allowed: workload=gemm"):
        parse_flags({"workload": "counting", "alpha": "0.5"})
    with pytest.raises(ConfigError, match="allowed: workload=counting or markov"):
        parse_flags({"vocab": "9"})
    with pytest.raises(ConfigError, match=r"draft=medusa4.* with workload=counting"):
        config = RunConfig(workload="counting", pair="8b/medusa:8b")
        resolve(config, 1, backend="emulated", memory_bytes=None)


def test_text_under_another_name_decodes_as_text(pair: TinyPair) -> None:
    workloads.register("story", f"{__name__}:Story", "text")
    text = text_config(pair, "ssd", num_tokens=20)
    story = replace(text, workload="story")
    assert story.is_text and finished(story).tokens == finished(text).tokens
    assert StoryDraft.steps > 0
    with pytest.raises(ConfigError, match="allowed: workload=gemm"):
        replace(story, alpha=0.5).check()


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"mean 'counting'\? allowed: counting, gemm, markov"):
        parse_flags({"workload": "countings"})
    with pytest.raises(ValueError, match="registered already"):
        workloads.register("gemm", "nowhere:Nothing")
