"""Gates against numbers that are off by chance: how many are caught, and which cannot be."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from tests.common.clean_row import Line, Rounds, judge, make


@pytest.fixture
def clean() -> tuple[Line, Rounds]:
    return make()


KEY_NUMBERS = """num_rounds num_tokens wall_s tok_per_s tok_per_s_per_gpu acceptance_length hit_rate
ledger_closure t_target_s t_draft_s t_growth_s round_us.mean round_us.p50 round_us.p90 round_us.p99
round_us.n phases_us.lead.device_wait phases_us.lead.sample phases_us.draft.wait
phases_us.draft.grow lookahead batch_size tp world_size branch_budget backup_lookahead""".split()


def test_a_number_off_by_five_percent_or_more_is_mostly_caught(clean: tuple[Line, Rounds]) -> None:
    """Seed 11, 5 factors a number."""
    rng = np.random.default_rng(11)
    caught = {}
    for path in KEY_NUMBERS:
        lines = 0
        for off in rng.uniform(0.05, 0.5, 5) * rng.choice([-1, 1], 5):
            row, rounds = copy.deepcopy(clean[0]), clean[1]
            *above, last = path.split(".")
            holder = row
            for key in above:
                holder = holder[key]
            old = holder[last]
            new = old * (1 + off)
            if isinstance(old, int):  # at least by one
                new = old + int(np.sign(off)) * max(1, round(abs(old * off)))
            holder[last] = new
            lines += bool(judge(row, rounds))
        caught[path] = lines
    assert {path for path, n in caught.items() if n < 5} == set()


@pytest.mark.parametrize("name", [k for k, v in make()[1].items() if v.dtype.kind in "if"])
def test_a_column_scaled_by_five_percent_is_caught(clean: tuple[Line, Rounds], name: str) -> None:
    row, rounds = clean
    table = rounds[name].reshape(len(rounds[name]), -1)
    unread = {"sequences": {2}, "draft_rounds": {0, 3, 4}}.get(name, set())  # epoch, round, counts
    for column in set(range(table.shape[1])) - unread:
        if table[:, column].any():
            spoiled = table.copy()
            spoiled[:, column] = (
                np.ceil(table[:, column] * 1.05)
                if name == "sequences"
                else (table[:, column] * 1.05)
            )
            assert judge(row, {**rounds, name: spoiled.reshape(rounds[name].shape)}), column
