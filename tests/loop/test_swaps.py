"""A draft whose weights change while it drafts: nothing is lost, and no version drafts twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpissd.common.config import RunConfig
from mpissd.engine.comm.version_pieces import Bytes, pieces
from mpissd.engine.decode.draft import Drafter
from mpissd.engine.decode.in_process import Decoder
from mpissd.engine.decode.updates import Updates
from mpissd.engine.model.transformer.sources import open_checkpoint
from mpissd.engine.model.transformer.tensors import EMBEDDING, tensors
from mpissd.engine.model.transformer.versions import Arrays, packed
from tests.loop.markov_rig import joint_law
from tests.loop.text_rig import TextPair
from tests.needs import module
from tests.text_config import text_config
from tests.tiny_pair import TinyPair, tiny_pair

module("safetensors.numpy", "safetensors")

from safetensors.numpy import load_file, save_file  # noqa: E402

SSD = {"mode": "ssd", "fan_out": "uniform:2", "lookahead": 3}
WAYS = [
    {"mode": "sd", "lookahead": 3},
    SSD,
    {**SSD, "on_late": "serve", "batch_size": 2},
    {**SSD, "backup": "fast"},
]


def between(pair: TinyPair, share: float, dtype: Any = np.float32) -> Arrays:
    """The draft's tensors, moved by a share of the way to the target's."""
    target = open_checkpoint(str(pair.target))
    draft = open_checkpoint(str(pair.draft), target=str(pair.target))
    found = {}
    for name, shape in tensors(draft.config):
        if name != EMBEDDING:
            read = [c.matrix if len(shape) == 2 else c.vector for c in (draft, target)]
            own, other = (np.array(one(name), np.float32) for one in read)
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


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    made = tiny_pair(tmp_path_factory.mktemp("pair"), noise=0.4, scale=3)
    share_embedding(made)
    return made


@pytest.mark.parametrize("flags", WAYS, ids=str)
def test_swaps_in_mid_run_change_no_token_and_help_as_much_as_they_should(
    pair: TinyPair, flags: dict[str, Any]
) -> None:
    config = text_config(pair, prompt=(3, 1, 4, 1, 5), num_tokens=150, **flags)
    shares = (0.3, 0.0, 0.6, 1.0)
    versions = [packed(between(pair, share)) for share in shares]
    found = decoded(config, lambda: (m for n, v in enumerate(versions, 1) for m in pieces(n, v)))
    with Decoder(replace(config, mode="ar", draft=None)) as alone:
        while not alone.is_over:
            alone.step()
    assert {k: v[:150] for k, v in found.tokens.items()} == {
        k: v[:150] for k, v in alone.tokens.items()
    }
    by_version = {version: told for version, *told in found.records.by_version()}
    assert list(by_version) == [0, 1, 2, 3, 4] and not found.updates.report.refused
    assert [swap.version for swap in found.updates.report.swaps] == [1, 2, 3, 4]
    rounds, drafted, accepted = by_version[4]
    if flags.get("backup") != "fast":
        assert rounds > 3 and accepted == drafted  # a draft that is the target
        assert by_version[0][2] < by_version[0][1]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_version_computes_as_the_same_files_would(
    pair: TinyPair, tmp_path: Any, dtype: Any
) -> None:
    """Of weights, buffers and caches alike: a run that swaps before its first answer."""
    arrays = between(pair, 0.5, dtype)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((pair.draft / "config.json").read_text())
    embedding = np.array(open_checkpoint(str(pair.draft)).matrix(EMBEDDING), np.float32)
    save_file({**arrays, EMBEDDING: embedding}, other / "model.safetensors")
    config = text_config(pair, prompt=(3, 1, 4), num_tokens=60, mode="sd", lookahead=3)
    swapped = decoded(config, lambda: pieces(1, packed(arrays)), every=1)
    anew = decoded(replace(config, draft=str(other)), lambda: iter(()))
    late, whole = (one.records.sequences() for one in (swapped, anew))
    same = {int(row[3]) for row in late[2:]} | {0}
    assert swapped.records.by_version()[-1][0] == 1 and len(same) > 1
    tokens = [one.records.source_arrays()[0].tolist() for one in (swapped, anew)]
    # Behind the first rounds, which the old weights drafted, both draft at the same places.
    assert sum(a == b for a, b in zip(*tokens, strict=False)) > 0
    assert late[-10:, 3].sum() == whole[-10:, 3].sum()


def test_a_damaged_an_older_an_infinite_and_a_partial_version_are_refused(pair: TinyPair) -> None:
    good = packed(between(pair, 0.2))
    wrong = {**between(pair, 0.2)}
    wrong["model.norm.weight"] = np.full_like(wrong["model.norm.weight"], np.inf)
    small = {**between(pair, 0.2)}
    small["lm_head.weight"] = small["lm_head.weight"][:5]
    part = {name: values for name, values in wrong.items() if not name.startswith("model.")}

    def messages() -> Iterator[Bytes]:
        for message in pieces(1, good):
            message[-1] ^= 1
            yield message
        yield from pieces(2, good)
        yield from pieces(2, good)
        yield from pieces(3, packed(wrong))
        yield from pieces(4, packed(small))
        yield from pieces(5, b"no tensors at all")
        yield from pieces(6, packed(part))
        yield from pieces(7, good)

    config = text_config(pair, prompt=(3, 1, 4, 1, 5), num_tokens=80, mode="sd", lookahead=3)
    report = decoded(config, messages, every=1).updates.report
    assert [swap.version for swap in report.swaps] == [2, 7]
    told = " | ".join(report.refused)
    parts = ("version 1: checksum is", "version 2 behind version 2", "is not finite",
             "lm_head.weight is [5, 64], expected [97, 64]", "a version of 17 bytes",
             "model.layers.0.input_layernorm.weight is missing, one of 19")  # fmt: skip
    assert len(report.refused) == 6 and all(part in told for part in parts), told


@pytest.mark.parametrize(
    "flags", [{"mode": "sd"}, {"mode": "ssd", "on_late": "serve", "fan_out": "uniform:2"}], ids=str
)
def test_sampled_answers_follow_the_target_while_versions_come_and_go(
    tmp_path: Any, flags: dict[str, Any]
) -> None:
    """A chi-squared test of the first three tokens, with a swap every few rounds."""
    made = tiny_pair(tmp_path, vocab=4, heads=2, kv_heads=1, hidden=32, noise=0.5)
    told = {"target_where": str(made.target), "draft_where": str(made.draft)}
    base = TextPair("ssd", vocab=4, lookahead=2, fan_out=(1, 1, 1), top_p=0.9, **told)
    count, prompt = 4000, base.prompts[0]
    law = joint_law(base, prompt, 3)
    versions = [packed(between(made, share)) for share in (0.9, -0.7, 0.3)]
    config = RunConfig(
        workload="text", temperature=1.0, top_p=0.9, backend="numpy", num_tokens=3, lookahead=2,
        prompt_ids=";".join([",".join(map(str, prompt))] * count), batch_size=40, seed=3,
        target=base.target_where, draft=base.draft_where, **flags,
    )  # fmt: skip
    found = decoded(
        config, lambda: (m for n in range(1, 500) for m in pieces(n, versions[n % 3])), every=2
    )
    texts = Counter(tuple(tokens[:3]) for tokens in found.tokens.values())
    assert len(found.updates.report.swaps) > 20 and not found.updates.report.refused
    assert sum(texts.values()) == count and set(texts) <= {t for t, p in law.items() if p > 0}
    common = [text for text, chance in law.items() if chance * count >= 5]
    rare = 1 - sum(law[text] for text in common)
    seen = [*(texts[text] for text in common), count - sum(texts[t] for t in common)]
    want = [*(law[text] * count for text in common), rare * count]
    cells = [(a, b) for a, b in zip(seen, want, strict=True) if b > 0]
    chi, freedom = sum((a - b) ** 2 / b for a, b in cells), len(cells) - 1
    # Wilson and Hilferty: 5 standard deviations, once in 3.5 million runs.
    assert ((chi / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / (2 / (9 * freedom)) ** 0.5 < 5
