"""A sweep over a real pair: its plan, while the backend is not known yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpissd.common.config import parse_flags
from mpissd.common.errors import ConfigError
from mpissd.engine.job import resolve
from mpissd.lab.sweep.commands import check_sweep, why_not
from mpissd.lab.sweep.plan import SweepConfig, planned
from tests.tiny_pair import tiny_pair


@pytest.mark.parametrize("backend", ["auto", "numpy", "cupy"])
def test_a_real_pair_is_planned_on_every_backend(tmp_path: Path, backend: str) -> None:
    """A machine with CuPy resolves the job before it knows whether there is a GPU."""
    pair = tiny_pair(tmp_path)
    flags = {"target": str(pair.target), "draft": str(pair.draft), "prompt_ids": "1,2"}
    job = resolve(parse_flags(flags), 1, backend=backend, memory_bytes=None)
    assert max(job.target_buckets()) == (32 if backend == "numpy" else 128)
    run = parse_flags(flags)
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
    assert [why_not(point, 1) for point in plan.points] == [
        None, "prompt_ids: prompt 1: token 999: allowed: 0..96"
    ]  # fmt: skip
