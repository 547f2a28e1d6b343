"""Drafts by task of prompt: each sequence is drafted by its own draft, whatever is beside it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mpissd.common.errors import ConfigError
from mpissd.common.records import outcome_digest
from mpissd.engine import Decoder, RunConfig
from mpissd.engine.spec.router import fit
from mpissd.engine.workload.text.tasks import Tasks
from tests.loop.pool_rig import Pool, config_of
from tests.tiny_pair import TinyPair, tiny_pair

V, TOKENS = 97, 48
# Even prompts are low tokens, which is "code"; odd ones high: "chat", of the folder's own draft.
PROMPTS = [
    [(5 * j + n) % 40 + 45 * (n % 2) for j in range(length)]
    for n, length in enumerate((9, 20, 70, 3))
]
WAYS: dict[str, dict[str, Any]] = {
    "sd": {"mode": "sd", "num_drafts": 0},
    "sd-rank": {"mode": "sd", "num_drafts": 1, "lookahead": 6, "draft_lookup": "suffix"},
    "ssd": {"mode": "ssd", "fan_out": "uniform:2"},
    "ssd-2": {"mode": "ssd", "fan_out": "uniform:3", "num_drafts": 2},
    "sampled": {"mode": "ssd", "fan_out": "uniform:2", "temperature": 0.5},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_pair(tmp_path_factory.mktemp("pair"), vocab=V, noise=0.1, scale=2.0)


@pytest.fixture(scope="module")
def folder(pair: TinyPair) -> Path:
    """The draft's folder with a router, and a draft of "code" that is another one."""
    home = pair.draft.parent / "drafts"
    shutil.copytree(pair.draft, home)
    shutil.copytree(pair.draft, home / "code")
    target = load_file(pair.target / "model.safetensors")
    own = load_file(pair.draft / "model.safetensors")
    mixed = {name: (0.7 * own[name] + 0.3 * target[name]).astype("f4") for name in own}
    save_file(mixed, home / "code" / "model.safetensors")
    router = fit({"chat": [PROMPTS[1], PROMPTS[3]], "code": [PROMPTS[0], PROMPTS[2]]})
    router.save(home)
    assert [router.choose(prompt) for prompt in PROMPTS] == [1, 0, 1, 0]
    return home


def decode(
    pair: TinyPair, draft: Path, prompts: list[list[int]], **flags: Any
) -> tuple[dict[int, list[int]], str, list[float]]:
    told: dict[str, Any] = {
        "workload": "text", "target": str(pair.target), "draft": str(draft),
        "prompt_ids": ";".join(",".join(map(str, prompt)) for prompt in prompts),
        "num_tokens": TOKENS, "backend": "numpy", "deadline_s": 20.0,
    }  # fmt: skip
    with Decoder(RunConfig(**{**told, **flags})) as decoder:
        while not decoder.is_over:
            decoder.step()
        rows, tokens = decoder.records.sequences(), decoder.tokens
    accepted = [float(rows[rows[:, 1] == n, 3].mean()) for n in range(len(prompts))]
    return {n: found[:TOKENS] for n, found in tokens.items()}, outcome_digest(rows), accepted


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_of_both_kinds_is_drafted_as_each_kind_alone(
    pair: TinyPair, folder: Path, way: str
) -> None:
    """Accepted tokens by sequence are those of its own draft, in a batch and one after another."""
    flags = WAYS[way]
    alone = [
        decode(pair, folder / "code" if n % 2 == 0 else pair.draft, PROMPTS, **flags)
        for n in range(2)
    ]
    for batch in (1, 3, 4):
        tokens, _, accepted = decode(pair, folder, PROMPTS, batch_size=batch, **flags)
        for n in range(len(PROMPTS)):
            told_tokens, _, told_accepted = alone[n % 2]
            assert tokens[n] == told_tokens[n]
            assert accepted[n] == told_accepted[n], f"sequence {n} by another draft"


def test_groups_that_share_the_drafts_are_drafted_as_one(pair: TinyPair, folder: Path) -> None:
    ids = ";".join(",".join(map(str, prompt)) for prompt in PROMPTS)
    told = {"target": pair.target, "draft": folder, "prompt_ids": ids, "num_tokens": TOKENS}
    told |= {"workload": "text", "mode": "ssd", "fan_out": "uniform:2", "backend": "numpy"}
    wanted = decode(pair, folder, PROMPTS, mode="ssd", fan_out="uniform:2")
    with Pool(config_of(**told, batch_size=1, groups=2)) as pool:
        pool.decode(range(2), 10**6)
    for group in pool.groups:
        rows = group.records.sequences()
        for n, tokens in group.records.tokens().items():
            assert tokens[:TOKENS] == wanted[0][n]
            assert rows[rows[:, 1] == n, 3].mean() == wanted[2][n], f"sequence {n} by another draft"


def test_the_drafts_differ(pair: TinyPair, folder: Path) -> None:
    """What the test above rests on."""
    sd = WAYS["sd"]
    mine, other = (decode(pair, d, PROMPTS, **sd) for d in (pair.draft, folder / "code"))
    assert mine[1] != other[1] and mine[0] == other[0]
    assert mine[2][0] != other[2][0] and mine[2][1] != other[2][1]


def test_a_slot_that_changes_its_draft_forgets_what_the_other_one_stored(
    pair: TinyPair, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second prompt begins with the first one, and goes to another draft."""
    prompts = [PROMPTS[0], PROMPTS[0] + [90] * 30]
    numbers = {len(prompts[0]): 1, len(prompts[1]): 0}
    monkeypatch.setattr(Tasks, "draft_of", lambda self, prompt: numbers[len(prompt)])
    sd = {"mode": "sd", "num_drafts": 0, "batch_size": 1}
    found, own = decode(pair, folder, prompts, **sd), decode(pair, pair.draft, prompts, **sd)
    assert found[0] == own[0] and found[2][1] == own[2][1]


def test_drafts_of_another_shape_are_refused(pair: TinyPair, folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "drafts"
    shutil.copytree(folder, home)
    other = tiny_pair(tmp_path / "other", vocab=V, layers=1, noise=0.1)
    shutil.rmtree(home / "code")
    shutil.copytree(other.draft, home / "code")
    with pytest.raises(ConfigError, match="another shape, or other tokens"):
        decode(pair, home, PROMPTS, mode="sd", num_drafts=0)


def test_a_learner_beside_several_drafts_is_refused(pair: TinyPair, folder: Path) -> None:
    with pytest.raises(ConfigError, match="drafts by task: allowed: a folder without a router"):
        decode(pair, folder, PROMPTS, mode="sd", num_drafts=1, learners=1)


def test_a_row_counts_its_prompts_by_kind(pair: TinyPair, folder: Path) -> None:
    from mpissd.engine.job import resolve
    from mpissd.lab.predict.row import is_followable

    ids = ";".join(",".join(map(str, prompt)) for prompt in PROMPTS)
    told: dict[str, Any] = {"target": str(pair.target), "prompt_ids": ids, "mode": "sd"}
    for draft, wanted in ((folder, {"chat": 2, "code": 2}), (pair.draft, None)):
        config = RunConfig(workload="text", draft=str(draft), num_drafts=0, **told)
        job = resolve(config, 1, backend="numpy", memory_bytes=None)
        assert job.workload.row_fields().draft_tasks == wanted
        assert len(job.workload.draft_members) == (draft == folder)
        assert is_followable(job) == (draft != folder)


def test_rows_of_several_drafts_come_back_in_their_order(pair: TinyPair, folder: Path) -> None:
    """Logits of any rows, as a sampled round reads them."""
    sampled = {"mode": "sd", "num_drafts": 0, "temperature": 1.0, "batch_size": 4}
    first, again = (decode(pair, folder, PROMPTS, **sampled) for _ in range(2))
    assert first[1] == again[1]
    alone = decode(pair, folder, PROMPTS, **{**sampled, "batch_size": 1})
    assert alone[0] == first[0] and np.isfinite(alone[2]).all()
