"""`pair` counts the outcomes of a pair's rounds, fits them, and --laws imposes the file."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.__main__ import main
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.engine.job import Job, resolve
from mpissd.engine.law.acceptance import load_laws, named_hit_law
from mpissd.engine.oracle.markov import MarkovLaws, MarkovModel
from mpissd.engine.oracle.replay import Recording, save
from mpissd.lab.pair.laws import Dataset, measured, read
from tests.loop.recorded import recording_of
from tests.tiny_pair import TinyPair

SEED = 4  # every interval below is of 95%, and holds for this seed
K, F = 4, 5
BEYOND, OUTSIDE = 0, -1  # ranks of tokens that are no candidates
KNOWN = [t for t in range(200) if t % 3]
LAWS = MarkovLaws(MarkovModel(200, 2, 3), MarkovModel(200, 2, 3, 0.4), 0.0, seed=6, prompt_tokens=2)


@pytest.fixture(scope="module")
def recording() -> Recording:
    made = recording_of(LAWS, 40, limit=40, K=6, F=F)
    return replace(made, known=np.array(KNOWN, np.int32), name="pair.npz")


@pytest.fixture(scope="module")
def file(recording: Recording, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("laws")
    save(folder / "pair.npz", recording)
    assert main(["pair", f"{folder / 'pair.npz'}", f"--out={folder / 'laws.json'}"]) == 0
    return folder / "laws.json"


def rounds_of(recording: Recording, lookahead: int) -> list[tuple[int, int, int | None]]:
    """(sequence, k, rank) of every round, by the definition: token by token, with lists."""
    found: list[tuple[int, int, int | None]] = []
    for n, part in enumerate(recording.sequences):
        c, tokens = 0, part.tokens.tolist()
        while c < part.end:
            drafted = part.rollout[c].tolist()[:lookahead]
            k = 0
            while k < lookahead and drafted[k] == tokens[c + k]:
                k += 1
            candidates = part.top[c + k].tolist() if c + k < part.end else []
            candidates = [t for t in candidates if t not in drafted[k : k + 1]][:F]
            rank: int | None = None
            if c + k + 1 < part.end:
                t = tokens[c + k]
                outside = BEYOND if t in KNOWN else OUTSIDE
                rank = candidates.index(t) + 1 if t in candidates else outside
            found.append((n, k, rank))
            c += k + 1
    return found


@pytest.mark.parametrize("lookahead", [1, K, 6])
def test_the_file_holds_defined_rounds(lookahead: int, recording: Recording, file: Path) -> None:
    laws, wanted = load_laws(str(file)), rounds_of(recording, lookahead)
    assert [at.lookahead for at in laws.at] == [1, 2, 3, 4, 5, 6]
    at = laws.behind(lookahead)
    assert at.accepted == tuple(sum(k == n for _, k, _ in wanted) for n in range(lookahead + 1))
    document = json.loads(file.read_text())
    stored = next(one for one in document["laws"] if one["lookahead"] == lookahead)
    for name, ends in (("rejected", range(lookahead)), ("complete", [lookahead])):
        ranks = [rank for _, k, rank in wanted if k in ends and rank is not None]
        counts = [ranks.count(n) for n in range(1, F + 1)]
        assert stored[name]["ranks"] == counts
        assert stored[name]["beyond"] == ranks.count(BEYOND)
        assert stored[name]["outside"] == ranks.count(OUTSIDE)
        miss = 1 - sum(counts[:4]) / len(ranks)
        assert stored[name]["misses"]["4"]["miss"] == pytest.approx(miss)
    assert document["about"]["sources"][0]["file"] == "pair.npz"


def test_a_group_of_prompts_is_left_out(recording: Recording, file: Path) -> None:
    """40 prompts are 20 groups of two, n and n + 20."""
    laws = load_laws(str(file))
    assert (laws.about["prompts"], len(laws.without_each)) == (40, 20)
    others = [part for n, part in enumerate(recording.sequences) if n % 20 != 7]
    save(file.with_name("others.npz"), replace(recording, sequences=others))
    measured_again = file.with_name("others.json")
    assert main(["pair", str(file.with_name("others.npz")), f"--out={measured_again}"]) == 0
    assert load_laws(laws.without_each[7]).at == load_laws(str(measured_again)).at
    with pytest.raises(ConfigError, match="IndexError"):
        load_laws(f"{file}#20")


def job(file: Path, **flags: Any) -> Job:
    config = RunConfig(laws=str(file), pair="8b/1b", lookahead=K, **flags)
    return resolve(config, 1, backend="emulated", memory_bytes=None)


def test_laws_impose_the_acceptance_and_hits_at_the_run_s_own_k(file: Path) -> None:
    at, made = load_laws(str(file)).behind(K), job(file, backup="fast")
    counts = np.array(at.accepted)
    reached = counts[::-1].cumsum()[::-1]
    hazards = next(law for source, law in made.acceptance.items() if source.name == "CACHE").hazards
    assert hazards == pytest.approx(reached[1:] / reached[:-1], abs=5e-5)
    law = made.hit_law
    for end, fit in ((False, at.rejected), (True, at.complete)):
        for width in (1, 3, 9):
            miss = min(1, fit.floor + fit.A * width**-fit.r)
            assert 1 - law.hit_probability(width, end) == pytest.approx(miss, abs=2e-3)
    assert named_hit_law(law.label) == law  # the row's text names the same model
    fast = next(law for source, law in made.acceptance.items() if source.name == "FAST")
    assert fast.label.startswith("rates:") and fast.label != made.hit_law.label
    fields = made.workload.row_fields()
    assert fields["laws"] == load_laws(str(file)).label and fields["hit_law"] == law.label
    assert str(fields["acceptance"]).startswith("rates:")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "JSONDecodeError"),
        (lambda text: text.replace('"schema": 1', '"schema": 2'), "schema 2"),
        (lambda text: text.replace('"kind": "laws"', '"kind": "row"'), "of row"),
        (lambda text: text.replace('"accepted": [', '"accepted": [-1, '), "counts"),
        (lambda text: text.replace('"levels": []', '"levels": [[2]]'), r"levels of \(1, 1\)"),
        (lambda text: "[]", "TypeError"),
    ],
)
def test_damaged_files_are_refused(file: Path, tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(change(file.read_text()))
    with pytest.raises(ConfigError, match=message) as error:
        load_laws(str(path))
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_no_file_is_overwritten(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = file.read_bytes()
    assert main(["pair", str(file.with_name("pair.npz")), f"--out={file}"]) == 2
    assert "exists" in capsys.readouterr().err and file.read_bytes() == before


def test_the_laws_begin_with_their_counts(
    recording: Recording, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pair", str(file.with_name("pair.npz")), f"--lookahead={K}"]) == 0
    counts, rates, *_ = capsys.readouterr().out.splitlines()
    tokens = sum(part.end for part in recording.sequences)
    rounds = len(rounds_of(recording, K))
    assert counts == f"40 prompts, {tokens:,} answered tokens, {rounds} rounds of SD at K = {K}"
    assert rates.count(" ±0.") == K and len(rates) <= 100


def test_sources_of_two_pairs_are_refused(recording: Recording, tmp_path: Path) -> None:
    about = {**recording.about, "draft_sha256": "another"}
    save(tmp_path / "a.npz", recording)
    save(tmp_path / "b.npz", replace(recording, about=about))
    sources = [found for name in "ab" for found in read(str(tmp_path / f"{name}.npz"))]
    with pytest.raises(ConfigError, match="several models"):
        measured(sources, K)


def test_sources_of_unlike_sampling_are_refused() -> None:
    """The error names both; at temperature 0 there is no C, and a recording has none."""

    def source(file: str, temperature: float | None, c: float | None = None) -> Dataset:
        about = {"target_sha256": "t", "draft_sha256": "d", "file": file}
        return Dataset({**about, "temperature": temperature, "saguaro_c": c}, {})

    cold, greedy = source("a.npz", None), source("b", 0.0, 0.5)
    for one, other, told in (
        (cold, source("b", 0.7, 1.0), "a.npz: T = 0; b: T = 0.7, C = 1"),
        (source("a", 1.0), source("b", 0.7), "a: T = 1, C = 1; b: T = 0.7, C = 1"),
        (source("a", 0.7, 0.3), source("b", 0.7, 1.0), "a: T = 0.7, C = 0.3; b: T = 0.7, C = 1"),
    ):
        with pytest.raises(ConfigError, match="one temperature and C") as refused:
            measured([one, greedy, other] if one is cold else [one, other], K)
        assert f"({told})" in str(refused.value)


def test_plan_takes_a_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--profile=h200", "--pair=8b/1b", f"--laws={file}"]) == 0
    printed = capsys.readouterr().out
    assert f"--laws={file}" in printed and " prompts of " in printed
    advice = json.loads(printed.splitlines()[-1])
    assert all(choice["lookahead"] <= 6 for choice in advice["judged"])
    flags = ["--profile=h200", "--pair=8b/1b", "--lookahead=4", f"--laws={file}"]
    assert main(["plan", "--mode=ssd", *flags]) == 0
    law, row = load_laws(str(file)).behind(4), json.loads(capsys.readouterr().out.splitlines()[-1])
    mean = 1 + np.dot(law.accepted, range(5)) / sum(law.accepted)
    assert row["acceptance_length"] == pytest.approx(mean, rel=0.15)  # one run of 200 rounds


def test_a_row_of_text_is_a_source(tmp_path: Path) -> None:
    """Two sequences, K = 2: rounds, and the ranks that it counted."""
    newest = max(
        (json.loads(line) for path in sorted(Path("results").glob("*/*.jsonl"))
         for line in path.read_text().splitlines() if '"round_us"' in line),
        key=len,
    )  # fmt: skip
    counts = {
        "ranks_rejected": [[3, 0, 5], [3, 1, 7]],
        "ranks_all_accepted": [[3, 1, 9], [3, 2, 1]],
    }
    told = {"workload": "text", "mode": "ssd", "lookahead": 2, "temperature": 0.7, "run_id": "r"}
    told |= {"learned": counts, "weights": None, "fan_out": [3, 3, 3]}
    (tmp_path / "runs.jsonl").write_text(json.dumps({**newest, **told}) + "\n")
    (tmp_path / "rounds").mkdir()
    # round, id, epoch, k, bonus, source, hit, num_draft; two lines served one token only, and a
    # fast backup (source 3) served one
    text = "0 4 0 2 9 2 0 2; 0 7 0 0 9 2 0 2; 1 4 0 1 9 1 1 2; 1 7 0 1 9 2 0 2; 2 4 0 0 9 2 0 2"
    text += "; 2 7 0 1 9 2 0 1; 3 4 0 1 9 1 1 1; 3 7 0 2 9 3 0 2; 4 7 0 2 9 1 1 2"
    lines = [line.split() for line in text.split(";")]
    np.savez(tmp_path / "rounds" / "r.npz", sequences=np.array(lines, np.int64))
    (source,) = read(str(tmp_path))
    of = source.outcomes[2]
    assert list(source.outcomes) == [2] and source.about["temperature"] == 0.7
    assert of.accepted.tolist() == [[1, 1, 1], [1, 1, 1]]
    (at,) = measured([source], 2)["laws"]
    assert at["accepted"] == [2, 2, 2] and at["fast"] == {}
    assert at["rejected"]["ranks"] == [7, 0, 0] and at["rejected"]["beyond"] == 5
    assert at["complete"]["ranks"] == [9, 1, 0] and at["complete"]["outside"] is None
    short = np.array(lines, np.int64)
    short[:, 7] = 1
    np.savez(tmp_path / "rounds" / "r.npz", sequences=short)
    with pytest.raises(ConfigError, match="no round of 2 tokens"):
        [*read(str(tmp_path))]
    (tmp_path / "rounds" / "r.npz").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(ConfigError, match=r"r\.npz"):
        [*read(str(tmp_path))]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"out": ""}, "out: needed"),
        ({"prompt_ids": ""}, "recording a pair needs prompts"),
        ({"draft": ""}, "one pair to record"),
        ({"pair": "toy"}, "one pair to record"),
        ({"prompt_ids": "1,97"}, r"token 97: allowed: 0\.\.96"),
        ({"fan_out": "64"}, "fan_out=64"),
        ({"draft": "nowhere"}, "nowhere"),
        ({"sources": "a.npz"}, "sources with a pair"),
        ({"num_tokens": "2000"}, "allowed: at most"),
    ],
    ids=str,
)
def test_what_cannot_be_recorded_is_refused(
    flags: dict[str, str], reason: str, pair: TinyPair, tmp_path: Path, capsys: Any
) -> None:
    told = {"target": pair.target, "draft": pair.draft, "prompt_ids": "5,6;7", "num_tokens": 45}
    told |= {"lookahead": 4, "fan_out": 6, "out": tmp_path / "pair.npz", **flags}
    words = [f"--{name}={value}" for name, value in told.items() if value != ""]
    assert main(["pair", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(reason, line), line
    assert not list(tmp_path.iterdir())
