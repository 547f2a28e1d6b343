"""A grid's text → configurations, folded, ordered, shared out; everything but the measuring.
Models are made once, shared by all jobs with the same weights, and dropped for lack of room."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpissd.common.config import RunConfig, parse_flags
from mpissd.common.errors import ConfigError
from mpissd.common.flags import parse_into
from mpissd.engine.backend.profile import EmulatedBackend, load_profile
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.job import Job, resolve
from mpissd.engine.session.session import Models
from mpissd.lab.sweep.commands import check_sweep, why_not
from mpissd.lab.sweep.plan import SweepConfig, SweepPlan, planned, read_grid
from tests.scripts import ROOT
from tests.tiny_pair import tiny_pair

FILE = """
# what holds everywhere
[DEFAULT]
pair = 8b/1b
rounds = 60

[acceptance]
mode = ar, sd, ssd      # three methods
lookahead = 2..4
alpha = .6, .8
    , .9

[lists]
mode = ssd
rounds = 100
fan_out = uniform:3, "list:4,4,3", geometric:12
lookahead = 2
"""


def axes(text: str) -> dict[str, tuple[str, ...]]:
    (block,) = read_grid(text)
    return block


def plan(grid: str, shard: str = "1/1", repeats: int = 1, **flags: object) -> SweepPlan:
    run = RunConfig(**flags)  # type: ignore[arg-type]
    return planned(SweepConfig(run=run, grid=grid, shard=shard, repeats=repeats))


def flags(found: SweepPlan) -> list[dict[str, str]]:
    return [dict(point.flags) for point in found.points]


def test_an_inline_grid() -> None:
    assert axes("mode=ar,sd,ssd; lookahead=2..8; alpha=.6, .7 ;p_hit=none,0") == {
        "mode": ("ar", "sd", "ssd"),
        "lookahead": ("2", "3", "4", "5", "6", "7", "8"),
        "alpha": (".6", ".7"),
        "p_hit": ("none", "0"),
    }
    assert axes("lookahead=2..12..4,3") == {"lookahead": ("2", "6", "10", "3")}
    assert axes("lookahead=3..3") == {"lookahead": ("3",)}


def test_a_file_has_blocks_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "a=b.grid"  # a file's name may look like an inline grid
    path.write_text(FILE)
    first, second = read_grid(str(path))
    assert first == {
        "mode": ("ar", "sd", "ssd"),
        "lookahead": ("2", "3", "4"),
        "alpha": (".6", ".8", ".9"),
        "pair": ("8b/1b",),
        "rounds": ("60",),
    }
    assert second["rounds"] == ("100",)
    assert second["fan_out"] == ("uniform:3", "list:4,4,3", "geometric:12")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lookahed=3", r"unknown flag in the grid 'lookahed': did you mean 'lookahead'\?"),
        ("out=x", "grid: out is one for all configurations: say --out="),
        ("mode=ar; mode=sd", "grid: mode twice"),
        ("mode=ar; sd", r"grid: 'sd': allowed: flag=value,value"),
        ("mode=", "grid: mode has no value"),
        ("fan_out='list:4,4", "a quotation does not end"),
        ("lookahead=8..2", r"grid: lookahead=8\.\.2: allowed: FIRST\.\.LAST"),
        ("nowhere", r"grid='nowhere': No such file.*allowed: a file, or flag=value"),
        ("rounds=1..9999; seed=1..9999", "99980001 combinations: allowed: at most 100000"),
        ("rounds=1..99999", r"rounds=1\.\.99999: allowed: at most 10000 values"),
        ("mode=ar,sdd", "unknown mode 'sdd': did you mean 'sd'?"),
        ("mode=sd; alpha=.5,2", r"alpha=2: allowed: a number in \[0, 1\]"),
        (f"lookahead=1..{'9' * 5000}", "allowed: a whole number"),  # as text, like any other
    ],
)
def test_refusals_take_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(text)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        *(
            ({"shard": text}, "shard=.*allowed: I/N with")
            for text in ("0/2", "3/2", "a/b", "1/2/3")
        ),
        ({"grid": None}, "grid: needed"),
        ({"trace": "1"}, "trace with sweep"),
    ],
)
def test_flags_that_no_sweep_takes(flags: dict[str, Any], message: str) -> None:
    told = {"grid": "mode=ar", "mode": "sd", **flags}
    with pytest.raises(ConfigError, match=message):
        parse_into(SweepConfig, {name: text for name, text in told.items() if text is not None})


def test_what_a_method_does_not_see_is_folded() -> None:
    found = plan("mode=ar,sd,ssd; lookahead=2..3; alpha=.6,.8; p_hit=0,1; batch_size=1,4")
    by_mode = {mode: [p for p in flags(found) if p["mode"] == mode] for mode in ("ar", "sd", "ssd")}
    assert [len(of) for of in by_mode.values()] == [2, 8, 16]
    assert by_mode["ar"] == [{"mode": "ar", "batch_size": n} for n in ("1", "4")]
    assert all(set(of) == {"mode", "lookahead", "alpha", "batch_size"} for of in by_mode["sd"])
    assert len({point.digest for point in found.points}) == len(found.points)


def test_what_cannot_be_is_kept_with_its_reason() -> None:
    found = plan("mode=ssd,sd; lookahead=0,4; num_drafts=0,1")
    reasons = [point.error for point in found.points if point.config is None]
    assert reasons == [
        "mode=ssd with lookahead=0: allowed: lookahead above 0",
        "mode=ssd with lookahead=0: allowed: lookahead above 0",
        "mode=ssd with num_drafts=0: allowed: num_drafts=1",
        "mode=sd with lookahead=0: allowed: lookahead above 0",
        "mode=sd with lookahead=0: allowed: lookahead above 0",
    ]
    assert len({point.digest for point in found.points}) == len(found.points) == 8


def test_repeats_interleave_in_orders_of_their_own() -> None:
    found = plan("mode=sd; lookahead=1..8", repeats=3)
    tasks = list(found.tasks())
    assert [task.repeat for task in tasks] == [0] * 8 + [1] * 8 + [2] * 8
    orders = [[task.point.digest for task in tasks[n : n + 8]] for n in (0, 8, 16)]
    assert all(set(order) == {point.digest for point in found.points} for order in orders)
    assert len(set(map(tuple, orders))) == 3
    assert [t.point for t in found.tasks()] == [t.point for t in tasks]  # the same every time


@settings(max_examples=10)
@given(st.integers(1, 7), st.integers(1, 20))
def test_shards_are_the_whole_and_overlap_nowhere(num_shards: int, count: int) -> None:
    grid = f"mode=sd; lookahead=1..{count}"
    whole = [point.digest for point in plan(grid).points]
    parts = [
        [point.digest for point in plan(grid, f"{i}/{num_shards}").points]
        for i in range(1, min(num_shards, count) + 1)
    ]
    assert sorted(itertools.chain(*parts)) == sorted(whole)
    if num_shards > count:
        with pytest.raises(ConfigError, match="leave it none"):
            plan(grid, f"{num_shards}/{num_shards}")


@pytest.mark.parametrize("backend", ["auto", "numpy", "cupy"])
def test_a_real_pair_is_planned_on_every_backend(tmp_path: Path, backend: str) -> None:
    """A machine with CuPy resolves the job before it knows whether there is a GPU."""
    pair = tiny_pair(tmp_path)
    flags = {"target": str(pair.target), "draft": str(pair.draft), "prompt_ids": "1,2"}
    run = parse_flags(flags)
    job = resolve(run, 1, backend=backend, memory_bytes=None)
    assert max(job.target_buckets()) == (32 if backend == "numpy" else 128)
    plan = planned(SweepConfig(run=run, grid="mode=ar,sd,ssd; lookahead=2,3"))
    assert len(plan.points) == 5


def test_prompts_that_cannot_be_answered_are_refused_before_mpi_starts(tmp_path: Path) -> None:
    """All of them at once, and one among others by its reason."""
    pair = tiny_pair(tmp_path)
    flags = {"target": str(pair.target), "draft": str(pair.draft), "out": str(tmp_path / "out")}
    run = parse_flags({**flags, "workload": "text"})
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        check_sweep(SweepConfig(run=run, grid="mode=ar,sd"), frozenset(), 2)
    plan = check_sweep(SweepConfig(run=run, grid="mode=ar; prompt_ids=1,999"), frozenset(), 1)
    refused = "prompt_ids: prompt 1: token 999: allowed: 0..96"
    assert [why_not(point, 1) for point in plan.points] == [None, refused]


@pytest.mark.parametrize("name", ["h200-70b", "h200-pairs", "h200-sweep"])
def test_committed_grids_make_the_configurations_of_their_rows(name: str) -> None:
    """So that a sweep that was cut off continues, whatever flags were added since."""
    folder = ROOT / "results" / name
    lines = [line for path in folder.glob("*.jsonl") for line in path.open()]
    known = {json.loads(line)["config_digest"] for line in lines}
    for grid in folder.glob("*.grid"):
        plan = planned(parse_into(SweepConfig, {"backend": "cupy", "grid": str(grid)}))
        assert {point.digest for point in plan.points} <= known and len(plan.points) > 10, grid


WORLD = SimpleNamespace(rank=0, size=1, allgather=lambda value: [value])
LEAD = SimpleNamespace(world=WORLD, group=WORLD, is_draft=False, is_lead=True)
WEIGHTS = 13_958_643_712  # bytes of 8b's layers in float16


class Counted(EmulatedBackend):
    """Counts tables and programs; few_rows as on a GPU whose layout depends on the rows."""

    def __init__(self) -> None:
        super().__init__(load_profile("h200"))
        self.few_rows = 32
        self.tables = self.programs = 0

    def table(self, entries: int, width: int, key: int) -> Any:
        self.tables += 1
        return None

    def program(self, *args: Any, **kwargs: Any) -> Any:
        self.programs += 1
        return super().program(*args, **kwargs)


def job(mode: str = "ssd", tp: int = 1, **flags: Any) -> Job:
    config = RunConfig(mode=mode, pair="8b/1b", **flags)
    return resolve(config, tp, backend="emulated", memory_bytes=None)


def opened(jobs: list[Job], backend: Counted, room: int | None = None) -> Any:
    held = Models(backend, SoloGroup(), 0, room)
    held.expect(jobs)
    return held


def test_weights_and_programs_are_made_once() -> None:
    backend = Counted()
    jobs = [job(lookahead=k, alpha=a) for k in (2, 4, 6) for a in (0.6, 0.9)]
    held = opened(jobs, backend)
    for found in jobs * 2:
        target, draft = held.open(found, LEAD)
        assert target is not None and draft is None
        assert target.buckets == found.target_buckets()  # its own, of all that were opened
    union = {rows for found in jobs for rows in found.target_buckets()}
    assert (backend.tables, backend.programs) == (1, len(union))
    assert held.open(jobs[0], LEAD)[0].bucket(3) == 3
    assert held.open(jobs[1], LEAD)[0].stack is held.open(jobs[0], LEAD)[0].stack


def test_what_was_used_longest_ago_makes_room() -> None:
    backend = Counted()
    few, many, head = job("ar"), job("ar", batch_size=64), job("ar", lm_head=True)
    held = opened([few, many, head], backend, room=2 * WEIGHTS + (4 << 30))
    first = held.open(few, LEAD)[0].stack
    held.open(many, LEAD)
    assert held.open(few, LEAD)[0].stack is first  # both have room
    held.open(head, LEAD)  # `many` goes: `few` was used since
    assert held.open(few, LEAD)[0].stack is first and backend.tables == 3
    held.open(many, LEAD)
    assert backend.tables == 4
