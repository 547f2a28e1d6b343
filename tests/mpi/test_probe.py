"""`mpissd probe` under mpirun: the profile, its replay, and data that are wrong.

As a program (`python -m mpi4py -m tests.mpi.test_probe FLAGS…`) it is a probe whose data change.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.presets import resolve_model
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.lab.predict.costs import HostCosts
from tests.mpi.harness import Job, ended, needs_mpi, start

pytestmark = needs_mpi

TARGET = "gen:layers=2,hidden=128,ffn=256,heads=4,vocab=512"
DRAFT = "gen:layers=1,hidden=64,ffn=128,heads=2,vocab=512"
NUMPY = ("--backend=numpy", f"--target={TARGET}", f"--draft={DRAFT}")


def probe(np_: int, *flags: str, folder: Path, program: str = "mpissd probe") -> Job:
    return ended(start(np_, *program.split(), *flags, f"--out={folder}"), folder)


@pytest.fixture(scope="module")
def numpy(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A probe of a tiny pair with T = 2 and one draft: its output, its profile's JSON."""
    folder = tmp_path_factory.mktemp("probe")
    done = probe(3, *NUMPY, "--name=tiny", folder=folder)
    assert done.row["profile"] == str(folder / "profiles" / "tiny.json")
    return done.out, json.loads((folder / "profiles" / "tiny.json").read_text())


def test_every_table_is_measured(numpy: Any) -> None:
    out, data = numpy
    tables = data["tables"]
    assert [e["rank"] for e in tables["bandwidths"]] == [0, 1, 2]
    target, draft = Shard(resolve_model(TARGET), 2), Shard(resolve_model(DRAFT))
    assert [(e["tp"], e["params"]) for e in tables["forwards"]] == [
        (2, target.num_params(ForwardOptions())),
        (1, draft.num_params(ForwardOptions())),
    ]
    assert [e["name"] for e in tables["all_reduces"]] == ["mpi"]
    assert [e["what"] for e in tables["launches"]] == ["empty"]
    for entry in [e for name in ("forwards", "all_reduces") for e in tables[name]]:
        assert entry["from"].startswith("measured") and min(entry["seconds"].values()) > 0
    assert [seat["role"] for seat in data["topology"]] == ["lead", "target", "draft"]
    assert data["provenance"]["mpi_library"] and data["dtype"] == "float32"
    for heading in ("r(M)", "all-reduce", "launch", "rank 2"):
        assert heading in out


def test_the_profile_replays_the_machine(numpy: Any, tmp_path: Path) -> None:
    _, data = numpy
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(data))
    flags = ("--backend=emulated", f"--device={file}", *NUMPY[1:], "--lookahead=7", "--rounds=20")
    row = probe(3, *flags, folder=tmp_path, program="mpissd run").row
    forward = load_profile(str(file)).forward_s(
        Shard(resolve_model(TARGET), 2).cost(8, 1, 2, ForwardOptions())
    )
    assert row["t_target_s"] == forward == data["tables"]["forwards"][0]["seconds"]["8"]


def test_host_costs_are_read_off_the_ledgers_of_short_runs(numpy: Any) -> None:
    _, data = numpy
    ways = [(e["mode"], e["num_drafts"], e["batch_size"]) for e in data["host"]]
    assert ways == [(mode, 1, b) for mode in ("sd", "ssd") for b in (1, 8)]
    for entry in data["host"]:
        assert entry["tp"] == 2 and entry["from"].startswith("measured: ledgers")
        costs = HostCosts.from_dict(entry["seconds"])
        assert costs.lead_sample > 0 and costs.step >= 0


def test_a_brief_probe_has_what_one_plan_needs(tmp_path: Path) -> None:
    """Of T = 1 and b = 1; SSD's host costs at two b, as its lanes add work."""
    flags = *NUMPY, "--forward=transformer", "--brief", "--mode=ssd", "--name=brief"
    path = probe(2, *flags, folder=tmp_path).row["profile"]
    data = json.loads(Path(path).read_text())
    tables, profile = data["tables"], load_profile(path)
    assert [(e["tp"], e["sequences"], e["kv_tokens"]) for e in tables["forwards"]] == [
        (1, 1, past) for _ in range(2) for past in (64, 1024)
    ]
    assert tables["read_outs"] and not tables["shards"] and profile.busy == data["busy"]
    ways = {(e["mode"], e["batch_size"]) for e in data["host"]}
    assert ways == {("sd", 1), ("ssd", 1), ("ssd", 8)}
    assert all(share >= 0.05 for share in profile.busy.values())


def test_wrong_data_end_the_job_and_save_nothing(tmp_path: Path) -> None:
    done = probe(2, *NUMPY, "--mode=ar", folder=tmp_path, program="tests.mpi.test_probe")
    assert done.code == 3 and len(done.lines) == 1 and "values are wrong" in done.lines[0]
    assert "{" not in done.out and not (tmp_path / "profiles").exists()


if __name__ == "__main__":
    from mpissd.__main__ import main
    from mpissd.engine.comm.mpi_group import MpiGroup

    add = MpiGroup.all_reduce

    def add_wrong(group: MpiGroup, array: Any) -> None:
        add(group, array)
        array[-1, -1] += 1

    MpiGroup.all_reduce = add_wrong  # type: ignore[method-assign]
    sys.exit(main(["probe", *sys.argv[1:]]))
