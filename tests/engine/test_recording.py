"""Files of recordings: each is read as it was written, and a broken one is refused in one line. A
text run, its recording by the same models, and the replay make the same decisions, one by one."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.__main__ import main
from mpissd.common.config import RunConfig, parse_flags
from mpissd.common.errors import ConfigError
from mpissd.common.records import outcome_digest
from mpissd.engine.job import resolve
from mpissd.engine.model.transformer.checkpoint import digest
from mpissd.engine.model.transformer.sources import SafetensorsFiles
from mpissd.engine.oracle.markov import MarkovLaws, MarkovModel
from mpissd.engine.oracle.replay import Recording, load, save
from tests.loop.recorded import recording_of
from tests.scripts import ROOT
from tests.text_config import finished
from tests.tiny_pair import TinyPair, tiny_pair

LAWS = MarkovLaws(MarkovModel(12, 2, 0), MarkovModel(12, 2, 0, 0.3), 0.0, 0, prompt_tokens=3)
MACHINE = {"pair": "toy", "backend": "emulated", "device": "null", "workload": "replay"}


@pytest.fixture
def recording() -> Recording:
    return recording_of(LAWS, 3, limit=10, K=4, F=5, stop=7)


@pytest.fixture
def path(tmp_path: Path, recording: Recording) -> Path:
    found = tmp_path / "pair.npz"
    save(found, recording)
    return found


def job_of(path: Path | None, **flags: Any) -> Any:
    config = RunConfig(**MACHINE, recording=None if path is None else str(path), **flags)
    return resolve(config, 1, backend="emulated", memory_bytes=None)


def rewritten(path: Path, **arrays: Any) -> Path:
    """The file with other arrays; None leaves one out."""
    with np.load(path) as archive:
        found = {**archive, **arrays}
    other = path.with_name("other.npz")
    np.savez(other, **{name: value for name, value in found.items() if value is not None})
    return other


def header_of(path: Path, **values: Any) -> Any:
    with np.load(path) as archive:
        header = {**json.loads(archive["header"].tobytes()), **values}
    return np.frombuffer(json.dumps(header).encode(), np.uint8)


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(str(path))
    text = str(caught.value)
    assert "\n" not in text and text.startswith(f"recording={path}: ")
    return text


@pytest.mark.parametrize("vocab", [12, 1 << 16, 1 << 17])
def test_what_is_written_is_read(recording: Recording, vocab: int, tmp_path: Path) -> None:
    path = tmp_path / "pair.npz"
    save(path, replace(recording, vocab=vocab, filler=None, about={"target": "Zürich"}))
    found = load(str(path))
    assert (found.vocab, found.filler, found.longest) == (vocab, None, 3)
    assert (found.lookahead, found.widest, found.name) == (4, 5, "pair.npz")
    assert found.about == {"target": "Zürich"}
    for one, other in zip(found.sequences, recording.sequences, strict=True):
        assert (one.end, one.stopped) == (other.end, other.stopped)
        for name in ("prompt", "tokens", "rollout", "top"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist()
    with np.load(path) as archive:
        assert archive["top"].itemsize == (4 if vocab > 1 << 16 else 2)


def test_a_damaged_file_is_refused_or_says_the_same(path: Path, recording: Recording) -> None:
    data, dice = path.read_bytes(), random.Random(0)
    for length in {*range(0, len(data), 151), 1, 4, len(data) - 1}:
        path.write_bytes(data[:length])
        refusal(path)
    for _ in range(80):
        damaged = bytearray(data)
        damaged[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        try:
            found = load(str(path))
        except ConfigError:
            continue
        for one, other in zip(found.sequences, recording.sequences, strict=True):
            assert one.top.tolist() == other.top.tolist()


def test_contradictions_are_refused(path: Path) -> None:
    with np.load(path) as archive:
        found = dict(archive)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"header": header_of(path, schema=4)}, "schema 4: allowed: 1 to 3"),
        ({"marginals": np.zeros((2, 3, 5), np.uint16)}, "marginals has 2 rows"),
        ({"marginals": np.zeros((len(found["top"]), 4, 5))}, r"marginals \(.*allowed: .* 1..3, 1"),
        ({"marginals": np.zeros((len(found["top"]), 3, 7))}, r"marginals \(.*allowed: .*, 1..6"),
        ({"marginals": np.full((len(found["top"]), 3, 5), 12)}, "marginals holds a token beyond"),
        ({"header": np.frombuffer(b"[1]", np.uint8)}, "list"),
        ({"header": header_of(path, vocab="many")}, "int"),
        ({"header": header_of(path, vocab=3)}, "beyond the vocabulary of 3"),
        ({"top": None}, "top is not a file"),
        ({"top": found["top"][:-1]}, "top has"),
        ({"rollout": found["rollout"][:, :0]}, "tokens has|empty"),
        ({"rollout": found["rollout"].reshape(-1)}, "unpack"),
        ({"ends": np.array([0, 1, 2])}, "rollout has|tokens has"),
    ]
    for arrays, reason in wrong:
        assert re.search(reason, refusal(rewritten(path, **arrays)))


def test_a_job_beyond_what_was_recorded_is_refused(path: Path) -> None:
    job_of(path, lookahead=4, fan_out="uniform:5", batch_size=3)
    job_of(path, mode="sd", batch_size=1)  # no fan-out counts
    for flags, text in (
        ({"lookahead": 5}, "lookahead=5 with recording=.*allowed: at most 4, as recorded"),
        ({"fan_out": "uniform:6"}, "fan_out=uniform:6: 6 candidates a row .*at most 5"),
        ({"fan_out": "uniform:12"}, "fan_out=uniform:12: 12 candidates a row .*at most 5"),
        ({"batch_size": 4}, "batch_size=4 .*at most 3"),
    ):
        with pytest.raises(ConfigError, match=text):
            job_of(path, **{"fan_out": "uniform:2", **flags})
    with pytest.raises(ConfigError, match="recording: needed with workload=replay"):
        job_of(None)
    with pytest.raises(ConfigError, match=r"recording=x with workload=gemm: allowed: .*replay"):
        parse_flags({"recording": "x"})
    with pytest.raises(ConfigError, match=r"alpha=0.5 with workload=replay"):
        parse_flags({"workload": "replay", "recording": "x", "alpha": "0.5"})


@pytest.mark.parametrize(("name", "count"), [("humaneval", 164), ("chat", 200)])
def test_the_committed_recordings_are_of_the_shipped_draft(name: str, count: int) -> None:
    """And their page describes their contents."""
    path = ROOT / f"results/recordings/smollm2-{name}.npz"
    found = load(str(path))
    shipped = SafetensorsFiles(ROOT / "mpissd/engine/model/shipped/smollm2_draft")
    assert found.about["draft_sha256"] == digest(shipped.paths)[0]
    assert len(found.sequences) == count and "MIT" in found.about["licence"]
    flags = {**MACHINE, "mode": "sd", "num_drafts": 0, "lookahead": 4, "batch_size": 8}
    decoder = finished(RunConfig(recording=str(path), **flags))
    tokens = sum(part.end for part in found.sequences)
    assert sum(map(len, decoder.tokens.values())) == tokens
    mean = decoder.records.sequences()[:, 3].mean() + 1
    told = (ROOT / "results/recordings/README.md").read_text()
    (line,) = [line for line in told.splitlines() if line.startswith(f"| `{path.name}`")]
    assert f"| {count} | {tokens:,} |" in line and f"| {mean:.3f} |" in line


PROMPTS = "5,6,7,8;9;" + ",".join(str(n * 11 % 97) for n in range(40)) + ";3,3,9;48,2;1,2,3,1,2"
LIMIT, STOP, COUNT = 20, 94, 6
REPLAYED = {"backend": "emulated", "device": "null", "workload": "replay"}
RUNS: list[dict[str, Any]] = [
    {"mode": "ar", "batch_size": 4},
    {"mode": "sd", "num_drafts": 0, "lookahead": 5, "batch_size": 2},
    {"mode": "sd", "lookahead": 3, "backup": "fast", "lookup": "suffix", "batch_size": 2},
    {"mode": "ssd", "lookahead": 3, "fan_out": "list:6,0,2,1", "batch_size": 4, "backup": "fast"},
    {"mode": "ssd", "lookahead": 5, "fan_out": "geometric:12/uniform:1", "batch_size": 2},
    {"mode": "ssd", "lookahead": 5, "fan_out": "uniform:8", "backup_lookahead": 2},
    {"mode": "sd", "num_drafts": 0, "lookahead": 5, "batch_size": 2, "parallel_drafting": True},
    {"mode": "sd", "num_drafts": 0, "lookahead": 5, "tree": 12, "parallel_drafting": True},
    {"mode": "ssd", "lookahead": 5, "fan_out": "uniform:8", "parallel_drafting": True},
    {"mode": "ssd", "lookahead": 4, "tree": 9, "fan_out": "uniform:1", "parallel_drafting": True},
]


@pytest.fixture(scope="module")
def recorded(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "pair.npz"
    told = {"target": pair.target, "draft": pair.draft, "prompt_ids": PROMPTS, "out": path}
    told |= {"num_tokens": LIMIT, "stop_token": STOP, "lookahead": 5, "fan_out": 8}
    assert main(["pair", *(f"--{name}={value}" for name, value in told.items())]) == 0
    return path


def test_wrong_trees_are_refused(recorded: Path) -> None:
    rows = len(np.load(recorded)["top"])
    wrong = [
        ({"ranking": np.zeros((rows - 1, 31), np.uint8)}, "ranking has .* rows"),
        ({"ranking": np.zeros((rows, 31), np.int16)}, r"ranking \(.*allowed: with 8 marginals"),
        ({"marginals": None}, r"ranking \(.*allowed: with 8 marginals"),
        ({"ranking": np.full((rows, 2), 8, np.uint8)}, "a node before its parent"),
        ({"ranking": np.tile(np.arange(0, 48, 8, dtype=np.uint8), (rows, 1))}, "the last level"),
    ]
    for arrays, reason in wrong:
        assert re.search(reason, refusal(rewritten(recorded, **arrays)))
    old = rewritten(recorded, ranking=None)
    dynamic = {"mode": "sd", "num_drafts": 0, "tree_shape": "dynamic", "lookahead": 5, "tree": 31}
    dynamic["parallel_drafting"] = True
    for path, flags, reason in (
        (recorded, {"parallel_drafting": False}, "allowed: with parallel_drafting"),
        (recorded, {"tree": 32}, "tree=32, dynamic, .*allowed: at most 31, as recorded"),
        (recorded, {"lookahead": 4}, "lookahead=4, tree_shape=dynamic .*allowed: 5, as recorded"),
        (old, {}, "tree=31, dynamic, .*allowed: at most 0, as recorded"),
    ):
        with pytest.raises(ConfigError, match=reason):
            job_of(path, **{**dynamic, **flags})
    for tree, lookahead in ((31, 5), (4, 9)):
        job_of(recorded, **{**dynamic, "tree": tree, "lookahead": lookahead})


@pytest.mark.parametrize("flags", RUNS, ids=str)
def test_a_replay_has_its_run_s_rows(flags: dict[str, Any], pair: TinyPair, recorded: Path) -> None:
    models = {"target": str(pair.target), "draft": str(pair.draft), "backend": "numpy"}
    told = {"prompt_ids": PROMPTS, "num_tokens": LIMIT, "stop_token": STOP}
    run = finished(RunConfig(workload="text", **models, **told, **flags))
    replay = finished(RunConfig(pair="toy", recording=str(recorded), **REPLAYED, **flags))
    rows = run.records.sequences()
    assert replay.records.sequences().tolist() == rows.tolist()
    assert outcome_digest(replay.records.sequences()) == outcome_digest(rows)
    cut = {n: tokens[:LIMIT] for n, tokens in run.tokens.items()}
    assert replay.tokens == cut and len(cut) == COUNT
    if flags["mode"] != "ar":
        assert 0 < rows[:, 3].mean() < flags["lookahead"]


def test_masks_are_recorded_up_to_the_rows_of_a_forward(tmp_path: Path) -> None:
    pair, file = tiny_pair(tmp_path, masks=63), tmp_path / "pair.npz"
    words = f"--target={pair.target} --draft={pair.draft} --lookahead=40 --num_tokens=3"
    made = main(["pair", *words.split(), f"--out={file}", "--prompt_ids=1", "--backend=numpy"])
    assert made == 0 and load(str(file)).at_once == (33, 8)


def test_a_replay_runs_over_a_transformer(pair: TinyPair, recorded: Path) -> None:
    """The recording decides, whatever the forwards compute."""
    flags = {"mode": "ssd", "lookahead": 4, "fan_out": "uniform:3", "batch_size": 3}
    models = {"target": str(pair.target), "draft": str(pair.draft), "backend": "numpy"}
    told = {"recording": str(recorded), "workload": "replay", **flags}
    found = finished(RunConfig(forward="transformer", **models, **told))
    products = finished(RunConfig(pair="toy", backend="emulated", device="null", **told))
    assert found.records.sequences().tolist() == products.records.sequences().tolist()
    small = "gen:layers=1,hidden=64,ffn=64,heads=4,vocab=50"
    with pytest.raises(ConfigError, match=r"has 97 tokens, .* 50: allowed: forward=gemm"):
        models = {"target": small, "draft": small, "backend": "numpy"}
        finished(RunConfig(forward="transformer", **models, **told))
