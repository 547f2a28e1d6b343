"""A draft whose weights change while it drafts: nothing is lost, and no version drafts twice. The
examples that a learner receives of a round: when, and with which logits."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mpissd.common.config import RunConfig
from mpissd.common.rounds import ReadyBranches, Speculation
from mpissd.engine import in_process
from mpissd.engine.comm.link import DraftEnd, LeadEnd, queue_link
from mpissd.engine.features.learning import (
    Bytes,
    ExamplePart,
    ExampleSender,
    Updates,
    pieces,
    read_parts,
)
from mpissd.engine.in_process import Decoder
from mpissd.engine.law import sampling
from mpissd.engine.model.transformer.checkpoint import EMBEDDING, Arrays, packed, tensors
from mpissd.engine.model.transformer.sources import open_checkpoint
from mpissd.engine.round.draft import Drafter
from tests.loop.markov_rig import deviation, joint_law
from tests.loop.text_rig import TextPair, logits_behind
from tests.text_config import finished, text_config
from tests.tiny_pair import TinyPair, tiny_pair

SSD = {"mode": "ssd", "fan_out": "uniform:2", "lookahead": 3}
WAYS = [{"mode": "sd", "lookahead": 3}, {**SSD, "batch_size": 2}, {**SSD, "backup": "fast"}]
SAMPLED = {"mode": "ssd", "fan_out": "uniform:2"}
LENGTH, PROMPT = 3, (1, 0, 2)  # enumerated tokens of a text, and the prompt before them


def between(pair: TinyPair, share: float, dtype: Any = np.float32) -> Arrays:
    """The draft's tensors, moved by a share of the way to the target's."""
    target = open_checkpoint(str(pair.target))
    draft = open_checkpoint(str(pair.draft), target=str(pair.target))
    found = {}
    for name, _ in tensors(draft.config):
        if name != EMBEDDING:
            own, other = draft.read(name), target.read(name)
            found[name] = (own + share * (other - own)).astype(dtype)
    return found


def share_embedding(pair: TinyPair) -> None:
    """Gives the draft the target's embedding, which no version replaces."""
    files = [folder / "model.safetensors" for folder in (pair.target, pair.draft)]
    target, draft = (load_file(file) for file in files)
    save_file({**draft, EMBEDDING: target[EMBEDDING]}, files[1])


class Feed:
    """Brings these messages to a draft, one every few rounds, and then nothing."""

    def __init__(self, messages: Iterator[Bytes], every: int) -> None:
        self.messages, self.every, self.asked = messages, every, 0

    def take(self) -> Bytes | None:
        self.asked += 1
        return next(self.messages, None) if self.asked % self.every == 0 else None


class Learning(Decoder):
    """A decoder whose draft gets newer weights."""

    feed: Callable[[], Feed]
    updates: Updates

    def _updates(self, drafter: Drafter) -> Updates:
        self.updates = Updates(type(self).feed(), drafter)
        return self.updates


def decoded(config: RunConfig, messages: Callable[[], Iterator[Bytes]], every: int = 3) -> Learning:
    class Fed(Learning):
        feed = staticmethod(lambda: Feed(messages(), every))

    with Fed(config) as decoder:
        while not decoder.is_over:
            decoder.step()
        return decoder


def drawing(made: TinyPair, count: int, **flags: Any) -> tuple[TextPair, RunConfig]:
    """A pair of V = 4 whose texts of LENGTH tokens can be enumerated, and a job of `count`."""
    told = {"target_where": str(made.target), "draft_where": str(made.draft)}
    base = TextPair("ssd", vocab=4, lookahead=2, fan_out=(1, 1, 1), top_p=0.9, **told)
    config = RunConfig(
        workload="text", temperature=1.0, top_p=0.9, backend="numpy", num_tokens=LENGTH,
        lookahead=2, prompt_ids=";".join([",".join(map(str, PROMPT))] * count), batch_size=15,
        seed=3, target=base.target_where, draft=base.draft_where, **flags,
    )  # fmt: skip
    return base, config


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    made = tiny_pair(tmp_path_factory.mktemp("pair"), noise=0.4, scale=3, masks=0)
    share_embedding(made)
    return made


@pytest.mark.parametrize("flags", WAYS, ids=str)
def test_swaps_in_mid_run_change_no_token_and_help(pair: TinyPair, flags: dict[str, Any]) -> None:
    config = text_config(pair, prompt=(3, 1, 4, 1, 5), num_tokens=150, **flags)
    shares = (0.3, 0.0, 0.6, 1.0)
    versions = [packed(between(pair, share)) for share in shares]
    found = decoded(config, lambda: (m for n, v in enumerate(versions, 1) for m in pieces(n, v)))
    alone = finished(replace(config, mode="ar", draft=None))
    assert {k: v[:150] for k, v in found.tokens.items()} == {
        k: v[:150] for k, v in alone.tokens.items()
    }
    by_version = {version: told for version, *told in found.records.by_version()}
    assert list(by_version) == [0, 1, 2, 3, 4] and not found.updates.report["refused_versions"]
    assert [swap["version"] for swap in found.updates.report["swaps"]] == [1, 2, 3, 4]
    rounds, drafted, accepted = by_version[4]
    if flags.get("backup") != "fast":
        assert rounds > 3 and accepted == drafted  # a draft that is the target
        assert by_version[0][2] < by_version[0][1]


@pytest.mark.parametrize("looks", [True, False], ids=["late", "unseen"])
def test_branches_from_before_a_swap_keep_their_version(
    pair: TinyPair, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 asks after the draft has sent them and loaded newer weights. It finds them before the
    answer (late), or has the answer alone, which comes from them."""
    kept: list[int] = []

    def slow(*of: Any) -> tuple[LeadEnd, DraftEnd]:
        lead, draft = queue_link(*of)
        ask = lead.speculation
        sent: list[ReadyBranches] = []
        push = draft.send_branches

        def pushed(ready: ReadyBranches, **told: Any) -> None:
            sent[:] = [ready]
            push(ready, **told)

        def branches(round_: int) -> None:
            sleep(0.02)

        def answer(round_: int, count: int, find: Any) -> Speculation:
            served = find(sent[0]) if sent and sent[0].round == round_ - 1 else None
            found = ask(round_, count, find if looks else None)
            if served is not None:
                assert found.version == served.version
                kept.append(served.version)
            return found

        draft.send_branches = pushed  # type: ignore[method-assign]
        lead.branches = branches  # type: ignore[method-assign]
        lead.speculation = answer  # type: ignore[method-assign, assignment]
        return lead, draft

    monkeypatch.setattr(in_process, "queue_link", slow)
    versions = [packed(between(pair, share)) for share in (0.8, 1.0) * 2]
    config = text_config(pair, prompt=(3, 1, 4, 1, 5), num_tokens=100, **SSD)
    found = decoded(config, lambda: (m for n, v in enumerate(versions, 1) for m in pieces(n, v)))
    assert len(found.updates.report["swaps"]) == 4 and len(set(kept)) > 2


def test_an_older_an_infinite_and_a_partial_version_are_refused(pair: TinyPair) -> None:
    good = packed(between(pair, 0.2))
    wrong = {**between(pair, 0.2)}
    wrong["model.norm.weight"] = np.full_like(wrong["model.norm.weight"], np.inf)
    small = {**between(pair, 0.2)}
    small["lm_head.weight"] = small["lm_head.weight"][:5]
    part = {name: values for name, values in wrong.items() if not name.startswith("model.")}

    def messages() -> Iterator[Bytes]:
        yield from pieces(2, good)
        yield from pieces(2, good)
        yield from pieces(3, packed(wrong))
        yield from pieces(4, packed(small))
        yield from pieces(5, b"no tensors at all")
        yield from pieces(6, packed(part))
        yield from pieces(7, good)

    config = text_config(pair, prompt=(3, 1, 4, 1, 5), num_tokens=80, mode="sd", lookahead=3)
    report = decoded(config, messages, every=1).updates.report
    assert [swap["version"] for swap in report["swaps"]] == [2, 7]
    told = " | ".join(report["refused_versions"])
    parts = ("version 2 after version 2", "is not finite",
             "lm_head.weight is [5, 64], expected [97, 64]", "a version of 17 bytes",
             "model.layers.0.input_layernorm.weight is missing, one of 19")  # fmt: skip
    assert len(report["refused_versions"]) == 5 and all(part in told for part in parts), told


@pytest.mark.parametrize("is_biased", [False, True], ids=["", "q of another version"])
def test_sampled_answers_follow_the_target_while_versions_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_biased: bool
) -> None:
    """A chi-squared test of the first three tokens, with a swap every few rounds.

    It refuses a draft that draws with the weights in use and sends the q of the next version.
    """
    made = tiny_pair(tmp_path, vocab=4, heads=2, kv_heads=1, hidden=32, noise=0.5, masks=0)
    base, config = drawing(made, 1500, **SAMPLED)
    versions = [between(made, share) for share in (0.9, -0.7, 0.3)]
    if is_biased:
        config = replace(config, cache="draft")  # a lead with a cache may refuse the wrong q
        folders = [written(made, n, version) for n, version in enumerate(versions)]
        say_q_of_the_next_version(monkeypatch, folders)
    packs = [packed(version) for version in versions]
    found = decoded(
        config, lambda: (m for n in range(1, 500) for m in pieces(n, packs[n % 3])), every=2
    )
    report, law = found.updates.report, joint_law(base, PROMPT, LENGTH)
    # A swap is taken in a pause of the draft: fewer if it also computes the wrong q.
    assert len(report["swaps"]) > (5 if is_biased else 20) and not report["refused_versions"]
    assert len(found.tokens) == 1500
    distance = deviation(law, found.tokens.values())
    print(f"biased: {is_biased}: {distance:.1f} standard deviations")
    assert (distance > 5) == is_biased


def written(made: TinyPair, number: int, version: Arrays) -> str:
    """Writes the draft of a version; returns its folder."""
    folder = made.draft.parent / f"version{number}"
    folder.mkdir()
    (folder / "config.json").write_text((made.draft / "config.json").read_text())
    embedding = load_file(made.draft / "model.safetensors")[EMBEDDING]
    save_file({**version, EMBEDDING: embedding}, folder / "model.safetensors")
    return str(folder)


def say_q_of_the_next_version(monkeypatch: pytest.MonkeyPatch, folders: list[str]) -> None:
    """Has drafters send, with tokens that version n drew, the distributions of version n + 1."""
    assembled = Drafter.assembled

    def wrong(drafter: Any, round_: int, parts: Any) -> Any:
        found = assembled(drafter, round_, parts)
        where = folders[(drafter.version + 1) % len(folders)]
        for row, history in enumerate(drafter.batch.sequences):
            told = []
            for place, token in enumerate(found.tokens[row, : found.num_draft[row]].tolist()):
                context = (*history.tokens, *found.tokens[row, :place].tolist())
                q = sampling.weigh(logits_behind(where, context), 1.0).probs.astype(np.float32)
                found.q[row, place] = float(q[token]) / float(q.sum(dtype=np.float64))
                told.append(q)
            found.drawn_from[row] = told
        return found

    monkeypatch.setattr(Drafter, "assembled", wrong)


def test_weights_that_overflow_are_left_and_lose_nothing(tmp_path: Path) -> None:
    """Finite ones, whose logits are not: between good versions, and again, until none is taken."""
    made = tiny_pair(tmp_path, vocab=4, heads=2, kv_heads=1, hidden=32, noise=0.5, masks=0)
    base, config = drawing(made, 1000, **SAMPLED)
    good = [packed(between(made, share)) for share in (0.9, 0.3)]
    arrays, norm = between(made, 0.5), "model.norm.weight"
    huge = packed(arrays | {norm: np.full_like(arrays[norm], 3e38, np.float32)})
    order = [good[0], huge, good[1], huge, good[0], huge, *good * 20]
    found = decoded(
        config, lambda: (m for n, v in enumerate(order, 1) for m in pieces(n, v)), every=2
    )
    report = found.updates.report
    assert [swap["version"] for swap in report["swaps"]] == [1, 2, 3, 4, 5, 6]  # none after three
    assert [told.split(":")[0] for told in report["refused_versions"]] == [
        f"version {n}" for n in (2, 4, 6)
    ]
    assert all("a logit is not finite" in told for told in report["refused_versions"])
    assert found.records.sequences()[-40:, 7].sum() > 0  # the draft's own weights draft again
    law = joint_law(base, PROMPT, LENGTH)
    assert deviation(law, found.tokens.values()) < 5


class Recorded:
    """An outlet that keeps the sent examples, and has room only in some rounds."""

    def __init__(self, has_room: Callable[[int], bool]) -> None:
        self._has_room, self.asked, self.parts = has_room, 0, list[list[ExamplePart]]()

    def has_room(self) -> bool:
        self.asked += 1
        return self._has_room(self.asked)

    def send(self, message: Bytes) -> None:
        self.parts.append(read_parts(message))


class Read:
    """A target oracle that counts the rows of logits that are read of it."""

    def __init__(self, worker: Any) -> None:
        self._worker, self.rows = worker, 0

    def logits_of(self, row: int) -> Any:
        self.rows += 1
        return self._worker.logits_of(row)


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("every", [1, 3])
def test_examples_carry_the_deciding_logits(pair: TinyPair, mode: str, every: int) -> None:
    """No later forward has overwritten them; if there is no room, none are read."""
    config = text_config(pair, prompt=(3, 1, 4, 1, 5), num_tokens=60, mode=mode, lookahead=3)
    outlet = Recorded(lambda asked: asked % every == 0)
    with Decoder(config) as decoder:
        read = Read(decoder.worker.oracle)
        sender = ExampleSender(read, outlet)  # type: ignore[arg-type]
        decoder.loop.observers.append(sender)
        while not decoder.is_over:
            decoder.step()
        decoder.loop.tell()
        answer = next(iter(decoder.tokens.values()))
    text = np.array([3, 1, 4, 1, 5, *answer], np.int32)
    assert len(outlet.parts) == sender.rounds // every > 5
    assert sender.dropped == sender.rounds - len(outlet.parts)
    rows = [row for (one,) in outlet.parts for row in zip(one.at, one.logits, strict=True)]
    assert len(rows) == read.rows == sender.rows
    assert all(int(logits.argmax()) == text[at + 1] for at, logits in rows)
    joined = [token for (one,) in outlet.parts for token in one.tokens.tolist()]
    assert joined == text[: len(joined)].tolist()
