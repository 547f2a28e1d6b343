"""The markov workload in the real loops: its model pair, the emitted tokens, the ranks that a draft
counts, and PROPOSALS, the whole rows that tokens were drawn from."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mpissd.common.errors import FaultError, ProtocolError
from mpissd.common.records import outcome_digest
from mpissd.common.rounds import Source
from mpissd.common.wait import Waiter
from mpissd.engine import Decoder, RunConfig, in_process, parts
from mpissd.engine.comm.link import DraftEnd, LeadEnd, queue_link
from mpissd.engine.features.ranks import RankCounts
from mpissd.engine.law.sampling import weigh
from mpissd.engine.oracle.markov import MarkovModel
from tests.loop.markov_rig import Pair, greedy
from tests.text_config import finished

GREEDY = Pair(temperature=0.0, vocab=12, order=2, lookahead=3, prompt_tokens=3, seed=4)


@settings(max_examples=25)
@given(st.data())
def test_any_pair_emits_what_its_target_or_sd_emits(data: st.DataObject) -> None:
    """At temperature 0 the target's likeliest tokens, in every mode. Above it SSD draws what SD
    draws, token by token and round by round."""
    draw = data.draw
    K, F = draw(st.integers(1, 5), "K"), st.integers(0, 12)
    lists = st.lists(F, min_size=K + 1, max_size=K + 1).filter(any)
    pair = replace(
        GREEDY,
        temperature=draw(st.sampled_from([0.0, 0.05, 0.5, 1.0, 2.0]), "temperature"),
        divergence=draw(st.sampled_from([0.0, 0.3, 1.0]), "divergence"),
        saguaro_c=draw(st.sampled_from([1.0, 1.0, 0.0]), "C"),
        seed=draw(st.integers(0, 99), "seed"),
        batch=draw(st.integers(1, 6), "b"),
        lookahead=K,
        fan_out=tuple(draw(lists, "F")),
        fan_out_miss=tuple(draw(lists, "F after a miss")),
    )
    if pair.temperature:
        pair = replace(pair, saguaro_c=1.0)
        ssd, sd = decode(pair, 15), decode(replace(pair, mode="sd"), 15)
        inline = decode(replace(pair, mode="sd", is_inline=True), 15)
        assert ssd.tokens == sd.tokens == inline.tokens
        assert outcome_digest(ssd.records.sequences()) == outcome_digest(sd.records.sequences())
        return
    way = draw(st.sampled_from(["ar", "sd", "inline", "ssd"]), "way")
    pair = replace(
        pair,
        mode="sd" if way == "inline" else way,
        is_inline=way == "inline",
        backup=draw(st.sampled_from(["jit", "fast"]), "backup"),
        backup_lookahead=draw(st.integers(1, K), "K_b"),
    )
    tokens = {n: found[:15] for n, found in decode(pair, 15).tokens.items()}
    assert tokens == greedy(pair, 15)


PAIR = Pair(vocab=20, order=2, divergence=0.4, lookahead=3, batch=2, fan_out=(2, 2, 2, 3))


Hook = Callable[[LeadEnd, DraftEnd], None]  # sees both ends of the link first


def decode(pair: Pair, count: int, hook: Hook | None = None, **flags: Any) -> Decoder:
    """Decodes so many tokens of each sequence."""
    told: dict[str, Any] = {"pair": "toy", "backend": "emulated", "device": "null", **flags}
    for name in ("mode", "vocab", "order", "divergence", "temperature", "prompt_tokens", "seed"):
        told[name] = getattr(pair, name)
    if pair.K:
        told |= {"lookahead": pair.K, "num_drafts": 1 - pair.is_inline, "backup": pair.backup}
        told |= {"backup_lookahead": pair.backup_lookahead, "saguaro_c": pair.saguaro_c}
    if pair.mode == "ssd":
        fans = (",".join(map(str, of)) for of in (pair.fans.after_hit, pair.fans.after_miss))
        told["fan_out"] = "list:{}/list:{}".format(*fans)
    config = RunConfig(workload="markov", num_tokens=count, batch_size=pair.batch, **told)
    with pytest.MonkeyPatch.context() as patch:
        if hook is not None:
            patch.setattr(in_process, "queue_link", lambda *of: hooked(hook, queue_link(*of)))
        return finished(config)


def hooked(hook: Hook, ends: tuple[LeadEnd, DraftEnd]) -> tuple[LeadEnd, DraftEnd]:
    hook(*ends)
    return ends


def test_rows_that_come_late_change_nothing() -> None:
    def late(lead: LeadEnd, draft: DraftEnd) -> None:
        inbox, polls = lead._proposals, [0]
        arrived, release = inbox.arrived, inbox.release

        def arrived_late() -> bool:
            polls[0] += 1
            return polls[0] > 40 and arrived()

        def released() -> None:
            polls[0] = 0
            release()

        inbox.arrived, inbox.release = arrived_late, released  # type: ignore[method-assign]

    assert decode(PAIR, 40, hook=late).tokens == decode(PAIR, 40).tokens


Rows = Sequence[NDArray[np.float32]]
Send = Callable[[int, Rows], None]


def tampering(change: Callable[[Send, int, Rows], None]) -> Callable[[LeadEnd, DraftEnd], None]:
    def hook(lead: LeadEnd, draft: DraftEnd) -> None:
        send = draft.send_proposals
        draft.send_proposals = lambda round_, rows: change(send, round_, rows)  # type: ignore[method-assign]

    return hook


MALFORMED: dict[str, tuple[Callable[[Send, int, Rows], None], str]] = {
    "another round": (lambda send, r, rows: send(r + 1, rows), "round is 1, expected 0"),
    "too few": (lambda send, r, rows: send(r, rows[1:]), "rows is 5, expected 6"),
    "out of order": (lambda send, r, rows: send(r, rows[::-1]), "its row says"),
    "not normal": (lambda send, r, rows: send(r, [row * np.nan for row in rows]), "row says nan"),
    "all zero": (lambda send, r, rows: send(r, [row * 0 for row in rows]), "its row says 0.0"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_rows_are_refused(name: str) -> None:
    change, message = MALFORMED[name]
    pair = replace(PAIR, divergence=1.0)  # rejects at once
    with pytest.raises(ProtocolError, match=message):
        decode(pair, 40, hook=tampering(change))


@pytest.mark.parametrize("divergence", [0.0, 1.0])
def test_rows_that_never_come_are_missed(divergence: float) -> None:
    """If none was needed, at the end of their round."""

    def lost(lead: LeadEnd, draft: DraftEnd) -> None:
        lead.waiter = Waiter(0.2, spin=False)
        draft.send_proposals = lambda round_, rows: None  # type: ignore[method-assign]

    with pytest.raises(FaultError, match="draft: proposals: nothing for"):
        decode(replace(PAIR, divergence=divergence), 40, hook=lost)


COUNTED = {"workload": "markov", "vocab": 9, "order": 1, "divergence": 0.4, "temperature": 1.0}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("backup", ["jit", "fast"])
def test_ranks_are_counted_by_what_was_kept_and_where_the_tokens_end(
    batch: int, backup: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hits have a rank and misses none; candidates after tokens from a lookup are not counted."""
    flags = {"fan_out": "list:3,1,2/list:2,4,1", "lookahead": 2}
    config = RunConfig(
        mode="ssd", pair="toy", backend="emulated", device="null", batch_size=batch,
        backup=backup, rounds=60, **flags, **COUNTED,
    )  # fmt: skip
    counts = RankCounts()
    monkeypatch.setattr(parts, "RankCounts", lambda: counts)
    rows = finished(config, 60).records.sequences().tolist()
    found = counts.to_dict()
    lists = {Source.CACHE: (3, 1, 2), Source.JIT: (2, 4, 1)}
    wanted: Counter[tuple[bool, int, bool]] = Counter()
    by_sequence: dict[int, list[list[int]]] = {}
    for row in rows:
        by_sequence.setdefault(row[1], []).append(row)
    for each in by_sequence.values():
        for (_, _, _, k, _, source, _, drafted), after in pairwise(each):
            if source != Source.FAST:
                wanted[k == drafted, lists[Source(source)][k], bool(after[6])] += 1
    got: Counter[tuple[bool, int, bool]] = Counter()
    for end, name in ((False, "ranks_rejected"), (True, "ranks_all_accepted")):
        for limit, rank, count in found[name]:
            assert 0 <= rank <= limit
            got[end, limit, rank > 0] += count
    assert got == wanted and found["outcomes"] == sum(wanted.values())


def overlap(a: MarkovModel, b: MarkovModel) -> float:
    """Mean Σ min(p, q), temperature 1."""
    found = []
    for n in range(60):
        context = a.context([n % a.vocab, 3 * n % a.vocab, 7 * n % a.vocab])
        p, q = (weigh(model.logits(context), 1.0).probs for model in (a, b))
        found.append(np.minimum(p, q).sum())
    return float(np.mean(found))


def test_divergence_takes_the_draft_away_from_the_target() -> None:
    target = MarkovModel(200, 1, 3)
    alpha = [overlap(target, replace(target, divergence=d)) for d in (0.0, 0.1, 0.3, 0.6, 1.0)]
    assert alpha[0] == pytest.approx(1, abs=1e-12)
    assert alpha == sorted(alpha, reverse=True) and len(set(alpha)) == 5
