"""Which kernel's times a prediction takes, and whose host costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mpissd.common.config import RunConfig
from mpissd.common.presets import resolve_model
from mpissd.engine.backend.base import ForwardKey
from mpissd.engine.backend.profile import Curve, Forward, HostEntry, Profile, Tables, load_profile
from mpissd.engine.job import Job, resolve
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.lab.predict.advisor import plan
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.derive import costs_at, derived_from, entry_of, host_of
from mpissd.lab.predict.search import Placement, survey
from mpissd.lab.predict.simulation import expected
from tests.datasheet import DATASHEET

MODELS = {"llama-3.1-8b": 3e-3, "llama-3.2-1b": 0.5e-3}
FREE = HostCosts()


def two_kernels() -> Profile:
    """A device on which jobs of at most 32 rows take 3 ms and 0.5 ms a forward, others a third
    more."""
    tables: dict[ForwardKey, tuple[Forward, ...]] = {}
    for name, seconds in MODELS.items():
        shard = Shard(resolve_model(name.split("-")[-1]))
        params = shard.num_params(ForwardOptions())
        few, many = (
            Curve((1, 32, 256), (s, 1.1 * s, 1.5 * s), "measured: here")
            for s in (seconds, 4 / 3 * seconds)
        )
        kernels = Forward(params, few, "chain", 32), Forward(params, many, "cublas")
        tables[shard.key(1, ForwardOptions())] = kernels
    return replace(load_profile(DATASHEET), tables=Tables(forwards=tables))


PROFILE = two_kernels()


def job(**flags: Any) -> Job:
    config = RunConfig(**{"pair": "8b/1b", "alpha": 0.8, **flags})
    return resolve(config, 1, backend="emulated", memory_bytes=None)


def measured(config: RunConfig, profile: Profile) -> list[Placement]:
    """Where forwards were measured: at T = 1."""
    return [place for place in survey(config, profile, 2).placements if place.tp == 1]


@pytest.mark.parametrize(
    ("flags", "verify", "draft"),
    [
        ({"mode": "ar"}, 3e-3, None),
        ({"mode": "ar", "batch_size": 33}, 4e-3, None),
        ({"mode": "sd", "lookahead": 31}, 3e-3, 0.5e-3),
        ({"mode": "sd", "lookahead": 32}, 4e-3, 2e-3 / 3),
        ({"mode": "ssd", "fan_out": "geometric:32"}, 3e-3, 0.5e-3),
        ({"mode": "ssd", "fan_out": "geometric:33"}, 3e-3, 2e-3 / 3),  # only the draft's rows
    ],
)
def test_a_job_s_largest_row_count_chooses_the_kernel_of_all(
    flags: dict[str, Any], verify: float, draft: float | None
) -> None:
    costs = DeviceCosts.from_profile(PROFILE, job(**flags))
    assert float(costs.verify(1)) == verify
    if draft is not None:
        assert float(costs.draft_s(1)) == pytest.approx(draft)


def test_a_plan_s_choices_are_what_predict_says_of_them() -> None:
    """Cells of one group may run two kernels: each has its own times."""
    config = RunConfig(pair="8b/1b", alpha=0.9)
    advice = plan(config, measured(config, PROFILE), 2)
    for choice in advice.judged:
        flags = {**choice.flags(), "lookahead": choice.lookahead, "num_drafts": choice.num_drafts}
        if "backup_lookahead" in flags:
            flags["backup_lookahead"] = choice.backup_lookahead
        one = job(**{**flags, "alpha": 0.9}) if choice.mode != "ar" else job(mode="ar")
        own = DeviceCosts.from_profile(PROFILE, one)
        rate = float(expected(one, own, FREE).tok_per_s[0])
        assert choice.tok_per_s == pytest.approx(rate, rel=1e-9), choice


def entry(mode: str, drafts: int, sample: float, **changes: Any) -> HostEntry:
    seconds = {**FREE.to_dict(), "lead_sample": sample}
    known = HostEntry(mode, 1, drafts, 1, 4, seconds, "measured: here")
    return replace(known, **changes)


HOSTS = (
    entry("ar", 0, 1e-6),
    entry("sd", 0, 2e-6),
    entry("sd", 1, 3e-6),
    entry("ssd", 1, 4e-6),
    entry("ssd", 1, 5e-6, batch_size=8),
    entry("ssd", 1, 6e-6, tp=2, source="derived: from T=1"),
    entry("ssd", 1, 7e-6, lookahead=9),
)


@pytest.mark.parametrize(
    ("flags", "tp", "sample", "derived"),
    [
        ({"mode": "ar"}, 1, 1e-6, False),
        ({"mode": "ar"}, 2, 1e-6, True),
        ({"mode": "sd", "num_drafts": 0}, 1, 2e-6, False),
        ({"mode": "sd"}, 1, 3e-6, False),
        ({"mode": "ssd"}, 1, 4e-6, False),
        ({"mode": "ssd", "batch_size": 2}, 1, (4 + 1 / 7) * 1e-6, False),
        ({"mode": "ssd", "batch_size": 4}, 1, (4 + 3 / 7) * 1e-6, False),
        ({"mode": "ssd", "batch_size": 15}, 1, 6e-6, False),
        ({"mode": "ssd"}, 2, 6e-6, True),
        ({"mode": "ssd", "lookahead": 7}, 1, 7e-6, False),
    ],
)
def test_host_costs_are_those_of_the_nearest_way_to_decode(
    flags: dict[str, Any], tp: int, sample: float, derived: bool
) -> None:
    profile = replace(PROFILE, hosts=HOSTS)
    found = replace(job(**flags), tp=tp)
    assert host_of(profile, found).lead_sample == pytest.approx(sample)
    label = derived_from(profile, profile, found) or ""
    assert ("host costs of" in label or "derived: from T=1" in label) is derived
    assert host_of(PROFILE, found) == FREE and entry_of(PROFILE, found) is None


def test_host_costs_lie_on_a_line_between_contexts_and_batches() -> None:
    points = {(1, 100): 1e-4, (8, 100): 8e-4, (1, 2100): 5e-4, (8, 2100): 12e-4}
    hosts = tuple(
        entry("sd", 0, seconds, batch_size=batch, context=context, forward="transformer")
        for (batch, context), seconds in points.items()
    )
    known = replace(PROFILE, hosts=hosts)
    for (batch, context), wanted in {**points, (1, 1100): 3e-4, (1, 20): 1e-4}.items():
        found = costs_at(known, hosts[0], batch, context).lead_sample
        assert found == pytest.approx(wanted), (batch, context)
