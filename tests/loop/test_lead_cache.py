"""The lead's own cache: with whole branches at hand it serves what the draft would have answered;
late, stale and wrong ones change no token."""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from mpissd.common.errors import FaultError, ProtocolError
from mpissd.common.records import outcome_digest
from mpissd.common.rounds import Control, Outcome, ReadyBranches, Speculation
from mpissd.engine.comm.link import DraftEnd, LeadEnd
from mpissd.engine.in_process import Decoder
from mpissd.engine.round import target
from tests.loop.markov_rig import Pair
from tests.loop.test_markov import GREEDY, decode

WIDE = Pair(vocab=20, order=2, divergence=0.4, lookahead=3, batch=1, fan_out=(2, 2, 2, 3))
PAIRS = {
    "greedy": replace(GREEDY, fan_out=(2, 1, 2, 3), divergence=0.3),
    "sampled": WIDE,
    "two sequences": replace(WIDE, batch=2),
    "C=.5": replace(WIDE, saguaro_c=0.5),
    "fewer tokens after a miss": replace(WIDE, backup="fast", backup_lookahead=1),
}


Change = Callable[[ReadyBranches], ReadyBranches | None]


class Watch:
    """Makes the lead wait until the draft has sent its branches, and counts those it took.

    change: alters what the lead finds. taken: the rounds served by the lead itself.
    """

    def __init__(self, change: Change | None = None) -> None:
        self.change, self.taken = change, list[int]()

    def __call__(self, lead: LeadEnd, draft: DraftEnd) -> None:
        find, send = lead.branches, lead.send_outcome

        def branches(round_: int) -> ReadyBranches | None:
            if round_ < 0 or lead._branches is None:
                return None
            lead.waiter.until(lead._branches.arrived, "branches")
            found = find(round_)
            return found if found is None or self.change is None else self.change(found)

        def sent(outcome: Outcome, stop: bool = False, taken: int | None = None) -> None:
            if taken is not None:
                self.taken.append(outcome.round)
            send(outcome, stop, taken)

        lead.branches = branches  # type: ignore[method-assign]
        lead.send_outcome = sent  # type: ignore[method-assign]


def decided(decoder: Decoder) -> tuple[dict[int, list[int]], str]:
    return decoder.tokens, outcome_digest(decoder.records.sequences())


@pytest.mark.parametrize("name", PAIRS)
def test_the_lead_serves_what_the_draft_would_have_answered(name: str) -> None:
    pair = PAIRS[name]
    watch = Watch()
    found = decode(pair, 60, hook=watch)
    assert decided(found) == decided(decode(pair, 60, cache="draft"))
    rows = found.records.sequences()
    rounds = sorted(set(rows[:, 0].tolist()))
    hits = [n - 1 for n in rounds if (rows[rows[:, 0] == n, 6] > 0).all()]
    assert watch.taken and set(watch.taken) <= set(hits)
    if pair.batch == 1:
        assert watch.taken == hits


@pytest.mark.parametrize(
    "flags", [{}, {"tree": 5, "fan_out": "geometric:8"}], ids=["chain", "tree"]
)
@pytest.mark.parametrize("lookahead", [1, WIDE.lookahead])
def test_the_lead_serves_hits_if_each_round_has_the_same_limit(
    lookahead: int, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server sets it, also if the limit is K itself."""
    monkeypatch.setattr(target, "Control", partial(Control, lookahead))
    watch = Watch()
    found = decode(WIDE, 60, hook=watch, **flags)
    assert decided(found) == decided(decode(WIDE, 60, cache="draft", **flags))
    rows = found.records.sequences()
    assert watch.taken == [n - 1 for n, is_hit in rows[:, [0, 6]].tolist() if is_hit > 0]
    assert watch.taken


def delayed(rounds: int) -> Change:
    """Each round the lead finds the branches of so many rounds ago, under this round's number."""
    past: list[ReadyBranches] = []

    def change(found: ReadyBranches) -> ReadyBranches | None:
        past.append(found)
        if len(past) <= rounds:
            return None
        old = past.pop(0)
        return ReadyBranches(found.round, old.rows, old.version, old.levels)

    return change


@pytest.mark.parametrize("rounds", [1, 2])
def test_branches_of_another_round_are_refused_by_the_draft(rounds: int) -> None:
    """A bonus token comes again, so that some key of an earlier round fits."""
    pair = replace(WIDE, vocab=3, order=1)
    with pytest.raises(FaultError, match=r"round \d+: rank 0 took branches for") as refused:
        decode(pair, 400, hook=Watch(delayed(rounds)))
    assert isinstance(refused.value.__cause__, ProtocolError)


def test_branches_of_other_weights_are_refused_by_the_draft() -> None:
    def older(found: ReadyBranches) -> ReadyBranches:
        return ReadyBranches(found.round, found.rows, found.version + 1, found.levels)

    message = r"round \d+: rank 0 took branches of version 1, sent were version 0"
    with pytest.raises(FaultError, match=message):
        decode(WIDE, 40, hook=Watch(older))


@pytest.mark.parametrize("name", PAIRS)
def test_branches_that_come_after_the_outcome_are_served_before_the_answer(name: str) -> None:
    """Every hit asks, and then finds the branches. The draft's answer is dropped when it comes."""
    leads: list[LeadEnd] = []
    unread: list[int] = []

    def late(lead: LeadEnd, draft: DraftEnd) -> None:
        Watch(lambda found: None)(lead, draft)
        ask = lead.speculation

        def answer(*told: Any) -> Speculation:
            found = ask(*told)
            unread.append(len(lead._unread))
            return found

        lead.speculation = answer  # type: ignore[method-assign]
        leads.append(lead)

    pair = PAIRS[name]
    assert decided(decode(pair, 40, hook=late)) == decided(decode(pair, 40, cache="draft"))
    assert max(unread) > 0
    leads[0].end()
    assert not leads[0]._unread


def test_an_answer_unlike_the_served_branches_is_refused() -> None:
    def wrong(lead: LeadEnd, draft: DraftEnd) -> None:
        Watch(lambda found: None)(lead, draft)
        send = draft.send_speculation

        def sent(answer: Speculation) -> None:
            answer.tokens[:, 0] += 1 * answer.hit
            send(answer)

        draft.send_speculation = sent  # type: ignore[method-assign]

    with pytest.raises(ProtocolError, match=r"round \d+: the draft answers .* but branches served"):
        decode(WIDE, 40, hook=wrong)


def test_branches_from_the_future_are_refused() -> None:
    def early(lead: LeadEnd, draft: DraftEnd) -> None:
        send = draft.send_branches

        def sent(ready: ReadyBranches, **told: Any) -> None:
            ahead = ReadyBranches(ready.round + 9, ready.rows, ready.version, ready.levels)
            send(ahead if len(ready.rows) else ready, **told)

        draft.send_branches = sent  # type: ignore[method-assign]
        Watch()(lead, draft)

    with pytest.raises(ProtocolError, match="BRANCHES message refused: round is 9, expected at"):
        decode(WIDE, 40, hook=early)


@pytest.mark.parametrize("name", PAIRS)
def test_whenever_branches_come_the_tokens_are_the_same(name: str) -> None:
    """MPISSD_FAULTS=1000 tries as many patterns of late branches."""
    pair = PAIRS[name]
    told = decided(decode(pair, 40, cache="draft"))
    for seed in range(int(os.environ.get("MPISSD_FAULTS", "3"))):
        rng = random.Random(seed)
        share = rng.random()
        watch = Watch(lambda found, rng=rng, share=share: found if rng.random() < share else None)
        assert decided(decode(pair, 40, hook=watch)) == told
