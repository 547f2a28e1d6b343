"""Forwards at a T that was not measured: by hand, and against a machine measured at two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mpissd.backend.profile import Profile, load_profile
from mpissd.config import RunConfig
from mpissd.errors import ConfigError
from mpissd.job import resolve
from mpissd.model.shard import ForwardOptions, Shard
from mpissd.predict.derive import derive, with_derived
from mpissd.predict.places import survey

PROFILES = Path(__file__).resolve().parents[2] / "results/h200/profiles"
FUSED = ForwardOptions(fuse=True)
EIGHT = RunConfig(pair="8b/1b", fuse=True)


def probed(name: str) -> Profile:
    return load_profile(str(PROFILES / f"{name}.json"))


def shard(pair: str, tp: int) -> Shard:
    config = RunConfig(pair=pair, mode="ar")
    return Shard(resolve(config, 1, backend="emulated", memory_bytes=None).target, tp)


def seconds(profile: Profile, of: Shard, rows: int) -> float:
    curve = profile.tables.forward(of.cost(rows, 1, 2, FUSED))
    assert curve is not None
    return curve(rows)


def with_all_reduces(profile: Profile, *others: Profile) -> Profile:
    latency, rate = {}, {}
    for known in (profile, *others):
        latency |= known.all_reduce_latency_s or {}
        rate |= known.all_reduce_bytes_per_s or {}
    return replace(profile, all_reduce_latency_s=latency, all_reduce_bytes_per_s=rate)


def test_by_hand() -> None:
    """8B from T=1 to T=2: half the bytes, all 128 products, and 64 all-reduces more."""
    flat = replace(
        probed("h200-8b-1b-T1D1"),
        product_overhead_s=1e-6,
        launch_s=2e-6,
        all_reduce_latency_s={2: 3e-6},
        all_reduce_bytes_per_s={2: 8192 / 1e-6},
    )
    one, two = shard("8b/1b", 1), shard("8b/1b", 2)
    (found,) = derive(flat, one, two, 1, FUSED)
    assert found.params == 6979321856 // 2
    for rows in (1, 16):
        kept = 128e-6 + 2e-6
        wanted = kept + (seconds(flat, one, rows) - kept) / 2 + 64 * (3e-6 + rows * 1e-6)
        assert found.seconds(rows) == pytest.approx(wanted, rel=1e-12)
    assert found.seconds.source.startswith("derived from T=1")
    (back,) = derive(with_derived(flat, two, 1, FUSED), two, one, 1, FUSED)
    assert back.seconds(5) == pytest.approx(seconds(flat, one, 5), rel=1e-12)


@pytest.mark.parametrize(("have", "want"), [(2, 4), (4, 2)])
def test_near_to_what_was_measured_there(have: int, want: int) -> None:
    """70B on H200, probed with T = 2 and with T = 4."""
    profiles = {2: probed("h200-70b-1b-T2D1"), 4: probed("h200-70b-T4")}
    known = with_all_reduces(profiles[have], profiles[want])
    (found,) = derive(known, shard("70b/1b", have), shard("70b/1b", want), 1, FUSED)
    for rows, most in {1: 0.016, 2: 0.016, 4: 0.016, 8: 0.016, 16: 0.05, 64: 0.016}.items():
        measured = seconds(profiles[want], shard("70b/1b", want), rows)
        assert found.seconds(rows) == pytest.approx(measured, rel=most)


def test_what_is_known_stays_as_it_is() -> None:
    measured, rates = probed("h200-8b-1b-T1D1"), load_profile("h200")
    assert with_derived(measured, shard("8b/1b", 1), 1, FUSED) is measured
    assert with_derived(rates, shard("8b/1b", 2), 1, FUSED) is rates
    assert with_derived(measured, shard("70b/1b", 2), 1, FUSED) is measured  # at no T


def test_all_reduces_are_those_of_the_same_device_or_unknown() -> None:
    alone = probed("h200-8b-1b-T1D1")
    found = with_derived(alone, shard("8b/1b", 2), 1, FUSED)
    assert "all-reduces of profile h200" in str(found.tables.forwards)
    other = replace(alone, device_name="Another device")
    with pytest.raises(ConfigError, match="knows no all-reduce over 2 ranks"):
        with_derived(other, shard("8b/1b", 2), 1, FUSED)


def test_a_survey_drops_no_t_silently() -> None:
    alone = probed("h200-8b-1b-T1D1")
    here = survey(EIGHT, alone, 4)
    assert [(p.tp, p.derived is None) for p in here.placements] == [
        (1, True),
        (2, False),
        (4, False),
    ]
    assert not here.unjudged
    there = survey(EIGHT, replace(alone, device_name="Another device"), 4)
    assert [p.tp for p in there.placements] == [1] and set(there.unjudged) == {2, 4}
    assert "all-reduce over 4 ranks" in there.unjudged[4]
    assert all(p.derived is None for p in survey(EIGHT, load_profile("h200"), 2).placements)


def test_a_model_of_the_same_name_and_other_weights_is_not_derived_from() -> None:
    alone = probed("h200-8b-1b-T1D1")
    with pytest.raises(ConfigError, match="doesn't cover"):
        survey(replace(EIGHT, fuse=False), alone, 2)
