"""`mpissd run` from the launch script to the JSON line: the row's contract, and equal digests."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.__main__ import main
from mpissd.common.presets import resolve_model
from mpissd.common.real_pairs import DEFAULT
from mpissd.common.records import outcome_digest, token_digest
from mpissd.common.row import KEYS
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.model.shard import ForwardOptions, Shard
from tests.loop.harness import Scenario, check_rows
from tests.mpi.harness import DIRECT, Job, Started, Together, launch, needs_mpi

pytestmark = needs_mpi

DRAFT_KEYS = """draft fan_out branch_budget acceptance hit_law hit_rate t_draft_s t_growth_s
T_SD""".split()

TOY = Scenario(batch=2, lookahead=3, rounds=20, seed=3, pair=DEFAULT)
COMMON = "--pair=toy --batch_size=2 --lookahead=3 --rounds=20 --seed=3 --warmup_rounds=2".split()
NUMPY = ("--backend=numpy", *COMMON)
NULL = ("--backend=emulated", "--device=null", *COMMON)


# name: (ranks, flags, what was decoded)
JOBS: dict[str, tuple[int, tuple[str, ...], Scenario]] = {
    "ar": (1, (*NUMPY, "--mode=ar"), replace(TOY, mode="ar")),
    "ar-T2": (2, (*NUMPY, "--mode=ar"), replace(TOY, mode="ar")),
    "sd": (2, (*NUMPY, "--mode=sd"), replace(TOY, mode="sd")),
    "sd-T2": (3, (*NUMPY, "--mode=sd"), replace(TOY, mode="sd")),
    "sd-inline": (1, (*NUMPY, "--mode=sd", "--num_drafts=0"), replace(TOY, mode="sd")),
    "sd-inline-T2": (2, (*NUMPY, "--mode=sd", "--num_drafts=0"), replace(TOY, mode="sd")),
    "ssd": (2, (*NUMPY, "--mode=ssd"), TOY),
    "ssd-T2": (3, (*NUMPY, "--mode=ssd"), TOY),
    "ssd-all-miss": (2, (*NUMPY, "--p_hit=0"), replace(TOY, p_hit=0.0)),
    "ssd-all-hit": (2, (*NUMPY, "--p_hit=1"), replace(TOY, p_hit=1.0)),
    "ar-null": (1, (*NULL, "--mode=ar"), replace(TOY, mode="ar")),
    "sd-null": (2, (*NULL, "--mode=sd"), replace(TOY, mode="sd")),
    "ssd-null-T4": (5, (*NULL, "--p_hit=0.5"), replace(TOY, p_hit=0.5)),
}
AR = [name for name in JOBS if name.startswith("ar")]
ALIKE = [AR, [name for name in JOBS if name not in AR]]


VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "fast": (("--backup=fast",), {"backup": "fast"}),
    "short": (("--backup_lookahead=1",), {"backup_lookahead": 1}),
    "K1": (("--lookahead=1", "--fan_out=list:0,4"), {"lookahead": 1, "fan_out": (0, 4)}),
    "rates": (("--acceptance=rates:1,0.5,0",), {"rates": (1.0, 0.5, 0.0)}),
    "one-round": (("--rounds=1", "--batch_size=64"), {"batch": 64}),
}
TOKENS = {"ar": 1, "sd": 2, "ssd": 3}  # ranks
OPTIONS = (
    "--fuse",
    "--lm_head",
    "--context=64",
    "--pair=toy-target@2L/toy-draft",
    "--fan_out=geometric:9",
)
H100 = ("--backend=emulated", "--device=h100", "--pair=8b@2L/1b", "--rounds=5")
H100 += ("--warmup_rounds=1", "--lookahead=3", "--p_hit=1")


def without(*names: str) -> tuple[str, ...]:
    """NULL's flags but these."""
    return tuple(flag for flag in NULL if flag.partition("=")[0] not in names)


RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    **{name: (np_, flags) for name, (np_, flags, _) in JOBS.items()},
    **{
        name: (2, (*without(*(flag.partition("=")[0] for flag in flags)), *flags))
        for name, (flags, _) in VARIANTS.items()
    },
    **{
        f"{mode}-tokens": (
            np_,
            (
                *without("--rounds", "--batch_size"),
                *"--batch_size=5 --num_tokens=31".split(),
                f"--mode={mode}",
            ),
        )
        for mode, np_ in TOKENS.items()
    },
    "many-tokens": (2, (*NULL, "--num_tokens=1000000")),
    "options": (3, (*NUMPY, *OPTIONS)),
    "h100": (3, H100),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Together:
    return Together(RUNS, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", JOBS)
def test_the_row_keeps_its_contract(runs: Together, name: str) -> None:
    done, (np_, _, scenario) = runs[name], JOBS[name]
    row = done.row
    assert tuple(row) == KEYS
    assert (row["schema"], row["mode"], row["workload"]) == (2, scenario.mode, "gemm")
    assert row["world_size"] == np_ == row["tp"] + row["num_drafts"]
    assert (row["lookahead"], row["seed"], row["batch_size"]) == (scenario.K, 3, 2)
    assert (row["target"], row["num_rounds"]) == ("toy-target", 20)
    assert row["fan_out"] == (list(scenario.fans) or None)
    assert row["branch_budget"] == (sum(scenario.fans) or None)
    assert set(row["round_us"]) == {"mean", "p50", "p90", "p99", "n"}
    assert row["provenance"]["hosts"] and len(row["provenance"]["ranks"]) == np_
    assert row["provenance"]["kernel"] == ("modelled" if "null" in name else "numpy")
    if scenario.mode == "ar":
        assert all(row[key] is None for key in DRAFT_KEYS)
    else:
        assert row["draft"] == "toy-draft" and row["t_draft_s"] >= 0
    if scenario.mode == "sd":
        assert row["hit_rate"] is row["hit_law"] is row["t_growth_s"] is None


@pytest.mark.parametrize("name", JOBS)
def test_what_was_said_is_what_was_written(runs: Together, name: str) -> None:
    done = runs[name]
    assert done.err == ""
    assert done.saved == [done.row]
    files = [path.name for path in (done.folder / "rounds").iterdir()]
    assert files == [f"{done.row['run_id']}.npz"]
    # Plain JSON: no NaN and no infinity.
    json.loads(done.out.splitlines()[-1], parse_constant=pytest.fail)


@pytest.mark.parametrize("name", JOBS)
def test_the_row_follows_from_the_raw_rounds(runs: Together, name: str) -> None:
    done, scenario = runs[name], JOBS[name][2]
    row, arrays = done.row, done.arrays
    rows = arrays["sequences"]
    tokens = check_rows(rows, scenario)  # the law, in every decision
    assert len(rows) == 40 and len(arrays["round_s"]) == len(arrays["t_target_s"]) == 20
    assert row["outcome_digest"] == outcome_digest(rows)
    assert row["token_digest"] == token_digest(tokens, 20)
    assert row["num_tokens"] == sum(len(found) for found in tokens.values())
    assert row["acceptance_length"] == pytest.approx(row["num_tokens"] / 40, abs=1e-5)
    assert row["accept_histogram"] == np.bincount(rows[:, 3], minlength=scenario.K + 1).tolist()
    if scenario.mode == "ssd":
        assert row["hit_rate"] == pytest.approx(rows[2:, 6].mean(), abs=1e-5)
    assert row["wall_s"] == pytest.approx(arrays["round_s"].sum(), rel=1e-3, abs=1e-5)
    assert row["tok_per_s"] == pytest.approx(row["num_tokens"] / row["wall_s"], rel=1e-3)
    per_rank = row["tok_per_s"] / row["world_size"]
    assert row["tok_per_s_per_gpu"] == pytest.approx(per_rank, abs=1e-2)
    ledger = arrays["lead_ledger_ns"]
    assert (ledger[:, 1] == ledger[:, 2:].sum(axis=1)).all() and len(ledger) == 20
    assert row["round_us"]["n"] == 20
    assert row["round_us"]["mean"] == pytest.approx(ledger[:, 1].mean() / 1e3, abs=2e-3)
    phases = sum(row["phases_us"]["lead"].values())
    assert phases == pytest.approx(row["round_us"]["mean"], abs=0.02)
    assert 0 < row["ledger_closure"] <= 1
    if row["T_SD"] is not None:
        assert row["T_SD"] == pytest.approx(row["t_draft_s"] / row["t_target_s"], rel=1e-6)


@pytest.mark.parametrize("names", ALIKE, ids=["ar", "sd-and-ssd"])
def test_equal_decisions_have_equal_digests(runs: Together, names: list[str]) -> None:
    """SSD with all misses is SD; T = 1 is T = 2; a draft inline is a draft on its own rank."""
    digests = {name: runs[name].row["outcome_digest"] for name in names}
    assert len(set(digests.values())) == 1, digests


def test_every_mode_emits_the_same_tokens(runs: Together) -> None:
    digests = {name: runs[name].row["token_digest"] for name in JOBS}
    assert len(set(digests.values())) == 1, digests


def test_messages_are_one_each_way_and_a_plan_to_each_follower(runs: Together) -> None:
    count = {name: runs[name].row["messages_per_round"] for name in JOBS}
    assert count["ar"] == count["sd-inline"] == 0
    assert count["ar-T2"] == count["sd-inline-T2"] == 1
    assert count["sd"] == count["ssd"] == 2
    assert count["sd-T2"] == count["ssd-T2"] == 3
    assert count["ssd-null-T4"] == 5
    assert runs["ar"].row["bytes_per_round"] == 0 < runs["sd"].row["bytes_per_round"]


@pytest.mark.parametrize("name", ["ar-T2", "sd", "sd-inline", "ssd-T2", "ssd-all-hit"])
def test_a_job_s_profile_predicts_the_number_in_its_row(
    runs: Together, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    done = runs[name]
    profile = done.folder / "profiles" / f"{done.row['run_id']}.json"
    assert main(["predict", f"--profile={profile}"]) == 0
    predicted = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert predicted["tok_per_s"] == done.row["predicted_tok_per_s"] > 0
    assert predicted["outcome_digest"] == done.row["outcome_digest"]
    assert predicted["num_tokens"] == done.row["num_tokens"]
    error = done.row["tok_per_s"] / predicted["tok_per_s"] - 1
    assert done.row["prediction_error"] == pytest.approx(error, abs=1e-4)


@pytest.mark.parametrize("show", ["why", "tables"])
def test_a_row_can_be_read_again(
    runs: Together, show: str, capfd: pytest.CaptureFixture[str]
) -> None:
    done = runs["ssd"]
    assert main(["compare", str(done.folder), f"--show={show}"]) == 0
    out, err = capfd.readouterr()
    assert err == "" and (done.row["run_id"] in out if show == "why" else "8B/1B" in out)


@pytest.mark.parametrize("mode", TOKENS)
def test_so_many_tokens_of_each_sequence(runs: Together, mode: str) -> None:
    """Sequences finish at their own pace; what they emit beyond does not count."""
    done = runs[f"{mode}-tokens"]
    rows, scenario = done.arrays["sequences"], replace(TOY, mode=mode, batch=5)
    tokens = check_rows(rows, scenario)
    assert done.row["num_tokens"] == 5 * 31
    assert done.row["token_digest"] == token_digest(tokens, 31)
    assert all(31 <= len(found) <= 31 + scenario.K for found in tokens.values())
    law = scenario.law()
    stream = {id_: [law.true(id_, p) for p in range(1, 32)] for id_ in range(5)}
    assert done.row["token_digest"] == token_digest(stream, 31)
    if mode != "ar":
        assert len(set(np.bincount(rows[:, 0]))) > 1, "all finished at once: choose another seed"


def test_rounds_end_a_run_before_its_tokens(runs: Together) -> None:
    row = runs["many-tokens"].row
    assert row["num_rounds"] == 20 and row["num_tokens"] < 200
    assert row["token_digest"] == runs["ar"].row["token_digest"]


@pytest.mark.parametrize("name", VARIANTS)
def test_policies_and_odd_sizes(runs: Together, name: str) -> None:
    done = runs[name]
    tokens = check_rows(done.arrays["sequences"], replace(TOY, **VARIANTS[name][1]))
    first = 1 if name == "one-round" else 20
    assert done.row["token_digest"] == token_digest(tokens, first)
    if name == "one-round":
        assert (done.row["num_rounds"], done.row["hit_rate"]) == (1, None)


def test_options_change_the_forward_and_not_the_tokens(runs: Together) -> None:
    row = runs["options"].row
    assert (row["fuse"], row["lm_head"], row["context"]) == (True, True, 64)
    assert (row["target"], row["num_layers"], row["full_num_layers"]) == ("toy-target@2L", 2, 4)
    assert sum(row["fan_out"]) == row["branch_budget"] == 9 and len(row["fan_out"]) == 4
    assert row["outcome_digest"] == runs["ssd"].row["outcome_digest"]
    assert row["floor_us"] > 0 and row["floor_fraction"] > 0


def test_a_run_needs_no_home(tmp_path: Path) -> None:
    words = ["env", "-u", "HOME", "launch/local.sh", "2", *NULL, f"--out={tmp_path}"]
    with Started(words) as job:
        assert Job(*job.finish(), tmp_path).row["num_rounds"] == TOY.rounds


def test_a_killed_mpirun_s_folder_stops_no_later_one(tmp_path: Path) -> None:
    """Open MPI 5 names the folder of a job by mpirun's process id, and refuses one that exists."""
    free = 2**22 + 1  # no process has so high an id
    # A process that runs, another release's folder, and that of another host on shared storage.
    kept = {"ompi.host.1000", f"ompi.{os.getpid()}", "ompi.0x", f"ompi.{free + 1}"}
    for name in {*kept, f"ompi.{free}"}:
        (tmp_path / name).mkdir()
    (tmp_path / f"ompi.{free + 1}" / "pmix.another-host.tool").touch()
    stale = 'mkdir "$TMPDIR/ompi.$$"; echo stale >"$TMPDIR/ompi.$$/pmix.$(uname -n).tool"; '
    run = ["mpirun", "1", "mpissd", "run", "--mode=ar", "--rounds=2", f"--out={tmp_path / 'out'}"]
    with Started(["bash", "-c", stale + DIRECT, *run], {"TMPDIR": str(tmp_path)}) as job:
        code, _, err = job.finish()
    assert code == 0, err
    assert {path.name for path in tmp_path.glob("ompi.*")} == kept


def test_a_run_can_be_repeated_and_rows_add_up(tmp_path: Path) -> None:
    seeds = ("5", "5", "6")
    jobs = [launch(1, *NULL, "--mode=ar", f"--seed={s}", folder=tmp_path) for s in seeds]
    assert [job.err for job in jobs] == ["", "", ""]
    rows = jobs[-1].saved
    assert rows == [job.row for job in jobs] and len({row["run_id"] for row in rows}) == 3
    assert [row["config_digest"] == rows[0]["config_digest"] for row in rows] == [True, True, False]
    for digest in ("token_digest", "outcome_digest"):
        assert rows[0][digest] == rows[1][digest] != rows[2][digest]


def test_an_emulated_forward_lasts_what_its_profile_says(runs: Together) -> None:
    row = runs["h100"].row
    target, profile = resolve_model("8b").scaled(2), load_profile("h100")
    cost = Shard(target, 2).cost(4, 1, 2, ForwardOptions())
    assert row["t_target_s"] == pytest.approx(profile.forward_s(cost), rel=1e-9)
    assert row["round_us"]["p50"] >= 1e6 * row["t_target_s"]
    assert row["t_draft_s"] >= 3 * profile.forward_s(
        Shard(resolve_model("1b")).cost(1, 1, 2, ForwardOptions())
    )
    assert row["floor_fraction"] < 1 and "emulated" in row["device_name"]
    assert row["read_bytes_per_s"] == profile.read_bytes_per_s
    full = row["t_target_full_depth_s"]
    assert full == pytest.approx(row["t_target_s"] * 32 / 2)


def test_the_default_run_of_a_machine_without_a_gpu(tmp_path: Path) -> None:
    """Nothing but the number of ranks, and a short run."""
    done = launch(2, "--rounds=3", folder=tmp_path / "new" / "folder")
    assert done.row["mode"] == "ssd" and done.row["num_rounds"] == 3
    assert done.saved == [done.row]
    shown = done.out.splitlines()
    assert any("lead" in line for line in shown) and any("tok/s" in line for line in shown)
