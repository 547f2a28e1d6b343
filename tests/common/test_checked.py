"""A run's configuration runs the checks of all its groups, wherever it is contained."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mpissd.cli.arguments import SPECS
from mpissd.cli.configs import ProbeConfig
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.flags import flags_of, parse_into
from mpissd.lab.sweep.configs import SweepConfig
from mpissd.lab.sweep.grid import read_grid
from mpissd.lab.sweep.plan import make_plan
from tests.common.refusals import REFUSED

COMMANDS = [spec.config for spec in SPECS.values()]
# Those that take all flags of a run; chat, serve and load take some of them.
HOLDERS = [kind for kind in COMMANDS if {"mode", "alpha", "rounds"} < flags_of(kind).keys()]
NEEDED = {"SweepConfig": {"grid": "seed=0,1"}}


@pytest.mark.parametrize(("told", "message"), REFUSED)
def test_a_run_is_judged_however_it_is_made(told: dict[str, Any], message: str) -> None:
    """By its constructor, as a change of another, as flags, and in every command that holds one.

    A flag that a command does not take is unknown to it: a probe has one target group.
    """
    text = {name: str(value) for name, value in told.items()}
    ways: list[tuple[type, Callable[[], Any]]] = [
        (RunConfig, lambda: RunConfig(**told)),
        (RunConfig, lambda: dataclasses.replace(RunConfig(), **told)),
    ]
    for kind in HOLDERS:
        flags = {**NEEDED.get(kind.__name__, {}), **text}
        ways.append((kind, partial(parse_into, kind, flags)))
    for kind, make in ways:
        if kind is ProbeConfig and told == {"num_drafts": 0}:
            continue  # probes the target with its draft inline
        lacks = [name for name in told if name not in flags_of(kind)]
        assert not lacks or (lacks, kind.__name__) == (["groups"], "ProbeConfig")
        with pytest.raises(ConfigError, match="groups" if lacks else re.escape(message)) as caught:
            make()
        assert caught.value.exit_code == 2


def test_a_command_hands_its_flags_to_the_run_that_it_contains() -> None:
    assert {"RunConfig", "ProbeConfig", "DoctorConfig", "SweepConfig", "PlanConfig"} == {
        kind.__name__ for kind in HOLDERS
    }
    for kind in HOLDERS:
        flags = {**NEEDED.get(kind.__name__, {}), "alpha": "0.5", "seed": "7"}
        config: Any = parse_into(kind, flags)
        run = config if kind is RunConfig else config.run
        deadline = 60.0 if kind.__name__ == "DoctorConfig" else 120.0
        assert run == RunConfig(alpha=0.5, seed=7, deadline_s=deadline)


@pytest.mark.parametrize(
    ("flags", "grid"),
    [
        ({"num_drafts": 0}, "mode=ar,sd; lookahead=2,4"),
        ({"temperature": 0.7}, "workload=markov; order=1,2"),
        ({"target": "8b"}, "draft=1b,medusa4:8b; mode=sd"),
        ({"backup_lookahead": 6}, "lookahead=6,8"),
        ({"alpha": 0.6}, "acceptance=alpha:.5; mode=ar"),
    ],
)
def test_what_a_grid_says_otherwise_is_judged_where_they_meet(
    flags: dict[str, Any], grid: str
) -> None:
    text = {name: str(value) for name, value in flags.items()}
    config = parse_into(SweepConfig, {"grid": grid, **text})
    plan = make_plan(read_grid(grid), config.run, 1, (1, 1))
    assert plan.points and all(point.config is not None for point in plan.points)


def test_a_block_that_says_nothing_of_what_is_wrong_does_not_excuse_it(tmp_path: Path) -> None:
    grid = tmp_path / "g"
    grid.write_text("[a]\nmode = ar\n[b]\nlookahead = 2, 4\n")
    with pytest.raises(ConfigError, match="num_drafts=0 with mode=ssd"):
        parse_into(SweepConfig, {"grid": str(grid), "num_drafts": "0"})


def test_a_lost_draft_is_not_for_a_grid_either() -> None:
    with pytest.raises(ConfigError, match="on_draft_loss is one for all configurations"):
        read_grid("on_draft_loss=abort,ar")
